"""A federation over mutual TLS in one process, and the same as a simulation. With conftest.inline trainers
do all that real ones do, but for a process of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, Self

from fedtrain.config import Config
from fedtrain.errors import FedtrainError, TaskError
from fedtrain.events import Event, silent
from fedtrain.pki import init, issue
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from fedtrain.runtime.trainers.trainer import Trainer
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.tracking.export import export
from tests.allowed import allowed
from tests.ports import free_port

SITES = ("a", "b", "c")
TASK = """
import zlib

import torch
from torch import nn

import fedtrain


class Blobs(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        body = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 8))
        return nn.Sequential(body.requires_grad_(False), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def data(self, site):
        g = torch.Generator().manual_seed(zlib.crc32(site.encode()))
        x = torch.randn(40 + 10 * ord(site[0]) % 3, 6, generator=g)
        return x, (x[:, 0] > 0).long()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
ONE_AT_A_TIME = threading.Lock()  # their random numbers are of one process


class Inline(Trainer):
    def __init__(self, bench: Workbench) -> None:
        self.bench, self.description = bench, bench.description
        self.asked: list[Any] = []

    @classmethod
    async def start(
        cls, config: Config, *, data_dir: Path | None = None, simulated: bool = False, **_: Any
    ) -> Self:
        def make() -> Workbench:
            with ONE_AT_A_TIME:
                return Workbench(config, data_dir, simulated=simulated)

        return cls(await asyncio.to_thread(make))

    async def _ask(self, message: Any) -> Any:
        self.asked.append(message)
        return await asyncio.to_thread(self._answer, message)

    def _answer(self, message: Any) -> Any:
        with ONE_AT_A_TIME:
            try:
                return self.bench.answer(message)
            except FedtrainError as e:
                raise TaskError(str(e)) from e

    @property
    def backlog(self) -> int:
        return 0

    async def close(self) -> None:
        """There is no process."""

    stop = close


async def start(started: list[Inline], config: Config, **options: Any) -> Inline:
    """Trainer.start, that notes which it started."""
    started.append(await Inline.start(config, **options))
    return started[-1]


def project(root: Path, task: str = TASK, **sections: dict[str, Any]) -> Config:
    """The configuration of a federation of three, with the task's module and certificates in the folder."""
    root.mkdir(parents=True, exist_ok=True)
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "task": "blobs_task:Blobs", "rounds": 3, "seed": 5},
        "train": {"lr": 0.1, "batch_size": 16},
        "strategy": {"min_sites": 3},
        "secagg": {"max_examples": 1000},
        "simulate": {"workers": 1},
        "network": {"listen": f"127.0.0.1:{free_port()}", "idle": "20s"},
    }
    for name, keys in sections.items():
        table[name] = table.get(name, {}) | keys
    file = root / f"{table['run']['task'].partition(':')[0]}.py"
    if not file.exists():
        file.write_text(task)
        init(root / "certs")
        issue(root / "certs", "aggregator")
        for name in SITES:
            issue(root / "certs", "site", name)
    return Config.of(table, root)


async def federation(config: Config, start: Path | None = None) -> list[dict[str, Any]]:
    """A whole run over mutual TLS; what the aggregator says of each round."""
    committed = []

    def emit(event: Event) -> None:
        kind, fields = event.kind, event.fields()
        if kind == "round_committed":
            committed.append(fields)

    tasks = [asyncio.create_task(site.run(allowed(config, name), name, emit=silent)) for name in SITES]
    try:
        async with asyncio.timeout(60):
            await aggregator.serve(config, emit=emit, start=start)
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return committed


async def simulation(config: Config, start: Path | None = None) -> None:
    await simulate(config, emit=silent, start=start, fresh=True)


def final(run_dir: Path, out: Path) -> str:
    """The exported model's SHA-256."""
    sha256: str = json.loads((export(run_dir, out) / "model.json").read_text())["sha256"]
    return sha256
