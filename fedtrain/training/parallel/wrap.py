"""A model made parallel: tensor parallel, then activation checkpointing, compile, and data parallel around.

The task's loss is a module around the model, and the data-parallel wrapper is around that. So the task is
given its own model, not a wrapper: what it reads of it, or calls, or calls twice, works as on one process.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...config import ParallelConfig
from ...errors import ConfigError, ErrorTranslation, TaskError, some
from .. import compat
from ..batches import Batch
from ..mesh import Mesh, is_dtensor
from ..precision import NARROW
from ..task import Task
from .families import unknown
from .plan import Plan

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

HALVES = ("zero-bubble", "zbv")  # schedules that compute weights' gradients apart from inputs'
Within = Callable[[], AbstractContextManager[Any]]


class Loss(nn.Module):
    """task.loss(model, ·) as a module."""

    def __init__(self, task: Task, model: nn.Module, autocast: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.task, self.model, self.autocast = task, model, autocast

    def forward(self, batch: Batch, call: Callable[[nn.Module, Batch], Any] | None = None) -> Any:
        """`call`: instead of the loss, of the same model."""
        return self.of(self.model, batch) if call is None else call(self.model, batch)

    def of(self, model: nn.Module, batch: Batch) -> Any:
        """The same loss of another model: a stand-in, say."""
        with self.autocast:
            return self.task.loss(model, batch)


def split_tensors(model: nn.Module, plan: Plan, config: ParallelConfig, mesh: Mesh) -> None:
    """Tensor parallel, and sequence parallel, as the plan says."""
    if mesh.sizes.tp == 1:
        return
    from torch.distributed.tensor.parallel import parallelize_module

    styles = plan.sequence if config.sp else plan.tensor
    if not styles:
        beyond = f" (transformers' own asks for {some(asked)})" if (asked := unknown(model)) else ""
        raise ConfigError(
            f"parallel.{'sp' if config.sp else 'tp'}: no plan says how a {type(model).__name__} is split"
            f"{beyond}. Use zero = 3, which needs none, or give the task a parallel_plan(), "
            f"see docs/datacenter.md."
        )
    if mesh.device.type == "cuda":  # else the first dropout would broadcast over all ranks, stages and all
        compat.seed_sharded_draws(torch.initial_seed(), mesh["tp"])
    shared = _shared(model)
    # A fresh style for each use is not needed; a fresh dict is, parallelize_module pops from it.
    parallelize_module(model, mesh["tp"], dict(styles))
    for first, *others in shared:
        _share_again(model, first, others)


def _shared(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _share_again(model: nn.Module, first: str, others: list[str]) -> None:
    """parallelize_module gives each layer a parameter of its own: one that was shared would be no more."""
    one = model.get_parameter(first)
    for name in others:
        if getattr(model.get_parameter(name), "placements", None) != getattr(one, "placements", None):
            raise ConfigError(
                f"parallel_plan(): {first} and {name} are one parameter, which the plan splits in two ways. "
                f"Split both along the same dimension, or neither."
            )
        module, _, parameter = name.rpartition(".")
        model.get_submodule(module).register_parameter(parameter, one)


def with_dense_gradients(model: nn.Module) -> None:
    """Ranks exchange dense gradients alone; a site of one process adds sparse ones into a dense vector."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


def in_our_words(config: ParallelConfig) -> ErrorTranslation:
    """What torch says of a task that doesn't go with a setting, with the setting and what to change."""

    def translate(e: Exception) -> TaskError | None:
        for torchs, ours in _WORDS.items() if isinstance(e, RuntimeError) else ():
            if torchs in str(e) and (ours is not _SHAPE or config.tp > 1):
                setting = f"parallel.tp = {config.tp}" if config.tp > 1 else f"parallel.zero = {config.zero}"
                return TaskError(ours.format(setting=setting, tp=config.tp, torchs=e))
        return None

    return ErrorTranslation(translate)


_SHAPE = (
    "parallel.tp = {tp}: {torchs}. A rank has a part of a layer's columns: choose a tp that divides heads "
    "and widths, and let forward() take the number of its heads from what it is given."
)
_UNUSED = (
    "parallel.find_unused: some parameters had no part in a step's loss. Set parallel.find_unused = "
    "true, or freeze those that never have one (requires_grad = False)."
)
_WORDS = {
    "mixed torch.Tensor and DTensor": (
        "{setting}: loss() or evaluate() computes with parameters of the model, of which each rank has a "
        "part there. For a term on the weights set train.weight_decay, or use zero = 2 or less without tp. "
        "Where it is an output that a plan leaves in parts, gather it: output_layouts=Replicate()."
    ),
    "Expected to have finished reduction in the prior iteration": _UNUSED,
    "is invalid for input of size": _SHAPE,
}


