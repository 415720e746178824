"""The ranks of an island as a site: what a strategy's half of a round is made of (site_training.SiteEngine).

Each rank has the whole model, in one arena as a site has it, and takes its part of each batch. So every rank
works the same numbers out, and a strategy's vectors are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...arena import Arena
from ...config import TrainConfig
from ...learning import Context, Correct, Group, Only
from ...messages import Metrics, SiteId
from ...schema import unique_tensors
from ..batches import Batch, examples_in
from ..engine import Step, Steps
from ..examples import Examples
from ..mesh import Mesh
from ..task import collate_of
from .data import Dealt
from .engine import MeshEngine
from .outer import BETWEEN

Watch = Callable[[Callable[[], Step]], Step]  # takes a step, and returns what it saw


class WatchedSteps(Steps):
    """Steps that somebody else has taken one by one, and counts."""

    watch: Watch
    taken: int | torch.Tensor = 0  # not left out

    def take(self, group: Any, doing: str = "", number: int = 0) -> Step:
        step = self.watch(lambda: Steps.take(self, group, doing, number))
        self.taken = self.taken + step.taken
        return step


class Island:
    """The ranks of one island, as each of them sees it. All call each method alike."""

    def __init__(self, engine: MeshEngine, rounds: int, correct: Correct | None) -> None:
        """`engine`: its model is whole at each rank. `rounds`: of the run, over which train.decay goes."""
        self._engine, self._rounds, self._correct = engine, rounds, correct
        self.task, self.config, self.device = engine.task, engine.config, engine.device
        self.run_seed, self.model = engine.run_seed, engine.parts[0]
        self.own_optimizer, self.over_ranks = engine.own_optimizer, engine.over_ranks
        self.watch: Watch = lambda take: take()
        tensors = unique_tensors(self.model)
        self.local = Arena.of(self.model, without=engine.kept)
        self.own = Arena.pack({name: t for name, t in tensors.items() if name in engine.kept})
        self.first_own = self.own.load()
        self._parameters: list[list[nn.Parameter]] = []  # those that are exchanged, and this site's own
        for arena in (self.local, self.own):
            arena.data = arena.data.to(self.device)
            arena.bind(self.model)
            trained = [tensors[spec.name] for spec in arena.schema.tensors if spec.trained]
            self._parameters.append([p for p in trained if isinstance(p, nn.Parameter)])
        self.train_only(None)

    @property
    def exchanged(self) -> list[torch.Tensor]:
        """One tensor for each parameter, in arena order."""
        return [p.detach() for p in self._parameters[0]]

    @property
    def exchanged_gradients(self) -> list[torch.Tensor]:
        return [
            torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1)
            for p in self._parameters[0]
        ]

    def load(self, weights: Arena, *, training: bool) -> None:
        self.local.copy_(weights)
        self.model.train(training)

    def gather_buffers(self) -> None:
        """Buffers are the first rank's; those that forward() replaced go back to their place in the arena."""
        self._engine.share_buffers()
        tensors = unique_tensors(self.model)
        for arena in (self.local, self.own):
            for name, view in arena.views().items():
                if tensors[name].data_ptr() != view.data_ptr():
                    view.copy_(tensors[name])
                    tensors[name].data = view

    def train_only(self, only: Only | None) -> None:
        exchanged, own = self._parameters
        self._engine.trained = {"shared": exchanged, "local": own, None: [*exchanged, *own]}[only]

    def seed(self, *purpose: object) -> int:
        """The first rank draws as a site of one process, each other one for itself."""
        rank = self._engine.mesh.data_rank
        return self._engine.seed(*purpose, *([rank] if rank else []))

    def steps(
        self, site: SiteId, dataset: Any, round: int, given: Sequence[Context] = (),
        correct: Correct | None = None, config: TrainConfig | None = None,
    ) -> tuple[Examples, Step]:  # fmt: skip
        """As of local.Engine; what they saw is of all ranks."""
        engine, config = self._engine, config or self.config
        data = self._dealt(site, dataset, config)
        steps = WatchedSteps(engine, config, correct or self._correct, engine.parallel.nonfinite)
        steps.watch = self.watch
        before = engine.steps, engine.config
        engine.steps, engine.config = steps, config
        try:
            seen = engine.train(data, round, self._rounds, given)
            steps.check(f"site {site}, round {round + 1}")
        finally:
            engine.steps, engine.config = before
        self.gather_buffers()
        return data.examples, replace(self._of_all_ranks(seen), steps=max(1, int(steps.taken)))

    def step_batches(self, site: SiteId, dataset: Any, round: int, draw: int) -> Iterator[Group]:
        """This rank's shares of them."""
        data = self._dealt(site, dataset, self.config)
        data.begin(round, draw)
        self.seed(round, site)
        yield from data.round()

    def dealt(self, dataset: Any) -> Iterator[tuple[Batch, bool]]:
        """This rank's shares of all examples."""
        return ((self._engine.here(b), counts) for b, counts in self._engine.dealt(dataset, apart=True))

    def all_batches(self, dataset: Any) -> Group:
        """The same as one group."""
        engine, batches = self._engine, list(self.dealt(dataset))
        sizes = [examples_in(batch) if counts else 0 for batch, counts in batches]
        others = int(self.over_ranks(sum(sizes))) - sum(sizes)
        engine.present(batches[0][0])  # where this rank has no example, it computes along
        group = [(batch if size else None, size) for (batch, _), size in zip(batches, sizes, strict=True)]
        return [*group[:-1], (group[-1][0], group[-1][1] + others)]

    def backward(self, group: Group, scale: float, doing: str = "") -> Step:
        for p in self.model.parameters():
            p.grad = None
        return self._of_all_ranks(self._engine.backward(group, scale, doing))

    def evaluate(self, dataset: Any, weights: Arena, own: Arena | None = None, site: SiteId = "") -> Metrics:
        self.load(weights.model, training=False)
        if own is not None:
            self.own.copy_(own)
        return self._engine.evaluate(dataset, apart=True, site=site)

    def _dealt(self, site: SiteId, dataset: Any, config: TrainConfig) -> Dealt:
        engine, mesh = self._engine, self._engine.mesh
        ranks = mesh.data_rank, mesh.data_ranks
        return Dealt(dataset, config, engine.run_seed, site, *ranks, collate_of(engine.task))

    def _of_all_ranks(self, seen: Step) -> Step:
        if not self._engine.mesh.axes():
            return seen
        loss, weight = map(self.over_ranks, seen.total())
        mean = torch.tensor(loss / weight if weight else 0.0, dtype=torch.float64)
        return replace(seen, losses=[mean], weights=[weight])


def shown(mesh: Mesh, values: torch.Tensor, island: int) -> torch.Tensor:
    """The `values` of one island, in a new tensor on the CPU at all of them."""
    found = values.to(mesh.device, copy=True)
    group = mesh.group(BETWEEN) if mesh.islands > 1 else None
    if group is not None:
        dist.broadcast(found, dist.get_global_rank(group, island), group=group)
    return found.cpu()
