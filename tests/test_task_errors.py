"""What people see when all that is wrong is in their task: its error and place, once, and what to change."""

import asyncio

import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.config import Config, TrainConfig
from fedtrain.errors import TaskError, TooFewSites, Unfinished
from fedtrain.messages import Failure, Update
from fedtrain.runtime.simulations.plain_sums import FixedPointSums
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.runtime.trainers.trainer import Trainer
from fedtrain.runtime.trainers.trainer_messages import Failed, Trained, good
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import RoundPlan
from fedtrain.training.local import Engine
from fedtrain.training.task import Task
from fedtrain.transport.memory import LocalCohort
from tests.inprocess import pool_of

SCHEMA = Schema((TensorSpec("w", (4,), "float32", True),))
SITES = ["a", "b", "c"]


class Example(Task):
    def __init__(self, data=None, loss=None):
        self._data, self._loss = data, loss

    def model(self):
        return torch.nn.Linear(3, 2)

    def loss(self, model, batch):
        found = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return found.mean() if self._loss is None else self._loss(found)


GOOD = torch.ones(8, 3), torch.zeros(8, dtype=torch.long)


def training(data, loss=None):
    engine = Engine(Example(loss=loss), TrainConfig(batch_size=4), 0)
    engine.train("a", data, 0, engine.initial(), Arena.zeros(engine.schema))


def test_a_loss_without_a_gradient_says_what_to_leave_out():
    with pytest.raises(TaskError, match=r"no gradient leads back from: leave out detach\(\)"):
        training(GOOD, lambda each: each.mean().detach())


# --- when all sites fail


def config(folder, **strategy):
    return Config.of({"run": {"name": "r"}, "strategy": {"min_sites": 3, "attempts": 1, **strategy}}, folder)


def weights():
    return Arena.zeros(SCHEMA)


def update(value=0.0):
    delta = Arena.zeros(SCHEMA)
    delta.views()["w"].fill_(value)
    return Update(delta=delta, num_examples=1.0)


def round_of(answers):
    return asyncio.run(answers.train(RoundPlan(0, 0, SITES), weights()))


def fails(site):
    return lambda request: Failure(reason=f"KeyError in task.py:12, in data, data({site!r})")


STAGES = {InTheOpen: "round 1", FixedPointSums: "secure sum"}


@pytest.mark.parametrize("answers", [InTheOpen, FixedPointSums])
def test_when_all_sites_raise_the_error_names_the_place_once_and_blames_no_deadline(tmp_path, answers):
    cohort = LocalCohort({site: fails(site) for site in SITES})
    with pytest.raises(TooFewSites) as error:
        round_of(answers(config(tmp_path), cohort, lambda *_, **__: None))
    assert str(error.value) == (
        f"{STAGES[answers]}: 0 of 3 sites gave what can be used, 3 are needed. a, b, c: KeyError in "
        "task.py:12, in data, data(). Mend that, or lower strategy.min_sites; the same command goes on from "
        "the last round."
    )


@pytest.mark.parametrize("answers", [InTheOpen, FixedPointSums])
def test_one_bad_site_of_three_is_named_and_the_two_good_ones_are_counted(tmp_path, answers):
    handlers = {"a": lambda r: update(), "b": lambda r: update(float("nan")), "c": lambda r: update()}
    why = rf"{STAGES[answers]}: 2 of 3 sites gave what can be used, 3 .*\. b: .*[nN]"
    with pytest.raises(TooFewSites, match=why) as e:
        round_of(answers(config(tmp_path), LocalCohort(handlers), lambda *_, **__: None))
    assert "round_deadline" not in str(e.value)


def test_sites_that_stay_silent_beside_those_that_fail_are_named_as_that(tmp_path):
    cohort = LocalCohort(
        {"a": fails("a"), "b": lambda r: update(), "c": fails("c")}, loses=lambda site, request: site == "c"
    )
    with pytest.raises(TooFewSites) as error:
        round_of(InTheOpen(config(tmp_path, round_deadline="0.2s"), cohort, lambda *_, **__: None))
    assert "1 of 3 sites gave what can be used" in str(error.value)
    assert "No reply in time: c. Lower strategy.min_sites, raise strategy.round_deadline" in str(error.value)


def test_a_secure_sum_whose_sites_all_say_why_blames_no_deadline():
    reasons = {site: f"ValueError in task.py:3, in loss, site {site}, round 0" for site in SITES}
    told = str(Unfinished("keys", 0, 3, dropped=reasons, blamed={}, failed=reasons))
    assert told.startswith("secure sum: 0 of 3 sites gave what can be used, 3 are needed. a, b, c: ")
    assert "ValueError in task.py:3, in loss, round 0. Mend that" in told
    silent = str(Unfinished("keys", 2, 3, dropped={"c": "keys: no reply"}, blamed={}, failed={}))
    assert "c: keys: no reply. Lower strategy.min_sites, raise strategy.round_deadline" in silent


# --- in a simulation, and on the screen


def test_in_a_simulation_the_first_task_error_ends_the_run_with_that_error(tmp_path):
    from fedtrain.arena import ArenaFile
    from fedtrain.messages import Evaluate
    from fedtrain.runtime.trainers.trainer import Trains
    from fedtrain.runtime.trainers.trainer_messages import Description, Done

    class Worker(Trains):
        async def _ask(self, message):
            where = "ValueError in task.py:9, in loss"
            return Done([Failed(f"{where}, site {site}, round 0") for site in message.sites])

    async def ask():
        worker = Worker()
        worker.description = Description(SCHEMA, "digest")
        pool = pool_of(config(tmp_path), [worker], tmp_path)
        request = Evaluate(id="e", round=1, weights=ArenaFile(SCHEMA, tmp_path / "weights", "0"))
        return [reply async for reply in pool.exchange(dict.fromkeys(SITES, request), 1.0)]

    with pytest.raises(TaskError, match=r"ValueError in task\.py:9, in loss, site a"):
        asyncio.run(ask())
    assert good(Trained(1.0, {})) == Trained(1.0, {})


TASK = """
import torch, fedtrain

class Broken(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(3, 2)
    def sites(self):
        return ["a", "b", "c"]
    def data(self, site):
        return {}["patients of " + site]
    def loss(self, model, batch):
        raise NotImplementedError
"""


@pytest.mark.slow(3)
def test_equal_errors_of_many_sites_and_trainers_are_one_traceback(tmp_path):
    (tmp_path / "broken_task.py").write_text(TASK)
    settings = Config.of({"run": {"task": "broken_task:Broken"}}, tmp_path)

    async def ask():
        for _ in range(2):
            async with await Trainer.start(
                settings, scratch=tmp_path, log=tmp_path / "log", simulated=True
            ) as trainer:
                initial = await trainer.initial(tmp_path / "initial")
                results = await trainer.evaluate_many(SITES, 0, initial, [-1] * len(SITES))
        return results

    results = asyncio.run(ask())
    assert [r.reason.partition(", in ")[0] for r in results] == ["KeyError in broken_task.py:10"] * 3
    told = (tmp_path / "log").read_text()
    assert told.count("Traceback") == 1
    assert len(told.splitlines()) <= 8
    assert "KeyError: 'patients of a'" in told


def test_nobody_is_advised_to_ask_fewer_sites_where_a_site_has_a_full_disk():
    full = "no room for sums.json: No space left on device. Free some: the same command goes on."
    for error in (
        TooFewSites("round 1", 2, 3, failed={"a": full}),
        Unfinished("shares", 2, 3, dropped={"a": full}, blamed={}, failed={"a": full}),
    ):
        assert str(error).endswith(full)
