"""Simulation over real trainer processes: the federation's numbers, whatever the machine does."""

import asyncio
import gc
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedtrain.aggregation import WeightedMean
from fedtrain.arena import Arena
from fedtrain.config import Config, EvaluateConfig
from fedtrain.errors import ConfigError, TooFewSites
from fedtrain.messages import Train, averages
from fedtrain.runtime.simulations.pool import PoolCohort
from fedtrain.runtime.simulations.shared_memory import SharedMemory
from fedtrain.runtime.simulations.simulation import TOLD_SITES, simulate
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import RunStore
from fedtrain.strategies import beginning, build, server_step

pytestmark = pytest.mark.usefixtures("forked")

TASK = """
import os, signal
from pathlib import Path
import torch
from torch import nn
import fedtrain

class Pool(fedtrain.Task):
    def model(self):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def data(self, site):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(240, 6, generator=generator)
        return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

class Natural(Pool):
    def sites(self):
        return ["north", "south", "west"]

    def data(self, site):
        x, y = super().data(site)
        with open("pids", "a") as f:
            f.write(f"{site} {os.getpid()}\\n")
        if site == "west" and Path("fail").exists():
            raise ValueError("no data here")
        if site == "west" and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if site == "south" and Path("nan").exists():
            x = x * float("nan")
        part = {"north": slice(0, 50), "south": slice(50, 90), "west": slice(90, 240)}[site]
        return x[part], y[part]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool_task.py").write_text(TASK)
    return tmp_path


def configured(folder, *, task="Pool", sites=7, name="run", rounds=3, engine="loop", **strategy):
    dealt = {"sites": sites, "partition": "quantity:1"} if task != "Natural" else {}
    return Config.of(
        {
            "run": {"task": f"pool_task:{task}", "rounds": rounds, "seed": 5, "name": name},
            "train": {"batch_size": 16, "lr": 0.1},
            "strategy": {"kind": "fedadam", **strategy},
            "secagg": {"enabled": False},
            "simulate": {"workers": 1, "engine": engine, **dealt},
        },
        folder,
    )


def simulated(config, **options):
    """(events, final weights)"""
    events = []
    asyncio.run(simulate(config, emit=lambda event: events.append((event.kind, event.fields())), **options))
    store = RunStore(config.simulate_dir, read_only=True)
    weights = store.load(config.run.rounds).weights
    store.close()
    return events, weights


def by_hand(config):
    """The same rounds without processes, pools, stores or loops of ours."""
    bench = Workbench(config, simulated=True)
    strategy = build(config.strategy.kind, config.strategy.options)
    weights = bench._engine.initial()
    weights, state = beginning(strategy, weights)
    for number in range(config.run.rounds):
        mean = WeightedMean(weights.schema)
        for site in sorted(bench.description.sites):
            mean.add(bench.train(site, number, weights, Arena.zeros(weights.schema)))
        weights, state = server_step(strategy, weights, state, mean.result())
    return weights


@pytest.mark.slow(6)
def test_any_number_of_workers_gives_the_bits_of_a_plain_loop(folder):
    expected = by_hand(configured(folder)).digest
    for workers in (1, 2):
        events, weights = simulated(configured(folder, name=f"with-{workers}"), workers=workers)
        assert weights.digest == expected
    assert [fields["sites"] for kind, fields in events if kind == "run_started"] == [7]
    metrics = [fields["metrics"] for kind, fields in events if kind == "evaluated"]
    assert [list(m) for m in metrics] == [["loss"]] * 3
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.slow(3)
def test_the_stacked_engine_gives_the_loops_numbers_up_to_rounding(folder):
    _, stacked = simulated(configured(folder, engine="stacked"))
    torch.testing.assert_close(stacked.views(), by_hand(configured(folder)).views(), rtol=1e-3, atol=1e-5)


@pytest.mark.slow(5)
def test_a_simulation_goes_on_from_its_last_round_and_fresh_forgets(folder):
    simulated(configured(folder, rounds=1))
    events, weights = simulated(configured(folder, rounds=3))
    assert [fields["round"] for kind, fields in events if kind == "round_committed"] == [2, 3]
    assert weights.digest == by_hand(configured(folder, rounds=3)).digest
    events, again = simulated(configured(folder, rounds=3), fresh=True)
    assert [fields["round"] for kind, fields in events if kind == "round_committed"] == [1, 2, 3]
    assert again.digest == weights.digest


@pytest.mark.slow(3)
def test_a_killed_trainer_changes_nothing(folder):
    config = configured(folder, task="Natural")
    (folder / "kill").touch()
    _, weights = simulated(config)
    assert not (folder / "kill").exists()
    assert weights.digest == by_hand(config).digest


@pytest.mark.parametrize("secagg", [False, True], ids=["open", "fixed point"])
def test_a_site_where_the_task_fails_is_missed_as_in_a_federation(folder, secagg):
    """The others go on where they are enough, and a sum under masks needs all three."""
    (folder / "fail").touch()
    table = configured(folder, task="Natural", rounds=1, min_sites=3 if secagg else 2).table()
    config = Config.of(table | {"secagg": {"enabled": secagg}}, folder)
    why = r"ValueError in pool_task\.py:\d+, in data, data\('west'\)"
    if secagg:
        with pytest.raises(TooFewSites, match=rf"2 of 3 sites gave what can be used, .* west: {why}"):
            simulated(config)
        return
    events, _ = simulated(config)
    assert [fields["sites"] for kind, fields in events if kind == "round_committed"] == [2]
    refused = [fields for kind, fields in events if kind == "update_refused"]
    assert {fields["site"] for fields in refused} == {"west"}
    assert re.match(why, refused[0]["reason"])


@pytest.mark.slow(2)
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_site_whose_update_is_nan_is_refused_and_named_among_its_neighbours(folder, engine):
    (folder / "nan").touch()
    events, weights = simulated(configured(folder, task="Natural", rounds=1, min_sites=2, engine=engine))
    refused = [(fields["site"], fields["reason"]) for kind, fields in events if kind == "update_refused"]
    nan = "metric loss is nan; did its training diverge?"  # in the evaluation, on the same data
    assert refused == [("south", "0.weight has 30 NaN or Inf of 30 values"), ("south", nan)]
    assert [fields["sites"] for kind, fields in events if kind == "round_committed"] == [2]
    assert bool(weights.flat(weights.schema.sections[0]).isfinite().all())


@pytest.mark.slow(4)
def test_a_round_of_many_sites_tells_of_refused_updates_only(folder):
    few, _ = simulated(configured(folder, sites=TOLD_SITES, rounds=1, name="few"))
    many, _ = simulated(configured(folder, sites=TOLD_SITES + 1, rounds=1, name="many"))
    assert sum(kind == "update_received" for kind, _ in few) == TOLD_SITES
    assert not any(kind == "update_received" for kind, _ in many)


@pytest.mark.slow(2)
def test_the_debugged_site_runs_in_this_process_and_gives_the_same_model(folder):
    config = configured(folder, task="Natural", rounds=2)
    _, weights = simulated(config, debug="south")
    ran_at = {tuple(line.split()) for line in (folder / "pids").read_text().splitlines()}
    assert {site for site, pid in ran_at if int(pid) == os.getpid()} == {"south"}
    assert {site for site, _ in ran_at} == {"north", "south", "west"}
    assert weights.digest == by_hand(config).digest


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("debug", "sites", "message"),
    [("sout", 7, "--debug sout: there is no such site"), (None, 1, "the simulation has 1 sites")],
)
def test_what_cannot_be_simulated_is_said_before_the_first_round(folder, debug, sites, message):
    with pytest.raises(ConfigError, match=message):
        simulated(configured(folder, sites=sites), debug=debug)


@pytest.mark.slow(2)
def test_stopping_an_exchange_early_leaves_the_pool_fit_for_the_next(folder):
    config = configured(folder, sites=40)

    async def main():
        async with await PoolCohort.start(config, 1, folder) as pool:
            weights = (await pool.beginning(None))[0]
            sites = await pool.members(2)
            first = dict.fromkeys(sites, Train(id="a", round=0, weights=weights))
            replies = pool.exchange(first, 60)
            kept = [await anext(replies) for _ in range(3)]
            await replies.aclose()
            again = [pair async for pair in pool.exchange(first, 60)]
            assert [site for site, _ in again] == sites
            assert [u.delta.digest for _, u in kept] == [u.delta.digest for _, u in again[:3]]
            assert averages({s: u.metrics for s, u in again})["loss"] > 0

    asyncio.run(main())


@pytest.mark.slow(2)
def test_a_block_is_used_again_once_nobody_looks_at_it_and_not_before():
    memory = SharedMemory()
    offset, view = memory.take(100)
    row = torch.frombuffer(view, dtype=torch.uint8)[10:20]
    del view
    second, other = memory.take(100)
    assert second != offset
    del row
    gc.collect()
    assert memory.take(100)[0] == offset
    del other
    memory.close()


@pytest.mark.slow(5)
def test_the_parent_costs_little_beside_its_trainers_so_more_of_them_train_more(folder):
    """In CPU time, which other work on the machine hardly changes; benchmarks/simulate.py has the seconds."""
    psutil = pytest.importorskip("psutil")
    config = configured(folder, sites=60, rounds=12)
    config = replace(config, train=replace(config.train, local_steps=20), evaluate=EvaluateConfig(every=0))
    spent = []

    def emit(event):
        kind, fields = event.kind, event.fields()
        if kind == "round_committed" and fields["round"] in (2, 12):
            trainers = [child.cpu_times() for child in psutil.Process().children()]
            spent.append((time.process_time(), sum(t.user + t.system for t in trainers)))

    asyncio.run(simulate(config, emit=emit, workers=2))
    (parent, trainers), (parent_after, trainers_after) = spent
    share = (parent_after - parent) / (trainers_after - trainers)
    assert share < 0.15  # two trainers are then 2 / (1 + share) > 1.7 times one


SCRIPT = """
import asyncio
from fedtrain import Config
from fedtrain.events import silent
from fedtrain.runtime.simulations.simulation import simulate

config = Config.of({"run": {"task": "pool_task:Pool", "rounds": 1}, "simulate": {"workers": 2}})
result = asyncio.run(simulate(config, emit=silent))
print(result.rounds, result.reason)
"""


@pytest.mark.slow(4)
def test_a_script_needs_no_main_guard(folder):
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "1 rounds done\n", done.stderr
    assert done.stderr == ""
