"""Training without rounds: who is asked when, what counts how much, what survives, and what it gains."""

import asyncio
import io
import math
import re
import selectors
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from fedtrain.arena import Arena
from fedtrain.cli import cli
from fedtrain.config import AsynchronousConfig, Config, EvaluateConfig, SecAggConfig
from fedtrain.errors import ConfigError, RoundError
from fedtrain.events import KINDS
from fedtrain.messages import Evaluate, Evaluation, Failure, Train, Update
from fedtrain.runtime.journal import Clock, Journal
from fedtrain.runtime.plan import round_plan
from fedtrain.runtime.simulations.clocked_turns import Clocked, TurnTimes
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.simulations.site_models import Load, SiteModels
from fedtrain.runtime.star import asynchronous, federated
from fedtrain.runtime.star.aggregator import serve
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.runtime.star.combinations import beyond
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import Checkpoint, RunStore, Turn, TurnState
from fedtrain.strategies import STRATEGIES, beginning, build
from fedtrain.tracking import Board, EventLog
from fedtrain.tracking.live import line, table
from fedtrain.transport.memory import LocalCohort
from tests.federation import aggregator, certificates, link, random_arena, sites
from tests.limits import bounded
from tests.processes import Project, kill_at_seeded_moments
from tests.test_federated import SCHEMA, SITES, Events, arena, handlers, pull
from tests.test_simulation import TASK, configured, simulated
from tests.test_simulation import by_hand as by_plain_loop

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
        store.commit(Checkpoint(0, *beginning(strategy, arena())), {})
    return store, strategy


def on_clock(cfg, cohort, sites, ahead, clock=None):
    times = TurnTimes(SiteModels(cfg, sites), Load(0, 0), {}, cfg.strategy.round_deadline)
    return Clocked(cfg, cohort, clock or Clock(), times, ahead)


def run(cfg, cohort, events=None, clocked=False):
    """Both results: (how it ended, the last version)."""
    store, strategy = begun(cfg)
    now = Clock() if clocked else None
    asks = on_clock(cfg, cohort, SITES, ahead=3, clock=now) if clocked else None
    journal = Journal(cfg, store, Events() if events is None else events, clock=now)
    try:
        result = asyncio.run(asynchronous.run(journal, cohort, strategy, asks=asks))
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


ASYNCHRONOUS = [kind for kind in sorted(STRATEGIES) if not beyond(build(kind, {}))]


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_with_all_sites_in_the_buffer_and_equal_speeds_it_is_the_synchronous_run_bit_for_bit(tmp_path, kind):
    evaluated = {"evaluate": {"every": 1}}
    cfg = config(tmp_path / "a", strategy={"kind": kind}, asynchronous={"buffer": 5}, **evaluated)
    events, plain = Events(), Events()
    result, last = run(cfg, LocalCohort(handlers()), events, clocked=True)
    sync = config(tmp_path / "s", strategy={"kind": kind}, asynchronous={"enabled": False}, **evaluated)
    store, strategy = begun(sync)
    cohort = LocalCohort(handlers())
    expected = asyncio.run(
        federated.run(Journal(sync, store, plain), InTheOpen(sync, cohort, plain), strategy)
    )
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
        clock = on_clock(cfg, cohort, SITES, ahead=ahead)
        asyncio.run(asynchronous.run(Journal(cfg, store, Events()), cohort, strategy, asks=clock))
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
                runner.run(asynchronous.run(Journal(cfg, store, events), cohort, strategy))
            else:
                answers = InTheOpen(cfg, cohort, events)
                runner.run(federated.run(Journal(cfg, store, events), answers, strategy))
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
    assert cohort.lines == [("e", f"version {refused[0]['round']}: the update was refused: {reason}")]
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


