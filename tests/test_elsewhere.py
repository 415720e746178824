"""Simulations whose trainers are on other machines: the bits of one process, whatever is lost."""

import asyncio
import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import fedtrain
from fedtrain.errors import ConfigError
from fedtrain.runtime.simulations import launchers, remote
from fedtrain.runtime.trainers.supervised import TrainerLost
from fedtrain.runtime.trainers.trainer_process import start_message
from fedtrain.store import RunStore
from tests.namespaces import two_hosts
from tests.test_simulation import TASK, configured, simulated
from tests.torchrun import Cluster as Machines
from tests.torchrun import kill

HELD = """
class Held(Pool):
    def optimizer(self, parameters, round):
        while round >= int(Path(__file__).with_name("rounds").read_text()):
            time.sleep(0.005)
"""
PROJECT = """
[run]
task = "pool_task:Held"
rounds = 6
name = "run"
[train]
batch_size = 16
lr = 0.1
[strategy]
kind = "scaffold"
[simulate]
sites = 40
partition = "quantity:1"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool_task.py").write_text(TASK)
    return tmp_path


def alone(folder):
    """The digest of the model that one process trains."""
    folder.mkdir()
    project(folder)
    with contextlib.chdir(folder):
        fedtrain.simulate(".", {"simulate.workers": 0})
    return digest(folder)


def project(folder, rounds=6):
    """A project that trains so many of its rounds, and holds the next one back."""
    (folder / "pool_task.py").write_text(TASK.replace("import os, signal", "import os, signal, time") + HELD)
    (folder / "fedtrain.toml").write_text(PROJECT)
    let_train(folder, rounds)


def let_train(folder, rounds):
    (folder / "rounds.new").write_text(str(rounds))
    (folder / "rounds.new").replace(folder / "rounds")


def digest(folder):
    store = RunStore(folder / "runs" / "run+simulate", read_only=True)
    try:
        return store.load(6).weights.digest
    finally:
        store.close()


class InMemory:
    """Desks in this process, without a path in common with those who ask; each dies after `lives` answers."""

    def __init__(self, config, data_dir, scratch, memory, lives=None):
        self.count, self.lives = 3, lives or {}
        self._start = start_message(config, data_dir, simulated=True, metrics_only=False)

    async def start(self, number):
        return await remote.Remote.begin(ByHand(self.lives.get(number, 1 << 30)), self._start)

    async def close(self):
        pass


class ByHand:
    def __init__(self, lives):
        self.desk, self.lives = remote.Desk(), lives

    async def carry(self, message, model):
        await asyncio.sleep(0)
        self.lives -= 1
        if self.lives < 0:
            raise TrainerLost("its machine is gone")
        if model is not None and not self.desk.holds(model[0]):
            self.desk.hold(model[0], model[1]())
        return self.desk.answer(message)

    async def close(self):
        pass


@pytest.fixture
def elsewhere(monkeypatch):
    return lambda **lives: monkeypatch.setitem(
        launchers.LAUNCHERS, "ray", partial(InMemory, lives={int(k[1:]): v for k, v in lives.items()})
    )


def on_ray(config):
    return replace(config, simulate=replace(config.simulate, on="ray", workers="auto"))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_trainers_without_a_common_path_give_the_bits_of_one_process(folder, elsewhere, engine):
    elsewhere()
    config = configured(folder, sites=60, engine=engine)
    _, here = simulated(config, workers=0)
    _, there = simulated(on_ray(config), fresh=True)
    assert there.digest == here.digest


def test_the_work_of_a_machine_that_is_gone_is_done_by_others_with_the_same_bits(folder, elsewhere):
    config = configured(folder, sites=60)
    _, here = simulated(config, workers=0)
    elsewhere(t0=4, t2=7)
    _, there = simulated(on_ray(config), fresh=True)
    assert there.digest == here.digest


def test_a_run_ends_when_all_machines_are_gone_and_goes_on_when_they_are_back(folder, elsewhere):
    config = configured(folder, sites=60)
    _, here = simulated(config, workers=0)
    elsewhere(t0=4, t1=6, t2=7)
    with pytest.raises(TrainerLost, match="its machine is gone"):
        simulated(on_ray(config), fresh=True)
    elsewhere()
    _, there = simulated(on_ray(config))
    assert there.digest == here.digest


def test_what_fails_over_there_is_said_here_and_a_site_whose_update_is_of_no_use_is_named(folder, elsewhere):
    elsewhere()
    config = configured(folder, task="Natural", min_sites=2)
    (folder / "nan").touch()
    events, _ = simulated(on_ray(config))
    assert {told["site"] for kind, told in events if kind == "update_refused"} == {"south"}
    (folder / "fail").touch()
    with pytest.raises(Exception, match="ValueError in pool_task"):
        simulated(on_ray(config), fresh=True)


class Abroad(remote.Desk):
    """A desk on another machine."""

    def answer(self, message):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "this_machine", lambda: "node-7 another-kernel")
            return super().answer(message)


@pytest.mark.parametrize("remembering", ["strategy", "compressor", ""])
def test_sites_that_remember_something_are_not_trained_on_several_machines(
    folder, elsewhere, monkeypatch, remembering
):
    elsewhere()
    monkeypatch.setattr(remote, "Desk", Abroad)
    config = configured(folder, kind="scaffold" if remembering == "strategy" else "fedavg", rounds=1)
    if remembering == "compressor":
        config = replace(config, compression=replace(config.compression, up="topk:0.1"))
    if not remembering:
        simulated(on_ray(config))
        return
    named = 'kind = "scaffold"' if remembering == "strategy" else 'up = "topk:0.1"'
    with pytest.raises(ConfigError, match=f"{named}.* in a database on .*worker on node-7 can't share"):
        simulated(on_ray(config))


def test_machines_and_their_trainers_are_told_and_one_that_is_lost_is_named(folder, elsewhere, monkeypatch):
    monkeypatch.setattr(remote.platform, "node", lambda: "node-7")
    elsewhere(t2=5)
    events, _ = simulated(on_ray(configured(folder, sites=60)))
    texts = [fields["text"] for kind, fields in events if kind == "notice"]
    notices = [text for text in texts if not text.startswith("simulate.min_examples")]
    assert notices == ["trainers: 3 on node-7", "a trainer on node-7 is lost, 2 on node-7 go on"]
    events, _ = simulated(configured(folder), workers=0, fresh=True)
    assert "notice" not in {kind for kind, _ in events}


THREADS = """
class Counting(Pool):
    def loss(self, model, batch):
        with open("threads", "a") as f:
            f.write(f"{torch.get_num_threads()}\\n")
        return super().loss(model, batch)
