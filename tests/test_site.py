"""A site's end of a round: what it trains is answered once, a failure is over with its attempt, and its
trainer may die at any moment."""

import asyncio
import os
from pathlib import Path

import pytest
import torch

from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config
from fedtrain.errors import ConfigError, TaskError
from fedtrain.messages import Evaluate, Evaluation, Failure, Train, Update
from fedtrain.runtime.simulations.simulated_masks import SimulatedKeys
from fedtrain.runtime.sites.secure_site import SecureSite
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.star.secure_terms import encoding_of, hash_of, policy
from fedtrain.runtime.trainers.supervised import Supervised
from fedtrain.runtime.trainers.trainer import TrainerDied, Trains
from fedtrain.runtime.trainers.trainer_messages import (
    Description,
    Done,
    EvaluateMany,
    Measured,
    Trained,
    TrainOne,
)
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.messages import Advertise, AdvertiseEvaluation, Keys, Terms
from fedtrain.store import Ledger
from tests.inprocess import pool_of

SCHEMA = Schema((TensorSpec("w", (64,), "float32", True),))
ABOUT = Description(SCHEMA, "digest")
SITES = ("a", "b", "c")
WEIGHTS = ArenaFile(SCHEMA, Path("weights"), "0")
OUT_OF_MEMORY = TaskError("OutOfMemoryError in task.py:7, in loss")
KILLED = TrainerDied("the trainer process was ended by signal 9 (SIGKILL)")


class Scripted(Trains):
    """A trainer without a process: request by request there `happens` what is listed; then all goes well."""

    def __init__(self, *happens, about=ABOUT):
        self.happens, self.description, self.asked = list(happens), about, []

    async def _ask(self, message):
        self.asked.append({TrainOne: "train", EvaluateMany: "evaluate"}[type(message)])
        if self.happens and (error := self.happens.pop(0)) is not None:
            raise error
        if isinstance(message, EvaluateMany):
            return Done([Measured({"loss": (3.0, 4.0)}) for _ in message.sites])
        delta = Arena.zeros(SCHEMA)
        delta.flat(SCHEMA.sections[0]).copy_(torch.arange(64.0) / 64)
        Path(message.out).write_bytes(delta.payload)  # noqa: ASYNC240 - a few bytes
        return Done([Trained(5.0, {}, delta.digest)])

    async def close(self):
        pass


def config_of(folder):
    return Config.of({"run": {"name": "r"}, "secagg": {"max_examples": 10, "verify": False}}, folder)


def secure_site(config):
    keys = SimulatedKeys()
    return SecureSite(config, "a", SimulatedKeys.FEDERATION, keys.signer("a"), keys)


def test_a_model_is_hashed_again_when_its_file_has_changed(tmp_path):
    """A site's masks and what it checked go by this hash."""
    ledger = Ledger(tmp_path / "ledger")
    site, model = Site("a", SCHEMA, ledger, None), Arena.zeros(SCHEMA)
    (tmp_path / "weights").write_bytes(model.payload)
    os.utime(tmp_path / "weights", (0, 0))  # long ago
    weights, found = ArenaFile(SCHEMA, tmp_path / "weights", model.digest), []
    for change in (False, False, True):
        if change:
            (tmp_path / "weights").write_bytes(bytes(model.payload)[:-1] + b"x")
        found.append(asyncio.run(site._hash_of(weights)))
    ledger.close()
    assert found[0] == found[1] == hash_of(model)
    assert found[2] == hash_of(weights) != found[0]


def requests(kind, folder, config):
    """The same question in one attempt after another."""
    model = Arena.zeros(SCHEMA)
    (folder / "weights").write_bytes(model.payload)
    weights = ArenaFile(SCHEMA, folder / "weights", model.digest)
    quorum, threshold, _ = policy(config, SimulatedKeys.FEDERATION).graph(len(SITES))
    schema = SCHEMA if kind is Advertise else None
    encoding = encoding_of(config, 1, len(SITES), schema)
    for attempt in range(9):
        fields = {"id": f"r/1/{attempt}", "round": 1, "weights": weights}
        if kind in (Advertise, AdvertiseEvaluation):
            fields["terms"] = Terms(
                federation=SimulatedKeys.FEDERATION, run="r", round=1, attempt=attempt,
                nonce=bytes([attempt] * 16), cohort=SimulatedKeys().fingerprints(SITES), quorum=quorum,
                threshold=threshold, value_bits=encoding.point.value_bits, clip=1.0, max_weight=10.0,
                length=encoding.length,
            )  # fmt: skip
        yield kind(**fields)