@pytest.mark.parametrize("buffer", [1, 3])
def test_an_update_that_no_model_survives_is_taken_out_of_the_buffer_and_named(tmp_path, buffer):
    cfg, events = config(tmp_path, asynchronous={"buffer": buffer}), Events()

    def hostile(request):
        return Update(delta=arena(*[3e38] * 8), num_examples=1.0)

    result, last = run(cfg, LocalCohort(handlers(c=hostile)), events, clocked=True)
    assert result.reason == "rounds done"
    assert last.weights.flat(FLAT).abs().max() < 100
    assert {e["site"] for e in events.of("update_refused")} == {"c"}
    assert "is not committed: " in events.of("update_refused")[0]["reason"]


def test_training_that_diverges_at_all_sites_alike_ends_the_run_and_blames_none(tmp_path):
    cfg = config(tmp_path, asynchronous={"buffer": 3}, strategy={"kind": "fedavgm"})

    def diverging(request):
        return Update(delta=arena(*[6e18] * 8), num_examples=1.0)

    with pytest.raises(RoundError, match=r"no site's update outweighs .*: lower train\.lr"):
        run(cfg, LocalCohort(dict.fromkeys(SITES, diverging)), clocked=True)


def test_when_no_site_gives_anything_the_run_stops_and_the_same_command_tries_again(tmp_path):
    cfg, events = config(tmp_path, strategy={"min_sites": 2}), Events()
    broken = LocalCohort(dict.fromkeys("ab", lambda request: Failure(reason="TaskError: no data")))
    for _ in range(2):
        with pytest.raises(RoundError, match=r"version 1: none of the sites here \(a, b\) gave an update"):
            run(cfg, broken, events)
    assert len(events.of("update_refused")) == 2 * 2 * cfg.strategy.attempts
    result, _ = run(cfg, LocalCohort({s: pull(s) for s in "ab"}))
    assert result.rounds == 6


def test_a_site_that_fails_once_in_an_evaluation_is_asked_again_for_it(tmp_path):
    cfg, events, asked = config(tmp_path), Events(), []

    def once(request):
        if isinstance(request, Evaluate):
            asked.append(request.id)
            if len(asked) % 2:
                return Failure(reason="OutOfMemoryError in task.py:7, in loss")
        return pull("c")(request)

    run(cfg, LocalCohort(handlers(c=once)), events, clocked=True)
    assert all("c" in e["by_site"] for e in events.of("evaluated"))
    assert len(set(asked)) == len(asked) == 2 * len(events.of("evaluated"))


def test_sites_that_all_fail_once_are_asked_anew_and_the_run_goes_on(tmp_path):
    """As when what they all read their data from is away for a moment."""
    cfg, failed = config(tmp_path, strategy={"min_sites": 2}), set()

    def once(site):
        def handle(request):
            if site not in failed:
                failed.add(site)
                return Failure(reason="OSError in task.py:7, in data")
            return pull(site)(request)

        return handle

    result, _ = run(cfg, LocalCohort({s: once(s) for s in "ab"}), Events(), clocked=True)
    assert result.rounds == 6


def test_a_site_that_is_never_heard_of_stops_nobody(tmp_path):
    cfg, events = config(tmp_path), Events()
    run(cfg, LocalCohort(handlers(), loses=lambda site, request: site == "b"), events)
    assert len(events.of("round_committed")) == 6
    assert {r["site"] for r in events.of("update_refused")} == {"b"}
    assert "strategy.round_deadline = 30 s" in events.of("update_refused")[0]["reason"]


class Leaving(LocalCohort):
    """Site e is lost in the middle of its first training, and is back when the model is at version 6."""

    def __init__(self, handlers):
        super().__init__(handlers)
        self.away, self.back = False, asyncio.Event()

    async def members(self, at_least):
        return [site for site in SITES if site != "e" or not self.away]

    async def newcomer(self, known):
        await self.back.wait() if self.away or "e" not in known else await super().newcomer(known)

    async def exchange(self, requests, deadline_s):
        async for site, reply in super().exchange(requests, deadline_s):
            if site == "e" and not self.back.is_set():
                self.away = True
                return
            await asyncio.sleep(0)
            yield site, reply


