"""Simulations of a million sites: what a run takes is what its sampled sites take."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress

import psutil
import pytest
import torch

from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.population import Population
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.store import RunStore
from tests.limits import WAIT_S
from tests.test_simulation import TASK

USERS = """
class Users(Pool):
    def sites(self):
        return fedtrain.Population(1_000_000, "user-")

    def data(self, site):
        x, y = super().data(site)
        at = int(site.removeprefix("user-")) % 200
        return x[at : at + 20], y[at : at + 20]

class Held(Pool):  # trains as many rounds as the file says, and then waits until it says more
    def optimizer(self, parameters, round):
        while round >= int(Path(__file__).with_name("rounds").read_text()):
            time.sleep(0.005)
"""
TOML = """
[run]
task = "population_task:Held"
rounds = 3
seed = 5
[train]
batch_size = 0
lr = 0.1
[strategy]
kind = "scaffold"
fraction = 0.001
[secagg]
enabled = false
[simulate]
sites = 1_000_000
partition = "dirichlet:0.3"
examples = 20
engine = "loop"
"""
GIB = 1 << 30


def configured(folder, **sections):
    folder.mkdir(exist_ok=True)
    (folder / "population_task.py").write_text("import time\n" + TASK + USERS)
    (folder / "fedtrain.toml").write_text(TOML)
    (folder / "rounds").write_text("3")
    table = tomllib.loads(TOML)
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return Config.of(table, folder)


def run(config, workers=0):
    """(events, the final weights' digest, who counted)"""
    events = []
    asyncio.run(simulate(config, emit=events.append, workers=workers))
    store = RunStore(config.simulate_dir, read_only=True)
    last, counted = store.latest(), store.counted()
    store.close()
    return events, last.weights.digest, counted


FEW = {
    "simulate": {"sites": 10, "partition": "iid", "examples": 0},  # defaults: the task names its sites
    "strategy": {"kind": "fedavg", "fraction": 0.00001},
    "run": {"task": "population_task:Users", "rounds": 2},
}


@pytest.mark.parametrize("secagg", [False, True], ids=["open", "fixed point"])
def test_natural_sites_of_a_population_train_and_evaluate_as_a_list_of_those_that_were_drawn(
    tmp_path, secagg
):
    config = configured(
        tmp_path,
        **{**FEW, "strategy": {**FEW["strategy"], "kind": "scaffold", "clip": 4.0}},
        evaluate={"sites": 7},
        secagg={"enabled": secagg},
    )
    events, _, counted = run(config)
    started = [event for event in events if event.kind == "round_started"]
    assert [len(event.sites) for event in started] == [10, 10]
    assert counted.keys() == {site for event in started for site in event.sites}
    assert all(site in Population(1_000_000, "user-") for site in counted)
    evaluated = [event.by_site for event in events if event.kind == "evaluated"]
    assert [len(by_site) for by_site in evaluated] == [7, 7]
    assert evaluated[0].keys() != evaluated[1].keys()
    (begun,) = (event for event in events if event.kind == "run_started")
    assert begun.sites == 1_000_000


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({}, r"all 1,000,000 sites would evaluate each time\. Draw some with evaluate\.sites"),
        (
            {"asynchronous": {"enabled": True}, "strategy": {"kind": "fedavg", "fraction": 1.0}},
            r"all 1,000,000 sites would train at once\. Lower simulate\.sites",
        ),
        (
            {"evaluate": {"sites": 2}, "secagg": {"enabled": True}},
            r"evaluate\.sites: 2, but a sum under masks",
        ),
    ],
)
def test_what_would_ask_each_of_a_million_sites_is_refused_with_what_to_do(tmp_path, sections, says):
    with pytest.raises(ConfigError, match=says):
        run(configured(tmp_path, **{**FEW, **sections}))


def test_evaluating_sites_are_drawn_anew_and_alike_after_a_restart(tmp_path):
    sections = {**FEW, "evaluate": {"sites": 5, "every": 1}}
    whole, digest, _ = run(configured(tmp_path / "a", **sections))
    one = configured(tmp_path / "b", **{**sections, "run": {**FEW["run"], "rounds": 1}})
    first, _, _ = run(one)
    second, again, _ = run(configured(tmp_path / "b", **sections))

    def found(events):
        return [event.by_site for event in events if event.kind == "evaluated"]

    assert found(first) + found(second) == found(whole)
    assert digest == again


def lines(folder, kind):
    path = folder / "runs/run+simulate/events.jsonl"
    return path.read_text().count(f'"{kind}"') if path.exists() else 0


class Watched:
    """`fedtrain simulate`, and the most memory that it and its trainers had together."""

    def __init__(self, folder, *more):
        command = [sys.executable, "-m", "fedtrain", "simulate", *more]
        self.folder, self.peak = folder, 0
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ}
        )

    def until(self, done):
        deadline = time.monotonic() + 120
        while not done() and self.process.poll() is None:
            assert time.monotonic() < deadline
            found = 0
            with suppress(psutil.Error):
                parent = psutil.Process(self.process.pid)
                for each in (parent, *parent.children(recursive=True)):
                    found += each.memory_info().rss
            self.peak = max(self.peak, found)
            time.sleep(0.2)
        return self

    def end(self):
        self.until(lambda: False)
        assert self.process.wait(WAIT_S) == 0
        return self


@pytest.mark.slow(25)
@pytest.mark.timeout(400)
def test_a_million_sites_fit_in_two_gib_and_kill_9_and_more_workers_change_no_bit(tmp_path):
    _, digest, counted = run(configured(tmp_path / "whole"))
    assert 2950 < len(counted) <= 3000
    configured(tmp_path / "killed")
    (tmp_path / "killed" / "rounds").write_text("1")
    killed = Watched(tmp_path / "killed", "--set", "simulate.workers=2")
    killed.until(lambda: lines(tmp_path / "killed", "round_committed") >= 1)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.process.wait(WAIT_S) == -signal.SIGKILL
    (tmp_path / "killed" / "rounds").write_text("3")
    resumed = Watched(tmp_path / "killed", "--set", "simulate.workers=1").end()
    store = RunStore(tmp_path / "killed/runs/run+simulate", read_only=True)
    last, found = store.latest(), store.counted()
    assert last.weights.digest == digest
    assert found == counted
    c = last.weights.load().extras()["c"]
    assert torch.equal(c, (last.state["sum"] / 1_000_000).to(c.dtype))
    store.close()
    assert max(killed.peak, resumed.peak) < 2 * GIB
    files = [path for path in (tmp_path / "killed/runs").rglob("*") if path.is_file()]
    assert len(files) < 30
    assert sum(path.stat().st_size for path in files) < 20 << 20, "what 3,000 sites leave, not a million"
