"""Context parallel: each rank has a part of every sequence, and attention sees the keys and values of all.

Keys and values are gathered before each attention (as in Llama 3's training, Dubey et al. 2024, §3.3.2), so
a rank holds those of the whole sequence for one layer at a time; queries and all else stay parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import TaskError
from ..batches import Batch, rebuilt
from ..compat import all_gather, native_multi_head_attention, transformer_encoder_layer_fwd
from ..devices import generator_states, generators_kept
from ..mesh import Mesh
from .plan import Plan
from .sharded import local

ARGUMENTS = {
    F.dropout: ("input", "p", "training"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    F.scaled_dot_product_attention: ("input", "key", "value", "attn_mask", "dropout_p"),
}
WHOLE = {
    F.multi_head_attention_forward,
    native_multi_head_attention,
    transformer_encoder_layer_fwd,
}
INSTEAD = "Write attention with F.scaled_dot_product_attention, or leave out cp"
LABELLED = ("input", "target", "weight", "size_average", "ignore_index")  # arguments of losses
FEW = 64  # positions of a part that are asked whether parts need each other
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
    gathered.part = length // gathered.ranks
    low, high = gathered.part * gathered.rank, gathered.part * (gathered.rank + 1)
    with positions(model, plan, mesh, low, high), gathered, asked:
        yield mine
    if not gathered.attended and mesh.sizes.pp == 1:  # a stage may have no attention
        raise TaskError(
            f"parallel.cp: the model never called F.scaled_dot_product_attention, and other attention "
            f"would be over a rank's part of the sequences alone. {INSTEAD}"
        )


@contextmanager
def positions(model: nn.Module, plan: Plan, mesh: Mesh, low: int, high: int) -> Iterator[None]:
    """Within it the model's positions are those from `low` to `high`."""
    whole = []
    for name in plan.positions:
        if mesh.sizes.pp > 1 and name not in dict(model.named_buffers()):
            continue  # another stage has it
        module, _, buffer = name.rpartition(".")
        owner = model.get_submodule(module)
        whole.append((owner, buffer, owner._buffers[buffer]))
        owner._buffers[buffer] = owner.get_buffer(buffer)[low:high]
    try:
        yield
    finally:
        for owner, buffer, tensor in whole:
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
    if len(lengths) != 1 or min(lengths) % mesh.sizes.cp:
        raise TaskError(
            f"parallel.cp: sequences of length {' and '.join(map(str, sorted(lengths))) or 'unknown'} along "
            f"dimension {plan.length} can't be cut into {mesh.sizes.cp} equal parts. Let data() give "
            f"sequences of one length, a multiple of {mesh.sizes.cp}; Plan(length=...) says which dimension "
            f"that is."
        )
    return mine, min(lengths)


def check_parts(
    loss: Callable[[Batch], tuple[torch.Tensor, Any]],
    model: nn.Module, batch: Batch, plan: Plan, mesh: Mesh, gathered: Gathered, *, exact: bool,
) -> None:  # fmt: skip
    """TaskError where the loss over parts of the sequences is not that over all of them: of their first
    positions, and as an evaluation has it. A loss that draws can't be asked.

    `loss`: (mean, weight) of a batch. `exact`: it is computed in float32 at least.
    """
    _, length = part_of(batch, plan, mesh)
    part = length // gathered.ranks
    few = next((n for n in range(min(part, FEW), FEW // 4, -1) if part % n == 0), part)

    def first(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > plan.length:
            return value.narrow(plan.length, 0, few * gathered.ranks)
        return rebuilt(value, first)

    batch, whole, parts, drawn = first(batch), Labels(), Labels(), generator_states(mesh.device)
    with generators_kept(), torch.no_grad():
        with positions(model, plan, mesh, 0, few * gathered.ranks), whole:
            found, _ = loss(batch)
        if generator_states(mesh.device) != drawn:
            return
        with in_parts(model, batch, plan, mesh, gathered, alike=False) as mine, parts:
            mean, weight = loss(mine)
    over = torch.tensor([float(mean) * float(weight), float(weight), parts.counted], dtype=torch.float64)
    total, weights, counted = mesh.sum(over.to(mesh.device), ("cp",)).tolist()
    given, expected = total / weights if weights else 0.0, float(found)
    same = math.isclose(given, expected, rel_tol=1e-5 if exact else 1e-2, abs_tol=1e-6)
    if whole.counted != counted or (math.isfinite(expected) and not same):
        raise TaskError(
            f"parallel.cp: of {few * gathered.ranks} positions in {gathered.ranks} parts the loss is "
            f"{given:.6g}, over {counted:.0f} labels; of the same in one part {expected:.6g}, over "
            f"{whole.counted}. Nothing but attention may look beyond a part: shift labels in data(), not in "
            f"loss(); take positions from a buffer that Plan(positions=...) names, or from the batch; where "
            f"some labels don't count, return (sum, weight)."
        )


class Labels(TorchFunctionMode):
    """Within it labels are counted that F.cross_entropy and F.nll_loss are given and do not leave out."""

    counted = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (F.cross_entropy, F.nll_loss):
            given = dict(zip(LABELLED, args, strict=False)) | (kwargs or {})
            labels = local(given["target"])
            if not labels.is_floating_point():
                self.counted += int((labels != given.get("ignore_index", -100)).sum())
        return function(*args, **(kwargs or {}))


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
