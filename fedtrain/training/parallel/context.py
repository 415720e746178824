"""Context parallel: each rank has a part of every sequence, and attention sees the keys and values of all.

Keys and values are gathered before each attention (as in Llama 3's training, Dubey et al. 2024, §3.3.2), so
a rank holds those of the whole sequence for one layer at a time; queries and all else stay parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import TaskError
from ..batches import Batch, rebuilt
from ..mesh import Mesh
from .plan import Plan
from .sharded import local

# torch.distributed.nn.functional.all_gather has wrong gradients here; the name is new in torch 2.13.
all_gather = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)


ARGUMENTS = {
    F.dropout: ("input", "p", "training"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    F.scaled_dot_product_attention: ("input", "key", "value", "attn_mask", "dropout_p"),
}
WHOLE = {
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
}
INSTEAD = "Write attention with F.scaled_dot_product_attention, or leave out cp"
PARTS = "draws for, or averages over, a part of a tensor on each rank. Set this dropout to 0"


def drawn(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of one of these that draws, or averages, as it does in training; else {}."""
    if function not in ARGUMENTS:
        return {}
    given = dict(zip(ARGUMENTS[function], args, strict=False)) | dict(kwargs or {})
    given.setdefault("input", given.pop("query", None))  # attention's
    if function is F.dropout and given.get("training", True):
        return given if given.setdefault("p", 0.5) > 0 else {}
    return given if given.get("training") or given.get("dropout_p") else {}


class Gathered(TorchFunctionMode):
    """Within it, scaled_dot_product_attention over parts is that over whole sequences, and dropout of a part
    is that part of the dropout of the whole."""

    part = 0  # the length of this rank's
    attended = 0  # how often attention was made whole

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        super().__init__()
        self.rank, self.ranks, self.along = mesh.at["cp"], mesh.sizes.cp, plan.length
        self.group = mesh["cp"].get_group()
        from torch.nn.attention.bias import causal_lower_right  # a second's import, of torch's compiler

        self.causal = causal_lower_right(1, 1)  # none can be made while operations are counted, see Flops

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if given := drawn(function, args, kwargs):
            return self.dropout(function, **given)
        if function is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        if function in WHOLE:  # attention within them is out of reach
            raise TaskError(f"parallel.cp: {function.__name__} attends to a rank's part alone. {INSTEAD}")
        return function(*args, **(kwargs or {}))

    def dropout(self, function: Any, input: torch.Tensor, p: float = 0.0, **_: Any) -> torch.Tensor:
        shape = [*input.shape]
        if function is not F.dropout or shape[self.along : self.along + 1] != [self.part]:
            raise TaskError(
                f"parallel.cp: {function.__name__} {PARTS}, normalize by LayerNorm, or leave out cp"
            )
        shape[self.along] *= self.ranks
        noise: torch.Tensor = F.dropout(input.new_ones(shape), p)  # all ranks draw alike
        return input * noise.chunk(self.ranks, self.along)[self.rank]

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,  # more is refused above
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """`query`, `key` and `value` are [..., length / ranks, width]."""
        if attn_mask is not None:
            raise TaskError("parallel.cp: attention with a mask of its own can't be cut; use is_causal=True")
        self.attended += 1
        mine, at = query.shape[-2], self.rank * query.shape[-2]
        key, value = (all_gather(t.contiguous(), t.dim() - 2, self.group) for t in (key, value))
        if is_causal:  # a kernel that knows this kind of mask, flash attention say, makes none in memory
            key, value = (t[..., : at + mine, :] for t in (key, value))
            attn_mask, self.causal.seq_len_q, self.causal.seq_len_kv = self.causal, mine, at + mine
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)


@contextmanager
def in_parts(
    model: nn.Module, batch: Batch, plan: Plan, mesh: Mesh, gathered: Gathered | None, *, alike: bool
) -> Iterator[Batch]:
    """Forward and backward within it are over this rank's part of the sequences, which is given; the model's
    positions are that part's. `alike`: tensor-parallel ranks are asked whether they draw for the same."""
    asked = Alike(mesh) if alike else nullcontext()
    if gathered is None:
        with asked:
            yield batch
        return
    mine, length = part_of(batch, plan, mesh)
    gathered.part, whole = length // gathered.ranks, {}
    low, high = gathered.part * gathered.rank, gathered.part * (gathered.rank + 1)
    for name in plan.positions:
        if mesh.sizes.pp > 1 and name not in dict(model.named_buffers()):
            continue  # another stage has it
        module, _, buffer = name.rpartition(".")
        owner = model.get_submodule(module)
        whole[name] = owner, buffer, owner._buffers[buffer]
        owner._buffers[buffer] = owner.get_buffer(buffer)[low:high]
    try:
        with gathered, asked:
            yield mine
        if not gathered.attended and mesh.sizes.pp == 1:  # a stage may have no attention
            raise TaskError(
                f"parallel.cp: the model never called F.scaled_dot_product_attention, and other attention "
                f"would be over a rank's part of the sequences alone. {INSTEAD}"
            )
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


class Alike(TorchFunctionMode):
    """Within it a dropout, or a BatchNorm, is refused whose tensor differs among tensor-parallel ranks: as
    all draw alike, the same places of each part would be dropped."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.group = mesh["tp"].get_group()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if given := drawn(function, args, kwargs):
            x = local(given["input"].detach()).double()
            most = torch.stack([x.sum(), -x.sum(), x.abs().sum()])
            dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
            if most[0] + most[1] > 1e-5 * most[2]:  # the last bits may differ
                raise TaskError(f"parallel.tp: {function.__name__} {PARTS}, or leave out tp, or sp alone")
        return function(*args, **(kwargs or {}))