@pytest.mark.parametrize("bound", [20, 3])
def test_a_lost_site_that_comes_back_is_asked_what_it_owes_unless_that_is_too_old_by_now(tmp_path, bound):
    asked, events = [], Events()

    def of_e(request):
        asked.append((request.round, request.weights.load().digest))
        return pull("e")(request)

    cfg = config(tmp_path, run={"rounds": 12}, asynchronous={"max_staleness": bound})
    cohort = Leaving(handlers(e=of_e))

    def emit(event):
        kind, fields = event.kind, event.fields()
        events(event)
        if kind == "round_committed" and fields["round"] == 6:
            cohort.away = False
            cohort.back.set()

    run(cfg, cohort, emit)
    assert asked[0] == (0, arena().digest)
    first = next(e for e in events.of("update_received") if e["site"] == "e")
    if bound == 20:
        assert asked[1] == asked[0]
        assert first["staleness"] >= 6
    else:
        assert asked[1][0] == 1
        assert asked[1][1] != asked[0][1]
        assert first["staleness"] <= 3
    assert events.of("update_refused") == []


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
        ({"simulate": {"engine": "stacked"}}, 'Set it to "loop"'),
        ({"aggregation": {"rule": "krum", "f": 1}}, "krum with f = 1 needs 5 updates a round, but 2 may be"),
    ],
)
def test_settings_that_cannot_go_with_it_say_what_to_set(tmp_path, sections, message):
    cfg = config(tmp_path, **sections)
    with pytest.raises(ConfigError, match=re.escape(message)):
        asynchronous.check_config(cfg)


@pytest.mark.parametrize("command", [serve, simulate], ids=["aggregator", "simulate"])
def test_with_secure_aggregation_neither_command_starts(tmp_path, command):
    with pytest.raises(ConfigError, match="secure aggregation sums over sites that are fixed"):
        asyncio.run(command(config(tmp_path, secagg={"enabled": True}), emit=Events()))
    assert not (tmp_path / "runs").exists()


# --- what survives


class Stop(BaseException):
    """kill -9, as far as a store can tell."""


class StoppingStore(RunStore):
    """Dies before its n-th transaction: after the one before, and all that lies between."""

    count, dies_before = 0, -1

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        begin = self.db.transaction

        def transaction():
            self.count += 1
            if self.count == self.dies_before:
                raise Stop
            return begin()

        self.db.transaction = transaction


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"speeds": "straggler:2"},
        {"speeds": "lognormal:1", "dropout": 0.3, "availability": "part:0.6,0.002"},
    ],
    ids=["equal", "straggler", "hard"],
)
def test_killed_between_any_two_transactions_a_clocked_run_goes_on_to_the_same_bits(tmp_path, keys):
    """No update is counted twice, none is lost and none made up: the model and every site's turn are those of
    the run without the accident."""

    def go(folder, dies_before=-1):
        cfg = config(folder, run={"rounds": 3}, asynchronous={"buffer": 3}, simulate=keys)
        for at in (dies_before, -1):
            store, strategy = begun(cfg, StoppingStore)
            store.count, store.dies_before = 0, at
            cohort, clock = LocalCohort(handlers()), Clock()
            asks = on_clock(cfg, cohort, SITES, ahead=3, clock=clock)
            asks.goes_on(store.turns.latest())
            journal = Journal(cfg, store, Events(), clock=clock)
            try:
                asyncio.run(asynchronous.run(journal, cohort, strategy, asks=asks))
                clocks = [r.record.get("clock_s") for r in store.rounds()]
                return (store.latest().weights.digest, store.turns.latest(), clocks), store.count
            except Stop:
                pass
            finally:
                store.close()
        raise AssertionError("the second time nothing stops it")

    whole, transactions = go(tmp_path / "whole")
    assert transactions > 20
    for at in range(1, transactions + 1):
        assert go(tmp_path / str(at), at)[0] == whole, at


