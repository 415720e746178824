"""How much memory a rank of a mesh will want, before anything is started."""

from __future__ import annotations

import fnmatch
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...config import Config
from ...schema import is_frozen, unique_tensors
from ..batches import Batch, cut, examples_in, rebuilt
from ..building import build_model
from ..examples import Stream, examples_of
from ..mesh import Sizes
from ..optimizers import OPTIMIZERS
from ..task import Task, collate_of, folder_of, load_task, mean_and_weight, user_code
from .data import pool_of, sites_of
from .families import plan_of
from .offload import BUCKET_BYTES
from .plan import Plan
from .wrap import save_memory


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank that has most. What a CUDA context or a process takes by itself (some hundred MB) and
    what allocators waste come on top."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def estimate(task: Task, config: Config, ranks: int, data: Any) -> MemoryEstimate:
    """Parameters, gradients and optimizer's state are counted, as the mesh of so many ranks cuts them.
    Activations are measured: what autograd keeps of two examples of `data`, for as many as a rank has."""
    sizes, parallel, train = Sizes.of(config.parallel, ranks), config.parallel, config.train
    model = build_model(task, config.run.seed, torch.device("cpu"))
    plan = plan_of(task, model)
    whole, trained = _cut_bytes(model, plan, sizes, parallel.sp)
    shards = sizes.dp_shard * sizes.cp if parallel.zero >= 2 else 1
    together = max(_units_bytes(model, plan, sizes)) if parallel.zero == 3 else 0  # gathered for its turn
    kept, sharing = OPTIMIZERS[train.optimizer].slots(train), sizes.dp if parallel.zero == 1 else shards
    state = kept * trained // sharing
    if parallel.offload in ("disk", "nvme"):  # what is read, stepped and written at a time
        state = min(state, 3 * kept * BUCKET_BYTES)
    width = 2 if train.precision != "fp32" and parallel.zero >= 2 else 4
    gathered = whole * width // 4 if parallel.zero == 2 else together * width // 4
    activations = _activations(model, plan, task, config, data, sizes)
    return MemoryEstimate(whole // shards + gathered, trained // shards, state, activations)


def _cut_bytes(model: nn.Module, plan: Plan, sizes: Sizes, sp: bool) -> tuple[int, int]:
    """Of the model at one rank, and of what of it is trained, before data-parallel shards: split by tp where
    the plan says so, by pp in equal parts."""
    split = tuple(plan.sequence if sp else plan.tensor)
    total = trained = 0
    for name, t in unique_tensors(model).items():
        module = name.rpartition(".")[0]
        ours = sizes.tp if any(fnmatch.fnmatch(module, pattern) for pattern in split) else 1
        total += t.nbytes // ours
        trained += 0 if is_frozen(t) else t.nbytes // ours
    return total // sizes.pp, trained // sizes.pp


def _units_bytes(model: nn.Module, plan: Plan, sizes: Sizes) -> list[int]:
    units = [sum(p.nbytes for p in unit.parameters()) for unit in plan.units(model)]
    rest = sum(p.nbytes for p in model.parameters()) - sum(units)
    return [(max(units, default=0) + rest) // sizes.tp]


def _activations(model: nn.Module, plan: Plan, task: Task, config: Config, data: Any, sizes: Sizes) -> int:
    save_memory(model, plan.units(model), config.parallel)
    kept: dict[int, int] = {}  # storage -> bytes, each once
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    examples = examples_of(data, collate_of(task))
    size = config.train.batch_size or (0 if isinstance(examples, Stream) else examples.count)
    if isinstance(examples, Stream):
        batch = next(iter(examples.batches(config.train.batch_size, False, None)))
        size = examples_in(batch)
        batch = _copied(cut(batch, 0, min(2, size)))  # else the whole of it is kept
    else:
        batch = examples.take(torch.arange(min(2, examples.count)))
    with user_code(folder_of(task), "the estimate"), saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = mean_and_weight(task.loss(model, batch), batch)  # its graph lives until we have counted
        sampled = sum(kept.values())
    del loss
    mine = -(-max(1, size) // (sizes.dp if config.parallel.sync == "step" else sizes.dp_shard))
    return sampled * mine // max(1, examples_in(batch)) // (sizes.pp * sizes.tp * sizes.cp)


def _copied(batch: Batch) -> Batch:
    return batch.clone() if isinstance(batch, torch.Tensor) else rebuilt(batch, _copied)


def planned(config: Config, ranks: int, data_dir: Path | None = None) -> tuple[str, dict[str, int]]:
    """The mesh of so many ranks, and the bytes that the one with most will want, by what they are for."""
    task = load_task(config.run.task, config.root, data_dir)
    sites = sites_of(task, config, 1)
    shared = config.parallel.sync == "step"
    memory = estimate(task, config, ranks, pool_of(sites) if shared else sites.data(sites.names[0]))
    return str(Sizes.of(config.parallel, ranks)), {**asdict(memory), "total": memory.total}
