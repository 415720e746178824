"""A regression that is small enough to differentiate by hand, y = head · tanh(norm ⊙ (body x)), and a
federation of it in this process: real rounds, answers, stores, trainers, and sites whose replies are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

import fedtrain
from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.exchange import CohortWrapper
from fedtrain.messages import Request, SiteId, Train
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.simulations.simulation import answers
from fedtrain.runtime.star import federated
from fedtrain.store import RunStore
from fedtrain.store.memories import Memories
from fedtrain.strategies import build
from tests.inprocess import Events, InProcess, begin, pool_of

HIDDEN, INPUTS = 3, 4
SITES = [f"site{i}" for i in range(6)]
LR = 0.1
SEED = 5


class NormScale(nn.Module):
    """A scale that is called after the layers that FedBN leaves at their sites."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, HIDDEN, bias=False, dtype=torch.float64)
        self.norm, self.head = NormScale(), Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.norm(self.body(x))))
        return found


def initial() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=HIDDEN * (INPUTS + 2)) * 0.7


def examples_of(site: SiteId) -> int:
    return 8 + 5 * int(site[-1])


def data_of(site: SiteId) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    number = int(site[-1])
    random = np.random.default_rng(100 + number)
    x = random.normal(size=(examples_of(site), INPUTS))
    return x, np.sin(x @ random.normal(size=INPUTS)) + 0.5 * (-1) ** number


def batches_of(
    site: SiteId, round: int, size: int = 8, epochs: int = 1, draw: int = 0
) -> list[np.ndarray[Any, Any]]:
    """Which examples are in each batch of a round: as the engine draws them."""
    seed = seed_of(SEED, round, site)
    count, order = examples_of(site), torch.Generator().manual_seed(seed_of(seed, draw) if draw else seed)
    found = []
    for _ in range(epochs):
        rows = torch.randperm(count, generator=order).numpy() if size and size < count else np.arange(count)
        found += [rows[at : at + (size or count)] for at in range(0, count, size or count)]
    return found


class Toy(fedtrain.Task):
    def model(self) -> nn.Module:
        net, whole = Net(), torch.from_numpy(initial())
        with torch.no_grad():
            net.body.weight.copy_(whole[:12].view(HIDDEN, INPUTS))
            net.norm.weight.copy_(whole[12:15])
            net.head.weight.copy_(whole[15:])
        return net

    def sites(self) -> list[str]:
        return SITES

    def data(self, site: str) -> Any:
        return tuple(map(torch.from_numpy, data_of(site)))

    def eval_data(self, site: str) -> Any:
        return self.data(site)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return (model(x) - y).square().mean() / 2


class Normed(fedtrain.Task):
    """Classes, by a network with BatchNorm: gradients depend on whole batches, and buffers move."""

    def sites(self) -> list[str]:
        return SITES[:4]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def data(self, site: str) -> Any:
        generator = torch.Generator().manual_seed(ord(site[-1]))
        x = torch.randn(40, 6, generator=generator)
        return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def config(folder: Path, kind: str, options: Mapping[str, Any] = {}, **sections: Mapping[str, Any]) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / "toy_task.py").write_text("from tests.toy import Toy\n")
    table = {
        "run": {"task": "toy_task:Toy", "name": "toy", "rounds": 10, "seed": SEED},
        "train": {"lr": LR, "batch_size": 8},
        "strategy": {"kind": kind, "min_sites": 2, "fraction": 0.7, "attempts": 20, **options},
        "evaluate": {"every": 0},
        "secagg": {"enabled": False},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return Config.of(table, folder)


class Losing(CohortWrapper):
    """Sites drop out, half of them after they have trained."""

    def __init__(self, inner: Any, share: float) -> None:
        super().__init__(inner)
        self._share = share

    def _drops(self, id: str, site: SiteId) -> str:
        draw = Random(f"{id} {site}")
        return draw.choice(["before", "after"]) if draw.random() < self._share else ""

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Any], None]:
        if not isinstance(next(iter(requests.values())), Train):
            asked = requests
        else:
            asked = {s: r for s, r in requests.items() if self._drops(r.id, s) != "before"}
        if not asked:
            return
        async with aclosing(self._inner.exchange(asked, deadline_s)) as replies:
            async for site, reply in replies:
                if asked is requests or self._drops(requests[site].id, site) != "after":
                    yield site, reply


class Toys:
    """A run, in as many processes' lives as wished."""

    def __init__(self, cfg: Config, share: float = 0.3) -> None:
        self.cfg, self._share, self.counted = cfg, share, list[list[SiteId]]()
        self.events = Events()

    def run(self, until: Sequence[int] = (10,), prepare: Callable[[Any], None] = lambda bench: None) -> Toys:
        """To the end of each of these rounds, with new stores and trainers after each."""
        begin(self.cfg, simulated=True)
        for rounds in until:
            table = self.cfg.table() | {"run": self.cfg.table()["run"] | {"rounds": rounds}}
            asyncio.run(self._go(Config.of(table, self.cfg.root), prepare))
        return self

    async def _go(self, cfg: Config, prepare: Callable[[Any], None]) -> None:
        store, trainer = RunStore(cfg.run_dir), InProcess(cfg, cfg.root, simulated=True)
        prepare(trainer.bench)

        try:
            pool, events = pool_of(cfg, [trainer], cfg.root), self.events
            strategy = build(cfg.strategy.kind, cfg.strategy.options, cfg.root)
            journal = Journal(cfg, store, events)
            commit = journal.commit

            def committed(after: Any, record: Any, prepared: Any, sites: Any, *more: Any) -> None:
                self.counted.append(sorted(sites))
                commit(after, record, prepared, sites, *more)

            journal.commit = committed  # type: ignore[method-assign]  # to see whose updates are in
            cohort = Losing(pool, self._share)
            found = answers(cfg, cohort, events, trainer.description.extras)
            await federated.run(journal, found, strategy)
            await pool.close()
        finally:
            store.close()

    @property
    def last(self) -> Any:
        store = RunStore(self.cfg.run_dir, read_only=True)
        try:
            return store.latest()
        finally:
            store.close()

    @property
    def weights(self) -> np.ndarray[Any, Any]:
        """All shared coordinates."""
        views = self.last.weights.load().views()
        return np.concatenate([view.numpy().ravel() for view in views.values()])

    def memory(self, site: SiteId) -> dict[str, np.ndarray[Any, Any]]:
        """What a site remembers, as the next request will have it."""
        store = RunStore(self.cfg.run_dir, read_only=True)
        counted = store.counted()
        store.close()
        if site not in counted:
            return {}
        kept = Memories(self.cfg.simulate_dir / "memory", read_only=True).of(site).load(counted[site])
        return {name: view.numpy() for name, view in kept.views().items()}
