"""Training without rounds: who is asked when, what counts how much, what survives, and what it gains."""

import asyncio
import math
import re
import selectors

import pytest
import torch

from fedtrain.config import Config
from fedtrain.errors import ConfigError, RoundError
from fedtrain.runtime import asynchronous, federated
from fedtrain.runtime.answers import InTheOpen
from fedtrain.runtime.simulation import simulate
from fedtrain.store import Checkpoint, RunStore
from fedtrain.strategies import STRATEGIES, build, state_init
from fedtrain.transport.memory import LocalCohort
from fedtrain.update import Evaluate, Evaluation, Failure, Train, Update
from tests.test_federated import SCHEMA, SITES, Events, arena, handlers, pull

FLAT = SCHEMA.sections[0]


def config(tmp_path, **sections):
    table = {
        "run": {"name": "t", "rounds": 6, "seed": 3},
        "strategy": {"kind": "fedavg", "min_sites": 3, "round_deadline": "30s"},
        "asynchronous": {"enabled": True, "buffer": 2},
        "secagg": {"enabled": False},
        "evaluate": {"every": 0},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return Config.of(table, root=tmp_path)


def begun(cfg, kind=RunStore):
    store, strategy = kind(cfg.run_dir, durable=False), build(cfg.strategy.kind, cfg.strategy.options)
    store.begin(SCHEMA, cfg.agreed(), task_digest="t")
    if store.latest() is None:
        store.commit(Checkpoint(0, arena(), state_init(strategy, arena())), {})
    return store, strategy


def run(cfg, cohort, events=None, clocked=False):
    """Both results: (how it ended, the last version)."""
    store, strategy = begun(cfg)
    clock = asynchronous.Clocked(cfg, cohort, SITES, ahead=3) if clocked else None
    try:
        result = asyncio.run(
            asynchronous.run(cfg, cohort, store, strategy, Events() if events is None else events, asks=clock)
        )
        return result, store.latest()
    finally:
        store.close()


def after(seconds, handle):
    """A site that takes so long."""

    async def wait(request):
        await asyncio.sleep(seconds if isinstance(request, Train) else 0.0)
        return handle(request)

    return wait


# --- what counts how much


def by_hand(weights, buffer, exponent=0.5):
    """FedBuff's step in float64: w + Σ n (1+τ)^-a Δ / Σ n over (Δ, n, τ)."""
    total = sum((n * (1 + tau) ** -exponent) * delta.double() for delta, n, tau in buffer)
    return weights + total / sum(n for _, n, _ in buffer)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("buffer", [1, 2, 3, 7])
def test_a_version_is_fedbuffs_step_by_hand(tmp_path, buffer, exponent):
    """On a clock where e takes 10 times as long as the others."""
    asked, cfg = {}, config(
        tmp_path, run={"rounds": 60 // buffer}, simulate={"speeds": "straggler:10"},
        asynchronous={"buffer": buffer, "staleness_exponent": exponent, "max_staleness": 1000},
    )  # fmt: skip

    def remembers(site):
        def handle(request):
            reply = pull(site)(request)
            asked[site, request.round] = (request.weights.load().flat(FLAT).double(), reply)
            return reply

        return handle

    events = Events()
    _, last = run(cfg, LocalCohort({s: remembers(s) for s in SITES}), events, clocked=True)
    versions = [arena().flat(FLAT).double()]
    turns, pending, stale = dict.fromkeys(SITES, 0), [], []
    for kind, fields in events:
        if kind == "update_received":
            site = fields["site"]
            trained_from, reply = asked[site, turns[site]]
            turns[site] += 1
            tau = fields["staleness"]
            torch.testing.assert_close(versions[-1 - tau], trained_from, rtol=1e-4, atol=1e-4)
            pending.append((reply.delta.flat(FLAT), reply.num_examples, tau))
            stale.append(tau)
        elif kind == "round_committed":
            assert len(pending) == buffer
            versions.append(by_hand(versions[-1], pending, exponent))
            assert fields["staleness"] == pytest.approx(sum(t for *_, t in pending) / buffer)
            pending = []
    assert len(versions) == 1 + 60 // buffer
    assert max(stale) > 0
    torch.testing.assert_close(last.weights.flat(FLAT).double(), versions[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(STRATEGIES))
def test_with_all_sites_in_the_buffer_and_equal_speeds_it_is_the_synchronous_run_bit_for_bit(tmp_path, kind):
    evaluated = {"evaluate": {"every": 1}}
    cfg = config(tmp_path / "a", strategy={"kind": kind}, asynchronous={"buffer": 5}, **evaluated)
    events, plain = Events(), Events()
    result, last = run(cfg, LocalCohort(handlers()), events, clocked=True)
    sync = config(tmp_path / "s", strategy={"kind": kind}, asynchronous={"enabled": False}, **evaluated)
    store, strategy = begun(sync)
    cohort = LocalCohort(handlers())
    expected = asyncio.run(federated.run(sync, InTheOpen(sync, cohort, plain), store, strategy, plain))
    assert last.weights.digest == store.latest().weights.digest
    assert events.of("evaluated") == plain.of("evaluated")
    assert (result.metrics, result.best_round) == (expected.metrics, expected.best_round)
    store.close()


def test_a_robust_rule_sees_the_buffer(tmp_path):
    cfg = config(tmp_path, asynchronous={"buffer": 5}, aggregation={"rule": "median"})

    def hostile(request):
        return Update(delta=arena(*[1e30] * 8), num_examples=1e6)

    _, last = run(cfg, LocalCohort(handlers(c=hostile)), clocked=True)
    assert last.weights.flat(FLAT).abs().max() < 100


# --- who is asked, and when


@pytest.mark.parametrize("speeds", ["equal", "straggler:10", "lognormal:1"])
@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_on_a_clock_of_its_own_a_run_is_the_same_however_fast_replies_come(tmp_path, speeds, ahead):
    def once(name, delays):
        cfg = config(tmp_path / name, simulate={"speeds": speeds}, run={"rounds": 12})
        store, strategy = begun(cfg)
        cohort = LocalCohort({s: after(d, pull(s)) for s, d in zip(SITES, delays, strict=True)})
        clock = asynchronous.Clocked(cfg, cohort, SITES, ahead=ahead)
        asyncio.run(asynchronous.run(cfg, cohort, store, strategy, Events(), asks=clock))
        digest = store.latest().weights.digest
        store.close()
        return digest

    assert once("x", [0.0, 0.003, 0.001, 0.0, 0.002]) == once("y", [0.002, 0.0, 0.0, 0.003, 0.0])


class SleepsInNoTime(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next thing to do."""

    def __init__(self):
        class Selector(selectors.DefaultSelector):
            def select(_, timeout=None):
                self.now += timeout or 0.0
                return super().select(0)

        self.now = 0.0
        super().__init__(Selector())

    def time(self):
        return self.now


class Concurrent(LocalCohort):
    """Sites that are asked together work at the same time, as real ones do."""

    async def exchange(self, requests, deadline_s):
        async def one(site, request):
            return site, await self._handlers[site](request)

        for first in asyncio.as_completed([one(*item) for item in requests.items()]):
            yield await first


def test_with_one_site_ten_times_slower_as_many_updates_take_a_fraction_of_the_synchronous_time(tmp_path):
    seconds, counts = {}, {}
    for enabled in (False, True):
        cfg = config(
            tmp_path / str(enabled), run={"rounds": 20}, asynchronous={"enabled": enabled, "buffer": 5}
        )
        store, strategy = begun(cfg)
        cohort, events = Concurrent({s: after(10 if s == "e" else 1, pull(s)) for s in SITES}), Events()
        with asyncio.Runner(loop_factory=SleepsInNoTime) as runner:
            if enabled:
                runner.run(asynchronous.run(cfg, cohort, store, strategy, events))
            else:
                answers = InTheOpen(cfg, cohort, events)
                runner.run(federated.run(cfg, answers, store, strategy, events))
            seconds[enabled] = runner.get_loop().time()
        counts[enabled] = len(events.of("update_received"))
        store.close()
    assert counts == {False: 100, True: 100}
    assert seconds[False] == pytest.approx(200)
    assert seconds[True] == pytest.approx(25, abs=1)  # 4.1 updates a second


def test_two_trainings_of_one_site_from_one_version_have_different_seeds(tmp_path):
    seen = []

    def handle(request):
        seen.append((request.round, request.weights.digest))
        return pull("a")(request)

    run(config(tmp_path, strategy={"min_sites": 1}, run={"rounds": 3}), LocalCohort({"a": handle}))
    assert [turn for turn, _ in seen[:6]] == [0, 1, 2, 3, 4, 5]
    assert [digest for _, digest in seen[:6:2]] == [digest for _, digest in seen[1:6:2]]


def test_an_update_over_the_bound_is_refused_named_told_and_its_site_asked_anew(tmp_path):
    cfg = config(
        tmp_path, run={"rounds": 30}, simulate={"speeds": "straggler:10"},
        asynchronous={"buffer": 2, "max_staleness": 4},
    )  # fmt: skip
    asked, events = [], Events()

    def slow(request):
        asked.append((request.round, request.weights.digest))
        return pull("e")(request)

    cohort = LocalCohort(handlers(e=slow))
    run(cfg, cohort, events, clocked=True)
    refused = events.of("update_refused")
    assert [r["site"] for r in refused] == ["e"]
    (reason,) = {r["reason"] for r in refused}
    assert "versions old, over asynchronous.max_staleness = 4" in reason
    assert cohort.told == [("e", f"version {refused[0]['round']}: the update was refused: {reason}")]
    assert [turn for turn, _ in asked] == [0, 1]
    assert asked[0][1] != asked[1][1]
    assert all(e["staleness"] <= 4 for e in events.of("update_received"))
    assert "e" not in {e["site"] for e in events.of("update_received")}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Update(delta=arena(math.nan, *[0.0] * 7), num_examples=1.0), "w has 1 NaN or Inf of 6 values"),
        (Update(delta=arena(*[1e9] * 8), num_examples=1.0), "over limits.max_norm"),
        (Update(delta=arena(), num_examples=1e12), "over limits.max_examples"),
        (Failure(reason="TaskError: disk full"), "disk full"),
        (Evaluation(metrics={}), "Evaluation does not answer Train"),
    ],
    ids=["s16-nan", "s19-norm", "s18-examples", "failure", "s20-other"],
)
def test_a_bad_update_is_refused_and_its_site_asked_again_with_the_next_version(tmp_path, reply, reason):
    cfg, events, asked = config(tmp_path, limits={"max_norm": 1e6}), Events(), []

    def bad(request):
        asked.append(request.weights.digest)
        return reply

    run(cfg, LocalCohort(handlers(c=bad)), events, clocked=True)
    assert {r["site"] for r in events.of("update_refused")} == {"c"}
    assert all(reason in r["reason"] for r in events.of("update_refused"))
    assert len(asked) == len(set(asked)) > 1
    assert len(events.of("round_committed")) == 6


def test_when_no_site_gives_anything_the_run_stops_and_the_same_command_tries_again(tmp_path):
    cfg, events = config(tmp_path, strategy={"min_sites": 2}), Events()
    broken = LocalCohort(dict.fromkeys("ab", lambda request: Failure(reason="TaskError: no data")))
    for _ in range(2):
        with pytest.raises(RoundError, match=r"version 1: none of the sites here \(a, b\) gave an update"):
            run(cfg, broken, events)
    assert len(events.of("update_refused")) == 4
    result, _ = run(cfg, LocalCohort({s: pull(s) for s in "ab"}))
    assert result.rounds == 6


def test_a_site_that_is_never_heard_of_stops_nobody(tmp_path):
    cfg, events = config(tmp_path), Events()
    run(cfg, LocalCohort(handlers(), loses=lambda site, request: site == "b"), events)
    assert len(events.of("round_committed")) == 6
    assert {r["site"] for r in events.of("update_refused")} == {"b"}
    assert "strategy.round_deadline = 30 s" in events.of("update_refused")[0]["reason"]


# --- evaluation


def test_each_site_evaluates_between_two_trainings_and_early_stop_and_best_work(tmp_path):
    asked = []

    def worse_after_two(site):
        def handle(request):
            asked.append((site, type(request).__name__))
            if isinstance(request, Evaluate):
                return Evaluation(metrics={"loss": (abs(request.round - 2.0), 1.0)})
            return pull(site)(request)

        return handle

    cfg = config(
        tmp_path, run={"rounds": 50}, asynchronous={"buffer": 5}, evaluate={"every": 1, "patience": 3}
    )
    result, last = run(cfg, LocalCohort({s: worse_after_two(s) for s in SITES}), clocked=True)
    assert (result.best_round, result.rounds, last.round) == (2, 5, 5)
    assert "loss has not improved for 3 evaluations" in result.reason
    by_a = [kind for site, kind in asked if site == "a"]
    assert by_a == ["Train", "Evaluate"] * 5
    store = RunStore(cfg.run_dir, read_only=True)
    assert store.load(2).round == 2
    store.close()


def test_an_evaluation_waits_for_a_slow_site_and_nobody_waits_for_the_evaluation(tmp_path):
    cfg = config(tmp_path, run={"rounds": 30}, simulate={"speeds": "straggler:10"}, evaluate={"every": 1})
    events = Events()
    run(cfg, LocalCohort(handlers()), events, clocked=True)
    kinds = [(kind, f.get("round")) for kind, f in events if kind in ("round_committed", "evaluated")]
    assert [number for kind, number in kinds if kind == "round_committed"] == list(range(1, 31))
    first = kinds.index(("evaluated", 1))
    assert max(number for kind, number in kinds[:first] if kind == "round_committed") > 15
    assert kinds[-1] == ("evaluated", 30)
    assert all(sorted(e["by_site"]) == SITES for e in events.of("evaluated"))


# --- what makes no sense


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"secagg": {"enabled": True}}, "Set secagg.enabled = false"),
        ({"strategy": {"fraction": 0.5}}, "every site that is free is asked"),
        ({"simulate": {"engine": "vmap"}}, 'Set it to "loop"'),
        ({"aggregation": {"rule": "krum", "f": 1}}, "krum with f = 1 needs 5 updates a round, but 2 may be"),
    ],
)
def test_settings_that_cannot_go_with_it_say_what_to_set(tmp_path, sections, message):
    cfg = config(tmp_path, **sections)
    with pytest.raises(ConfigError, match=re.escape(message)):
        asynchronous.check_config(cfg)


@pytest.mark.parametrize("serve", [federated.serve, simulate], ids=["aggregator", "simulate"])
def test_with_secure_aggregation_neither_command_starts(tmp_path, serve):
    with pytest.raises(ConfigError, match="secure aggregation sums over sites that are fixed"):
        asyncio.run(serve(config(tmp_path, secagg={"enabled": True}), emit=Events()))
    assert not (tmp_path / "runs").exists()


# --- what survives


class Stop(BaseException):
    """kill -9, as far as a store can tell."""


class StoppingStore(RunStore):
    """Dies before its n-th transaction: after the one before, and all that lies between."""

    count, dies_before = 0, -1

    def _transaction(self):
        self.count += 1
        if self.count == self.dies_before:
            raise Stop
        return super()._transaction()


@pytest.mark.parametrize("speeds", ["equal", "straggler:2"])
def test_killed_between_any_two_transactions_a_clocked_run_goes_on_to_the_same_bits(tmp_path, speeds):
    """No update is counted twice, none is lost and none made up: the model and every site's turn are those of
    the run without the accident."""

    def go(folder, dies_before=-1):
        cfg = config(folder, run={"rounds": 3}, asynchronous={"buffer": 3}, simulate={"speeds": speeds})
        for at in (dies_before, -1):
            store, strategy = begun(cfg, StoppingStore)
            store.count, store.dies_before = 0, at
            cohort = LocalCohort(handlers())
            clock = asynchronous.Clocked(cfg, cohort, SITES, ahead=3)
            try:
                asyncio.run(asynchronous.run(cfg, cohort, store, strategy, Events(), asks=clock))
                return (store.latest().weights.digest, store.turns()), store.count
            except Stop:
                pass
            finally:
                store.close()
        raise AssertionError("the second time nothing stops it")

    whole, transactions = go(tmp_path / "whole")
    assert transactions > 20
    for at in range(1, transactions + 1):
        assert go(tmp_path / str(at), at)[0] == whole, at
