"""A model cut into stages, and a task's loss run through them (outside.py)."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.func import functional_call

from ...config import ParallelConfig
from ...errors import ConfigError, TaskError, some
from ..batches import Batch, cut, examples_in, tensors_in
from ..collectives import everyones
from ..compat import silent
from ..mesh import Mesh, is_dtensor
from .outside import Call, Replay, inputs_of
from .plan import Plan

SCHEDULES: dict[str, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
# (what loss() returned, its batch, where that begins in the whole) -> what backward starts from
Measured = Callable[[Any, Batch, int], torch.Tensor]


class Activation(NamedTuple):
    """What passes from one stage to the next, without its numbers; it lies contiguous in memory."""

    shape: list[int]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


class Moved(torch.autograd.Function):
    """A tensor on another device. It lies contiguous there, and its gradient where the tensor came from: so
    both are sent as stages expect them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.device = tensor.device
        return tensor.to(device).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.device).contiguous(), None


class Pipeline:
    """This rank's stages, and schedules for each shape of batch that came."""

    def __init__(
        self, loss: Call, stages: dict[int, nn.Module], config: ParallelConfig, mesh: Mesh,
        has: Container[str] = (), traced: int = 0,
    ) -> None:  # fmt: skip
        """`stages`: by number, in order, those of this rank; wrapped already. `has`: as of Outside. `traced`:
        they take so many examples at once, neither more nor fewer; 0: any number."""
        self.loss, self.stages, self.config, self.mesh, self.has = loss, stages, config, mesh, has
        self.traced = traced
        self.group = mesh["pp"].get_group()
        self.number = stages_in_all(config)
        self.first, self.last = 0 in stages, self.number - 1 in stages
        # Gloo sends and receives what lies in memory, and nothing of a GPU.
        gloo = dist.get_backend(self.group) == "gloo"
        self._between = torch.device("cpu") if gloo else mesh.device  # where activations travel
        self._schedules: dict[tuple[Any, ...], Any] = {}
        self._evaluated: dict[tuple[Any, ...], list[list[Activation]]] = {}  # see _run; by shapes of batches
        self._present: tuple[Batch, Measured] | None = None
        for index, module in stages.items():
            if index > 0:
                module.register_forward_pre_hook(self._arriving)
            module.register_forward_hook(partial(self._leaving, index))

    def train(self, batch: Batch, measured: Measured) -> None:
        """Forward and backward of a batch in microbatches; `measured` is called for each at the last."""
        count = self.config.microbatches or 2 * self.mesh.sizes.pp
        inputs = inputs_of(self.loss, batch, self.has) if self.first else ()
        schedule = self._schedule(batch, inputs, count)
        given: dict[str, Any] = {"return_outputs": False}
        if self.last:
            given["target"] = torch.arange(examples_in(batch))
        self._present = batch, measured
        schedule.step(*inputs, **given)
        self._present = None

    def forward(self, batch: Batch, call: Call) -> Any:
        """What `call(model, batch)` gives, at the last stage's rank; None at others. Without gradients."""
        inputs = inputs_of(call, batch, self.has, training=False) if self.first else ()
        passed = self._evaluated.setdefault(shapes_of(batch), [])
        if not self.traced:
            output = self._run(inputs, passed)
        else:
            n, size = examples_in(batch), self.traced
            parts = [self._run([exactly(t, at, size) for t in inputs], passed) for at in range(0, n, size)]
            output = joined(parts, n) if self.last else None
        return call(Replay(output, self.has, training=False), batch) if self.last else None

    def _schedule(self, batch: Batch, inputs: tuple[Any, ...], count: int) -> Any:
        n = examples_in(batch)
        if n % count:
            raise TaskError(
                f"a pipeline's microbatches are of one size, but {n} examples can't be cut into {count}. "
                f"Set parallel.microbatches to a divisor, or train.batch_size to a multiple of it times the "
                f"data-parallel ranks and drop_last = true (where data() gives a DataLoader, its own)."
            )
        if self.traced not in (0, n // count):
            raise TaskError(
                f"the model was traced for microbatches of {self.traced} examples, and here they have "
                f"{n // count}. Set drop_last = true, or cut the model by the stage() of a parallel_plan()."
            )
        if (key := (count, *shapes_of(batch))) not in self._schedules:
            passed: list[list[Activation]] = []
            cuda = [self.mesh.device] if self.mesh.device.type == "cuda" else []
            with torch.random.fork_rng(cuda), torch.enable_grad():
                self._run([t.tensor_split(count)[0] for t in inputs], passed)
            ends = [tuple(each.empty("meta") for each in activations) for activations in passed]
            stage_of = partial(
                pipelining.PipelineStage, num_stages=self.number, device=self._between, group=self.group
            )
            stages: list[Any] = [
                silent(stage_of(module, index, input_args=ends[index], output_args=ends[index + 1]))
                for index, module in self.stages.items()
            ]
            kind = SCHEDULES[self.config.schedule]
            several = stages if len(stages) > 1 else stages[0]
            self._schedules[key] = kind(several, count, self._loss, scale_grads=False)
        return self._schedules[key]

    def _run(self, inputs: Sequence[torch.Tensor], passed: list[list[Activation]]) -> Any:
        """The output of the last stage, where this rank has it, for the inputs of the first, of one stage
        after the other. `passed`: what goes into each stage, and what leaves the last, as an earlier run of
        tensors of these shapes has noted it; an empty list is filled, on all ranks."""
        new, output = not passed, tuple(inputs)
        if new:
            passed.append(self._agreed(output))
        for index in range(self.number):
            stage = self.stages.get(index)
            if stage is not None:
                if index > 0 and index - 1 not in self.stages:
                    output = tuple(each.empty(self._between) for each in passed[index])
                    for tensor in output:
                        dist.recv(tensor.detach(), self._rank_of(index - 1), self.group)
                # A trial that is not a step leaves buffers as they are.
                kept = dict(stage.named_buffers()) if torch.is_grad_enabled() else {}
                found = functional_call(stage, {name: t.clone() for name, t in kept.items()}, output)
                output = (found,) if isinstance(found, torch.Tensor) else tuple(found)
            if new:
                passed.append(self._agreed(output if stage is not None else ()))
            if stage is not None and index + 1 < self.number and index + 1 not in self.stages:
                for tensor in output:
                    dist.send(tensor.detach(), self._rank_of(index + 1), self.group)
        return found if self.last else None

    def _agreed(self, mine: tuple[torch.Tensor, ...]) -> list[Activation]:
        """What the one rank has that has any, on all ranks."""
        noted = [Activation([*t.shape], t.dtype, t.requires_grad) for t in mine]
        return max(everyones(noted, list[Activation], self.group, self._between), key=len)

    def _rank_of(self, stage: int) -> int:
        """Among all ranks, the one that has this stage and is in the same pipeline."""
        turned = self.config.schedule == "zbv" and stage >= self.config.pp
        at = (self.number - 1 - stage if turned else stage) % self.config.pp
        return dist.get_global_rank(self.group, at)

    def _arriving(self, stage: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A stage's inputs on its device."""
        here = self.mesh.device
        return tuple(Moved.apply(t, here) for t in inputs)  # type: ignore[no-untyped-call]  # torch's

    def _leaving(self, index: int, stage: nn.Module, inputs: object, output: Any) -> Any:
        """A stage's outputs as they are sent."""
        parts = [*output] if isinstance(output, tuple | list) else [output]
        for part in parts:
            if not isinstance(part, torch.Tensor) or is_dtensor(part):
                raise TaskError(
                    f"parallel.pp: stage {index} returns a {type(part).__name__}. Let the forward() of a "
                    f"stage return a tensor, or a tuple of tensors."
                )
        there = self.mesh.device if index == self.number - 1 else self._between
        # A tensor that stays as it is must not become a view, which torch can't detach in place.
        for i in (i for i, t in enumerate(parts) if t.device != there or not t.is_contiguous()):
            parts[i] = Moved.apply(parts[i], there)  # type: ignore[no-untyped-call]  # torch's
        if isinstance(output, torch.Tensor):
            return parts[0]
        return parts if isinstance(output, list) else tuple(parts)

    def _loss(self, output: Any, which: torch.Tensor) -> torch.Tensor:
        assert self._present is not None, "only within train()"
        batch, measured = self._present
        start, stop = int(which[0]), int(which[-1]) + 1
        micro = cut(batch, start, stop)
        return measured(self.loss(Replay(output, self.has), micro), micro, start)


def exactly(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """So many examples from `start` on, the last one again and again where there are fewer."""
    part = tensor[start : start + size]
    return torch.cat([part, *[part[-1:]] * (size - len(part))])


def joined(outputs: list[Any], count: int) -> Any:
    """The first `count` examples of what several calls gave: tensors, or tuples of them."""
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(outputs)[:count]
    return tuple(joined([*each], count) for each in zip(*outputs, strict=True))


def shapes_of(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """Of every tensor in a batch."""
    return tuple(tuple(t.shape) for t in tensors_in(batch))


# --- A model, in stages


def stages_of(
    model: nn.Module, plan: Plan, config: ParallelConfig, mesh: Mesh, micro: Any
) -> dict[int, nn.Module]:
    """This rank's stages by number, made of `model` itself. As the task's plan cuts it; a Sequential between
    its children; any other model by tracing it with `micro`, the inputs of one microbatch (not beside tp,
    whose modules a trace takes apart)."""
    number, rank = stages_in_all(config), mesh.at["pp"]
    mine = [*range(rank, number, config.pp)] if config.schedule != "zbv" else [rank, number - 1 - rank]
    if plan.stage is not None:
        cuts = even_cuts([1] * len(plan.units(model)), number)
        own = {i: copy.deepcopy(model) for i in mine[:-1]} | {mine[-1]: model}
        return {i: plan.stage(own[i], range(*cuts[i : i + 2]), i == 0, i == number - 1) for i in mine}
    if isinstance(model, nn.Sequential):
        named = list(model._modules.items())  # named_children() leaves out one that is there twice
        cuts = even_cuts([sum(p.numel() for p in child.parameters()) for _, child in named], number)
        return {i: nn.Sequential(OrderedDict(named[cuts[i] : cuts[i + 1]])) for i in mine}
    if mesh.sizes.tp > 1:
        raise ConfigError("parallel: pp beside tp needs a parallel_plan() with a stage().")
    if not plan.blocks:
        raise ConfigError(
            f"parallel.pp: nothing says where a {type(model).__name__} may be cut. Name its blocks in the "
            f"task's parallel_plan(), or make it a Sequential."
        )
    names = [f"{plan.blocks}.{name}" for name, _ in model.get_submodule(plan.blocks).named_children()]
    starts = even_cuts([1] * len(names), number)[1:-1]
    begins = pipelining.SplitPoint.BEGINNING
    traced = pipelining.pipeline(model, micro, split_spec={names[at]: begins for at in starts})
    return {i: traced.get_stage_module(i) for i in mine}


def names_of_parameters(model: nn.Module) -> dict[str, str]:
    """Each name of a parameter -> the first one of the same."""
    firsts: dict[nn.Parameter, str] = {}
    return {name: firsts.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def check_stages(names: Mapping[str, str], stages: Mapping[int, nn.Module], mesh: Mesh) -> None:
    """ConfigError on all ranks where a parameter is in two stages, which would each train their own, or in
    none. `names`: of the whole model's parameters, see names_of_parameters."""
    mine = [[name for name, _ in s.named_parameters(remove_duplicate=False)] for s in stages.values()]
    everyone = everyones(mine, list[list[str]], mesh["pp"].get_group(), mesh.device)
    has = [{name for name in each if name in names} for rank in everyone for each in rank]
    found = Counter(first for each in has for first in {names[name] for name in each})
    for first, stages_with_it in found.items():
        if stages_with_it > 1:
            known = sorted({n for each in has for n in each if names[n] == first})
            what = f"{' and '.join(known)} are one parameter" if known[1:] else f"{first} is one parameter"
            raise ConfigError(
                f"parallel.pp: {what}, which {stages_with_it} stages would each train for itself. Give the "
                f"layers parameters of their own, have one stage hold them all, or use parallel.zero or tp "
                f"in place of pp."
            )
    if left := [name for name in dict.fromkeys(names.values()) if name not in found]:
        raise ConfigError(f"parallel.pp: no stage has {some(left)}. Let the plan's stage() keep names.")


def stages_in_all(config: ParallelConfig) -> int:
    """One a rank, or two."""
    return config.pp * (1 if config.schedule in ("1f1b", "gpipe") else 2)


def even_cuts(weights: list[int], parts: int) -> list[int]:
    """Where to cut a list into so many non-empty runs of about the same weight: parts + 1 positions."""
    if len(weights) < parts:
        raise ConfigError(
            f"parallel.pp: {len(weights)} layers or blocks can't make {parts} stages. Lower pp."
        )
    total, seen, cuts = sum(weights), 0, [0]
    for at, weight in enumerate(weights):
        left, due = parts - len(cuts), (seen + weight / 2) * parts >= total * len(cuts)
        if left and at > cuts[-1] and (due or len(weights) - at == left):
            cuts.append(at)
        seen += weight
    return [*cuts, len(weights)]
