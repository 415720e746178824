"""One site's mistake, or the aggregator's, does not end the run of the others (findings D1 and D2)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtrain.arena import ArenaFile
from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.messages import NewestModel
from fedtrain.pki import issue, revocation
from fedtrain.runtime.auditing import root_of, verify
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.sites import site
from fedtrain.runtime.sites.approval import key_in
from fedtrain.runtime.sites.models import FILE
from fedtrain.runtime.star import aggregator, mutual, restored
from fedtrain.runtime.star.secure_terms import hash_of
from fedtrain.store import Checkpoint, RoundPlan, RunStore
from fedtrain.transport.endpoints import RemoteCohort
from fedtrain.transport.memory import LocalCohort
from tests.allowed import allowed
from tests.federation import aggregator as star
from tests.federation import certificates, echo_plus, hello, link, random_arena
from tests.inline import project
from tests.inprocess import Events

FIVE = ("a", "b", "c", "d", "e")


class Log(Events):
    """What one end told, and a way to wait for a line of it."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        self._changed.set()

    def notices(self, part: str, of: str = "") -> list[str]:
        found = [e["text"] for e in self.of("notice") if part in e["text"]]
        return [text for text in found if text.startswith(of)]

    async def until(self, true: Callable[[], Any]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()

    async def committed(self, more: int = 1) -> None:
        due = len(self.of("round_committed")) + more
        await self.until(lambda: len(self.of("round_committed")) >= due)


class World:
    """An aggregator and sites over mutual TLS in this process, each of which may be started and ended."""

    def __init__(self, config: Config, *sites: str) -> None:
        self.config, self.logs = config, {name: Log() for name in ("aggregator", *sites)}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        for name in sites:
            if not (config.root / "certs/sites" / name).exists():
                issue(config.root / "certs", "site", name)

    def __getitem__(self, name: str) -> Log:
        return self.logs[name]

    def policy(self, name: str, **rules: Any) -> None:
        folder = self.config.root / "certs/sites" / name
        keep_policy(folder, replace(policy_from(folder), **rules))

    def pin(self, *names: str, at: str) -> None:
        keys = {name: key_in(self.config.root / "certs/sites" / name) for name in names}
        self.policy(at, members={name: key for name, key in keys.items() if name != at})

    def start(self, *names: str) -> None:
        for name in names:
            run: Coroutine[Any, Any, Any] = (
                aggregator.serve(self.config, emit=self.logs[name])
                if name == "aggregator"
                else site.run(self.config, name, emit=self.logs[name])
            )
            self.tasks[name] = asyncio.create_task(run)

    async def end(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await asyncio.gather(*(self.tasks[name] for name in names), return_exceptions=True)

    def go(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def told() -> None:
            try:
                async with asyncio.timeout(90):
                    telling = asyncio.create_task(story())
                    while not telling.done():
                        running = [task for task in self.tasks.values() if not task.done()]
                        await asyncio.wait([telling, *running], return_when=asyncio.FIRST_COMPLETED)
                        for name, task in self.tasks.items():
                            if task.done() and not task.cancelled():
                                assert task.exception() is None, (name, task.exception())
                    telling.result()
            finally:
                telling.cancel()
                await self.end(*self.tasks)

        asyncio.run(told())


@pytest.fixture
def world(tmp_path: Path, inline: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """A federation whose sites read pins and lists of revoked certificates every 50 ms."""
    monkeypatch.setattr(revocation, "RELOAD_S", 0.05)

    def make(*sites: str, own: Mapping[str, Mapping[str, Any]] = {}, **sections: Any) -> World:
        sections["run"] = {"rounds": 1000, **sections.get("run", {})}
        found = World(project(tmp_path, **sections), *sites)
        allowed(found.config, *sites)
        return found

    return make


# --- D1: a site that some have not pinned


@pytest.mark.slow(6)
def test_d1_a_site_that_no_other_has_pinned_is_left_out_until_they_pin_it(world):
    run = world(*FIVE, "late", strategy={"min_sites": 5})
    for name in FIVE:
        run.pin(*FIVE, at=name)

    async def story() -> None:
        run.start("aggregator", *FIVE)
        await run["aggregator"].committed(2)
        run.start("late")
        await run["aggregator"].until(lambda: run["aggregator"].notices("late is left out"))
        await run["late"].until(lambda: run["late"].notices("this site is left out"))
        await run["aggregator"].committed(5)
        for name in FIVE:
            run.pin(*FIVE, "late", at=name)
        await run["aggregator"].until(lambda: run["aggregator"].of("round_committed")[-1]["sites"] == 6)
        await run["aggregator"].committed(2)

    run.go(story)
    said = run["aggregator"].notices("late is left out")
    key = key_in(run.config.root / "certs/sites/late")
    assert "not pinned at a, b, c, d, e (policy.pin_members). If `fedtrain policy show` prints" in said[0]
    assert said[0].endswith(f"run there: fedtrain policy pin late={key}")
    assert len(said) == len({*said}) <= 5, "once for each set of sites that lack the pin"
    assert not run["aggregator"].of("round_failed")
    inside = [e["sites"] for e in run["aggregator"].of("round_committed")]
    assert inside[:5] == [5] * 5
    assert inside[-1] == 6


@pytest.mark.slow(6)
def test_d1_sites_that_have_pinned_nobody_are_waited_for_and_the_run_begins_with_the_last_pin(world):
    run = world("a", "b", "c", strategy={"min_sites": 3}, run={"rounds": 2})
    for name in "abc":
        run.policy(name, members={})

    async def story() -> None:
        run.start("aggregator", *"abc")
        for name in "abc":  # the people of one site after the other
            await run["aggregator"].until(lambda: run["aggregator"].notices("is left out"))
            run.pin(*"abc", at=name)
        await run.tasks["aggregator"]
        await asyncio.gather(*(run.tasks[name] for name in "abc"))

    run.go(story)
    assert not run["aggregator"].of("round_failed")
    assert [e["sites"] for e in run["aggregator"].of("round_committed")] == [3, 3]
    for name in "abc":
        assert run[name].of("run_finished"), "each site ends as the run does"


@pytest.mark.slow(8)
def test_d1_whoever_lacks_one_pin_the_newcomer_or_the_site_that_took_a_pin_back_is_left_out(world):
    run = world(*FIVE, "late", strategy={"min_sites": 4})
    for name in "abcd":
        run.pin(*FIVE, "late", at=name)
    run.pin(*FIVE, at="e")

    async def story() -> None:
        run.start("aggregator", *FIVE)
        await run["aggregator"].committed(2)
        run.start("late")
        await run["aggregator"].until(lambda: run["aggregator"].notices("late is left out of the sums: not"))
        await run["aggregator"].committed(2)
        run.pin("b", "c", "d", "e", at="a")  # not late
        run.pin("a", "c", "d", "e", "late", at="e")  # not b: so e sums without b, or not at all
        await run["aggregator"].until(lambda: run["aggregator"].notices("is left out", of="e "))
        await run["aggregator"].committed(2)

    run.go(story)
    assert "late is left out of the sums: not pinned at e " in run["aggregator"].notices("late is")[0]
    assert "it has not pinned b (its own policy.pin_members)" in run["aggregator"].notices("", of="e is")[0]
    assert not run["aggregator"].of("round_failed")
    assert min(e["sites"] for e in run["aggregator"].of("round_committed")) >= 4


@pytest.mark.slow(6)
def test_d1_statistics_are_of_the_sites_that_accept_each_other(world):
    run = world(*FIVE, strategy={"min_sites": 4}, stats={"allow": True, "min_cell": 1})
    for name in FIVE:
        run.pin(*"abcd", at=name)

    async def story() -> None:
        run.start(*"abce")
        found = asyncio.create_task(aggregator.survey(run.config, emit=run["aggregator"]))
        run.tasks["survey"] = found
        await run["aggregator"].until(lambda: run["aggregator"].notices("e is left out"))
        run.start("d")
        assert list((await found).sites) == list("abcd")

    run.go(story)


@pytest.mark.slow(6)
def test_sites_whose_own_rules_refuse_are_left_out_of_a_sum_that_the_others_can_have(world):
    """Two of five refuse for good: the quorum of five would be four."""
    run = world(*FIVE, strategy={"min_sites": 3})
    for name in "de":
        run.policy(name, rounds=1)
    refused = lambda: {e["site"] for e in run["aggregator"].of("update_refused")}

    async def story() -> None:
        run.start("aggregator", *FIVE)
        await run["aggregator"].until(lambda: {*"de"} <= refused())
        await run["aggregator"].committed(2)

    run.go(story)
    assert run["aggregator"].of("round_committed")[-1]["sites"] == 3
    assert not run["aggregator"].of("round_failed")
    assert refused() == {*"de"}


@pytest.mark.slow(6)
def test_one_site_that_checked_the_model_is_enough_for_a_sum_with_two_others(world, monkeypatch):
    """The other sites of the last sum left for good; before, the run ended."""
    members = RemoteCohort.members
    all_of = lambda cohort, need: members(cohort, need and 5)
    monkeypatch.setattr(RemoteCohort, "members", all_of)
    run = world(*FIVE, strategy={"min_sites": 3})
    told = run["aggregator"]

    async def story() -> None:
        run.start("aggregator", *FIVE)
        await told.committed(2)
        await run.end("aggregator", *FIVE)
        for name in "bcde":  # as of sites that were not in the last sum
            (run.config.site_dir(name) / FILE).unlink()
        told.clear()
        run.start("aggregator", *FIVE)
        await told.committed(4)

    run.go(story)
    assert not told.of("round_failed")
    inside = [e["sites"] for e in told.of("round_committed")]
    assert inside[0] == 3, "the site that checked the model, and two others"
    assert inside[-1] == 5, "these three have checked the next one"
    (said,) = {e["reason"] for e in told.of("update_refused") if e["site"] == "b"}
    assert "1 of 5 sites checked the sum that this model was made of: 2 must" in said


def brute(sites, pairs, worth):
    every = (set(some) for n in range(len(sites) + 1) for some in itertools.combinations(sites, n))
    return max(worth(some) for some in every if not any(some.issuperset(pair) for pair in pairs))


def test_the_largest_set_of_sites_without_refusals_is_found_the_same_each_time():
    draw = random.Random(5)
    for n in (1, 2, 5, 8, 11):
        for _ in range(20):
            sites = [f"s{i}" for i in range(n)]
            pairs = [pair for pair in itertools.permutations(sites, 2) if draw.random() < 0.2]
            inside = {site for site in sites if draw.random() < 0.5}
            worth = lambda found, inside=inside: (len(found), len(inside & set(found)))
            found = mutual.largest(frozenset(sites), pairs, worth)
            assert not any(found.issuperset(pair) for pair in pairs)
            assert worth(found) == brute(sites, pairs, worth)
            assert found == mutual.largest(frozenset(reversed(sites)), pairs, worth)


def test_of_two_hundred_sites_that_refuse_two_of_them_the_others_stay():
    sites = [f"s{i:03}" for i in range(200)]
    pairs = [(site, other) for site in sites for other in sites[:2] if site != other]
    assert mutual.largest(frozenset(sites), pairs, lambda found: (len(found),)) == {*sites[2:]}


# --- D2: an aggregator that is restored from a copy


def copied(source: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to)


@pytest.mark.slow(12)
@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
def test_d2_an_aggregator_restored_from_an_older_copy_goes_on_with_the_sites_newest_model(
    world, tmp_path, masks
):
    sections = {} if masks else {"secagg": {"enabled": False}}
    run = world(*FIVE, strategy={"min_sites": 5}, **sections)
    runs, copy, told = run.config.root / "runs", tmp_path / "copy", run["aggregator"]
    rounds = lambda: [e["round"] for e in told.of("round_committed")]

    async def story() -> None:
        run.start("aggregator", *FIVE)
        await told.committed(2)
        await run.end("aggregator")
        for part in ("r", "audit"):
            copied(runs / part, copy / part)
        run.start("aggregator")
        await told.committed(4)
        await run.end("aggregator")
        before.append(rounds()[-1])
        for part in ("r", "audit/aggregator.jsonl", "audit/aggregator.head"):
            if (copy / part).is_dir():
                copied(copy / part, runs / part)
            else:
                shutil.copy(copy / part, runs / part)
        told.clear()
        run.start("aggregator")
        await told.committed(3)

    before: list[int] = []
    run.go(story)
    (said,) = told.notices("this run directory ended with round")
    assert "5 sites hold its model" in said
    assert not told.of("round_failed")
    assert rounds()[0] >= before[0] - 1, "no round that a site has done is trained again"
    assert rounds() == list(range(rounds()[0], rounds()[0] + len(rounds())))
    assert all(e["metrics"] for e in told.of("evaluated"))

    log, root = runs / "audit/aggregator.jsonl", root_of(run.config)
    wrong = verify(log, root, [runs / "audit/a.jsonl"]).problems
    assert "fedtrain audit verify --restored" in wrong[-1], wrong
    line = int(re.search(r"--restored (\d+)", wrong[-1])[1])
    restored = verify(log, root, [runs / "audit/a.jsonl"], line)
    assert not restored.problems
    assert restored.lost
    assert verify(log, root, [runs / "audit/a.jsonl"], line + 1).problems, "more is missing than was said"


def test_d2_a_model_that_few_sites_claim_is_not_taken_from_them(tmp_path):
    """Two of five, at most, may lie: the run goes on from its own round."""
    schema = random_arena(10, 1).schema
    own, forged = random_arena(10, 1), random_arena(10, 2)
    config = Config.of({"run": {"name": "r"}, "strategy": {"min_sites": 3}}, tmp_path)
    with contextlib.closing(RunStore(config.run_dir)) as store:
        store.begin(schema, config.agreed(), task_digest="t")
        for site in FIVE:
            store.join(site, None)
        for number in (0, 1):
            store.commit(Checkpoint(number, own), {})
        told = Log()
        journal = Journal(config, store, told)
        path = tmp_path / forged.digest
        path.write_bytes(forged.payload)
        file = ArenaFile(schema, path, forged.digest)
        lies = NewestModel(round=9, model=hash_of(forged).hex(), weights=file)
        wrong = NewestModel(round=9, model="ab" * 32, weights=file)

        def found(many: int, lie: NewestModel) -> int:
            sites = {site: lambda _: NewestModel() for site in FIVE}
            sites |= {site: lambda _, lie=lie: lie for site in FIVE[:many]}
            before = store.latest()
            return asyncio.run(restored.caught_up(journal, LocalCohort(sites), before, None)).round

        assert found(2, lies) == 1
        assert found(5, wrong) == 1, "whose bytes have another SHA-256"
        assert found(3, lies) == 9


def with_momentum(root: Path, rounds: int) -> tuple[Config, RunStore]:
    """A run of five sites in the open, whose strategy has a state that is another one after each round."""
    config = Config.of({"run": {"name": "r"}, "strategy": {"min_sites": 3}}, root)
    store = RunStore(config.run_dir)
    store.begin(random_arena(10, 0).schema, config.agreed(), task_digest="t")
    for name in FIVE:
        store.join(name, None)
    for number in range(rounds + 1):
        plan = RoundPlan(number, 0, [*FIVE], registered=5)
        state = {"m": torch.full((10,), float(number))}
        store.commit(Checkpoint(number, random_arena(10, number), state), {}, None, FIVE, plan)
        store.evaluated(number, {"loss": 1.0 / (1 + number)}, best=True)
    return config, store


def caught_up(config: Config, store: RunStore, number: int, told: Log) -> Checkpoint:
    """What an aggregator that starts again goes on from, where all sites hold the model of this round."""
    model = random_arena(10, number)
    path = config.root / model.digest
    path.write_bytes(model.payload)
    weights = ArenaFile(model.schema, path, model.digest)
    has = NewestModel(round=number, model=hash_of(model).hex(), weights=weights)
    cohort = LocalCohort({name: lambda _: has for name in FIVE})
    before = store.latest()
    return asyncio.run(restored.caught_up(Journal(config, store, told), cohort, before, None))


@pytest.mark.parametrize("killed", [False, True], ids=["at once", "killed meanwhile"])
def test_a_damaged_model_comes_from_the_sites_and_nothing_else_is_lost(tmp_path, killed):
    """Before, the older round's momentum went on with it: another model came out."""
    (config, store), told = with_momentum(tmp_path, 3), Log()
    rounds, newest = store.rounds(), store.rounds()[-1].weights
    (store.blobs / newest).write_bytes(b"damaged")
    if killed:
        assert store.latest().round == 2
    store.close()
    store = RunStore(config.run_dir)
    with contextlib.closing(store):
        after = caught_up(config, store, 3, told)
        assert (after.round, after.weights.digest) == (3, newest)
        assert after.state["m"].tolist() == [3.0] * 10
        assert store.rounds() == rounds
        assert store.plan(3).sites == [*FIVE]
        assert store.counted() == dict.fromkeys(FIVE, 2)
        assert store.latest().round == 3
    assert told.notices("the model of round 3 came from a: nothing is lost")


def test_a_round_whose_momentum_is_damaged_too_is_trained_again(tmp_path):
    (config, store), told = with_momentum(tmp_path, 3), Log()
    with contextlib.closing(store):
        for lost in store.db.one("SELECT weights, state FROM rounds WHERE round = 3"):
            (store.blobs / lost).write_bytes(b"damaged")
        after = caught_up(config, store, 3, told)
        assert (after.round, after.state["m"].tolist()) == (2, [2.0] * 10)
        assert store.plan(2).sites == [*FIVE], "the same sites, so the same model"
        assert [each.round for each in store.rounds()] == [0, 1, 2]
    assert told.notices("The sites train round 3 again")


def test_a_newer_model_than_a_copys_goes_on_with_older_momentum_and_the_log_says_so(tmp_path):
    (config, store), told = with_momentum(tmp_path, 2), Log()
    with contextlib.closing(store):
        after = caught_up(config, store, 4, told)
        assert (after.round, after.state["m"].tolist()) == (4, [2.0] * 10)
    (said,) = told.notices("as a copy does")
    assert said.endswith("The strategy's own state (its momentum, say) is the one of round 2")


# --- the end of a run


def test_a_site_that_connects_in_the_last_moment_of_a_run_learns_that_it_is_over(tmp_path):
    certs, schema = certificates(tmp_path / "certs", "b"), random_arena(10, 1).schema

    async def story() -> str:
        async with asyncio.timeout(30), star(certs, tmp_path, schema) as found:
            port = found.cohort.port
            _, slow = await asyncio.open_connection("127.0.0.1", port)
            slow.write(b"\x16")  # a handshake begins: before, the port closed as nobody had joined yet
            while not found.cohort._transport.arriving():  # noqa: ASYNC110  # no event tells it
                await asyncio.sleep(0)
            over = asyncio.create_task(found.cohort.stop("rounds done"))
            reason = await link(certs, "b", port, tmp_path).serve(hello(schema), echo_plus(1))
            slow.close()
            await over
            return reason

    assert asyncio.run(story()) == "rounds done"