def save_memory(
    model: nn.Module, units: list[nn.Module], config: ParallelConfig, within: Within | None = None
) -> None:
    """Activation checkpointing and compile, of each of the model's repeated blocks (`units`). A model
    without them is compiled as a whole. forward() itself is replaced: names of parameters stay.

    `within`: what activations are computed again within, which happens in the backward pass, where the modes
    of the forward pass are no more.
    """
    if within is not None and config.checkpoint_activations and config.compile:
        raise ConfigError(
            "parallel.cp: not with both compile and checkpoint_activations; choose one of them."
        )
    if config.pp > 1 and config.schedule in HALVES and (config.compile or config.zero == 3):
        other = "compile" if config.compile else "zero = 3"
        raise ConfigError(
            f"parallel.schedule: {config.schedule} computes a gradient in two halves, which torch gets wrong "
            f"beside {other}. Use interleaved, or leave {other} out."
        )
    if not units and config.checkpoint_activations:
        raise ConfigError(
            "parallel.checkpoint_activations: it is done block by block, and which blocks of the "
            "model repeat is not known. Name them in the task's parallel_plan(), as in "
            "Plan(blocks='layers'), or leave it out."
        )
    for unit in units or [model]:
        if config.checkpoint_activations:
            unit.forward = _again(unit.forward, within)
        if config.compile:
            unit.forward = torch.compile(unit.forward)


def check_compiler(device: torch.device) -> None:
    """torch.compile asks for one only in the first step, and in other words."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"parallel.compile: on a CPU it needs a C++ compiler, and {compiler} is not here. Install one "
            f"(Debian: apt-get install g++) or name it in CXX; or set parallel.compile = false."
        )


def _again(forward: Callable[..., Any], within: Within | None) -> Callable[..., Any]:
    # Only where it is needed: torch.compile can't see through a context_fn.
    both: dict[str, Any] = {} if within is None else {"context_fn": lambda: (nullcontext(), Anew(within))}

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **both, **kwargs)

    return checkpointed


class Anew(AbstractContextManager[None]):
    """`within()` each time it is entered: by a zero-bubble schedule's backward pass in two halves, twice."""

    def __init__(self, within: Within) -> None:
        self._within, self._stack = within, ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._within())

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def with_autocast(module: nn.Module, autocast: AbstractContextManager[Any]) -> None:
    """A stage's forward in narrower floats; its backward follows."""
    if isinstance(autocast, nullcontext):
        return
    forward: Callable[..., Any] = module.forward

    def narrow(*args: Any, **kwargs: Any) -> Any:
        with autocast:
            return forward(*args, **kwargs)

    module.forward = narrow


def data_parallel(
    root: nn.Module, units: list[nn.Module], config: ParallelConfig, mesh: Mesh, precision: str
) -> nn.Module:
    """What averages the gradients of `root` over the data-parallel and context-parallel ranks.

    DDP alone where nothing else is; fully_shard for zero 2 and 3; replicate_with_fsdp beside tp or pp, where
    DDP fails. `root` itself where there is one rank to average over.
    """
    axes = mesh.averaging_axes
    if config.zero >= 2:
        return _sharded(root, units, config, mesh, precision)
    if not axes:
        return root
    if mesh.sizes.tp > 1 or mesh.sizes.pp > 1:
        flat = mesh.flat(axes)
        for unit in units:
            compat.replicate(unit, mesh=flat)
        compat.replicate(root, mesh=flat)  # in place, as fully_shard
        with_unused(root)
        return root
    from torch.nn.parallel import DistributedDataParallel

    apart: dict[str, Any] = {"broadcast_buffers": False} if mesh.sizes.cp > 1 else {}  # positions of its own
    gradient_bytes = sum(p.numel() * p.element_size() for p in root.parameters() if p.requires_grad)
    return DistributedDataParallel(
        root,
        # PowerSGD with more than one bucket hangs on Gloo: one that holds everything.
        bucket_cap_mb=gradient_bytes // 2**20 + 1 if config.comm_hook == "powersgd" else None,
        device_ids=[mesh.device] if mesh.device.type == "cuda" else None,
        process_group=mesh.group(axes),
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank builds the model under the same seed
        find_unused_parameters=config.find_unused,
        **apart,
    )


def _sharded(
    root: nn.Module, units: list[nn.Module], config: ParallelConfig, mesh: Mesh, precision: str
) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    shards = tuple(axis for axis in ("dp_shard", "cp") if getattr(mesh.sizes, axis) > 1)
    copies = mesh.sizes.dp_replicate > 1 and mesh.islands == 1
    if not shards and mesh.alone:  # its weights can rest in memory or on a disk all the same
        shards = ("dp_shard",)
    if not shards:
        raise ConfigError(
            f"parallel.zero = {config.zero}: nothing to shard over, mesh {mesh.sizes}. "
            f"Lower parallel.replicate, or set parallel.zero = 0."
        )
    flat = mesh.flat(shards)
    if copies:
        flat = compat.concatenate_meshes([mesh["dp_replicate"], flat])
    policy = MixedPrecisionPolicy()
    if precision != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=NARROW[precision], reduce_dtype=torch.float32)
    pinned = mesh.device.type == "cuda"  # memory that a GPU copies from; there is none without one
    offload = OffloadPolicy() if config.offload == "none" else CPUOffloadPolicy(pin_memory=pinned)
    for module in [*units, root]:
        fully_shard(
            module,
            mesh=flat,
            reshard_after_forward=config.zero == 3,
            mp_policy=policy,
            offload_policy=offload,
        )
    with_unused(root)
    return root