"""


def test_sites_train_with_the_threads_of_the_config_here_and_over_there(folder, elsewhere):
    (folder / "pool_task.py").write_text(TASK + THREADS)
    config = configured(folder, task="Counting", rounds=2)
    config = replace(config, train=replace(config.train, threads=3))
    before = torch.get_num_threads()
    try:
        simulated(config, workers=0)
        here = set((folder / "threads").read_text().split())
        (folder / "threads").unlink()
        elsewhere()
        simulated(on_ray(config), fresh=True)
        there = set((folder / "threads").read_text().split())
    finally:
        torch.set_num_threads(before)
    assert here == there == {"3"}


def test_torchrun_is_asked_for_where_it_has_not_started_the_simulation(folder):
    config = configured(folder)
    config = replace(config, simulate=replace(config.simulate, on="torchrun"))
    with pytest.raises(ConfigError, match="torchrun has not started this process"):
        simulated(config)


RAY = """
import asyncio, os
import psutil
from ray.cluster_utils import Cluster
from fedtrain import api

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=2)
os.environ["RAY_ADDRESS"] = cluster.address

def on_event(event):
    if event.kind != "round_started":
        return
    if event.round == 2:
        ours = psutil.Process().children(recursive=True)
        next(p for p in ours if p.cmdline()[:1] and p.cmdline()[0].startswith("ray::Room")).kill()
    if event.round == 4:
        cluster.remove_node(node, allow_graceful=False)

async def main():
    config, _ = api.resolved(".", {"simulate.on": "ray"}, "simulate")
    await api.simulation(config, on_event=on_event)

try:
    asyncio.run(main())
finally:
    import ray
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow(60)
def test_a_ray_cluster_that_loses_a_trainer_and_a_machine_gives_the_bits_of_one_process(tmp_path):
    pytest.importorskip("ray", reason="pip install fedtrain[ray]")
    expected, there = alone(tmp_path / "alone"), tmp_path / "cluster"
    there.mkdir()
    project(there)
    (there / "script.py").write_text(RAY)
    env = os.environ | {"PYTHONPATH": os.getcwd(), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=there, env=env, timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert digest(there) == expected


@pytest.mark.slow(30)
def test_two_machines_of_torchrun_give_the_bits_of_one_process_also_when_a_rank_is_killed(tmp_path):
    expected, there = alone(tmp_path / "alone"), tmp_path / "ranks"
    there.mkdir()
    project(there, rounds=3)
    env = {"FEDTRAIN_SIMULATE__ON": "torchrun"}
    with Machines(there, "-m", "fedtrain", "simulate", "--json", nodes="2") as machines:
        agents = [machines.add(**env), machines.add(**env)]
        machines.wait_for(lambda: machines.log().count('"kind":"round_committed"') == 3)
        kill(machines.rank(1))
        machines.wait_for(lambda: machines.log().count('"kind":"run_started"') == 2)
        let_train(there, 6)
        for agent in agents:
            assert agent.wait(200) == 0, machines.log()
    assert digest(there) == expected


@pytest.mark.slow(20)
def test_two_machines_with_a_wire_between_them_give_the_bits_of_one_process(tmp_path):
    expected, there = alone(tmp_path / "alone"), tmp_path / "ranks"
    there.mkdir()
    project(there, rounds=3)
    env = {"FEDTRAIN_SIMULATE__ON": "torchrun"}
    with (
        two_hosts() as hosts,
        Machines(there, "-m", "fedtrain", "simulate", "--json", nodes="2", hosts=hosts) as machines,
    ):
        agents = [machines.add(**env), machines.add(**env)]
        machines.wait_for(lambda: machines.log().count('"kind":"round_committed"') == 3)
        ranks = [machines.rank(0), machines.rank(1)]
        assert len({os.readlink(f"/proc/{rank.pid}/ns/net") for rank in ranks}) == 2
        let_train(there, 6)
        for agent in agents:
            assert agent.wait(200) == 0, machines.log()
    assert digest(there) == expected
