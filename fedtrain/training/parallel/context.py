"""Context parallel: each rank has a part of every sequence, and attention sees the keys and values of all.

Keys and values are gathered before each attention (as in Llama 3's training, Dubey et al. 2024, §3.3.2), so
a rank holds those of the whole sequence for one layer at a time; queries and all else stay parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import TaskError
from ..batches import Batch, rebuilt
from ..mesh import Mesh
from .plan import Plan

# torch.distributed.nn.functional.all_gather has wrong gradients here; the name is new in torch 2.13.
all_gather = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)


class Gathered(TorchFunctionMode):
    """Within it, scaled_dot_product_attention over parts is that over whole sequences."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.rank, self.ranks = mesh.at["cp"], mesh.sizes.cp
        self.group = mesh["cp"].get_group()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """`query`, `key` and `value` are [..., length / ranks, width]."""
        if attn_mask is not None:
            raise TaskError("parallel.cp: attention with a mask of its own can't be cut; use is_causal=True")
        mine, at = query.shape[-2], self.rank * query.shape[-2]
        key, value = (all_gather(t.contiguous(), t.dim() - 2, self.group) for t in (key, value))
        if is_causal:
            whole = torch.arange(key.shape[-2], device=query.device)
            attn_mask = whole[None, :] <= whole[at : at + mine, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)


@contextmanager
def context_parallel(model: nn.Module, plan: Plan, mesh: Mesh, length: int) -> Iterator[None]:
    """Forward and backward within it are over parts of sequences of this `length`; the model's positions are
    this rank's."""
    low, high = length * mesh.at["cp"] // mesh.sizes.cp, length * (mesh.at["cp"] + 1) // mesh.sizes.cp
    whole = {}
    for name in plan.positions:
        module, _, buffer = name.rpartition(".")
        owner = model.get_submodule(module)
        whole[name] = owner, buffer, owner._buffers[buffer]
        owner._buffers[buffer] = owner.get_buffer(buffer)[low:high]
    try:
        with Gathered(mesh):
            yield
    finally:
        for owner, buffer, tensor in whole.values():
            owner._buffers[buffer] = tensor


def part_of(batch: Batch, plan: Plan, mesh: Mesh) -> tuple[Batch, int]:
    """This rank's part of the sequences, and how long they are."""
    lengths: set[int] = set()

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > plan.length:
            lengths.add(value.shape[plan.length])
            return value.chunk(mesh.sizes.cp, plan.length)[mesh.at["cp"]]
        return rebuilt(value, part)

    mine = part(batch)
    if len(lengths) != 1 or (length := lengths.pop()) % mesh.sizes.cp:
        raise TaskError(
            f"parallel.cp: sequences of {sorted(lengths) or 'no'} length can't be cut into {mesh.sizes.cp} "
            f"equal parts along dimension {plan.length}."
        )
    return mine, length