def with_unused(root: nn.Module) -> None:
    """Have ranks exchange gradients of the same parameters in each step, whichever their losses asked for."""
    if is_fsdp(root):
        compat.reduce_unused(root)


class ReachedParameters:
    """Which parameters a step gives a gradient, on this rank and on any: the others are not stepped."""

    def __init__(self, roots: Sequence[nn.Module], config: ParallelConfig, mesh: Mesh) -> None:
        """`roots`: see data_parallel."""
        # A schedule that computes gradients in halves adds them to .grad by itself.
        halves = mesh.sizes.pp > 1 and config.schedule in HALVES
        self._hook = "register_hook" if halves else "register_post_accumulate_grad_hook"
        # DDP, unless it looks for them, refuses a step that leaves parameters out.
        self._all = mesh.sizes.pp == mesh.sizes.tp == 1 and config.zero < 2 and not config.find_unused
        self.here: set[nn.Parameter] = set()  # those that a gradient arrived at, on this rank
        self._counts = True  # whether a gradient does: a rank without examples only computes along
        self._last: set[nn.Parameter] = set()  # those that a gradient arrived at in the last microbatch
        self._group, self._device = mesh.group(mesh.averaging_axes), mesh.device
        self._shards: dict[tuple[nn.Module, str], nn.Parameter] = {}  # by (module, name)
        self._first: dict[object, Any] = {}  # hooks for the first forward pass
        modules = {module for root in roots for module in root.modules()}
        sharded = any(map(is_fsdp, modules))
        self._hooked = sharded or self._group is not None
        for module in modules:
            own = ((name, p) for name, p in module._parameters.items() if p is not None and p.requires_grad)
            for name, p in own if self._hooked else ():
                if sharded:
                    self._shards[module, name] = p
                else:
                    self._note(p, p)
            if is_fsdp(module):
                self._first[module] = cast(nn.Module, module).register_forward_pre_hook(self._watch)

    def _watch(self, module: nn.Module, _: object) -> None:
        """Gradients arrive at a module's whole tensors, which there are from its first forward pass on."""
        self._first.pop(module).remove()
        for (owner, name), shard in [*self._shards.items()]:
            whole = owner._parameters[name]
            if whole is not None and whole is not shard:
                self._note(whole, self._shards.pop((owner, name)))

    def _note(self, tensor: nn.Parameter, parameter: nn.Parameter) -> None:
        """Have a gradient that arrives at the tensor be one of the parameter."""

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                self._last.add(parameter)
                if self._counts:
                    self.here.add(parameter)

        getattr(tensor, self._hook)(arrived)

    def begin(self, *, counts: bool) -> None:
        """Before each microbatch. `counts`: whether its gradients do."""
        self._counts, self._last = counts, set()

    def settle(self, trained: Sequence[nn.Parameter]) -> None:
        """When the backward pass is over: on one rank without shards, the gradients that there are."""
        if not self._hooked:
            self.here = {p for p in trained if p.grad is not None}

    def by_none(self, trained: Sequence[nn.Parameter]) -> set[nn.Parameter]:
        """Those that no rank reached. A rank that reached all of them does not wait for the others.
        TaskError where DDP needs parallel.find_unused: it averaged no gradient of this step."""
        missing = set(trained) - self.here
        if self._group is None or not trained:
            return missing
        if self._all:
            if set(trained) - self._last:
                raise TaskError(_UNUSED)
            return set()
        reached = torch.ones(len(trained), dtype=torch.int32, device=self._device)
        for i in (i for i, p in enumerate(trained) if p in missing):
            reached[i] = 0
        work = dist.all_reduce(reached, dist.ReduceOp.MAX, self._group, async_op=True)
        if missing and work is not None:
            work.wait()
            missing = {p for p, there in zip(trained, reached.tolist(), strict=True) if not there}
        return missing


def laid_out(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient, dense and placed as the parameter is; 0 where there is none."""
    found = parameter.grad
    if found is None:
        return torch.zeros_like(parameter)
    if found.is_sparse:
        return found.to_dense()
    if is_dtensor(found) and found.placements != parameter.placements:  # type: ignore[attr-defined]  # a DTensor
        # With tp, the gradient of a replicated parameter may be in parts, that of a cut one whole.
        return found.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]  # a DTensor
    return found


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether fully_shard or replicate was applied; loads neither."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)
