"""A site whose trainer is several ranks sends the update that a site of one process sends."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from fedtrain.arena import ArenaFile
from fedtrain.config import Config
from fedtrain.errors import TaskError
from fedtrain.messages import Update
from fedtrain.runtime.trainers.trainer import Trainer, TrainerDied
from tests.equivalence.tiny import project
from tests.forked import fork_trainers
from tests.inline import Inline
from tests.limits import WAIT_S

pytestmark = pytest.mark.slow(12)
EXACT = 1e-12  # float64


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return project(tmp_path_factory.mktemp("site"))


def configured(folder: Path, *, task: str = "Padded", ranks: int = 1, **parallel) -> Config:
    return Config.of(
        {
            "run": {"task": f"mesh_task:{task}", "seed": 5},
            "train": {
                "batch_size": 16,
                "optimizer": "adamw",
                "lr": 0.01,
                "local_epochs": 2,
                "clip_norm": 0.5,
            },
            "strategy": {"kind": "fedprox", "mu": 0.1},
            "parallel": {"ranks": ranks, "timeout": "60s", **parallel},
        },
        folder,
    )


async def two_rounds(config: Config, scratch: Path) -> list[tuple[torch.Tensor, Update, float]]:
    """(delta, update, loss in evaluation) of two rounds, each from the initial weights."""
    found = []
    async with await Trainer.start(config, scratch=scratch) as trainer:
        initial = await trainer.initial(scratch / "initial")
        assert await trainer.examples("a") in (80.0, 96.0, None)
        for round in (0, 1):
            update = await trainer.train("a", round, initial, scratch / f"delta-{round}")
            value, count = (await trainer.evaluate("a", round, initial)).metrics["loss"]
            delta = update.delta.load()
            flat = torch.cat([delta.flat(s) for s in delta.schema.sections if s.trained])
            found.append((flat, update, value / count))
    return found


@pytest.fixture(scope="session")
def one(folder, tmp_path_factory) -> list[tuple[torch.Tensor, Update, float]]:
    """What a site of one process sends."""
    return asyncio.run(two_rounds(configured(folder), tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize(
    ("ranks", "mesh"), [(2, {}), (4, {"tp": 2, "zero": 3}), (4, {"pp": 2})], ids=["dp", "zero3-tp", "dp-pp"]
)
def test_a_site_of_several_ranks_sends_the_update_of_one(folder, tmp_path, one, monkeypatch, ranks, mesh):
    if ranks > 2:  # processes that need not load torch
        fork_trainers(monkeypatch, ranks)
    several = asyncio.run(two_rounds(configured(folder, ranks=ranks, **mesh), tmp_path))
    for (delta, update, loss), (other, theirs, their_loss) in zip(one, several, strict=True):
        assert (delta - other).abs().max() < EXACT
        assert delta.abs().max() > 1e-3
        assert theirs.num_examples == pytest.approx(update.num_examples, rel=EXACT)
        assert theirs.metrics["loss"] == pytest.approx(update.metrics["loss"], rel=EXACT)
        assert their_loss == pytest.approx(loss, rel=EXACT)


def test_several_ranks_train_with_frozen_parameters_that_the_site_was_given_as_one_does(
    folder, tmp_path, monkeypatch
):
    fork_trainers(monkeypatch)

    async def given(kind: type[Trainer], ranks: int, scratch: Path) -> torch.Tensor:
        config = configured(folder, task="Adapted", ranks=ranks)
        async with await kind.start(config, scratch=scratch) as trainer:
            initial, frozen = await trainer.beginning(None, scratch)
            (scratch / "weights").write_bytes(initial.payload)
            weights = ArenaFile(initial.schema, scratch / "weights")
            for section in frozen.schema.sections:
                frozen.flat(section).mul_(1.5)
            (scratch / "given").write_bytes(frozen.payload)
            before = await trainer.train("a", 0, weights, scratch / "before")
            first = before.delta.load().data.view(torch.float64)
            await trainer.freeze(ArenaFile(frozen.schema, scratch / "given"))
            update = await trainer.train("a", 0, weights, scratch / "delta")
            second = update.delta.load().data.view(torch.float64)
            assert (second - first).abs().max() > 1e-4
            return second

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = asyncio.run(given(Inline, 1, tmp_path / "one"))
    two = asyncio.run(given(Trainer, 2, tmp_path / "two"))
    assert (one - two).abs().max() < EXACT


MOODY = """
import os
from pathlib import Path