def with_two_in_the_buffer(cfg):
    store, _ = begun(cfg)
    for site in "ab":
        store.turns.set(site, Turn(4, 0))
        delta = store.turns.keep(site, arena(*range(8)))
        store.turns.take(
            site, Turn(4, 0), Update(delta=delta, num_examples=2.0, metrics={"loss": (1.0, 2.0)})
        )
    return store


def test_the_buffer_is_read_back_as_it_was_and_what_a_power_cut_damaged_is_owed_again(tmp_path):
    store = with_two_in_the_buffer(config(tmp_path))
    a, b = store.turns.buffered()
    assert (a.site, a.turn, a.update.num_examples) == ("a", Turn(4, 0, TurnState.TAKEN), 2.0)
    assert a.update.metrics == {"loss": (1.0, 2.0)}
    assert a.update.delta.load().digest == arena(*range(8)).digest
    b.update.delta.path.write_bytes(bytes(SCHEMA.nbytes))
    assert [left.site for left in store.turns.buffered()] == ["a"]
    assert store.turns.latest() == {"a": Turn(4, 0, TurnState.TAKEN), "b": Turn(4, 0, TurnState.OWED)}
    store.close()


def test_a_damaged_version_is_passed_over_with_all_that_was_trained_from_it(tmp_path):
    cfg = config(tmp_path)
    store = with_two_in_the_buffer(cfg)
    store.commit(Checkpoint(1, arena(*[1.0] * 8), {}), {})
    assert store.turns.buffered() == []
    store.turns.set("a", Turn(5, 1))
    delta = store.turns.keep("a", arena(*range(8)))
    store.turns.take("a", Turn(5, 1), Update(delta=delta, num_examples=2.0))
    store.turns.set("b", Turn(5, 1))
    store.weights(1).path.write_bytes(b"damaged")
    assert store.latest().round == 0
    assert store.turns.buffered() == []
    assert {turn.state for turn in store.turns.latest().values()} == {TurnState.REFUSED}
    store.close()


def test_a_turn_from_an_older_version_that_is_damaged_is_given_up_and_its_site_gets_another(tmp_path):
    cfg, lines = config(tmp_path), []
    store, _ = begun(cfg)
    store.turns.set("a", Turn(0, 0))
    for number in (1, 2, 3):
        store.commit(Checkpoint(number, arena(*[float(number)] * 8), {}), {})
    path = store.weights(0).path  # which is here for a's sake
    store.close()
    path.write_bytes(b"damaged")
    store = RunStore(cfg.run_dir, warn=lines.append)
    assert store.latest().round == 3
    assert store.turns.latest()["a"].state == TurnState.REFUSED
    assert f"{path} is damaged" in lines[0]
    assert "another turn" in lines[0]
    store.close()


@pytest.mark.parametrize("buffer", [1, 4])
def test_the_plan_of_a_version_is_that_of_a_full_buffer_however_many_sites_there_are(folder, buffer):
    cfg = configured(folder, task="Natural", rounds=20)
    rounds = round_plan(cfg)
    versions = round_plan(replace(cfg, asynchronous=AsynchronousConfig(enabled=True, buffer=buffer)), 9)
    each = rounds.down_bytes + rounds.up_bytes
    assert (rounds.sites, rounds.updates, rounds.run_bytes) == (3, 3, 20 * 3 * each)
    assert (versions.sites, versions.updates, versions.run_bytes) == (9, buffer, 20 * buffer * each)
    with pytest.raises(ConfigError, match="secure aggregation sums over sites"):
        round_plan(replace(cfg, asynchronous=AsynchronousConfig(enabled=True), secagg=SecAggConfig()))


