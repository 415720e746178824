"""The trainer process, with real processes: what it gives, how it fails, how it ends."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fedtrain
from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config
from fedtrain.errors import ConfigError, TaskError, Unreadable
from fedtrain.runtime.trainers.trainer import Trainer, TrainerDied
from fedtrain.runtime.trainers.trainer_process import environment
from fedtrain.runtime.trainers.workbench import Workbench
from tests.forked import fork_trainers
from tests.limits import WAIT_S, bounded

TASK = """
import json, os, subprocess, sys, time
from pathlib import Path
import torch
from torch import nn
import fedtrain

class Small(fedtrain.Task):
    def model(self):
        return nn.Linear(3, 2)

    def data(self, site):
        if site == "broken":
            raise ValueError("patient 4711 has no age")
        if site == "hangs":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path("pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        if site == "talks":
            print("hello from the task")
            Path("environment.json").write_text(json.dumps(dict(os.environ)))
        generator = torch.Generator().manual_seed(len(site))
        return torch.randn(10, 3, generator=generator), torch.arange(10) % 2

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_task.py").write_text(TASK)
    run = {"task": "small_task:Small", "seed": 3}
    return Config.of({"run": run, "train": {"batch_size": 4}, "strategy": {"kind": "fedprox"}}, tmp_path)


def gone(pid):
    """Whether the process has ended, waited for up to 10 seconds; a zombie has."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


async def pids(folder):
    """Of the trainer that hangs, and of the process that its task started."""
    while not (folder / "pids").exists() or not (folder / "pids").read_text():  # noqa: ASYNC110  another process writes it
        await asyncio.sleep(0.01)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.mark.slow(2)
def test_a_trainer_process_gives_the_bits_of_the_engine_and_survives_a_failing_task(config, tmp_path):
    async def main():
        async with await Trainer.start(config, scratch=tmp_path, log=tmp_path / "log") as trainer:
            initial = await trainer.initial(tmp_path / "initial")
            with pytest.raises(TaskError) as failure:
                await trainer.train("broken", 0, initial, tmp_path / "broken")
            update = await trainer.train("site-1", 0, initial, tmp_path / "delta")
            evaluation = await trainer.evaluate("site-1", 0, initial)
            return trainer.description, initial, failure, update, evaluation, await trainer.examples("site-1")

    description, initial, failure, update, evaluation, examples = asyncio.run(main())
    assert str(failure.value).startswith("ValueError in small_task.py:")
    assert "4711" not in str(failure.value)
    assert "4711" in (tmp_path / "log").read_text()  # for the people at the site
    assert not list(tmp_path.glob("*.new"))
    assert not (tmp_path / "broken").exists()
    assert examples == 10

    bench = Workbench(config, simulated=False)
    weights, delta = initial.load(), Arena.zeros(description.schema)
    here = bench.train("site-1", 0, weights, delta)
    assert bench.description == description
    assert update.delta.load().digest == delta.digest == update.delta.digest
    assert ArenaFile(description.schema, tmp_path / "delta").digest == update.delta.digest
    assert (here.num_examples, here.metrics) == (update.num_examples, update.metrics)
    assert evaluation == bench.evaluate("site-1", 0, weights)


@pytest.mark.slow(3)
def test_a_killed_trainer_is_a_task_error_and_another_gives_the_same_bits(config, tmp_path):
    async def main():
        first = await Trainer.start(config, scratch=tmp_path)
        initial = await first.initial(tmp_path / "initial")
        before = await first.train("site-1", 0, initial, tmp_path / "before")
        hanging = asyncio.create_task(first.train("hangs", 0, initial, tmp_path / "never"))
        waiting = asyncio.create_task(first.train("site-1", 0, initial, tmp_path / "later"))
        os.kill((await pids(tmp_path))[0], signal.SIGKILL)
        for task in (hanging, waiting):
            with pytest.raises(TrainerDied, match=r"signal 9 \(SIGKILL"):
                await task
        with pytest.raises(TrainerDied):
            await first.evaluate("site-1", 0, initial)
        await first.close()
        assert not (tmp_path / "never").exists()
        async with await Trainer.start(config, scratch=tmp_path) as second:
            after = await second.train("site-1", 0, initial, tmp_path / "after")
        assert after.delta.digest == before.delta.digest

    asyncio.run(main())


@pytest.mark.slow(3)
def test_stop_ends_a_hanging_task_and_the_processes_that_it_started(config, tmp_path):
    async def main():
        trainer = await Trainer.start(config, scratch=tmp_path)
        initial = await trainer.initial(tmp_path / "initial")
        hanging = asyncio.create_task(trainer.train("hangs", 0, initial, tmp_path / "never"))
        started = await pids(tmp_path)
        await asyncio.wait_for(trainer.stop(), WAIT_S)  # the task would hang for ten minutes
        with pytest.raises(TrainerDied):
            await hanging
        return started

    assert all(map(gone, asyncio.run(main())))


def test_a_process_that_does_not_die_when_it_is_killed_keeps_nobody(monkeypatch):
    """One that waits for a dead disk, or for a driver."""
    monkeypatch.setattr("fedtrain.runtime.trainers.trainer.KILLED_S", 0.01)

    class Undying:
        pid = 1 << 30  # no process has it

        async def wait(self):
            await asyncio.Event().wait()

    async def main():
        trainer, (ours, theirs) = Trainer(Undying(), None), socket.socketpair()
        with theirs:
            await asyncio.get_running_loop().create_connection(lambda: trainer, sock=ours)
            await trainer.stop()
        assert not trainer._watching.done()

    bounded(main(), WAIT_S)


@pytest.mark.slow(3)
def test_a_task_that_cannot_be_loaded_is_the_users_error(config, tmp_path):
    wrong = Config.of({"run": {"task": "small_task:Smal"}}, tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean '?Small"):
        asyncio.run(Trainer.start(wrong, scratch=tmp_path, log=tmp_path / "log"))


PARENT = """
import asyncio, json, sys, time
from pathlib import Path
from fedtrain.config import Config
from fedtrain.runtime.trainers.trainer import Trainer

async def main():
    here = Path.cwd()
    config = Config.of({"run": {"task": "small_task:Small"}}, here)
    trainer = await Trainer.start(config, scratch=here)
    initial = await trainer.initial(here / "initial")
    await trainer.train("talks", 0, initial, here / "delta")
    heavy = sorted({"torch", "grpc", "cryptography", "numpy"} & sys.modules.keys())
    print(json.dumps({"pid": trainer._process.pid, "heavy": heavy}), flush=True)
    await trainer.train("hangs", 0, initial, here / "never")

asyncio.run(main())
"""


def test_a_trainer_finds_this_very_fedtrain_and_no_module_of_its_by_a_name_of_pythons(tmp_path):
    path = environment(Config(), tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert path[0] == str(Path(fedtrain.__file__).resolve().parents[1])
    assert str(Path(fedtrain.__file__).resolve().parent) not in path


def test_the_parent_loads_no_torch_and_its_trainer_has_no_keys_and_dies_with_it(config, tmp_path):
    environment = os.environ | {"FEDTRAIN_NETWORK__CERTS": "/secret/certs", "SSLKEYLOGFILE": "/secret/log"}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as parent:  # fmt: skip
        said = json.loads(parent.stdout.readline())  # and nothing of what the task printed
        started = asyncio.run(pids(tmp_path))
        os.kill(started[0], signal.SIGSTOP)
        parent.kill()
    assert said["heavy"] == []
    assert said["pid"] == started[0]
    assert all(map(gone, started))
    seen = json.loads((tmp_path / "environment.json").read_text())
    assert not [name for name, value in seen.items() if "/secret" in value]


@pytest.mark.slow(2)
def test_a_request_nobody_waits_for_does_not_keep_the_trainer_for_ever(config, tmp_path, monkeypatch):
    monkeypatch.setattr("fedtrain.runtime.trainers.trainer.ABANDONED_S", 0.2)

    async def main():
        trainer = await Trainer.start(config, scratch=tmp_path)
        initial = await trainer.initial(tmp_path / "initial")
        hanging = asyncio.create_task(trainer.train("hangs", 0, initial, tmp_path / "never"))
        await asyncio.sleep(0)
        hanging.cancel()
        with pytest.raises(TrainerDied):
            await trainer.train("site-1", 1, initial, tmp_path / "next")
        await trainer.close()

    asyncio.run(main())


def test_an_arena_larger_than_a_page_and_empty_sections_travel_by_file(tmp_path):
    from fedtrain.schema import Schema, TensorSpec
    from fedtrain.store.disk import new_file

    schema = Schema((TensorSpec("w", (5000,), "float32", True), TensorSpec("none", (0,), "int64", False)))
    with new_file(schema, tmp_path / "whole") as arena:
        arena.views()["w"].copy_(torch.arange(5000.0))
        digest = arena.digest
    assert ArenaFile(schema, tmp_path / "whole").load().digest == digest
    with pytest.raises(KeyError), new_file(schema, tmp_path / "half"):
        raise KeyError
    assert [f.name for f in tmp_path.iterdir()] == ["whole"]


def test_a_full_disk_where_an_arena_gets_its_name_is_told_with_the_files_name(tmp_path, monkeypatch):
    from fedtrain.schema import Schema, TensorSpec
    from fedtrain.store.disk import new_file

    def full(path, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    schema = Schema((TensorSpec("w", (5,), "float32", True),))
    with pytest.raises(Unreadable, match=r"no room for .*initial"), new_file(schema, tmp_path / "initial"):
        pass
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow(10)
def test_a_process_that_is_killed_as_it_starts_is_started_again_up_to_three_times(
    config, tmp_path, monkeypatch
):
    """The task's module ends its process, as the kernel does for want of memory, while `deaths` says so."""
    fork_trainers(monkeypatch)
    dying = "import os, pathlib\nleft = pathlib.Path('deaths')\nif n := int(left.read_text()):\n"
    dying += "    left.write_text(str(n - 1))\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "dying_task.py").write_text(dying + TASK)
    config = Config.of({"run": {"task": "dying_task:Small"}}, tmp_path)

    async def start(deaths):
        (tmp_path / "deaths").write_text(str(deaths))
        async with await Trainer.start(config, scratch=tmp_path, log=tmp_path / "log") as trainer:
            return trainer.description.task_digest

    assert asyncio.run(start(2))
    with pytest.raises(TrainerDied, match="signal 9"):
        asyncio.run(start(3))
