"""One model trained by all ranks of a mesh: the steps that every way to synchronize runs.

What a step does is what local.Engine does with the same batch on one process: the gradient of
(Σ loss sums) / (Σ weights) over all ranks and microbatches, clipped, stepped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...config import Config
from ...digest import seed_of
from ...errors import ConfigError, TaskError
from ...messages import Metrics, add_metrics
from ...schema import Schema, unique_tensors
from ..batches import Batch, cut, examples_in, move
from ..engine import Correct, build_model, seed_all
from ..examples import Stream, examples_of
from ..mesh import Mesh, is_dtensor
from ..precision import LossScale
from ..task import Task, collate_of, folder_of, mean_and_weight, measured, user_code
from .context import Gathered, context_parallel, part_of
from .data import Share
from .flops import Flops, peak_flops
from .hooks import compress
from .optimizer import optimizer_of, schedule_of
from .plan import plan_of
from .sharded import ShardedModel, digest_of_model, local, pieces
from .wrap import Loss, check_compiler, data_parallel, is_fsdp, save_memory, split_tensors, with_autocast

if TYPE_CHECKING:
    from .pipeline import Pipeline

MAX_SKIPPED = 20  # steps in a row that may be left out


@dataclass(frozen=True)
class Step:
    """What one optimizer step saw; of this rank, where not said otherwise."""

    loss: torch.Tensor  # Σ loss over the examples, a float64 scalar
    weight: float  # Σ weight
    examples: int  # of all ranks
    norm: torch.Tensor  # of the whole gradient, before clipping; NaN or Inf where the step was not taken
    taken: bool  # by all ranks or by none


class MeshEngine(ShardedModel):
    """One model over the ranks of a mesh. Made, and called, alike on every rank."""

    def __init__(
        self,
        task: Task,
        config: Config,
        mesh: Mesh,
        *,
        steps: int | None = None,
        example: Batch | None = None,
        correct: Correct | None = None,
    ) -> None:
        """`steps`: how many there will be, where parallel.decay asks. `example`: any batch, for pp."""
        torch.set_num_threads(config.train.threads)
        self.task, self.mesh, self.correct = task, mesh, correct
        self.train, self.parallel, self.run_seed = config.train, config.parallel, config.run.seed
        self.loss_scale = LossScale(self.train.precision)
        self._folder = folder_of(task)
        self._flops = Flops()
        self._skipped = 0  # steps left out since the last one taken
        self._stand_in: Batch | None = None  # for a rank that has no examples in a step
        self._pipeline: Pipeline | None = None
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if self.train.precision != "fp32" and self.parallel.zero < 2:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.train.precision]
            self._autocast = torch.autocast(mesh.device.type, dtype=dtype)
        model = build_model(task, self.run_seed, mesh.device)
        schema, frozen = Schema.of(model), Schema.of(model, frozen=True)
        if not mesh.alike(digest_of_model(model)):
            raise TaskError(
                "model() builds other weights on one rank than on another. It may draw from torch's, numpy's "
                "and random's generators, which are seeded; not from os.urandom, the clock or the rank."
            )
        model = model.to(mesh.device)
        self.plan = plan_of(task, model)
        parts, self._roots = self._parallel(model, example)
        super().__init__(mesh, parts, schema, frozen, sharded=any(map(is_fsdp, self._roots)))
        for part in self.parts:
            part.train()
        named = [pair for part in self.parts for pair in unique_tensors(part).items()]
        self._parameters = [p for _, p in named if isinstance(p, nn.Parameter) and p.requires_grad]
        self._scratch = config.root / self.parallel.offload_dir / config.run.name / f"rank-{mesh.rank:05d}"
        self.optimizer = self._new_optimizer()
        self.schedule = schedule_of(self.optimizer, self.train, steps)

    @property
    def spread(self) -> int:
        """Ranks whose gradients the wrapper averages; 1 where there is none."""
        return self.mesh.averaging

    def _parallel(self, model: nn.Module, example: Batch | None) -> tuple[list[nn.Module], list[nn.Module]]:
        """(the model or its stages, the modules that average their gradients)."""
        config, mesh = self.parallel, self.mesh
        if config.compile:
            check_compiler(mesh.device)
        # torch.compile can't see through what activations are computed again within.
        again = self._again if mesh.sizes.cp > 1 or not config.compile else None
        if mesh.sizes.pp == 1:
            split_tensors(model, self.plan, config, mesh)
            units = self.plan.units(model)
            save_memory(units, config, again)
            root = data_parallel(
                Loss(self.task, model, self._autocast), units, config, mesh, self.train.precision
            )
            if isinstance(root, DistributedDataParallel):
                compress(root, config)
            elif config.comm_hook != "none" and mesh.averaging_axes:
                raise ConfigError(
                    "parallel.comm_hook works with plain data parallelism: zero 0 or 1, no tp, pp."
                )
            return [model], [root]
        if example is None:
            raise ConfigError("parallel.pp: data() is a stream; a pipeline needs to see a batch beforehand")
        from .pipeline import Pipeline, inputs_of, stages_of

        loss = Loss(self.task, model, self._autocast)
        micro = examples_in(example) // (config.microbatches or 2 * mesh.sizes.pp)
        inputs = inputs_of(self.task.loss, cut(example, 0, max(1, micro)))
        stages = stages_of(model, self.plan, config, mesh, inputs)
        for stage in stages.values():
            split_tensors(stage, self.plan, config, mesh)
            units = self.plan.units(stage) if self.plan.stage is not None else []
            save_memory(units, config, again)
            with_autocast(stage, self._autocast)
            data_parallel(stage, units, config, mesh, self.train.precision)
        self._pipeline = Pipeline(loss.of, stages, config, mesh)
        parts = [stages[index] for index in sorted(stages)]
        return parts, parts

    @contextmanager
    def _again(self) -> Iterator[None]:
        """What activations are computed again within."""
        with self._flops.again(), Gathered(self.mesh) if self.mesh.sizes.cp > 1 else nullcontext():
            yield

    # --- one step

    def seed(self, *purpose: object) -> None:
        """Every source of random numbers of this rank, by the run and what they are for. Ranks that work on
        the same examples draw the same."""
        seed_all(seed_of(self.run_seed, *purpose), self.mesh.device)

    def step(self, shares: Sequence[Share], doing: str) -> Step:
        """One optimizer step over these batches; `doing` stands in errors: "step 7", say.

        TaskError where a gradient is not finite and parallel.nonfinite says so; else no rank takes the step.
        """
        batches = [(self._here(batch), 0 if batch is None else examples_in(batch)) for batch, _ in shares]
        total = sum(n for _, n in shares)
        while True:
            with user_code(self._folder, doing), self._counting():
                loss, weight, factor = self._backward(batches, total)
            self._rescale(factor)
            norm = self._norm()
            finite = bool(norm.isfinite())
            if not self.loss_scale.again(finite, partial(self._loss_finite, loss)):
                break
        if not finite and self.parallel.nonfinite == "raise":
            raise TaskError(
                f"{doing}: the gradient is not finite (norm {float(norm)}). Lower train.lr or set "
                f"train.clip_norm; parallel.nonfinite = skip leaves such steps out."
            )
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped == MAX_SKIPPED:
            raise TaskError(
                f"{doing}: the gradient was not finite in {MAX_SKIPPED} steps in a row, and none of them was "
                f"taken. Look for NaN in the data and in loss(), lower train.lr, or set train.clip_norm."
            )
        if finite:
            self._update(norm)
        return Step(loss, weight, total, norm, finite)

    @property
    def flops(self) -> int | None:
        """Of one step's arithmetic at this rank, where it was counted."""
        return self._flops.of_step

    @property
    def peak(self) -> float:
        """Operations a second that this rank's device could do; 0 where nobody knows."""
        return self.parallel.peak_tflops * 1e12 or peak_flops(self.mesh.device)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """In the first step, where a peak to compare with is known, arithmetic is counted. Not of compiled
        blocks, into which the counter can't see, nor beside tp, where it would count whole tensors."""
        if self.flops is not None or not self.peak or self.parallel.compile or self.mesh.sizes.tp > 1:
            yield
            return
        with self._flops.counted():
            yield

    def waiting_s(self) -> float | None:
        """Of a step, how long gradients were still under way when the backward pass had computed its last, as
        DDP samples it; None where it doesn't."""
        root = self._roots[0]
        if not isinstance(root, DistributedDataParallel):
            return None
        told: dict[str, Any] = root._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # torch's
        sent, beside = (told.get(f"avg_backward_{k}_time", 0) for k in ("comm", "compute_comm_overlap"))
        return max(0, int(sent) - int(beside)) / 1e9

    def _backward(self, batches: list[tuple[Batch, int]], total: int) -> tuple[torch.Tensor, float, float]:
        """Gradients of all ranks' batches together, but for a factor. Returns (Σ loss, Σ weight, factor)."""
        self.optimizer.zero_grad()
        sums: dict[tuple[int, int], torch.Tensor] = {}  # (batch, where in it) -> Σ loss
        weights: dict[tuple[int, int], float] = {}
        known = True  # whether the factor is in the gradient already

        def measured(counts: bool, number: int, loss: Any, batch: Batch, start: int) -> torch.Tensor:
            nonlocal known
            at = number, start
            mean, weight = mean_and_weight(loss, batch)
            sums[at] = mean.detach().double() * (weight if counts else 0.0)
            weights[at] = weight if counts else 0.0
            if self._pipeline is not None:
                known = False
                part = weight if counts else 0.0
            elif not isinstance(loss, tuple):
                part = weight * self.mesh.data_ranks / total if counts else 0.0
            elif len(batches) > 1:
                known = False
                part = weight if counts else 0.0
            else:
                whole = self.over_ranks(weights[at])
                part = weights[at] * self.spread / whole if whole else 0.0
            part *= self.loss_scale.value
            return mean if part == 1.0 else mean * part

        for i, (batch, mine) in enumerate(batches):
            counts = mine > 0
            with self._syncing(i == len(batches) - 1), self._context(batch) as present:
                if self._pipeline is not None:
                    self._pipeline.train(present, partial(measured, counts, i))
                else:
                    objective = measured(counts, i, self._roots[0](present), present, 0)
                    objective.backward()  # type: ignore[no-untyped-call]  # torch's
        none = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        loss = torch.stack([*sums.values()]).sum() if sums else none
        weight = math.fsum(weights.values())
        factor = 1.0
        if not known or self._pipeline is not None:
            whole = self.over_ranks(weight)
            factor = self.spread / whole if whole else 0.0
        return loss, weight, factor / self.loss_scale.value

    def _loss_finite(self, loss: torch.Tensor) -> bool:
        """On all ranks that share the gradient."""
        return math.isfinite(self.over_ranks(float(loss)))

    def over_ranks(self, weight: float) -> float:
        """Summed over all that one gradient is of."""
        axes = self.mesh.averaging_axes + (("pp",) if self.mesh.sizes.pp > 1 else ())
        if not axes:
            return weight
        each = torch.tensor(weight, dtype=torch.float64, device=self.mesh.device)
        return float(self.mesh.sum(each, axes))

    def _rescale(self, factor: float) -> None:
        for p in self._parameters:  # beside tp, a replicated parameter's gradient may still be in parts
            if is_dtensor(p.grad) and any(place.is_partial() for place in p.grad.placements):
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]  # a DTensor
        if factor != 1.0 and (gradients := self.gradients()):
            torch._foreach_mul_(gradients, factor)

    def gradients(self) -> list[torch.Tensor]:
        """This rank's pieces."""
        return [local(p.grad) for p in self._parameters if p.grad is not None]

    def _norm(self) -> torch.Tensor:
        """L2 norm of the whole gradient, the same on every rank of the island: so all agree whether it is
        finite. Without shards every rank has all of it, and nothing is sent."""
        mesh = self.mesh
        named = [p.grad for p in self._parameters if p.grad is not None]
        cut = mesh.sizes.pp > 1 or any(pieces(gradient) > 1 for gradient in named)
        island = math.prod(getattr(mesh.sizes, axis) for axis in mesh.model_axes if axis != "pp")
        owned: dict[int, list[torch.Tensor]] = {}  # how many ranks' sums a piece will be in -> pieces
        for gradient in named:
            owned.setdefault(island // pieces(gradient) if cut else 1, []).append(local(gradient))
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for copies, gradients in owned.items():
            norms = torch.stack(torch._foreach_norm(gradients))
            total += norms.to(mesh.device).double().square().sum() / copies
        if cut:
            mesh.sum(total, mesh.model_axes)
        return total.sqrt()

    def _update(self, norm: torch.Tensor) -> None:
        if self.train.clip_norm:
            factor = float(self.train.clip_norm / (norm + 1e-6))
            if factor < 1.0:
                torch._foreach_mul_(self.gradients(), factor)
        if self.correct is not None:
            for p, begun in zip(self._parameters, self._start, strict=True):
                if p.grad is not None:
                    self.correct(local(p.grad).view(-1), local(p.detach()).view(-1), begun)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def begin_round(self, *, afresh: bool) -> None:
        """Remember where the round began, for a strategy's site half. `afresh`: with a new optimizer, and the
        first loss scale."""
        self.note_frozen()
        if self.correct is not None:
            self._start = [local(p.detach()).clone().view(-1) for p in self._parameters]
        if afresh:
            self.optimizer = self._new_optimizer()
            self.schedule = None
            self.loss_scale.begin()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        """As the task or [train] says; its state shared among ranks, or on a disk, as [parallel] does."""
        shared_by = self.mesh.group(self.mesh.averaging_axes) if self.parallel.zero == 1 else None
        optimizer = optimizer_of(self.task, self._parameters, self.train, shared_by)
        if self.parallel.offload not in ("disk", "nvme"):
            return optimizer
        from .offload import Resting, disk_of

        return Resting(optimizer, disk_of(self.parallel.offload), self._scratch)

    @contextmanager
    def _syncing(self, now: bool) -> Iterator[None]:
        """Gradients are averaged with the last batch of a step only."""
        with ExitStack() as stack:
            for root in self._roots:
                if isinstance(root, DistributedDataParallel) and not now:
                    stack.enter_context(root.no_sync())
                elif is_fsdp(root):
                    root.set_requires_gradient_sync(now)
            yield

    @contextmanager
    def _context(self, batch: Batch) -> Iterator[Batch]:
        if self.mesh.sizes.cp == 1:
            yield batch
            return
        mine, length = part_of(batch, self.plan, self.mesh)
        with context_parallel(self.parts[0], self.plan, self.mesh, length):
            yield mine

    def _here(self, batch: Batch | None) -> Batch:
        if batch is None:
            if self._stand_in is None:
                raise ConfigError(
                    "train.batch_size: fewer examples than data-parallel ranks in the first step"
                )
            return self._stand_in
        batch = batch if self.mesh.device.type == "cpu" else move(batch, self.mesh.device)
        self._stand_in = batch
        return batch

    # --- evaluation

    def evaluate(self, dataset: Any) -> Metrics:
        """Σ over the whole dataset of what the task's evaluate() gives; the same on every rank. It is of the
        model that gather() would give."""
        self.seed("evaluate")
        self._share_buffers()
        for part in self.parts:
            part.eval()
        mine: Metrics = {}
        with user_code(self._folder, "evaluation"), torch.no_grad():
            for batch, counts in self._evaluation_batches(dataset):
                metrics = self._measure(self._here(batch))
                if counts:
                    add_metrics(mine, metrics)
        for part in self.parts:
            part.train()
        return self._summed(mine) or {"loss": (0.0, 0.0)}

    def _share_buffers(self) -> None:
        """Running statistics, BatchNorm's say, are each rank's own; those of the first are committed."""
        group = self.mesh.group(tuple(axis for axis in self.mesh.model_axes if axis != "pp"))
        if group is None:
            return
        for part in self.parts:
            for tensor in unique_tensors(part).values():
                if not isinstance(tensor, nn.Parameter):
                    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)

    def _evaluation_batches(self, dataset: Any) -> Iterator[tuple[Batch, bool]]:
        """As many on every rank, for a forward pass may be a collective: (batch, whether it counts)."""
        sizes, at = self.mesh.sizes, self.mesh.at
        ranks = sizes.dp * sizes.cp
        rank = (at["dp_replicate"] * sizes.dp_shard + at["dp_shard"]) * sizes.cp + at["cp"]
        examples, size = examples_of(dataset, collate_of(self.task)), self.train.eval_batch_size
        if isinstance(examples, Stream):
            for batch in examples.batches(size, False, None):
                n = examples_in(batch)
                low, high = n * rank // ranks, n * (rank + 1) // ranks
                yield (cut(batch, low, high), True) if high > low else (cut(batch, 0, 1), False)
            return
        for start in range(0, examples.count, size * ranks):
            low = start + rank * size
            high = min(low + size, examples.count)
            counts = high > low
            yield examples.take(torch.arange(low, high) if counts else torch.arange(1)), counts

    def _measure(self, batch: Batch) -> Metrics:
        if self._pipeline is not None:
            found: Metrics | None = self._pipeline.forward(batch, self._metrics)
            return found or {}
        if is_fsdp(root := self._roots[0]):  # only through it are the shards of the whole model gathered
            metrics: Metrics = root(batch, self._metrics)  # type: ignore[operator]  # a module as well
            return metrics
        return self._metrics(self.parts[0], batch)

    def _metrics(self, model: nn.Module, batch: Batch) -> Metrics:
        with self._autocast:
            return measured(self.task, model, batch)

    def _summed(self, mine: Metrics) -> Metrics:
        if not dist.is_initialized():
            return mine
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine if self.mesh.at["tp"] == 0 else {})
        total: Metrics = {}
        for one in everyone:
            add_metrics(total, one)
        return total