def test_the_command_plan_speaks_of_versions(folder):
    (folder / "fedtrain.toml").write_text(
        '[run]\ntask = "pool_task:Natural"\nrounds = 20\n[secagg]\nenabled = false\n'
        "[asynchronous]\nenabled = true\nbuffer = 2\n"
    )
    said = CliRunner().invoke(cli, ["plan"])
    assert said.exit_code == 0, said.output
    assert said.output.startswith("A version, which is 2 updates of any of 3 sites, in the open")
    assert "in all 20 versions" in said.output


# --- in simulation


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool_task.py").write_text(TASK)
    return tmp_path


@pytest.mark.slow(2)
def test_the_simulation_with_a_full_buffer_at_equal_speeds_is_that_of_rounds(folder):
    cfg = configured(folder, task="Natural")
    expected = by_plain_loop(cfg).digest
    asynchronously = AsynchronousConfig(enabled=True, buffer=3)
    _, weights = simulated(replace(cfg, asynchronous=asynchronously))
    assert weights.digest == expected


@pytest.mark.slow(2)
def test_neither_workers_nor_processes_change_a_bit_of_an_asynchronous_simulation(folder):
    cfg = configured(folder, task="Natural", rounds=6)
    cfg = replace(
        cfg,
        asynchronous=AsynchronousConfig(enabled=True, buffer=2),
        simulate=replace(cfg.simulate, speeds="straggler:3"),
    )
    events, weights = simulated(cfg, workers=2)
    assert [f["sites"] for kind, f in events if kind == "run_started"] == [3]
    assert max(f["staleness"] for kind, f in events if kind == "update_received") >= 1
    bench = Workbench(cfg, simulated=True)

    def site(name):
        return lambda r: bench.train(name, r.round, r.weights.load(), Arena.zeros(r.weights.schema))

    names = bench.description.sites
    plain = replace(cfg, run=replace(cfg.run, name="plain"), evaluate=EvaluateConfig(every=0))
    store, strategy = RunStore(plain.run_dir, durable=False), build(plain.strategy.kind, {})
    initial = bench.initial()
    store.begin(initial.schema, plain.agreed(), task_digest="t")
    store.commit(Checkpoint(0, *beginning(strategy, initial)), {})
    cohort = LocalCohort({name: site(name) for name in names})
    clock = on_clock(plain, cohort, names, ahead=1)
    asyncio.run(asynchronous.run(Journal(plain, store, Events()), cohort, strategy, asks=clock))
    assert store.latest().weights.digest == weights.digest
    store.close()


# --- what people see


def test_lines_and_table_count_versions_and_show_staleness(tmp_path):
    cfg = config(tmp_path, simulate={"speeds": "straggler:4"}, run={"rounds": 12})
    board, lines, events = Board(), [], Events()
    run(cfg, LocalCohort(handlers()), events, clocked=True)
    with EventLog(tmp_path / "told", board.add, lambda e: lines.append(line(e, board))) as log:
        for kind, fields in events:
            log.emit(KINDS[kind](**fields))
    assert lines[0].startswith("run t (federated): 12 versions")
    assert "version 9/12: update from e: 5 examples" in "\n".join(filter(None, lines))
    assert any(text and "from e" in text and text.endswith("staleness 8") for text in lines)
    assert any(text and text.startswith("version 10/12: done: ") and "staleness" in text for text in lines)
    console = Console(width=100, height=30, file=io.StringIO(), force_terminal=False)
    console.print(table(board, board.updated, 100, 30))
    shown = console.file.getvalue()
    assert re.search(r"t  federated  version 12/12", shown)
    assert re.search(r"site +state +version +staleness +examples +loss", shown)
    assert re.search(r"^e +training +\d+ +8 +5", shown, re.M)


# --- over a network


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), *"abcd")


