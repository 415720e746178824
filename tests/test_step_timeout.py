"""Once a rank has taken its first step, a rank that hangs is seen within parallel.step_timeout."""

import ctypes
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fedtrain.config import Config, ParallelConfig
from fedtrain.training.elastic import Leave
from fedtrain.training.mesh import Mesh, Sizes, backends_of
from fedtrain.training.parallel.data import Dealt
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.rank_log import RankLog
from fedtrain.training.task import load_task
from tests.limits import WAIT_S
from tests.worlds import TIMEOUT, world

TASK = """
import fedtrain, torch
class Line(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(3, 1)
    def data(self, site):
        return torch.ones(8, 3), torch.ones(8, 1)
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


def hang(rank: int, ranks: int, folder: Path) -> None:
    table = {"run": {"task": "line:Line"}, "train": {"batch_size": 8}, "parallel": {"step_timeout": "1s"}}
    config, seen = Config.of(table, folder), folder / "seen"
    mesh, task = Mesh(Sizes.of(config.parallel, ranks), torch.device("cpu")), load_task("line:Line", folder)
    engine = MeshEngine(task, config, mesh)
    data = Dealt(task.data(""), config.train, 1, "", rank, ranks)
    engine.steps.take(data.take())
    if rank == 1:  # until the other has seen it, or for as long as a whole timeout
        for _ in range(600):
            if seen.exists():
                return
            time.sleep(0.1)
        return
    try:
        engine.steps.take(data.take())
    except Exception as e:
        seen.write_text(str(e.__cause__ or e))
    raise SystemExit(1)


def limits(rank: int, ranks: int) -> None:
    mesh = Mesh(Sizes.of(ParallelConfig(tp=2, cp=2), ranks), torch.device("cpu"))

    def found() -> set[timedelta]:
        groups = [mesh[axis].get_group() for axis in ("tp", "cp", "dp_shard")] + [dist.group.WORLD]
        groups.append(mesh.flat(("cp", "tp")).get_group())
        return {backend.options._timeout for group in groups for backend in backends_of(group)}

    assert found() == {TIMEOUT}
    mesh.limit(7)
    assert found() == {timedelta(seconds=7)}
    assert backends_of(mesh.flat(("dp_shard", "cp")).get_group())[0].options._timeout.seconds == 7


@pytest.mark.slow(4)
def test_every_group_of_a_mesh_has_the_worlds_limit_and_one_that_is_made_later_the_newest():
    world(4, limits)


# One rank has ended, or the other couldn't meet it: whichever is seen first.
ENDED = (torch.multiprocessing.ProcessExitedException, torch.multiprocessing.ProcessRaisedException)


@pytest.mark.slow(5)
def test_a_rank_that_hangs_after_the_first_step_is_seen_within_the_limit_of_a_step(tmp_path):
    (tmp_path / "line.py").write_text(TASK)
    with pytest.raises(ENDED):
        world(2, hang, tmp_path)
    assert "1000ms" in (tmp_path / "seen").read_text()


LIMIT_S = 1.5  # over what passes between two looks at a step


def stands(how: str, leave: Leave, armed: list[float]) -> None:
    """A step has LIMIT_S only from here on: a rank that others keep from running before does not hang."""
    leave._hangs_s = LIMIT_S
    if how == "in Python":
        time.sleep(WAIT_S)
    while LIMIT_S not in armed:
        time.sleep(0.01)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # never returns, and keeps all Python threads of the process from running
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def stand_still(rank: int, ranks: int, folder: Path, how: str) -> None:
    os.environ |= {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(folder / f"told-{rank}")}
    with RankLog(folder, rank) as log, Leave(hangs_s=WAIT_S, log=log) as leave:
        armed, arm = list[float](), log.write_stacks_after

        def noted(seconds: float) -> None:
            armed.append(seconds)
            if how == "in a call":  # in Python the stacks are written without it
                arm(seconds)

        log.write_stacks_after = noted  # type: ignore[method-assign]
        for step in range(3):
            with leave.during("step"):
                if rank == 1 and step == 2:
                    stands(how, leave, armed)
                dist.barrier()


@pytest.mark.slow(4)
@pytest.mark.parametrize("how", ["in Python", "in a call"])
def test_a_rank_that_hangs_leaves_its_stacks_in_its_log_and_ends(tmp_path, how):
    with pytest.raises(ENDED):
        world(2, stand_still, tmp_path, how)
    log = (tmp_path / "ranks" / "rank-00001.log").read_text()
    assert "in stands" in log
    assert "in stand_still" in log
    if how == "in Python":
        line = json.loads((tmp_path / "told-1").read_text())["message"]["message"]
        assert line.startswith("rank 1 stands still: its step of")
        assert "It is at test_step_timeout.py:" in line
        assert "rank-00001.log" in line


def test_a_log_of_a_rank_has_the_error_that_ended_it_and_what_it_had_before(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), RankLog(tmp_path, 3):
            raise KeyError("age")
    log = (tmp_path / "ranks" / "rank-00003.log").read_text()
    assert log.count("KeyError: 'age'") == log.count(f"process {os.getpid()}, restart 0") == 2
    assert log.index("begins on") < log.index("Traceback (most recent call last)")
