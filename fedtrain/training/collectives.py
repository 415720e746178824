"""What ranks say to each other that is no tensor: typed MessagePack in tensors of bytes.

torch's own collectives of objects are pickles, which run code at whoever loads them; `refuse_pickles` has
them refused. Here a rank decodes another's bytes as the type that it expects and as nothing else, and takes
no more than FRAME_BYTES of any rank.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ..errors import WireError
from .compat import replace_name

T = TypeVar("T")
Group = dist.ProcessGroup | None
FRAME_BYTES = 64 << 20  # of one rank at once; a checkpoint's plan has about 200 bytes a tensor


def everyones(mine: T, kind: Any, group: Group = None, device: torch.device | None = None) -> list[T]:
    """What each rank of a group has, in the order of ranks, on all of them. `device`: where the group's
    tensors lie; the CPU without it. WireError for what is not of the kind."""
    frame = _frame(mine, device)
    length = torch.tensor([len(frame)], device=device)
    boxes = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(boxes, length, group=group)
    lengths = [_allowed(int(box), rank) for rank, box in enumerate(boxes)]  # before room is made for any
    frames = [frame.new_empty(max(lengths)) for _ in lengths]
    dist.all_gather(frames, torch.nn.functional.pad(frame, (0, max(lengths) - len(frame))), group=group)
    return [_value(each[:n], kind, rank) for rank, (each, n) in enumerate(zip(frames, lengths, strict=True))]


def firsts(value: T, kind: Any, group: Group = None, device: torch.device | None = None) -> T:
    """What the first rank of a group has, on all of them. The `value` of another rank is not looked at."""
    first = dist.get_global_rank(group, 0) if group is not None else 0
    frame = _frame(value, device) if dist.get_rank() == first else torch.empty(0, device=device)
    box = torch.tensor([len(frame)], device=device)
    dist.broadcast(box, first, group=group)
    if dist.get_rank() != first:
        frame = torch.empty(_allowed(int(box), 0), dtype=torch.uint8, device=device)
    dist.broadcast(frame, first, group=group)
    found: T = _value(frame, kind, 0)
    return found


def refuse_pickles() -> None:
    """From here on no collective of objects, whoever calls it, loads anything in this process."""
    for name in ("tensor_to_object", "object_to_tensor"):
        replace_name(name, _refused)


def _refused(*_: object) -> NoReturn:
    raise WireError(
        "torch's collectives of objects (all_gather_object, broadcast_object_list and others) load pickles, "
        "with which one rank can run code in another. fedtrain refuses them: exchange tensors instead."
    )


# --- frames


def _frame(value: Any, device: torch.device | None) -> torch.Tensor:
    body = msgspec.msgpack.encode(value, enc_hook=_encoded)
    whole = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    _allowed(len(whole), None)
    return whole.to(device) if device is not None else whole


def _value(frame: torch.Tensor, kind: Any, rank: int) -> Any:
    try:
        return msgspec.msgpack.decode(frame.cpu().numpy().tobytes(), type=kind, dec_hook=_decoded)
    except (msgspec.MsgspecError, RecursionError, ValueError) as e:
        raise WireError(f"rank {rank} of the group sent what can't be read: {e}") from None


def _allowed(length: int, rank: int | None) -> int:
    if not 0 <= length <= FRAME_BYTES:
        whose = "this rank has" if rank is None else f"rank {rank} of the group announces"
        raise WireError(f"{whose} a message of {length:,} bytes for other ranks; {FRAME_BYTES:,} are allowed")
    return length


# --- torch's own types in a checkpoint's plan


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    raise NotImplementedError(f"a {type(value).__name__} is not sent to other ranks")


def _decoded(kind: Any, value: Any) -> Any:
    if kind is torch.Size:
        return torch.Size(value)
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(found, kind):
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return found