def test_over_mutual_tls_no_site_waits_for_a_slow_one_and_one_that_joins_later_takes_part(certs, tmp_path):
    """Sites c and d take part when a and b have made two, and four, versions without them: by events, without
    a clock. The slow one is not disturbed by the evaluations that go on meanwhile."""
    weights, events = random_arena(50_000, 1), Events()
    cfg = config(tmp_path, run={"rounds": 8}, evaluate={"every": 1})
    store, strategy = RunStore(cfg.run_dir, durable=False), build("fedavg", {})
    store.begin(weights.schema, cfg.agreed(), task_digest="t")
    store.commit(Checkpoint(0, weights, {}), {})
    trained = {name: [] for name in "abcd"}

    async def main():
        reached = {version: asyncio.Event() for version in range(1, 9)}
        heard = {name: asyncio.Event() for name in "abcd"}

        def emit(event):
            kind, fields = event.kind, event.fields()
            events(event)
            if kind == "round_committed":
                reached[fields["round"]].set()
            elif kind == "update_received":
                heard[fields["site"]].set()

        def answer(name):
            async def handle(request):
                if isinstance(request, Evaluate):
                    return Evaluation(metrics={"loss": (float(request.round), 1.0)})
                if name in "ab" and reached[2].is_set():
                    await heard["d"].wait()
                if name in "ab" and reached[4].is_set():
                    await heard["c"].wait()
                if name == "c":
                    await reached[4].wait()
                trained[name].append(request.round)
                return Update(delta=random_arena(50_000, request.round), num_examples=1.0)

            return handle

        async with aggregator(certs, store.folder, weights.schema) as agg:
            links = {n: link(certs, n, agg.cohort.port, tmp_path) for n in "abcd"}
            late = links.pop("d")
            async with sites(links, weights.schema, answer):
                running = asyncio.create_task(
                    asynchronous.run(Journal(cfg, store, emit), agg.cohort, strategy)
                )
                await asyncio.wait([running, asyncio.create_task(reached[2].wait())],
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
                async with sites({"d": late}, weights.schema, answer):
                    return await running

    result = bounded(main())
    assert result.rounds == 8
    by_site = {name: [e for e in events.of("update_received") if e["site"] == name] for name in "abcd"}
    assert all(by_site.values())
    assert by_site["c"][0]["staleness"] >= 4
    assert sum(map(len, by_site.values())) == 16
    assert events.of("update_refused") == []
    assert all(turns == list(range(len(turns))) for turns in trained.values())
    over = {"loss/uniform": 8.0, "loss/worst_decile": 8.0, "loss/std": 0.0}
    assert result.metrics == {"loss": 8.0, **over}
    store.close()


@pytest.mark.slow(20)  # seven processes that load torch: about 20 s
@pytest.mark.timeout(600)
def test_s31_an_aggregator_killed_at_seeded_moments_counts_each_update_once_and_loses_none(tmp_path):
    with Project(tmp_path, rounds=40, slow=0.005, task="Held") as p:
        p.let_train(0)
        with (p.root / "fedtrain.toml").open("a") as f:
            f.write(
                "[asynchronous]\nenabled = true\nbuffer = 2\nmax_staleness = 1000\n[evaluate]\nevery = 7\n"
            )
        kill_at_seeded_moments(
            p, lambda: p.start("aggregator"), p.start_all(), 2, 5, lambda: p.count("update_received")
        )
        p.wait_for(lambda: p.count("run_finished"))
        store = RunStore(p.root / "runs" / "r", read_only=True)
        turns, waiting = store.turns.latest(), len(store.turns.buffered())
        store.close()
        answered = sum(turn.number + (turn.state == TurnState.TAKEN) for turn in turns.values())
        assert answered == 40 * 2 + waiting
        assert [e for e in p.events() if e["kind"] == "update_refused"] == []
        for site, turn in turns.items():
            worked = [e["round"] for e in p.events(f"r@{site}") if e.get("state") == "training"]
            assert worked[: turn.number] == list(range(1, turn.number + 1))