GOOD = {Train: Update, Evaluate: Evaluation, Advertise: Keys, AdvertiseEvaluation: Keys}


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
def test_a_failure_is_over_with_its_attempt_and_what_was_found_is_answered_once(tmp_path, kind):
    config, ledger = config_of(tmp_path), Ledger(tmp_path / "ledger")
    trainer = Scripted(OUT_OF_MEMORY, OUT_OF_MEMORY)
    secure = secure_site(config) if GOOD[kind] is Keys else None
    site = Site("a", SCHEMA, ledger, trainer, secure=secure)

    async def ask():
        asked = requests(kind, tmp_path, config)
        return [await site.answer(next(asked)) for _ in range(4)]

    replies = asyncio.run(ask())
    ledger.close()
    assert replies[:2] == [Failure(reason=str(OUT_OF_MEMORY))] * 2
    assert all(isinstance(reply, GOOD[kind]) for reply in replies[2:]), replies
    assert len(trainer.asked) == 3, "the fourth attempt was answered with what the third had found"


def test_an_attempt_that_comes_while_another_is_at_work_waits_for_the_same_work(tmp_path):
    ledger, go = Ledger(tmp_path / "ledger"), asyncio.Event()

    class Slow(Scripted):
        async def train(self, site, round, weights, out, counted):
            update = await super().train(site, round, weights, out, counted)
            await go.wait()
            return update

    trainer = Slow()
    site = Site("a", SCHEMA, ledger, trainer)

    async def ask():
        asked = requests(Train, tmp_path, config_of(tmp_path))
        first = asyncio.create_task(site.answer(next(asked)))
        while not trainer.asked:  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0)
        first.cancel()
        second = asyncio.create_task(site.answer(next(asked)))
        await asyncio.sleep(0)
        go.set()
        return await second

    assert isinstance(asyncio.run(ask()), Update)
    ledger.close()
    assert trainer.asked == ["train"]


def supervised(*lives):
    """What starts these processes one after the other (an error is one that never starts), and who began."""
    begun, waiting = [], list(lives)

    async def start():
        life = waiting.pop(0)
        begun.append(life)
        if isinstance(life, Exception):
            raise life
        return life

    return start, begun


@pytest.mark.parametrize("kind", [Train, Evaluate], ids=["train", "evaluate"])
def test_a_trainer_that_cannot_be_started_again_is_a_failure_and_the_next_attempt_starts_it(tmp_path, kind):
    ledger = Ledger(tmp_path / "ledger")
    start, begun = supervised(Scripted(KILLED), KILLED, ConfigError("train.device: gone"), Scripted())

    async def ask():
        site = Site("a", SCHEMA, ledger, await Supervised.begin(start))
        asked = requests(kind, tmp_path, config_of(tmp_path))
        return [await site.answer(next(asked)) for _ in range(3)]

    replies = asyncio.run(ask())
    ledger.close()
    assert replies[:2] == [
        Failure(reason=str(KILLED)),
        Failure(reason="train.device: gone", final=True),
    ]
    assert isinstance(replies[2], GOOD[kind])
    assert len(begun) == 4


def test_a_trainer_that_dies_over_each_request_is_started_three_times_for_one(tmp_path):
    start, begun = supervised(*(Scripted(KILLED, KILLED) for _ in range(9)))

    async def ask():
        trainer = await Supervised.begin(start)
        with pytest.raises(TrainerDied):
            await trainer.evaluate("a", 0, WEIGHTS)

    asyncio.run(ask())
    assert [len(life.asked) for life in begun] == [1, 1, 1]


def test_changed_code_is_not_trained_and_the_site_goes_on_when_the_change_is_undone(tmp_path):
    """Also where the site's people have approved the change: the run was begun with other code."""
    changed = Scripted(about=Description(SCHEMA, "other"))
    start, _ = supervised(Scripted(KILLED), changed, changed, Scripted())

    async def ask():
        trainer = await Supervised.begin(start)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"has the digest other, the run .*another run.name"):
                await trainer.train("a", 0, WEIGHTS, tmp_path / "out")
        return await trainer.train("a", 0, WEIGHTS, tmp_path / "out")

    assert isinstance(asyncio.run(ask()), Update)


def test_a_simulations_pool_survives_workers_that_die_over_one_batch_twice(tmp_path):
    start, begun = supervised(Scripted(KILLED), Scripted())

    async def ask():
        pool = pool_of(config_of(tmp_path), [Scripted(KILLED)], tmp_path, start)
        request = Evaluate(id="e", round=1, weights=WEIGHTS)
        return [reply async for reply in pool.exchange(dict.fromkeys(SITES, request), 1.0)]

    assert [site for site, _ in asyncio.run(ask())] == list(SITES)
    assert len(begun) == 2
