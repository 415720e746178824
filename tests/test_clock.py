"""Rounds on the run's own clock: when they close, who is in them, what is counted, what survives a kill."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from fedtrain.cli import cli
from fedtrain.cli.output import run_row
from fedtrain.config import Config
from fedtrain.errors import ConfigError, StoreError
from fedtrain.events import KINDS
from fedtrain.messages import Failure
from fedtrain.results import Run
from fedtrain.runtime.journal import Clock, Journal
from fedtrain.runtime.simulations.clock import OnClock, TrainedOn, passes
from fedtrain.runtime.simulations.policies import policies
from fedtrain.runtime.simulations.site_models import SiteModels
from fedtrain.runtime.simulations.training_bytes import TrainingBytes
from fedtrain.runtime.star import federated
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.store import Checkpoint, RunStore
from fedtrain.strategies import beginning, build
from fedtrain.tracking import Board, EventLog
from fedtrain.tracking.live import duration, line
from fedtrain.tracking.runs import summaries
from fedtrain.transport.memory import LocalCohort
from tests.test_asynchronous import Stop, StoppingStore
from tests.test_asynchronous import config as asynchronous_config
from tests.test_asynchronous import run as run_asynchronously
from tests.test_federated import SCHEMA, SITES, Events, arena, handlers, pull
from tests.test_simulation import configured, simulated
from tests.test_simulation import folder as folder

EXAMPLES = dict.fromkeys(SITES, 10.0)


def config(tmp_path, **sections):
    table = {
        "run": {"name": "t", "rounds": 3, "seed": 3},
        "strategy": {"kind": "fedavg", "min_sites": 2, "round_deadline": "100s"},
        "secagg": {"enabled": False},
        "evaluate": {"every": 0},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return Config.of(table, root=tmp_path)


def trace(tmp_path, text):
    tmp_path.mkdir(parents=True, exist_ok=True)
    (tmp_path / "trace").write_text(text)
    return {"trace": "trace"}


def seconds(tmp_path, **of_sites):
    """A trace in which a training of 10 examples takes each site so long."""
    lines = [f"{site},{of_sites.get(site, 1) / 10}" for site in SITES]
    return trace(tmp_path, "\n".join(["site,seconds_per_example", *lines]))


def run(cfg, sites=None, kind=RunStore, dies_before=-1, rounds=None):
    """(the committed rounds as they were told, the last model)"""
    events, clock = Events(), Clock()
    store, strategy = kind(cfg.run_dir, durable=False), build(cfg.strategy.kind, cfg.strategy.options)
    store.dies_before = dies_before

    async def examples(asked):
        return EXAMPLES

    try:
        store.begin(SCHEMA, cfg.agreed(), task_digest="t")
        if store.latest() is None:
            store.commit(Checkpoint(0, *beginning(strategy, arena())), {})
        cohort = OnClock(
            cfg, LocalCohort(handlers() if sites is None else sites), clock, SiteModels(cfg, SITES),
            TrainingBytes(cfg, SCHEMA, SCHEMA), examples,
        )  # fmt: skip
        journal = Journal(cfg, store, events, clock=clock)
        asyncio.run(federated.run(journal, InTheOpen(cfg, cohort, events), strategy))
        return events.of("round_committed"), store.latest().weights.digest
    finally:
        run.events, run.transactions = events, getattr(store, "count", 0)
        store.close()


# --- when a round closes


def test_a_round_takes_as_long_as_its_slowest_site(tmp_path):
    cfg = config(tmp_path, simulate=seconds(tmp_path, a=3, b=7, c=20, d=5, e=1))
    rounds, _ = run(cfg)
    assert [r["clock_s"] for r in rounds] == pytest.approx([20, 40, 60])
    assert {r["sites"] for r in rounds} == {5}
    assert {(*r["late"], *r["away"]) for r in rounds} == {()}


@pytest.mark.parametrize(("enough", "closes"), [(0.2, 3), (0.4, 3), (0.6, 5), (0.8, 7), (1.0, 20)])
def test_a_round_closes_with_the_kth_of_its_sites(tmp_path, enough, closes):
    """At least min_sites = 2 must be in it."""
    cfg = config(tmp_path, simulate=seconds(tmp_path, a=3, b=7, c=20, d=5, e=1), strategy={"enough": enough})
    rounds, _ = run(cfg)
    assert rounds[0]["clock_s"] == pytest.approx(closes)
    inside = ["e", "a", "d", "b", "c"][: max(2, round(enough * 5))]
    assert rounds[0]["sites"] == len(inside)
    assert rounds[0]["late"] == sorted(set(SITES) - set(inside))


def test_whoever_is_late_is_not_trained_and_the_round_closes_at_its_deadline(tmp_path):
    asked = []
    sites = {site: pull(site, asked) for site in SITES}
    cfg = config(tmp_path, simulate=seconds(tmp_path, c=20), strategy={"round_deadline": "12s"})
    rounds, digest = run(cfg, sites)
    assert [r["clock_s"] for r in rounds] == pytest.approx([12, 24, 36])
    assert [r["late"] for r in rounds] == [["c"]] * 3
    assert {site for _, site in asked} == {"a", "b", "d", "e"}
    other = config(tmp_path / "without", simulate=seconds(tmp_path / "without"))
    cohort = handlers()
    del cohort["c"]
    assert run_without_clock(other, cohort) == digest


def run_without_clock(cfg, sites):
    store, strategy = RunStore(cfg.run_dir, durable=False), build(cfg.strategy.kind, {})
    store.begin(SCHEMA, cfg.agreed(), task_digest="t")
    store.commit(Checkpoint(0, *beginning(strategy, arena())), {})
    cohort = LocalCohort(sites)
    asyncio.run(federated.run(Journal(cfg, store, Events()), InTheOpen(cfg, cohort, Events()), strategy))
    digest = store.latest().weights.digest
    store.close()
    return digest


def test_bytes_and_messages_take_their_time(tmp_path):
    cfg = config(tmp_path, simulate={"up_mbit": 0.001, "down_mbit": 0.002, "latency": 0.25})
    wire = TrainingBytes(cfg, SCHEMA, SCHEMA).load(0, -1, SITES)
    rounds, _ = run(cfg)
    expected = 1 + 8 * wire.down_bytes / 2000 + 8 * wire.up_bytes / 1000 + 2 * 0.25
    assert rounds[0]["clock_s"] == pytest.approx(expected)


def test_a_site_that_drops_out_is_away_and_holds_the_round_up_until_its_deadline(tmp_path):
    cfg = config(tmp_path, simulate={"dropout": 0.3}, run={"rounds": 30})
    rounds, _ = run(cfg)
    away = [len(r["away"]) for r in rounds]
    assert sum(away) / 150 == pytest.approx(0.3, abs=0.1)
    took = [b["clock_s"] - a["clock_s"] for a, b in zip([{"clock_s": 0.0}, *rounds], rounds, strict=False)]
    failed = len(run.events.of("round_failed"))  # with fewer than two left, it is tried again
    assert all(t == (1 if not n else 100) or failed for t, n in zip(took, away, strict=True))
    assert all(r["sites"] + len(r["away"]) == 5 for r in rounds)


def test_over_selection_spares_the_wait_for_those_that_drop_out(tmp_path):
    """What it is for: of five asked three are enough, and only a round that lost three waits."""
    taken = {}
    for enough in (1.0, 0.6):
        cfg = config(
            tmp_path / str(enough), simulate={"dropout": 0.2}, run={"rounds": 20},
            strategy={"enough": enough, "min_sites": 3},
        )  # fmt: skip
        taken[enough] = run(cfg)[0][-1]["clock_s"]
    assert taken[1.0] > 8 * taken[0.6]


def test_the_place_of_a_site_that_fails_is_taken_by_the_next_to_answer(tmp_path):
    def fails(request):
        return Failure(reason="disk full")

    cfg = config(
        tmp_path,
        simulate=seconds(tmp_path, a=1, b=2, c=3, d=4, e=5),
        strategy={"enough": 0.6, "min_sites": 3},
    )
    rounds, _ = run(cfg, handlers(b=fails))
    assert rounds[0]["clock_s"] == pytest.approx(4)
    assert rounds[0]["sites"] == 3
    assert rounds[0]["late"] == ["e"]


def test_a_round_that_needs_a_site_waits_for_it(tmp_path):
    cfg = config(
        tmp_path, simulate=seconds(tmp_path, e=9), strategy={"enough": 0.4},
        aggregation={"rule": "fltrust", "root": "e"},
    )  # fmt: skip
    rounds, _ = run(cfg)
    assert rounds[0]["clock_s"] == pytest.approx(9)


def test_sites_that_answer_at_one_moment_take_turns_in_the_rounds(tmp_path):
    cfg = config(tmp_path, simulate={"latency": 0.1}, strategy={"enough": 0.4}, run={"rounds": 20})
    rounds, _ = run(cfg)
    inside = {site for r in rounds for site in set(SITES) - set(r["late"])}
    assert inside == set(SITES)


# --- who is there


def test_only_sites_that_are_there_are_asked_and_the_clock_goes_on_until_there_are_enough(tmp_path):
    text = (
        "site,available,period_s\na,0-50,1000\nb,0-50,1000\nc,600-900,1000\nd,700-900,1000\ne,990-1000,1000"
    )
    cfg = config(tmp_path, simulate=trace(tmp_path, text), run={"rounds": 60})
    rounds, _ = run(cfg)
    assert [r["clock_s"] for r in rounds[:49]] == list(range(1, 50))
    started = [set(r["sites"]) for r in run.events.of("round_started")]
    assert started[0] == {"a", "b"}
    assert rounds[50]["clock_s"] == 701  # a and b are gone; c waits for d
    assert started[50] == {"c", "d"}


def test_a_site_that_goes_away_in_a_round_is_not_in_it(tmp_path):
    text = "site,available,period_s\na,0-1000,1000\nb,0-1000,1000\nc,0-0.5,1000\nd,0-1000,1000\ne,0-1000,1000"
    rounds, _ = run(config(tmp_path, simulate=trace(tmp_path, text), run={"rounds": 2}))
    assert [(r["clock_s"], r["away"]) for r in rounds] == [(100, ["c"]), (101, [])]


def test_sites_that_are_never_there_at_once_end_the_run(tmp_path):
    text = "site,available\na,0-5\nb,6-9\nc,10-20\nd,30-40\ne,50-60"
    with pytest.raises(ConfigError, match=r"of 5 sites 2 are not there at once within 31 days\. Lower"):
        run(config(tmp_path, simulate=trace(tmp_path, text)))


# --- the same each time


HARD = {"speeds": "lognormal:1", "dropout": 0.35, "availability": "part:0.7,0.01", "up_mbit": "lognormal:1,1"}


def test_killed_between_any_two_transactions_a_run_goes_on_with_the_same_clock(tmp_path):
    """With rounds that fail and are tried again, later."""

    def go(name, dies_before=-1):
        cfg = config(
            tmp_path / name, simulate=HARD, run={"rounds": 6},
            strategy={"min_sites": 3, "enough": 0.7, "round_deadline": "20s", "attempts": 50},
        )  # fmt: skip
        told = {}
        for at in (dies_before, -1):
            try:
                rounds, digest = run(cfg, kind=StoppingStore, dies_before=at)
                told |= {r["round"]: (r["clock_s"], r["late"], r["away"]) for r in rounds}
                return told, digest
            except Stop:
                told |= {
                    r["round"]: (r["clock_s"], r["late"], r["away"]) for r in run.events.of("round_committed")
                }
        raise AssertionError("the second time nothing stops it")

    whole = go("whole")
    transactions = run.transactions
    assert run.events.of("round_failed")
    assert len(whole[0]) == 6
    for at in range(1, transactions + 1):
        told, digest = go(str(at), at)
        assert digest == whole[1], at
        assert told.items() <= whole[0].items(), at
        assert told[6] == whole[0][6]


def test_another_seed_has_another_day(tmp_path):
    clocks = [
        run(config(tmp_path / str(seed), simulate=HARD, run={"seed": seed}, strategy={"attempts": 50}))[0][-1]
        for seed in (1, 2)
    ]
    assert clocks[0]["clock_s"] != clocks[1]["clock_s"]


def of_rounds(events):
    return [
        {key: fields[key] for key in ("round", "sites", "clock_s", "late", "away", "bytes_in", "bytes_out")}
        for kind, fields in events
        if kind == "round_committed"
    ]


@pytest.mark.parametrize(
    "secure",
    [pytest.param({}, marks=pytest.mark.slow(7)), {"enabled": True, "max_examples": 500.0}],
    ids=["open", "masks"],
)
def test_neither_workers_nor_restarts_change_who_is_in_a_simulated_round_or_when(folder, secure):
    """Who takes part follows from the models; under masks rounds need a quorum of those that were asked."""

    def go(workers, rounds=6, fresh=True, masks=False):
        cfg = configured(folder, rounds=rounds, min_sites=3, enough=0.7, round_deadline=8.0, attempts=20)
        hard = {
            "speeds": "lognormal:0.7",
            "dropout": 0.15,
            "example_time": "20ms",
            "up_mbit": 1,
            "masks": masks,
        }
        table = cfg.table() | {
            "simulate": cfg.table()["simulate"] | hard,
            "secagg": secure or {"enabled": False},
        }
        return simulated(Config.of(table, folder), workers=workers, fresh=fresh)

    events, weights = go(0)
    told = of_rounds(events)
    assert any(r["late"] for r in told)
    assert any(r["away"] for r in told)
    assert len({r["sites"] for r in told}) > 1 or told[0]["sites"] < 7
    if not secure:
        again, same = go(2)
        assert of_rounds(again) == told
        assert same.digest == weights.digest
    if secure:  # the work as it is done for real
        again, same = go(0, masks=True)
        assert of_rounds(again) == told
        assert same.digest == weights.digest
    first, _ = go(0, rounds=3)
    rest, same = go(0, fresh=False)
    assert of_rounds(first) + of_rounds(rest) == told
    assert same.digest == weights.digest


# --- without rounds


def test_versions_are_told_by_the_same_clock(tmp_path):
    """Four sites give an update each second, two make a version."""
    cfg = asynchronous_config(tmp_path, simulate={"speeds": "straggler:10"}, run={"rounds": 20})
    events = Events()
    run_asynchronously(cfg, LocalCohort(handlers()), events, clocked=True)
    assert [r["clock_s"] for r in events.of("round_committed")] == [1 + i // 2 for i in range(20)]


# --- examples


def test_a_round_trains_on_as_many_examples_as_its_settings_say():
    def trained(examples, **train):
        return passes(Config.of({"train": train}).train, examples)

    assert trained(70) == 70
    assert trained(70, local_epochs=3) == 210
    assert trained(70, local_steps=5, batch_size=8) == 40
    assert trained(70, local_steps=5, batch_size=8, accumulate=2) == 80
    assert trained(70, local_steps=5, batch_size=0) == 350


def test_examples_are_counted_once_and_unknown_ones_are_refused():
    counted = []

    async def count(site):
        counted.append(site)
        return None if site == "c" else 7.0

    on = TrainedOn(Config.of({}), count)
    assert asyncio.run(on(["a", "b"])) == {"a": 7, "b": 7}
    asyncio.run(on(["a", "b"]))
    assert counted == ["a", "b"]
    with pytest.raises(ConfigError, match="example_time: how many examples c has is not known"):
        asyncio.run(on(["a", "c"]))


def test_a_simulation_goes_on_with_the_trace_that_it_began_with_and_no_other(folder):
    def go(rounds):
        cfg = configured(folder, rounds=rounds, task="Natural")
        return simulated(replace(cfg, simulate=replace(cfg.simulate, trace="trace")), workers=0)

    (folder / "trace").write_text("site,latency_s\nnorth,1\nsouth,2\nwest,5\n")
    go(1)
    events, _ = go(2)
    assert [r["clock_s"] for r in of_rounds(events)] == pytest.approx([22])
    (folder / "trace").write_text("site,latency_s\nnorth,1\nsouth,2\nwest,6\n")
    with pytest.raises(StoreError, match=r"of another configuration: simulate.trace was [0-9a-f]{64}, is"):
        go(3)
    (folder / "trace").unlink()
    with pytest.raises(ConfigError, match=r"simulate.trace: .*trace can't be read"):
        go(3)


# --- what people see


def logged(cfg, events):
    """The lines that people see; the log is written on the way."""
    board, lines = Board(), []
    with EventLog(cfg.simulate_dir, board.add, lambda e: lines.append(line(e, board))) as log:
        for kind, fields in events:
            log.emit(KINDS[kind](**fields))
    return lines


def test_the_clock_is_told_in_lines_lists_history_and_exports(folder):
    cfg = configured(folder, rounds=3, min_sites=2, enough=0.7)
    cfg = replace(cfg, simulate=replace(cfg.simulate, speeds="lognormal:1", dropout=0.2))
    events, _ = simulated(cfg, workers=0)
    lines = logged(cfg, events)
    last = [fields for kind, fields in events if kind == "round_committed"][-1]
    (said,) = [text for text in lines if text and "round 3/3: done" in text]
    assert re.search(rf"  clock {duration(last['clock_s'])}(, \d late)?(, \d away)?(  |$)", said)
    assert len(last["late"]) + len(last["away"]) + last["sites"] == 7
    found = Run(cfg.simulate_dir, cfg)
    assert [row["clock_s"] for row in found.history][-1] == last["clock_s"]
    assert found.history[-1]["late"] == last["late"]
    (summary,) = summaries(folder / "runs")
    assert summary.clock_s == last["clock_s"]
    assert run_row(summary)[2] == f"3/3 at {duration(last['clock_s'])}"
    model = json.loads((cfg.simulate_dir / "model" / "model.json").read_text())
    assert model["clock_s"] == last["clock_s"]
    plain = configured(folder, name="plain", rounds=1)
    logged(plain, simulated(plain, workers=0)[0])
    assert not {"clock_s", "late"} & Run(plain.simulate_dir, plain).history[0].keys()


# --- policies compared without training


def toml(folder, **keys):
    simulate = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    (folder / "fedtrain.toml").write_text(
        '[run]\ntask = "pool_task:Pool"\nrounds = 20\n[secagg]\nenabled = false\n'
        f'[strategy]\nmin_sites = 5\nround_deadline = "30s"\n[simulate]\nsites = 20\n{simulate}'
    )


def test_plan_compares_policies_as_the_clock_has_them(folder):
    """One site of 20 takes ten times as long: rounds take 10 s, and 1 s with the other 19; without rounds 19
    updates come each second, and one each ten seconds."""
    toml(folder, speeds="straggler:10")
    found = {each.policy: each for each in policies(Config.load())}
    assert list(found)[:2] == ["as it is set", "wait for all"]
    assert found["wait for all"].round_s == found["as it is set"].round_s == 10
    assert (found["wait for all"].updates, found["wait for all"].lost) == (20, 0)
    shorter = found["deadline 1 s"]
    assert (shorter.round_s, shorter.updates, shorter.lost) == (1, 19, pytest.approx(0.05))
    assert shorter.updates_per_hour == 19 * 3600
    buffered = found["asynchronous, buffer 20"]
    assert buffered.round_s == pytest.approx(20 / 19.1, rel=0.05)
    said = CliRunner().invoke(cli, ["plan"])
    assert said.exit_code == 0, said.output
    assert re.search(r"^  wait for all +10.0 s +20 +7,200 +0% ", said.output, re.M)
    asked = json.loads(CliRunner().invoke(cli, ["plan", "--json"]).output)["policies"]
    assert [each["policy"] for each in asked] == list(found)


def test_plan_foretells_the_clock_of_the_rounds_that_are_then_trained(folder):
    toml(folder, speeds="lognormal:1", dropout=0.2, up_mbit="lognormal:1,1", example_time="10ms")
    cfg = Config.load(sets=["run.rounds=4", "strategy.enough=0.6"])
    plan = policies(cfg)[0]
    events, _ = simulated(cfg, workers=0)
    rounds = [fields for kind, fields in events if kind == "round_committed"]
    assert plan.round_s == pytest.approx(rounds[-1]["clock_s"] / 4)
    assert plan.updates == sum(r["sites"] for r in rounds) / 4
    said = CliRunner().invoke(cli, ["plan", "--set", "simulate.dropout=0.97"])
    assert said.exit_code == 1
    assert "simulate: in 50 attempts at a round strategy.min_sites = 5 sites never answered" in said.output
