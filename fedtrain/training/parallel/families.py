"""Tensor parallel of transformers' models: which layers are split, and how.

As in Megatron-LM (Shoeybi et al. 2019, §3): a layer is split by columns and the next by rows, so that
attention and the feed-forward part each need one sum over the ranks. The vocabulary is split too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.parallel.style import SequenceParallel

from ...errors import ConfigError
from ..compat import all_to_all
from ..task import Task
from .plan import Plan

# What transformers calls them, in a model's own plan; there it is done by hooks of its own.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    # A norm within each head: to it, heads are as parts of a sequence, along any dimension but the last.
    "replicated_with_grad_allreduce": partial(SequenceParallel, use_local_output=True),
}


def shipped(model: Any) -> Plan:
    """The plan that transformers has for a causal language model of this class (base_model_tp_plan), where
    it is of these styles alone; else an empty one."""
    told = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    if not told or not STYLES.keys() >= {*told.values()} or model.get_output_embeddings() is None:
        return Plan()
    names = {module: name for name, module in model.named_modules()}
    ends = (names[each] for each in (model.get_input_embeddings(), model.get_output_embeddings()))
    told = {f"{model.base_model_prefix}.{name}": style for name, style in told.items()}
    shared = {n.rpartition(".")[0]: Heads() for n, how in told.items() if "att" in n and how == "colwise"}
    layers = {name: STYLES[style]() for name, style in told.items()}
    return Plan(blocks=next(iter(told)).partition(".*")[0], tensor=shared | layers | _vocabulary(*ends))


def unknown(model: Any) -> list[str]:
    """What the plan that transformers has for a model asks for beyond these styles."""
    told = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    return [f"{style} of {name}" for name, style in told.items() if style not in STYLES]


def gpt2() -> Plan:
    attention, mlp = "transformer.h.*.attn", "transformer.h.*.mlp"
    return Plan("transformer.h", {
        attention: Heads(), f"{attention}.c_attn": Fused(), f"{attention}.c_proj": Rows(),
        f"{mlp}.c_fc": Columns(), f"{mlp}.c_proj": Rows(), **_vocabulary("transformer.wte"),
    })  # fmt: skip


def plan_of(task: Task, model: nn.Module) -> Plan:
    """The task's own plan, else that for GPT-2, else the one that transformers ships, where there is one."""
    return task.parallel_plan() or (gpt2() if type(model).__name__ == "GPT2LMHeadModel" else shipped(model))


def _vocabulary(embedding: str, head: str = "lm_head") -> dict[str, ParallelStyle]:
    """Both ends alike, for in many of these models they are one tensor."""
    return {
        embedding: RowwiseParallel(input_layouts=Replicate()),
        head: ColwiseParallel(output_layouts=Replicate()),
    }


class Heads(ParallelStyle):
    """An attention whose heads are shared among the ranks."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        config, ranks = module.config, device_mesh.size()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if heads % ranks:
            raise ConfigError(
                f"parallel.tp: {heads} heads (of keys and values) can't be shared by {ranks} ranks. "
                f"Use a divisor of {heads}."
            )
        if hasattr(module, "split_size"):  # GPT-2's: the width of the queries in what c_attn gives
            module.split_size //= ranks
        whole: nn.Module = module
        return whole


class Columns(ParallelStyle):
    """By columns, of a Conv1D: a Linear whose weight is transposed. Every rank has the whole input, and of
    the output its own columns."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split(module, device_mesh, weight=Shard(1), bias=Shard(0))
        module.register_forward_pre_hook(lambda _, inputs: _as(device_mesh, Replicate(), inputs[0]))
        module.register_forward_hook(lambda _, inputs, out: out.to_local())
        return module


class Fused(Columns):
    """By columns where queries, keys and values lie side by side in one weight.

    The weight is cut as it lies, so that a checkpoint has plain pieces: the second of two ranks holds half
    of the keys and all values. What comes out is then dealt by heads, each column to the rank of its head.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        columns = module.get_parameter("weight").shape[1]
        ranks, rank, group = device_mesh.size(), device_mesh.get_local_rank(), device_mesh.get_group()
        width = columns // 3
        wanted = (torch.arange(columns) % width * ranks // width).chunk(ranks)  # by whom, of each rank's
        order = wanted[rank].argsort(stable=True)
        sent = wanted[rank].bincount(minlength=ranks).tolist()
        received = [int((theirs == rank).sum()) for theirs in wanted]

        def deal(_: nn.Module, inputs: object, out: torch.Tensor) -> torch.Tensor:
            rows = out.movedim(-1, 0).index_select(0, order.to(out.device))
            dealt: torch.Tensor = all_to_all(rows, received, sent, group)
            return dealt.movedim(0, -1)

        super()._apply(module, device_mesh).register_forward_hook(deal)
        return module


class Rows(ParallelStyle):
    """By rows, of a Conv1D. Every rank has its own columns of the input, and the whole output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split(module, device_mesh, weight=Shard(0), bias=Replicate())
        module.register_forward_pre_hook(lambda _, inputs: _as(device_mesh, Shard(-1), inputs[0]))
        module.register_forward_hook(
            lambda _, inputs, out: out.redistribute(placements=[Replicate()]).to_local()
        )
        return module


def _split(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    for name, placement in placements.items():
        whole = module.get_parameter(name)
        pieces = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(pieces, requires_grad=whole.requires_grad))


def _as(mesh: DeviceMesh, placement: Placement, value: torch.Tensor) -> DTensor:
    return DTensor.from_local(value, mesh, [placement], run_check=False)
