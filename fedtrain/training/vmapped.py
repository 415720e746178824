"""Many small sites at once: the gradients of a hundred models in one call, for simulate.engine = "vmap".

It gives the loop's numbers up to rounding (a test holds both together in float64), and below some 50,000
parameters it gives them several times sooner, since the price of a kernel's launch is shared. Sites are
bucketed by the size of their data, so that no padding is needed and any loss is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count as forever
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from ..errors import ConfigError, TaskError
from ..update import Arena, Section, SiteId, Update, seed_of
from .examples import Tensors, examples_of, move, spans
from .local import Engine
from .optimizers import clip, optimizer_of
from .task import Batch, Task, examples_in, folder_of, user_code

CHUNK = 100  # sites at once, at most; more would leave a core's cache without being cheaper to start
CHUNK_BYTES = 32 << 20  # of their weights, at most


class Vmapped:
    """An engine's sites, many at a time. Make it once: it keeps what does not change from round to round."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._section = _one_section(engine)
        self._loss = _Loss(engine.task, engine.model)
        trained = [s for s in engine.schema.tensors if s.trained]
        self._names = [f"model.{s.name}" for s in trained]
        self._shapes = [s.shape for s in trained]
        self._sizes = [s.numel for s in trained]
        at_once = max(1, min(CHUNK, CHUNK_BYTES // max(1, engine.schema.nbytes)))
        # Arenas of the sites at work; what isn't trained is zero there, and stays so.
        self._slab = torch.zeros(at_once, engine.schema.nbytes, dtype=torch.uint8, device=engine.device)
        gradient = grad_and_value(self._objective, has_aux=True)
        self._gradient_at = {  # [sites, n], or [n] at the first step, when all sites have the same weights
            2: vmap(gradient, in_dims=(0, 0)),
            1: vmap(gradient, in_dims=(None, 0)),
        }

    def train(
        self,
        sites: Sequence[tuple[SiteId, Any]],
        round: int,
        weights: Arena,
        outs: Sequence[Arena] | torch.Tensor,
    ) -> list[Update]:
        """As Engine.train for each (site, data), in their order.

        `outs` is an arena a site, or the memory of them all, uint8 [sites, schema.nbytes].
        """
        engine = self.engine
        if isinstance(outs, torch.Tensor):
            outs = [Arena(engine.schema, row) for row in outs.unbind()]
        engine.load(weights, training=True)
        updates: dict[int, Update] = {}
        for bucket in _buckets(sites):
            for at in range(0, len(bucket), len(self._slab)):
                chunk = bucket[at : at + len(self._slab)]
                names = [sites[i][0] for i, _ in chunk]
                deltas, losses, counts, seen = self._chunk([e for _, e in chunk], names, round)
                for (i, e), delta, loss, count in zip(chunk, deltas, losses, counts, strict=True):
                    outs[i].data.copy_(delta)
                    outs[i]._digest = None
                    updates[i] = Update(
                        delta=outs[i], num_examples=e.count * (count / seen), metrics={"loss": (loss, count)}
                    )
        return [updates[i] for i in range(len(sites))]

    def _chunk(
        self, examples: list[Tensors], names: list[SiteId], round: int
    ) -> tuple[Sequence[torch.Tensor], list[float], list[float], int]:
        """Of sites with equally many examples: each one's delta (an arena's bytes), Σ loss and Σ weight; and
        how many examples each one's steps saw."""
        engine, section = self.engine, self._section
        start = engine.local.flat(section)[: section.trained]  # [n]
        slab = self._slab[: len(examples)]
        local = slab[:, section.offset : section.offset + section.nbytes].view(start.dtype)
        local = local[:, : section.trained].copy_(start)  # [sites, n]
        optimizer = optimizer_of(engine.config)
        state = optimizer.init(local)
        losses, counts = [], []
        seen = 0
        engine.seed(round, *names)  # for a loss that draws from random or numpy; torch's is refused
        batches = islice(self._batches(examples, names, round), engine.config.local_steps or None)
        for step, (size, batch) in enumerate(batches, start=1):
            seen += size
            gradient, loss, count = self._gradient(start if step == 1 else local, batch)
            losses.append(loss)
            counts.append(count)
            if engine.config.clip_norm:
                clip([gradient], engine.config.clip_norm)
            if engine.correct is not None:
                engine.correct(gradient, local, start)
            optimizer.step(local, gradient, state, step)
        local.sub_(start)
        weight = torch.stack(counts).double()  # [steps, sites]
        total = torch.stack(losses).double().mul_(weight)
        return slab.unbind(), total.sum(0).tolist(), weight.sum(0).tolist(), seen

    def _batches(
        self, examples: list[Tensors], names: list[SiteId], round: int
    ) -> Iterator[tuple[int, Batch]]:
        """(size, batch [sites, size, ...]), each site's in the order that the loop would take."""
        config, device = self.engine.config, self.engine.device
        count, build = examples[0].count, examples[0].build
        columns = [
            move(torch.stack(same), device) for same in zip(*(e.columns for e in examples), strict=True)
        ]
        rows = torch.arange(len(examples), device=device)[:, None]
        orders: list[torch.Generator] = []
        for _ in forever() if config.local_steps else range(config.local_epochs):
            if config.batch_size == 0 or config.batch_size >= count:
                yield count, build(columns)
                continue
            orders = orders or [
                torch.Generator().manual_seed(seed_of(self.engine.run_seed, round, name)) for name in names
            ]
            order = torch.stack([torch.randperm(count, generator=g) for g in orders]).to(device)
            for start, stop in spans(count, config.batch_size, config.drop_last):
                yield stop - start, build([c[rows, order[:, start:stop]] for c in columns])

    def _gradient(
        self, weights: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each site's gradient [sites, n], mean loss and weight [sites]."""
        try:
            with user_code(folder_of(self.engine.task), "under vmap"):
                gradient, (loss, count) = self._gradient_at[weights.dim()](weights, batch)
        except TaskError as e:
            raise refusal(f"{e}. Random numbers, .item() and LSTM can't be vmapped") from e
        if not bool(count.all()):
            raise refusal("a batch without weight is skipped, at its own site only")
        return gradient, loss, count

    def _objective(self, flat: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """One site's mean loss, and its weight."""
        pieces = [
            p.view(shape) for p, shape in zip(torch.split(flat, self._sizes), self._shapes, strict=True)
        ]
        loss = functional_call(self._loss, dict(zip(self._names, pieces, strict=True)), (batch,))
        if isinstance(loss, tuple):
            weight = torch.as_tensor(loss[1])
            return loss[0] / torch.where(weight == 0, 1, weight), weight
        return loss, torch.tensor(examples_in(batch))


class _Loss(nn.Module):
    """The task's loss as a module: it may use the model in any way while its weights are exchanged."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Batch) -> Any:
        return self.task.loss(self.model, batch)


def _one_section(engine: Engine) -> Section:
    """Where the trained coordinates lie, or a ConfigError that says why these sites need the loop."""
    config = engine.config
    trained = [s for s in engine.schema.sections if s.trained]
    if config.precision != "fp32":
        raise refusal(f"train.precision is {config.precision}, not fp32")
    if config.accumulate > 1:
        raise refusal(f"train.accumulate is {config.accumulate}, not 1")
    if engine.task.optimizer(engine.model.parameters()) is not None:
        raise refusal("the task has its own optimizer()")
    if len(trained) != 1:
        raise refusal(f"the model has trained parameters of {len(trained)} dtypes, not one")
    if any(True for _ in engine.model.buffers()):
        name = next(name for name, _ in engine.model.named_buffers())
        raise refusal(f"the model has buffers ({name}), which each site would change")
    return trained[0]


def _buckets(sites: Sequence[tuple[SiteId, Any]]) -> Iterator[list[tuple[int, Tensors]]]:
    """(place in `sites`, examples) of all sites whose tensors have equal shapes, bucket by bucket."""
    found: dict[object, list[tuple[int, Tensors]]] = {}
    for i, (site, data) in enumerate(sites):
        examples = examples_of(data)
        if not isinstance(examples, Tensors):
            raise refusal(f"data() returned a {type(data).__name__}, and only tensors can be stacked")
        if not examples.count:
            raise TaskError(f"site {site} has no examples: data({site!r}) is empty")
        shapes = tuple((c.shape, c.dtype) for c in examples.columns)
        found.setdefault(shapes, []).append((i, examples))
    yield from found.values()


def refusal(why: str) -> ConfigError:
    return ConfigError(f'simulate.engine = "vmap" can\'t train this: {why}. Use simulate.engine = "loop".')
