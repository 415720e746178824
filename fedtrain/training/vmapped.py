"""Many small sites at once: the gradients of a hundred models in one call, for simulate.engine = "vmap".

It gives the loop's numbers up to rounding (a test holds both together in float64), and below some 50,000
parameters it gives them several times sooner, since the price of a kernel's launch is shared. Sites are
bucketed by the size of their data, so that no padding is needed and any loss is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import nn
from torch.func import vmap

from ..arena import Arena, Slab
from ..digest import seed_of
from ..errors import ConfigError, TaskError
from ..learning import Context
from ..messages import SiteId, Update
from ..schema import Section, unique_tensors
from .batches import Batch, move
from .engine import Backend, Step, Steps, groups
from .examples import Tensors, examples_of, spans
from .local import Engine
from .optimizers import OPTIMIZERS
from .task import collate_of, folder_of, user_code

CHUNK = 100  # sites at once, at most; more would leave a core's cache without being cheaper to start
CHUNK_BYTES = 32 << 20  # of their weights, at most
STACKED_BYTES = 256 << 20  # of stacked data that is kept for the next round


class Vmapped(Backend):
    """An engine's sites, many at a time. Make it once: it keeps what does not change from round to round."""

    def __init__(self, engine: Engine, *, own_training: bool = False) -> None:
        """`own_training`: the strategy overrides `train`, which is for one site."""
        self.engine = engine
        self._section, self._folder = _one_section(engine, own_training), folder_of(engine.task)
        trained = [s for s in engine.schema.tensors if s.trained]
        self._shapes = [s.shape for s in trained]
        self._sizes = [s.numel for s in trained]
        parameters = unique_tensors(engine.model)
        self._places = [_places(engine.model, parameters[s.name]) for s in trained]
        at_once = max(1, min(CHUNK, CHUNK_BYTES // max(1, engine.schema.nbytes)))
        # Arenas of the sites at work; what isn't trained is zero there, and stays so.
        self._slab = torch.zeros(at_once, engine.schema.nbytes, dtype=torch.uint8, device=engine.device)
        self._objectives = vmap(self._objective)
        self._steps = Steps(self, engine.config, engine.correct)
        self.weights: list[torch.Tensor] = []  # [sites, n]
        self.gradients: list[torch.Tensor] = []
        self._first: torch.Tensor | None = None  # of a round, as all sites have them in its first step
        self.steps: list[int] = []  # that each site took in the last round
        self._kept: dict[tuple[SiteId, ...], tuple[list[Any], list[_Stack]]] = {}

    def train(
        self,
        sites: Sequence[tuple[SiteId, Any]],
        round: int,
        weights: Arena,
        outs: torch.Tensor,
        memories: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> list[Update]:
        """As Engine.train for each (site, data), in their order; `outs` is uint8 [sites, bytes of an update],
        of which a model is the beginning. `memories`: each site's, for the strategy's correction."""
        engine, nbytes = self.engine, self.engine.schema.nbytes
        engine.load(weights.model, training=True)
        deltas = Slab(engine.schema, outs[:, :nbytes]).arenas()
        updates: dict[int, Update] = {}
        self.steps = [0] * len(sites)  # that each site took
        down = weights.extras()
        for stack in self._stacks(sites):
            rows = [memories[i] for i in stack.members] if memories else []
            memory = {name: torch.stack([row[name] for row in rows]) for name in (rows[0] if rows else ())}
            given = partial(Context, down=down, memory=memory, lr=engine.config.lr)
            slab, seen = self._chunk(stack, [sites[i][0] for i in stack.members], round, given)
            weight = torch.stack(seen.weights).double()  # [steps, sites]
            loss = torch.stack(seen.losses).double().mul_(weight)
            sums = zip(stack.members, loss.sum(0).tolist(), weight.sum(0).tolist(), strict=True)
            for start, stop, to in stack.runs:  # many times cheaper than by index
                outs[to : to + stop - start, :nbytes].copy_(slab[start:stop])
            for i, total, count in sums:
                self.steps[i] = seen.steps
                num_examples = stack.like.count * (count / seen.examples)
                updates[i] = Update(
                    delta=deltas[i], num_examples=num_examples, metrics={"loss": (total, count)}
                )
        return [updates[i] for i in range(len(sites))]

    def _chunk(
        self, stack: _Stack, names: list[SiteId], round: int, given: Callable[[torch.Tensor], Context]
    ) -> tuple[torch.Tensor, Step]:
        """Each site's delta, an arena's bytes in a row, and what all steps of the round saw."""
        engine, section, config = self.engine, self._section, self.engine.config
        start = engine.local.flat(section)[: section.trained]  # [n]
        slab = self._slab[: len(names)]
        local = slab[:, section.offset : section.offset + section.nbytes].view(start.dtype)
        local = local[:, : section.trained].copy_(start)  # [sites, n]
        self.weights, self._first = [local], start.expand_as(local)
        engine.seed(round, *names)  # for a loss that draws from random or numpy; torch's is refused
        self._steps.begin(OPTIMIZERS[config.optimizer](config, self.weights), [given(start)])
        size = config.batch_size or stack.like.count
        drawn = names if size < stack.like.count else []  # one batch of all: its order is nobody's concern
        orders = [torch.Generator().manual_seed(seed_of(engine.run_seed, round, name)) for name in drawn]
        batches = groups(config, partial(self._pass, stack, orders))
        seen = self._steps.round(batches, stack.like, round, engine.rounds)
        local.sub_(start)
        return slab, seen

    def _pass(self, stack: _Stack, orders: list[torch.Generator]) -> Iterator[tuple[int, Batch]]:
        """(size, batch [sites, size, ...]), each site's in the order that the loop would take."""
        config, device, count = self.engine.config, self.engine.device, stack.like.count
        if not orders:
            yield count, stack.like.build(stack.columns)
            return
        rows = torch.arange(len(orders), device=device)[:, None]
        order = torch.stack([torch.randperm(count, generator=g) for g in orders]).to(device)
        for start, stop in spans(count, config.batch_size, config.drop_last):
            yield stop - start, stack.like.build([c[rows, order[:, start:stop]] for c in stack.columns])

    def _stacks(self, sites: Sequence[tuple[SiteId, Any]]) -> list[_Stack]:
        """The sites' data, stacked; kept while the same sites come with the same data."""
        key, data = tuple(name for name, _ in sites), [d for _, d in sites]
        known, stacks = self._kept.pop(key, (None, []))
        if known is None or any(a is not b for a, b in zip(known, data, strict=True)):
            stacks = [
                _Stack.of(bucket[at : at + len(self._slab)], self.engine.device)
                for bucket in _buckets(sites)
                for at in range(0, len(bucket), len(self._slab))
            ]
        self._kept[key] = data, stacks  # the last, as the one used last
        while self._kept_bytes() > STACKED_BYTES:
            del self._kept[next(iter(self._kept))]
        return stacks

    def _kept_bytes(self) -> int:
        return sum(stack.nbytes for _, stacks in self._kept.values() for stack in stacks)

    def backward(self, group: tuple[int, Batch], scale: float, doing: str) -> Step:
        """See Backend. Each loss hangs on its own row of the weights alone, so one backward pass through the
        stacked kernels gives all gradients."""
        size, batch = group
        # All sites have the same weights at first: expanded, they are not copied to be multiplied with.
        at, self._first = self.weights[0] if self._first is None else self._first, None
        weights = at.detach().requires_grad_()
        try:
            with user_code(self._folder, "under vmap"):
                found = self._objectives(weights, batch)
                loss, count = found if isinstance(found, tuple) else (found, None)
                self.gradients = [*torch.autograd.grad(loss, weights, torch.ones_like(loss))]
        except TaskError as e:
            raise refusal(f"{e}. Random numbers, .item() and LSTM can't be vmapped") from e
        if count is None:
            count = torch.full_like(loss, size)
        elif not bool(count.all()):
            raise refusal("a batch without weight is skipped, at its own site only")
        return Step([loss.detach()], [count.detach()], size)

    def _objective(
        self, flat: torch.Tensor, batch: Batch
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One site's mean loss; also its weight, unless that is the size of the batch."""
        pieces = torch.split(flat, self._sizes)
        with _lent(self._places, [p.view(shape) for p, shape in zip(pieces, self._shapes, strict=True)]):
            loss = self.engine.task.loss(self.engine.model, batch)
        if not isinstance(loss, tuple):
            return _scalar(loss)
        weight = torch.as_tensor(loss[1])
        return _scalar(loss[0]) / torch.where(weight == 0, 1, weight), weight


@dataclass(frozen=True)
class _Stack:
    """The data of sites whose tensors have equal shapes."""

    members: list[int]  # which of the sites
    columns: list[torch.Tensor]  # [sites, examples, ...]
    like: Tensors  # the first one's

    @classmethod
    def of(cls, bucket: list[tuple[int, Tensors]], device: torch.device) -> Self:
        members, examples = [i for i, _ in bucket], [e for _, e in bucket]
        columns = [
            move(torch.stack(same), device) for same in zip(*(e.columns for e in examples), strict=True)
        ]
        return cls(members, columns, examples[0])

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(start, stop, i): rows [start, stop) of the stack are the i-th of the sites and those after it."""
        at = range(len(self.members))
        firsts = [i for i in at if i == 0 or self.members[i] != self.members[i - 1] + 1]
        return [(i, j, self.members[i]) for i, j in zip(firsts, [*firsts[1:], len(at)], strict=True)]

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)


def _places(model: nn.Module, parameter: torch.Tensor) -> list[tuple[dict[str, Any], str]]:
    """Where a parameter hangs in the model: in several places when it is tied."""
    return [
        (module._parameters, name)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is parameter
    ]


@contextmanager
def _lent(places: list[list[tuple[dict[str, Any], str]]], tensors: list[torch.Tensor]) -> Iterator[None]:
    """The model with these tensors for its parameters (torch's functional_call, without what it looks up
    anew at each call: half of a small model's time)."""
    own = [owner[name] for (owner, name), *_ in places]
    try:
        for where, tensor in zip(places, tensors, strict=True):
            for owner, name in where:
                owner[name] = tensor
        yield
    finally:
        for where, parameter in zip(places, own, strict=True):
            for owner, name in where:
                owner[name] = parameter


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    if loss.dim():
        raise TaskError(f"loss() returned a tensor of shape {tuple(loss.shape)}, not a scalar")
    return loss


def _one_section(engine: Engine, own_training: bool) -> Section:
    """Where the trained coordinates lie, or a ConfigError that says why these sites need the loop."""
    config = engine.config
    trained = [s for s in engine.schema.sections if s.trained]
    buffers = next((name for name, _ in engine.model.named_buffers()), None)
    collates = collate_of(engine.task) is not None
    own = (engine.own_optimizer(engine.model.parameters(), round) for round in range(engine.rounds))
    reasons = {
        f"train.precision is {config.precision}, not fp32": config.precision != "fp32",
        f"train.accumulate is {config.accumulate}, not 1": config.accumulate > 1,
        "the task has its own collate(), and batches of different sites may not stack": collates,
        "the task has its own optimizer()": any(own),
        f"the model has trained parameters of {len(trained)} dtypes, not one": len(trained) != 1,
        f"the model has buffers ({buffers}), which each site would change": buffers is not None,
        "the strategy leaves tensors at their sites": bool(engine.own.schema.tensors),
        "the strategy trains in a way of its own": own_training,
    }
    if found := next((reason for reason, holds in reasons.items() if holds), None):
        raise refusal(found)
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
