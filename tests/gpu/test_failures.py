"""Ranks on GPUs that fail, die or stand still end together and are named; a rank that has no GPU is told."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from fedtrain.config import Config
from fedtrain.errors import TaskError
from fedtrain.runtime.trainers.trainer import Trainer, TrainerDied
from tests.equivalence.test_site_of_ranks import MOODY, configured
from tests.equivalence.tiny import project
from tests.forked import fork_trainers
from tests.gpu.on import GPUS_ONLY, slowly
from tests.limits import WAIT_S
from tests.torchrun import Cluster, kill
from tests.waves import STEPS, Waves


def site_of_two(tmp_path, device, act, backend="gloo"):
    """What the site says of a round before which `act` was done to the pids of its ranks 0 and 1; then what
    becomes of the same round, asked again of a trainer that is started anew."""
    folder = project(tmp_path / "project")
    with (folder / "mesh_task.py").open("a") as f:
        f.write(MOODY)
    table = configured(folder, task="Moody", ranks=2, backend=backend).table()
    config = Config.of(table | {"train": table["train"] | {"device": device}}, folder)

    async def rounds() -> str:
        async with await Trainer.start(config, scratch=tmp_path) as trainer:
            initial = await trainer.initial(tmp_path / "initial")
            await trainer.train("a", 0, initial, tmp_path / "delta")
            zero = psutil.Process(trainer._process.pid)
            (one,) = zero.children()
            act(folder, one.pid)
            with pytest.raises(TaskError) as failed:
                async with asyncio.timeout(WAIT_S):
                    await trainer.train("a", 1, initial, tmp_path / "delta")
            with pytest.raises(TrainerDied):
                await trainer.train("a", 1, initial, tmp_path / "delta")
            assert psutil.wait_procs([zero, one], WAIT_S)[1] == []
        for file in folder.glob("raise"):
            file.unlink()
        async with await Trainer.start(config, scratch=tmp_path) as trainer:
            await trainer.train("a", 1, initial, tmp_path / "delta")
        return str(failed.value)

    return asyncio.run(rounds())


@pytest.fixture
def executed(device, monkeypatch):
    """On a GPU trainers are executed, for CUDA does not live through a fork."""
    if device == "cpu":
        fork_trainers(monkeypatch)


@slowly(4)
def test_exception_on_one_rank_ends_all(device, tmp_path, capfd, executed):
    said = site_of_two(tmp_path, device, lambda folder, one: (folder / "raise").touch())
    assert said.startswith("rank 1: KeyError in mesh_task.py:")
    assert capfd.readouterr().err.count("Traceback (most recent call last)") == 1


@slowly(4)
def test_site_of_two_ranks_kill9(device, tmp_path, executed):
    said = site_of_two(tmp_path, device, lambda folder, one: os.kill(one, signal.SIGKILL))
    assert "was ended by signal 9" in said


@pytest.mark.gpu2
def test_hung_rank(tmp_path):
    said = site_of_two(tmp_path, "cuda", lambda folder, one: os.kill(one, signal.SIGSTOP), "nccl")
    assert "was stopped for 3 s" in said


@pytest.mark.gpu2
def test_kill9_a_rank_nccl(tmp_path):
    """The run goes on at the very step: its model is that of a run that nothing happened to."""
    waves = Waves(tmp_path / "p", pace=0.05)
    with Cluster(waves.folder, "-m", "fedtrain", "datacenter", "--json", ranks=2) as cluster:
        agent = cluster.add()
        cluster.wait_for(lambda: waves.step() >= 4)
        kill(cluster.wait_for(lambda: cluster.rank(1)))
        assert agent.wait(300) == 0, cluster.log()
    assert waves.step() == STEPS


@GPUS_ONLY
def test_device_choice(device):
    """A rank that is shown one GPU takes it whatever its number, also by its uuid."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    say = "from fedtrain.training.devices import device_of_rank; print(device_of_rank('auto'))"
    for shown in ("0", uuid):
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": shown, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
        told = subprocess.run(
            [sys.executable, "-c", say], env=env, capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == "cuda:0"
