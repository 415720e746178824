"""Functions that count, move and cut batches, for all engines.

A batch has tensors in tuples, named tuples, lists and dicts of any depth, or is an object with `.to()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import TaskError

Batch = Any  # the argument of loss() and evaluate()
PINNED = range(64 << 10, 64 << 20)  # bytes: less is copied at once anyway; of more, torch would keep too much


def examples_in(batch: Batch) -> int:
    """The number of examples in a batch: the first dimension of its first tensor. TaskError without one."""
    for count in (_by_tensor, _by_length):
        if (found := count(batch)) is not None:
            return found
    raise TaskError(
        f"a batch is a {type(batch).__name__} that doesn't say how many examples it holds. Put a tensor into "
        f"it whose first dimension they are, or give its class a batch_size."
    )


def move(batch: Batch, device: torch.device) -> Batch:
    """A copy of the batch on the device, with containers of the same types."""
    if isinstance(batch, torch.Tensor):
        plain = device.type == "cuda" and type(batch) is torch.Tensor and batch.layout is torch.strided
        if plain and batch.device.type == "cpu" and batch.nbytes in PINNED:
            batch = batch.pin_memory()  # the GPU then takes it while this process goes on
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, Mapping):
        moved = batch.to(device)
        return batch if moved is None else moved  # None: it moved itself
    return rebuilt(batch, lambda part: move(part, device))


def cut(batch: Batch, low: int, high: int) -> Batch:
    """Examples [low, high) of a batch. TaskError for a batch that can't be cut into examples."""
    count = examples_in(batch)
    return batch if low == 0 and high >= count else _cut(batch, low, high, count)


def rebuilt(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """A container of the same type with `change(part)` for each part; any other batch is returned as is."""
    if isinstance(batch, Mapping):
        return renamed(batch, {name: change(part) for name, part in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, tuple | list):
        return type(batch)([change(part) for part in batch])
    return batch


def renamed(like: Mapping[str, Any], parts: dict[str, Any]) -> Mapping[str, Any]:
    """A mapping of the type of `like`, such as a tokenizer's BatchEncoding, that holds these parts."""
    if type(like) is dict or not hasattr(like, "__setitem__"):
        return parts
    made: Any = copy(like)
    for name, part in parts.items():
        made[name] = part
    return made  # type: ignore[no-any-return]  # of the type of `like`


def tensors_in(batch: Batch) -> Iterator[torch.Tensor]:
    """Every tensor in a batch, in the order of its containers."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)


def columns_of(batch: Batch) -> dict[str, torch.Tensor]:
    """The columns of a batch's tensors, for statistics: of [n, c, …] c columns, of [n] one. Inputs and
    targets are x and y; tensors in a mapping or a named tuple have its names. TaskError without a tensor."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(batch, ""):
        each = tensor.unbind(1) if tensor.ndim > 1 else [tensor]
        found |= {name if len(each) == 1 else f"{name}[{i}]": column for i, column in enumerate(each)}
    if not found:
        raise TaskError(f"a batch is a {type(batch).__name__} without tensors. Define columns(site).")
    return found


def named_tensors(batch: Batch, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch, named as columns_of names them, under `name`."""
    if isinstance(batch, torch.Tensor):
        if batch.ndim:
            yield name or "x", batch
        return
    parts: Mapping[Any, Any] = {}
    if isinstance(batch, Mapping):
        parts = batch
    elif isinstance(batch, tuple | list):
        pair = ("x", "y") if len(batch) == 2 else map(str, range(len(batch)))
        parts = dict(zip(getattr(batch, "_fields", pair), batch, strict=True))
    for key, part in parts.items():
        yield from named_tensors(part, f"{name}.{key}" if name else str(key))


def _by_tensor(batch: Batch) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    size = getattr(batch, "batch_size", None)
    if size is not None:
        return int(size if isinstance(size, int) else size[0])
    if isinstance(batch, Mapping | tuple | list):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return next((n for n in map(_by_tensor, parts) if n is not None), None)
    return None


def _by_length(batch: Batch) -> int | None:
    """The length of the first list in a batch without tensors."""
    if isinstance(batch, Mapping):
        return next((n for n in map(_by_length, batch.values()) if n is not None), None)
    return len(batch) if hasattr(batch, "__len__") and not isinstance(batch, str | bytes) else None


def _cut(batch: Batch, low: int, high: int, count: int) -> Batch:
    if hasattr(batch, "shape"):
        return batch[low:high] if len(batch.shape) else batch
    if isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence):
        if len(batch) == count and not any(
            hasattr(v, "shape") or isinstance(v, Mapping | tuple | list) for v in batch
        ):
            return batch[low:high]  # a list with an entry for each example, such as names
    elif not isinstance(batch, Mapping) and hasattr(batch, "to"):
        raise TaskError(
            f"a {type(batch).__name__} can't be cut into the shares of several ranks. Let data() return a "
            f"Dataset, and collate() make the batches: then each rank makes its own."
        )
    return rebuilt(batch, lambda part: _cut(part, low, high, count))
