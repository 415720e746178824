"""A model over the ranks of a mesh, whichever way they share it: how gradients arise there, and evaluation.

A step is what it is on one process with the same batches (engine.py): the gradient is of (Σ loss sums) /
(Σ weights) over all ranks and microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...config import Config
from ...digest import seed_of
from ...errors import ConfigError, TaskError
from ...learning import Context, Correct
from ...messages import Metrics, SiteId, summed
from ...schema import Schema, unique_tensors
from ..batches import Batch, cut, examples_in
from ..building import build_model
from ..collectives import everyones
from ..compat import ddp_times, foreach_mul_, foreach_norm
from ..engine import Number, Step, Steps, Trainable, multiply, sum_of
from ..examples import examples_of
from ..mesh import Mesh
from ..optimizers import TorchOptimizer, of_parameters, with_all_cores
from ..task import Task, mean_and_weight, user_code
from ..tensors import Shares, kept_at_a_site
from .alike import check
from .context import Gathered, check_parts, in_parts
from .data import Dealt
from .families import plan_of
from .flops import Flops, peak_flops
from .hooks import compress
from .plan import Plan
from .reading import Share, read_once
from .sharded import ShardedModel, digest_of_model, local, pieces
from .streamed import StreamedModel
from .wrap import (
    Loss,
    ReachedParameters,
    check_compiler,
    data_parallel,
    in_our_words,
    is_fsdp,
    laid_out,
    save_memory,
    split_tensors,
    with_autocast,
    with_dense_gradients,
)

if TYPE_CHECKING:
    from .pipeline import Pipeline


class MeshEngine(Trainable, ShardedModel):
    """One model over the ranks of a mesh. Made, and called, alike on every rank. Steps move `trained`."""

    def __init__(
        self, task: Task, config: Config, mesh: Mesh, *, example: Batch = None,
        correct: Correct | None = None, shares: Shares | None = None,
    ) -> None:  # fmt: skip
        """`example`: any batch, for pp. `shares`: as of local.Engine."""
        Trainable.__init__(self, task, config.train, config.run.seed, mesh.device)
        self.mesh, self.parallel = mesh, config.parallel
        if self.parallel.zero >= 2:
            self._autocast = nullcontext()  # shards are narrowed as they are gathered
        self.flops = Flops()
        # Operations a second that this rank's device could do; 0 where nobody knows.
        self.peak = self.parallel.peak_tflops * 1e12 or peak_flops(mesh.device)
        self._none = torch.zeros((), device=mesh.device)  # the loss of no batch
        self._limited = False  # whether collectives have their time limit of a step
        self._stand_in: Batch | None = None  # for a rank that has no examples in a step
        self._pipeline: Pipeline | None = None
        # What is cut into shards is made shard by shard.
        streams = self.parallel.zero >= 2 and mesh.sizes.tp == mesh.sizes.pp == 1
        streamed = StreamedModel.of(task, self.run_seed, mesh.device) if streams else None
        model = streamed.model if streamed is not None else build_model(task, self.run_seed, mesh.device)
        with_dense_gradients(model)
        self.kept = kept_at_a_site(model, shares)  # names of tensors that no gather() has
        schema, frozen = Schema.of(model, without=self.kept), Schema.of(model, frozen=True)
        digest = digest_of_model(model)
        self.plan = plan_of(task, model)
        if mesh.sizes.cp > 1 and self.plan == Plan() and task.parallel_plan() is None:
            raise ConfigError(
                "parallel.cp: nothing says along which dimension sequences lie, and which buffers are "
                "positions. Give the task a parallel_plan(), as in Plan(length=1, positions=['positions'])."
            )
        self._gathered = Gathered(mesh, self.plan) if mesh.sizes.cp > 1 else None
        parts, self._roots = self._parallel(model, example)
        if streamed is not None:
            offloaded = self.parallel.offload != "none"
            digest ^= streamed.fill(mesh.device, offloaded=offloaded)
        if not mesh.alike(digest):
            raise TaskError(
                "model() builds other weights on one rank than on another. It may draw from torch's, numpy's "
                "and random's generators, which are seeded; not from os.urandom, the clock or the rank."
            )
        ShardedModel.__init__(self, mesh, parts, schema, frozen, sharded=any(map(is_fsdp, self._roots)))
        for part in self.parts:
            part.train()
        tensors = [t for part in self.parts for t in unique_tensors(part).values()]
        self.trained = [p for p in tensors if isinstance(p, nn.Parameter) and p.requires_grad]
        self._cut = mesh.sizes.pp > 1 or any(pieces(p) > 1 for p in self.trained)
        self._reached = ReachedParameters(self._roots, self.parallel, mesh)
        self._scratch = config.root / self.parallel.offload_dir / config.run.name / f"rank-{mesh.rank:05d}"
        self.steps = Steps(self, config.train, correct, self.parallel.nonfinite)
        self._renew(0)

    def _parallel(self, model: nn.Module, example: Batch | None) -> tuple[list[nn.Module], list[nn.Module]]:
        """(the model or its stages, the modules that average their gradients)."""
        config, mesh = self.parallel, self.mesh
        if config.compile:
            check_compiler(mesh.device)
        # torch.compile can't see through what activations are computed again within.
        again = self._again if mesh.sizes.cp > 1 or not config.compile else None
        loss = Loss(self.task, model, self._autocast)
        # What is to be sharded stays in memory: units are moved as each is cut, so no device has them all.
        whole = config.zero < 2 or mesh.sizes.tp > 1
        if mesh.sizes.pp == 1:
            if whole:
                model.to(mesh.device)
            split_tensors(model, self.plan, config, mesh)
            units = self.plan.units(model)
            save_memory(model, units, config, again)
            root = data_parallel(loss, units, config, mesh, self.config.precision)
            if isinstance(root, DistributedDataParallel):
                compress(root, config)
            elif config.comm_hook != "none" and mesh.averaging_axes:
                raise ConfigError("parallel.comm_hook: with plain data parallelism: zero 0 or 1, no tp, pp.")
            return [model], [root]
        if example is None:
            raise ConfigError(
                "parallel.pp: data() gives a stream, and a pipeline needs to see a batch beforehand. Return "
                "tensors, a Dataset, or a DataLoader over a Dataset with a batch_size."
            )
        from .outside import inputs_of
        from .pipeline import Pipeline, check_stages, names_of_parameters, stages_of

        micro = max(1, examples_in(example) // (config.microbatches or 2 * mesh.sizes.pp))
        has, names = frozenset(dir(model)), names_of_parameters(model)
        inputs = inputs_of(self.task.loss, cut(example, 0, micro), has)
        stages = stages_of(model, self.plan, config, mesh, inputs)
        check_stages(names, stages, mesh)
        traced = micro if self.plan.stage is None and not isinstance(model, nn.Sequential) else 0
        loss.model = nn.Module()  # what this rank has no stage of is given back
        for stage in stages.values():
            if whole:
                stage.to(mesh.device)
            split_tensors(stage, self.plan, config, mesh)
            units = self.plan.units(stage) if self.plan.stage is not None else []
            save_memory(stage, units, config, again)
            with_autocast(stage, self._autocast)
            data_parallel(stage, units, config, mesh, self.config.precision)
        self._pipeline = Pipeline(loss.of, stages, config, mesh, has, traced)
        return [*stages.values()], [*stages.values()]

    @contextmanager
    def _again(self) -> Iterator[None]:
        """What activations are computed again within."""
        with self.flops.again(), self._gathered or nullcontext():
            yield

    def seed(self, *purpose: object) -> int:
        """A pipeline's stages draw apart: their layers are alike, and the same would be dropped in each."""
        stage = self.mesh.at["pp"] if purpose != ("evaluate",) else 0
        return super().seed(*purpose, *([f"stage {stage}"] if stage else []))

    # --- one step, see Backend

    def backward(self, group: Sequence[Share], scale: float, doing: str = "") -> Step:
        total = sum(n for _, n in group)
        found: dict[tuple[int, int], tuple[torch.Tensor, Number]] = {}  # (batch, where in it) -> mean, weight
        whole: Number = float(total)
        late = self._pipeline is not None  # gradients are divided by `whole` afterwards

        def objective(number: int, counts: bool, loss: Any, batch: Batch, start: int = 0) -> torch.Tensor:
            nonlocal whole, late
            mean, weight = mean_and_unread(loss, batch)
            weight = weight if counts else 0.0
            found[number, start] = mean.detach(), weight
            if self._pipeline is None and not isinstance(loss, tuple):
                part: Number = weight * self.mesh.data_ranks / total
            elif self._pipeline is None and len(group) == 1:
                whole = self._unread(weight)
                part = share_of(weight * self.mesh.averaging, whole)
            else:
                late, part = True, weight
            part = part * scale
            return mean if isinstance(part, float) and part == 1.0 else mean * part

        self.optimizer.zero_grad()
        self._reached.here = set()
        if self._gathered is not None and self._pipeline is None and not self._limited:
            with user_code(self._folder, doing):
                self._check_parts(self.present(group[0][0]), self._gathered)
        with user_code(self._folder, doing), in_our_words(self.parallel), self._counting():
            for i, (batch, _) in enumerate(group):  # a device holds one batch at a time
                counts = batch is not None and examples_in(batch) > 0
                self._reached.begin(counts=counts)
                with self._syncing(i == len(group) - 1), self._context(self.present(batch)) as present:
                    if self._pipeline is not None:
                        self._pipeline.train(present, partial(objective, i, counts))
                    else:
                        loss = objective(i, counts, self._roots[0](present), present)
                        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        losses, weights = zip(*(found.values() or [(self._none, 0.0)]), strict=True)
        factor: Number = 1.0
        if late:
            whole = self._unread(sum_of(weights))
            factor = share_of(self.mesh.averaging, whole)
        self._collect(factor / scale)
        if not self._limited and self.parallel.step_timeout < self.parallel.timeout:
            self.mesh.limit(self.parallel.step_timeout)  # the first step, which compiles, may take longer
        self._limited = True
        return Step([*losses], [*weights], total, whole > 0)

    def _collect(self, factor: Number) -> None:
        """The gradients, times the factor. A parameter that no rank reached has none for the optimizer."""
        self._reached.settle(self.trained)
        self.gradients = []
        for p in self.trained:
            p.grad = gradient = laid_out(p)
            self.gradients.append(local(gradient))
        missing = self._reached.by_none(self.trained)
        unreached = [i for i, p in enumerate(self.trained) if p in missing] if missing else []
        self.unreached = [(i, 0, self.trained[i].numel()) for i in unreached]
        for p in missing:
            p.grad = None
        if self.steps.correct is not None:  # each time anew: in its first forward FSDP lays pieces out anew
            self.weights = [local(p.detach()) for p in self.trained]
        if isinstance(factor, torch.Tensor):
            multiply(self.gradients, factor)
        elif factor != 1.0 and self.gradients:
            foreach_mul_(self.gradients, factor)

    def norm(self) -> torch.Tensor:
        """The same on every rank of the island: so all agree whether it is finite. Without shards every rank
        has the whole gradient, and nothing is sent."""
        mesh = self.mesh
        if not self._cut:
            return norm_of(self.gradients, mesh.device)
        island = math.prod(getattr(mesh.sizes, axis) for axis in mesh.axes("pp"))
        owned: dict[int, list[torch.Tensor]] = {}  # how many ranks' sums a piece will be in -> pieces
        for p, gradient in zip(self.trained, self.gradients, strict=True):
            owned.setdefault(island // pieces(p), []).append(gradient)
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for copies, gradients in owned.items():
            total += norm_of(gradients, mesh.device).square() / copies
        return mesh.sum(total, mesh.axes()).sqrt()

    def loss_finite(self, step: Step) -> bool:
        return math.isfinite(self.over_ranks(float(step.loss)))

    def over_ranks(self, weight: Number) -> float:
        """Summed over all that one gradient is of."""
        return float(self._unread(weight))

    def _unread(self, weight: Number) -> Number:
        """The same, for which nobody waits: on the device, where there are others."""
        if not (axes := self.mesh.axes("tp")):
            return weight
        if isinstance(weight, torch.Tensor):
            each = weight.clone()
        else:
            each = torch.full((), weight, dtype=torch.float64, device=self.mesh.device)  # tensor() would wait
        return self.mesh.sum(each, axes)

    def train(self, data: Dealt, round: int, rounds: int, given: Sequence[Context] | None = None) -> Step:
        """All steps of a site's round, with an optimizer of its own: as a site of one process takes them.
        `given`: what a correction sees; None: where the round began, and nothing more."""
        self.begin_round(round, afresh=True)
        if given is not None:
            self.steps.given = given
        data.begin(round)
        self.seed(round, data.name, *([data.rank] if data.rank else []))  # the first draws as a site of one
        doing = f"site {data.name}, round {round + 1}"
        with user_code(self._folder, doing):
            return self.steps.round(data.round(), data.examples, round, rounds, doing)

    def begin_round(self, round: int, *, afresh: bool) -> None:
        """Remember where the round began, for a strategy's site half. `afresh`: with a new optimizer, and the
        first loss scale."""
        self.note_frozen()
        if afresh:
            self._renew(round)
        if self.steps.correct is not None:
            self.steps.given = [Context(local(p.detach()).clone(), lr=self.config.lr) for p in self.trained]

    def _renew(self, round: int) -> None:
        """The optimizer: the task's, or as [train] says; its state shared among ranks, or on a disk, as
        [parallel] does."""
        shared_by = self.mesh.group(self.mesh.averaging_axes) if self.parallel.zero == 1 else None
        own = self.own_optimizer(self.trained, round)
        self.optimizer = of_parameters(own, self.trained, self.config, shared_by)
        if self.parallel.offload in ("disk", "nvme"):
            from .offload import Resting, disk_of

            self.optimizer = Resting(self.optimizer, disk_of(self.parallel.offload), self._scratch)
        if self.parallel.offload != "none":
            with_all_cores(self.optimizer, self.config.threads)
        self.steps.begin(TorchOptimizer(self.optimizer, here=self.parallel.offload == "none"))

    def _syncing(self, now: bool) -> AbstractContextManager[None]:
        """Gradients are averaged with the last batch of a step only."""
        for root in filter(is_fsdp, self._roots):
            root.set_requires_gradient_sync(now)
        whole = self._roots[0]  # DDP is around a whole model only
        if not isinstance(whole, DistributedDataParallel) or now:
            return nullcontext()
        return whole.no_sync()

    def _context(self, batch: Batch) -> AbstractContextManager[Batch]:
        first = self.mesh.sizes.tp > 1 and not (self._limited or self.parallel.compile)
        return in_parts(self.parts[0], batch, self.plan, self.mesh, self._gathered, alike=first)

    def _check_parts(self, batch: Batch, gathered: Gathered) -> None:
        model, root = self.parts[0], self._roots[0]
        exact = self.config.precision == "fp32" and not self.config.tf32
        # Nothing is compiled for what is called once.
        eager = torch.compiler.set_stance("force_eager") if self.parallel.compile else nullcontext()
        model.eval()
        with eager:
            check_parts(
                lambda batch: mean_and_weight(root(batch), batch),
                model, batch, self.plan, self.mesh, gathered, exact=exact,
            )  # fmt: skip
        model.train()

    def present(self, batch: Batch | None) -> Batch:
        """On the device; a batch of before where this rank has none, for its forward pass is a collective."""
        if batch is not None:
            self._stand_in = self.here(batch)
        if self._stand_in is None:
            raise ConfigError(
                "train.batch_size: the first step has fewer examples than there are data-parallel ranks. "
                "Raise it; where data() gives ready batches, make those larger; or start fewer ranks."
            )
        return self._stand_in

    # --- what it costs

    def _counting(self) -> AbstractContextManager[None]:
        """In the first step, where a peak to compare with is known, arithmetic is counted. Not of compiled
        blocks, into which the counter can't see, nor beside tp, where it would count whole tensors."""
        due = self.flops.of_step is None and self.peak > 0
        blind = self.parallel.compile or self.mesh.sizes.tp > 1
        return self.flops.counted() if due and not blind else nullcontext()

    def waiting_s(self) -> float | None:
        """Of a step, how long gradients were still under way when the backward pass had computed its last: of
        the last one, or as DDP samples it; None where it doesn't."""
        root = self._roots[0]
        if not isinstance(root, DistributedDataParallel):
            return None
        told: dict[str, Any] = ddp_times(root)
        sent, beside = (told.get(f"avg_backward_{k}_time", 0) for k in ("comm", "compute_comm_overlap"))
        return max(0, int(sent) - int(beside)) / 1e9

    # --- evaluation

    def evaluate(self, dataset: Any, *, apart: bool = False, site: SiteId = "") -> Metrics:
        """Σ over the whole dataset of what the task's evaluate() gives; the same on every rank. It is of the
        model that gather() would give. `apart`: each island has a model and a dataset of its own.
        `site`: see `measured`."""
        self.seed("evaluate")
        self.share_buffers()
        for part in self.parts:
            part.eval()
        mine = self.measured(self.dealt(dataset, apart=apart), site)
        for part in self.parts:
            part.train()
        return self._over_all_ranks(mine, apart) or {"loss": (0.0, 0.0)}

    def measure(self, batch: Batch) -> Metrics:
        with in_our_words(self.parallel):
            if self._pipeline is not None:
                found: Metrics | None = self._pipeline.forward(batch, self.metrics)
                return found or {}
            if is_fsdp(root := self._roots[0]):  # only through it are the shards of the whole model gathered
                metrics: Metrics = root(batch, self.metrics)  # type: ignore[operator]  # a module as well
                return metrics
            return self.metrics(self.parts[0], batch)

    def share_buffers(self) -> None:
        """Running statistics, BatchNorm's say, are each rank's own; those of the first are committed."""
        group = self.mesh.group(self.mesh.axes("pp"))
        if group is None:
            return
        for part in self.parts:
            for tensor in unique_tensors(part).values():
                if not isinstance(tensor, nn.Parameter):
                    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)

    def dealt(self, dataset: Any, *, apart: bool = False) -> Iterator[tuple[Batch, bool]]:
        """See read_once. `apart`: among the ranks of this island."""
        sizes, at = self.mesh.sizes, self.mesh.at
        whole = sizes.dp, at["dp_replicate"] * sizes.dp_shard + at["dp_shard"]
        ranks, rank = (self.mesh.data_ranks, self.mesh.data_rank) if apart else whole
        ranks, rank = ranks * sizes.cp, rank * sizes.cp + at["cp"]
        examples, seed = examples_of(dataset, self._collate), seed_of(self.run_seed, "evaluate")
        readers, size = self.parallel.readers, self.config.eval_batch_size
        first = check(self.task, examples, self.mesh, "the data to evaluate on", everywhere=not apart)
        return read_once(examples, size, seed, rank, ranks, readers, self.device, first)

    def _over_all_ranks(self, mine: Metrics, apart: bool) -> Metrics:
        group = self.mesh.group(self.mesh.axes()) if apart else None
        if not dist.is_initialized() or (apart and group is None):
            return mine
        everyone = everyones(mine if self.mesh.at["tp"] == 0 else {}, Metrics, group, self.mesh.device)
        return summed({f"{rank:09d}": metrics for rank, metrics in enumerate(everyone)})


def norm_of(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """L2, of all together, as a float64 on the device; in few kernels, for each step takes it."""
    norms = torch.stack(foreach_norm(gradients))
    total: torch.Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64).to(device)
    return total


def mean_and_unread(loss: Any, batch: Batch) -> tuple[torch.Tensor, Number]:
    """As mean_and_weight; but a weight that lies where the loss does stays there, as a float64 scalar."""
    if isinstance(loss, tuple) and [type(each) for each in loss] == [torch.Tensor] * 2:
        total, weight = loss
        if total.device == weight.device and weight.numel() == 1:
            total, _ = mean_and_weight((total, 1.0), batch)
            weight = weight.detach().double().reshape(())
            kind = torch.promote_types(total.dtype, torch.float32)
            return total / torch.where(weight == 0, 1.0, weight).to(kind), weight
    return mean_and_weight(loss, batch)


def share_of(part: Number, whole: Number) -> Number:
    """part / whole; 0 where all of it is 0."""
    if isinstance(whole, torch.Tensor):
        return torch.where(whole == 0, 0.0, part / whole)
    return part / whole if whole else 0.0
