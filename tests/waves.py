"""A small datacenter run: its files, and what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.store import RunStore
from tests.equivalence.ranks import run_case
from tests.worlds import world

ROUNDS, STEPS_A_ROUND = 3, 10
STEPS = ROUNDS * STEPS_A_ROUND
TASK = """
import time
from pathlib import Path
import torch
from torch import nn
import fedtrain

class Waves(fedtrain.Task):
    def model(self):
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2)).double()

    def data(self, site):
        x = torch.randn(96, 5, generator=torch.Generator().manual_seed(2)).double()
        return x, (x[:, 0] > 0).long()

    def loss(self, model, batch):
        began = time.monotonic()
        while time.monotonic() < began + float(Path("pace").read_text()):  # it may change meanwhile
            time.sleep(0.01)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


class Waves:
    """A project in a folder; `pace` is how many seconds a step lasts."""

    def __init__(
        self, folder: Path, *, pace: float = 0.05, checkpoints: Path | str = "", dropout: bool = True
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "task.py").write_text(TASK if dropout else TASK.replace("Dropout(0.1)", "Identity()"))
        (folder / "fedtrain.toml").write_text(
            f'[run]\nname = "r"\ntask = "task:Waves"\nrounds = {ROUNDS}\nseed = 5\n'
            f'[train]\nbatch_size = 12\nlocal_steps = {STEPS_A_ROUND}\noptimizer = "adam"\ndevice = "cpu"\n'
            f'[evaluate]\nevery = 0\n[parallel]\nlog_every = 1\ntimeout = "60s"\n'
            f'[checkpoint]\nevery = 2\nkeep = 2\ndir = "{checkpoints}"\npatience = "60s"\n'
        )
        self.dir = folder / "runs" / "r+datacenter"
        self.set_pace(pace)

    def set_pace(self, seconds: float) -> None:
        """How long a step lasts, from now on."""
        (self.folder / "pace.new").write_text(str(seconds))
        (self.folder / "pace.new").replace(self.folder / "pace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """A torn last line left out."""
        path = self.dir / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [e for e in (json.loads(line) for line in lines if line.endswith("\n")) if e["kind"] == kind]

    def notices(self) -> list[str]:
        return [e["text"] for e in self.events("notice")]

    def step(self) -> int:
        """The last one that rank 0 logged."""
        steps = self.events("step")
        return int(steps[-1]["step"]) if steps else 0

    def model(self) -> Arena:
        """The last round's."""
        with contextlib.closing(RunStore(self.dir, read_only=True)) as store:
            last = store.latest()
        assert last is not None
        assert last.round == ROUNDS
        return last.weights.load()

    def losses(self) -> list[float]:
        """Of the rounds, in training."""
        with contextlib.closing(RunStore(self.dir, read_only=True)) as store:
            return [each.record["loss"] for each in store.rounds()]

    def checkpoints(self) -> list[Path]:
        return sorted((self.dir / "checkpoints").iterdir())


def undisturbed(folder: Path) -> Waves:
    """The run of two ranks that nothing happens to."""
    calm = Waves(folder, pace=0.0)
    world(2, _train, calm.folder)
    return calm


def _train(rank: int, ranks: int, folder: Path) -> None:
    os.chdir(folder)
    run_case(Config.load("fedtrain.toml"), [], torch.device("cpu"))
