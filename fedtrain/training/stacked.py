"""Many small sites at once: the gradients of some fifty models in one call, for simulate.engine = "stacked".

It gives the loop's numbers up to rounding (a test holds both together in float64), and below some 50,000
parameters it gives them several times sooner: kernels are launched for many sites, from a graph that was
traced once for each shape. Sites of different sizes are padded where that changes nothing, see `padding`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from ..arena import Arena, Slab
from ..digest import seed_of
from ..errors import ConfigError, ErrorTranslation, TaskError
from ..learning import Context
from ..messages import Metrics, SiteId, Update
from ..schema import Section, is_compiled
from .batches import Batch
from .engine import Backend, Step, Steps
from .examples import Tensors, examples_of
from .local import Engine
from .optimizers import OPTIMIZERS
from .stacks import DropoutLayer, Group, Padded, StackedSites, plan_of
from .task import collate_of, folder_of, user_code
from .traced import Dropout, traced

CHUNK = 72  # sites at once on a CPU, at most; see runtime/trainers/folding.stacks
CHUNK_BYTES = 32 << 20  # of their weights, at most, as a CPU's caches want it
GPU_PART = 16  # of a GPU's free memory, for weights and data; gradients, state and activations take the rest
STACKED_BYTES = 256 << 20  # of stacked data that is kept for the next round
TRACES = 64  # that are kept: of the shapes used last
PROBED = 8  # sites whose first batches say whether a loss is a mean over examples
Memory = Mapping[str, torch.Tensor]


class Stacked(Backend):
    """An engine's sites, many at a time. Make it once: it keeps what does not change from round to round."""

    def __init__(
        self, engine: Engine, *, own_training: bool = False,
        samples: Callable[[], Iterable[Any]] | None = None,
    ) -> None:  # fmt: skip
        """`own_training`: the strategy overrides `train`, which is for one site. `samples`: data of sites, of
        which the first decide on `padding`, the same in every process of a run; None: the first that come."""
        self.engine, self._samples = engine, samples
        self._section, self._folder = _one_section(engine, own_training), folder_of(engine.task)
        trained = [s for s in engine.schema.tensors if s.trained]
        self._names, self._shapes = [f"model.{s.name}" for s in trained], [s.shape for s in trained]
        self._sizes = [s.numel for s in trained]
        # Where each parameter is in `_parts`.
        self._places = [(i, 0, size) for i, size in enumerate(self._sizes)]
        if engine.correct:
            self._places = [(0, *edges) for edges in pairwise(accumulate(self._sizes, initial=0))]
        self._reached: set[int] = set()  # parameters that the step under way gave a gradient
        self._loss = _Loss(engine)
        like = engine.local.flat(self._section)
        self._slab = like.new_empty(0, self._section.trained)  # the weights of the sites at work
        self._steps = Steps(self, engine.config, engine.correct)
        self.weights: list[torch.Tensor] = []  # [sites, n], of those that still train
        self.gradients: list[torch.Tensor] = []
        self._local = torch.zeros(0)  # the weights of all of them
        self._first: torch.Tensor | None = None  # of a round, as all sites have them in its first step
        self.steps: list[int] = []  # that each site took in the last round
        self._weighed: list[torch.Tensor] = []  # of each step of a round: whether all batches had a weight
        self._kept: OrderedDict[tuple[SiteId, ...], tuple[list[Any], list[StackedSites]]] = OrderedDict()
        self._kept_bytes = 0
        # With the parameters that the loss gives a gradient.
        self._traces: OrderedDict[Any, tuple[Callable[..., Sequence[torch.Tensor]], set[int]]] = OrderedDict()
        self._padding: bool | None = None
        self._layers: list[DropoutLayer] | None = None

    def train(
        self, sites: Sequence[tuple[SiteId, Any]], round: int, weights: Arena, outs: torch.Tensor,
        memories: Sequence[Memory] = (), own: Slab | None = None,
    ) -> list[Update]:  # fmt: skip
        """As Engine.train for each (site, data), in their order; `outs` is uint8 [sites, bytes of an update],
        of which a model is the beginning. `memories`: each site's, for the strategy's correction. `own`: what
        each site starts from, where that is not `weights`."""
        engine, nbytes = self.engine, self.engine.schema.nbytes
        engine.load(weights.model, training=True)
        starts = (own or engine.local).flat(self._section)[..., : self._section.trained]
        slab = Slab(engine.schema, outs[:, :nbytes])
        deltas, rows = slab.arenas(), slab.flat(self._section)[:, : self._section.trained]
        outs[:, : self._section.offset].zero_()  # and what is not trained at all
        outs[:, self._section.offset + rows.shape[1] * rows.itemsize : nbytes].zero_()
        updates: dict[int, Update] = {}
        self.steps = [0] * len(sites)
        down = weights.extras()
        for stack in self._stacks(sites):
            kept = [memories[i] for i in stack.members] if memories else []
            memory = {name: torch.stack([each[name] for each in kept]) for name in (kept[0] if kept else ())}
            first, sums = self._chunk(stack, round, down, memory, starts)
            for start, stop, to in stack.runs:  # many times cheaper than by index
                difference(self._local[start:stop], first[start:stop], rows[to : to + stop - start])
            for row, (i, (loss, weight)) in enumerate(zip(stack.members, sums, strict=True)):
                self.steps[i] = stack.steps[row]
                num_examples = stack.counts[row] * (weight / stack.seen[row])
                metrics: Metrics = {"loss": (loss, weight)}
                updates[i] = Update(delta=deltas[i], num_examples=num_examples, metrics=metrics)
        return [updates[i] for i in range(len(sites))]

    def _chunk(
        self, stack: StackedSites, round: int, down: Memory, memory: Memory, starts: torch.Tensor
    ) -> tuple[torch.Tensor, list[list[float]]]:
        """Train the sites' weights, `_local`. Returns the first ones, and each site's (Σ loss, Σ weight)."""
        engine, own = self.engine, starts.dim() > 1
        start = starts[stack.members].to(engine.device) if own else starts
        if len(self._slab) < len(stack.names):
            self._slab = self._slab.new_empty(len(stack.names), self._section.trained)
        self._local = self._slab[: len(stack.names)].copy_(start)  # [sites, n]
        self.weights, self._first = [*self._parts(self._local)], None if own else start
        self._steps.begin(OPTIMIZERS[engine.config.optimizer](engine.config, self.weights))
        groups = self._groups(stack, round, start, down, memory)
        self._weighed = []
        seen = self._steps.round(groups, stack.like, round, engine.rounds)
        if self._weighed and not bool(torch.stack(self._weighed).all()):
            raise refusal("a batch without weight is skipped, at its own site only")
        sums = torch.zeros(len(stack.names), 2, dtype=torch.float64, device=engine.device)
        for loss, weight in zip(seen.losses, seen.weights, strict=True):
            sums[: len(loss)] += torch.stack((loss.double() * weight, weight.double()), 1)
        return start.expand_as(self._local), sums.tolist()

    def _groups(
        self, stack: StackedSites, round: int, start: torch.Tensor, down: Memory, memory: Memory
    ) -> Iterator[Group]:
        """A round's. The sites that take a step are those that `weights` and the correction see in it."""
        active, self._loss.build = 0, stack.like.build
        if self._layers is None:
            calls = self._drops([column[:2] for column in stack.columns])
            self._layers = [DropoutLayer(p, x.shape[1:], x.dtype) for p, x in calls]
        for group in stack.groups(partial(seed_of, self.engine.run_seed, round), self._layers):
            if group.active != active:
                active = group.active
                self.weights = [*self._parts(self._local[:active])]
                rows = {name: values[:active] for name, values in memory.items()}
                first = start if start.dim() == 1 else start[:active]
                self._steps.given = [Context(first, down, rows, self.engine.config.lr)]
            yield group

    def _stacks(self, sites: Sequence[tuple[SiteId, Any]]) -> list[StackedSites]:
        """The sites' data, stacked; kept while the same sites come with the same data."""
        key, data = tuple(name for name, _ in sites), [d for _, d in sites]
        known, stacks = self._kept.pop(key, (None, []))
        self._kept_bytes -= sum(stack.nbytes for stack in stacks)
        if known is None or any(a is not b for a, b in zip(known, data, strict=True)):
            config, device = self.engine.config, self.engine.device
            stacks = [
                StackedSites.of(bucket[at : at + most], config, device)
                for bucket in self._buckets(sites)
                for most in [self._at_once(bucket)]
                for at in range(0, len(bucket), most)
            ]
        self._kept[key] = data, stacks
        self._kept_bytes += sum(stack.nbytes for stack in stacks)
        while self._kept_bytes > STACKED_BYTES:
            _, (_, freed) = self._kept.popitem(last=False)
            self._kept_bytes -= sum(stack.nbytes for stack in freed)
        return stacks

    def _at_once(self, bucket: Sequence[tuple[int, str, Tensors]]) -> int:
        """How many of these sites are one stack."""
        device, nbytes = self.engine.device, max(1, self.engine.schema.nbytes)
        if device.type != "cuda":
            return max(1, min(CHUNK, CHUNK_BYTES // nbytes))
        nbytes += max(sum(column.nbytes for column in examples.columns) for _, _, examples in bucket)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own to give
        free = torch.cuda.mem_get_info(device)[0] + kept
        return max(1, free // GPU_PART // nbytes)

    def _buckets(self, sites: Sequence[tuple[SiteId, Any]]) -> Iterator[list[tuple[int, str, Tensors]]]:
        """(place in `sites`, name, examples) of all sites that can be one stack, those with most steps first.
        A learning rate that changes asks for equally many steps."""
        config = self.engine.config
        found = [(i, name, _tensors(name, data)) for i, (name, data) in enumerate(sites)]
        steps = {size: len(plan_of(config, size)) for size in {e.count for _, _, e in found}}
        scheduled = bool(config.warmup) or config.decay != "none"
        by_shape: dict[object, list[tuple[int, str, Tensors]]] = {}
        for one in found:
            shape = tuple((c.shape[1:], c.dtype) for c in one[2].columns)
            by_shape.setdefault((shape, scheduled and steps[one[2].count]), []).append(one)
        for alike in by_shape.values():
            buckets: dict[int, list[tuple[int, str, Tensors]]] = {}
            ragged = any(e.count != alike[0][2].count for _, _, e in alike)
            padded = ragged and self.padding(alike)
            for one in alike:
                buckets.setdefault(0 if padded else one[2].count, []).append(one)
            for bucket in buckets.values():
                yield sorted(bucket, key=lambda one: -steps[one[2].count])

    # --- Gradients

    def backward(self, group: Group, scale: float, doing: str) -> Step:
        """See Backend. Each loss hangs on its own row of the weights alone, so one backward pass through the
        stacked kernels gives all gradients."""
        single, active = len(group.batches) == 1, group.active
        self._reached = set()
        losses, weights, *slopes = zip(*(self._found(single, b, active) for b in group.batches), strict=True)
        self._first = None
        total = weights[0] if single else torch.stack(weights).sum(0)
        if self._loss.weighs:
            self._weighed.append(total.all())
        found = [s[0] if single else torch.stack(s).sum(0).div_(total[:, None]) for s in slopes]
        self.gradients = [torch.cat(found, 1)] if self.engine.correct else found
        self.unreached = [place for i, place in enumerate(self._places) if i not in self._reached]
        return Step([*losses], [*weights], active)

    def _parts(self, weights: torch.Tensor) -> Sequence[torch.Tensor]:
        """Of [sites, n], what an optimizer steps on: the parameters, or all at once for a correction."""
        return [weights] if self.engine.correct else torch.split(weights, self._sizes, 1)

    def _found(self, single: bool, batch: Padded, active: int) -> Sequence[torch.Tensor]:
        """Of a batch, the mean loss [sites], weight [sites], and gradient of each parameter [sites, size]: of
        the mean where the batch is the `single` one of a step, else of the sum."""
        rows, masked = len(batch.columns[0]), batch.mask is not None
        # All sites have the same weights at first: expanded, they are not copied to be multiplied with.
        weights = self._local[:rows] if self._first is None else self._first.expand(rows, -1)
        inputs = [weights, *batch.columns, *batch.noise, *([batch.mask] if batch.mask is not None else [])]
        key = single, masked, self._first is None, *(tensor.shape for tensor in inputs)
        if key not in self._traces:
            with self._refusing():
                graph = traced(partial(self._gradient, single, len(batch.columns), masked), inputs)
                self._traces[key] = graph.forward, self._asked_for
                if len(self._traces) > TRACES:
                    self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        call, reached = self._traces[key]
        self._reached |= reached
        with torch.no_grad(), user_code(self._folder, "in a stack of sites"):
            return [each[:active] for each in call(*inputs)]

    def _gradient(
        self, single: bool, columns: int, masked: bool, weights: torch.Tensor, *inputs: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        rows, mask = len(weights), inputs[-1] if masked else None
        noise = inputs[columns : len(inputs) - masked]
        pieces = [
            piece.view(rows, *shape).detach().requires_grad_()
            for piece, shape in zip(torch.split(weights, self._sizes, 1), self._shapes, strict=True)
        ]
        if mask is None:
            mean, weight = vmap(self._alone)(pieces, inputs[:columns], noise)
        else:
            mean, weight = vmap(self._padded)(pieces, inputs[:columns], noise, mask)
        objective = mean if single else mean * weight
        found = torch.autograd.grad(objective.sum(), pieces, allow_unused=True)
        self._asked_for = {i for i, slope in enumerate(found) if slope is not None}
        slopes = (torch.zeros_like(p) if s is None else s for p, s in zip(pieces, found, strict=True))
        return mean.detach(), weight.detach(), *(slope.flatten(1).contiguous() for slope in slopes)

    def _alone(
        self, pieces: Sequence[torch.Tensor], columns: Sequence[torch.Tensor], noise: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One site's mean loss, and the weight of its batch."""
        with Dropout(noise):
            found: tuple[torch.Tensor, torch.Tensor] = functional_call(
                self._loss, dict(zip(self._names, pieces, strict=True)), (columns,)
            )
        return found

    def _padded(
        self, pieces: Sequence[torch.Tensor], columns: Sequence[torch.Tensor],
        noise: Sequence[torch.Tensor], mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The same of the real examples: each is a batch of its own, and their losses are averaged."""
        apart = [c.unsqueeze(1) for c in columns], [n.unsqueeze(1) for n in noise]
        mean, weight = vmap(self._alone, in_dims=(None, 0, 0))(pieces, *apart)
        weight = torch.where(mask, weight, 0.0)
        total = weight.sum()
        return torch.where(mask, mean * weight, 0.0).sum() / torch.where(total == 0, 1.0, total), total

    # --- What a task's loss is like

    def padding(self, sites: Sequence[tuple[int, str, Tensors]]) -> bool:
        """Whether sites of different sizes are stacked: where a batch's loss is the mean of its examples'."""
        if self._padding is None:
            given = None if self._samples is None else (_tensors("", data) for data in self._samples())
            samples = given or (examples for _, _, examples in sites)
            self._padding = all(self._is_mean(examples) for examples in islice(samples, PROBED))
        return self._padding

    def _is_mean(self, examples: Tensors) -> bool:
        self._loss.build, size = examples.build, self.engine.config.batch_size or examples.count
        columns = [c[:size].to(self.engine.device) for c in examples.columns]
        views = self.engine.local.views()
        pieces = [views[name.removeprefix("model.")] for name in self._names]
        noise = [x.new_ones(len(columns[0]), *x.shape[1:]) for _, x in self._drops(columns)]
        mask = torch.ones(len(columns[0]), dtype=torch.bool, device=self.engine.device)
        with torch.no_grad(), self._refusing():
            whole, apart = self._alone(pieces, columns, noise), self._padded(pieces, columns, noise, mask)
        return all(torch.allclose(a, b, rtol=1e-4, equal_nan=True) for a, b in zip(whole, apart, strict=True))

    def _drops(self, columns: Sequence[torch.Tensor]) -> list[tuple[float, torch.Tensor]]:
        """(p, input) of each call of F.dropout in the loss."""
        with torch.no_grad(), self._refusing(), Dropout() as dropout:
            self._loss(columns)
        if any(x.shape[:1] != columns[0].shape[:1] for _, x in dropout.calls):
            raise refusal("a dropout layer's first dimension is not the examples")
        calls: list[tuple[float, torch.Tensor]] = dropout.calls
        return calls

    def _refusing(self) -> ErrorTranslation:
        why = "Random numbers other than dropout's, .item() and LSTM can't be stacked"
        known = user_code(self._folder, "in a stack of sites").translate

        def translate(e: Exception) -> ConfigError | None:
            error = e if isinstance(e, TaskError) else known(e)
            return refusal(f"{error}. {why}") if error is not None else None

        return ErrorTranslation(translate)


class _Loss(nn.Module):
    """task.loss(model, ·) as a module, so that it can be called with other parameters: (mean, weight)."""

    build: Callable[[Sequence[torch.Tensor]], Batch]  # a batch of columns

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.model, self._task = engine.model, engine.task
        self.weighs = False  # whether it came as (sum, weight)

    def forward(self, columns: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._task.loss(self.model, self.build(columns))
        self.weighs = isinstance(found, tuple)
        loss = found[0] if isinstance(found, tuple) else found
        if loss.dim():
            raise TaskError(f"loss() returned a tensor of shape {tuple(loss.shape)}, not a scalar")
        if not isinstance(found, tuple):
            return loss, torch.full_like(loss, len(columns[0])).detach()
        weight = torch.as_tensor(found[1], device=loss.device).to(loss.dtype).detach()
        return loss / torch.where(weight == 0, 1.0, weight), weight


def difference(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a - b, on whatever device each of them lies."""
    if out.device == a.device:
        torch.sub(a, b, out=out)
    else:
        out.copy_(a - b)


def _one_section(engine: Engine, own_training: bool) -> Section:
    """Where the trained coordinates lie, or a ConfigError that says why these sites need the loop."""
    config = engine.config
    trained = [s for s in engine.schema.sections if s.trained]
    buffers = next((name for name, _ in engine.model.named_buffers()), None)
    collates = collate_of(engine.task) is not None
    own = (engine.own_optimizer(engine.model.parameters(), round) for round in range(engine.rounds))
    reasons = {
        f"train.precision is {config.precision}, not fp32": config.precision != "fp32",
        "the task has its own collate(), and batches of different sites may not stack": collates,
        "the task has its own optimizer()": any(own),
        f"the model has trained parameters of {len(trained)} dtypes, not one": len(trained) != 1,
        f"the model has buffers ({buffers}), which each site would change": buffers is not None,
        "a module of the model is compiled": any(map(is_compiled, engine.model.modules())),
        "the strategy leaves tensors at their sites": bool(engine.own.schema.tensors),
        "the strategy trains in a way of its own": own_training,
    }
    if found := next((reason for reason, holds in reasons.items() if holds), None):
        raise refusal(found)
    return trained[0]


def _tensors(site: SiteId, data: Any) -> Tensors:
    examples = examples_of(data)
    if not isinstance(examples, Tensors):
        raise refusal(f"data() returned a {type(data).__name__}, and only tensors can be stacked")
    if not examples.count:
        raise TaskError(f"site {site} has no examples: data({site!r}) is empty")
    return examples


def refusal(why: str) -> ConfigError:
    return ConfigError(f'simulate.engine = "stacked" can\'t train this: {why}. Use simulate.engine = "loop".')