class Moody(Rows):
    def loss(self, model, batch):
        if os.environ["LOCAL_RANK"] == "1" and Path(__file__).with_name("raise").exists():
            raise KeyError("patient 4711")
        return super().loss(model, batch)
"""


def test_whatever_becomes_of_a_rank_ends_all_and_is_named(tmp_path, capfd, monkeypatch):
    fork_trainers(monkeypatch)
    folder = project(tmp_path / "project")
    with (folder / "mesh_task.py").open("a") as f:
        f.write(MOODY)

    async def ended(says: str, act: Callable[[int, int], object]) -> None:
        """`act` with the pids of both ranks before a round; then why the round failed, and who is left."""
        config = configured(folder, task="Moody", ranks=2)
        async with await Trainer.start(config, scratch=tmp_path) as trainer:
            initial = await trainer.initial(tmp_path / "initial")
            await trainer.train("a", 0, initial, tmp_path / "delta")
            zero = psutil.Process(trainer._process.pid)
            (one,) = zero.children()
            act(zero.pid, one.pid)
            with pytest.raises(TaskError, match=says):
                await trainer.train("a", 1, initial, tmp_path / "delta")
            with pytest.raises(TrainerDied):
                await trainer.train("a", 1, initial, tmp_path / "delta")
            assert psutil.wait_procs([zero, one], WAIT_S)[1] == []

    def stop_one_and_kill_zero(zero: int, one: int) -> None:
        os.kill(one, signal.SIGSTOP)
        os.kill(zero, signal.SIGKILL)

    async def all_of_them() -> None:
        killed, stopped = "was ended by signal 9", "was stopped for 3 s"
        await ended(rf"^rank 1 \(pid \d+\) {killed}", lambda zero, one: os.kill(one, signal.SIGKILL))
        await ended(rf"^rank 1 \(pid \d+\) {stopped}", lambda zero, one: os.kill(one, signal.SIGSTOP))
        await ended(rf"^the trainer process {killed}", stop_one_and_kill_zero)
        await ended(r"^rank 1: KeyError in mesh_task.py:\d+", lambda zero, one: (folder / "raise").touch())

    asyncio.run(all_of_them())
    said = capfd.readouterr().err
    assert said.count("Traceback (most recent call last)") == 1, said
    assert "KeyError: 'patient 4711'" in said


def test_data_that_one_rank_cannot_load_fails_the_request_and_nothing_else(tmp_path, monkeypatch):
    fork_trainers(monkeypatch)
    folder = project(tmp_path / "project")
    with (folder / "mesh_task.py").open("a") as f:
        f.write(
            "\nimport os\n\nclass Elsewhere(Rows):\n    def data(self, site):\n"
            "        if site == 'b' and os.environ['LOCAL_RANK'] == '1':\n            raise OSError\n"
            "        return super().data(site)\n"
        )

    async def run() -> None:
        async with await Trainer.start(
            configured(folder, task="Elsewhere", ranks=2), scratch=tmp_path
        ) as trainer:
            initial = await trainer.initial(tmp_path / "initial")
            with pytest.raises(TaskError, match="1 of 2 ranks could not load their data"):
                await trainer.train("b", 0, initial, tmp_path / "delta")
            await trainer.train("a", 0, initial, tmp_path / "delta")

    asyncio.run(run())
