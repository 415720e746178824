"""Functions that count, move and cut batches, for all engines.

A batch has tensors in tuples, named tuples, lists, dicts and dataclasses of any depth, or is an object with
`.to()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from operator import setitem
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


def parts_of(batch: Batch) -> dict[Any, Any]:
    """The parts of a container by name or place; {} for anything else. A dataclass leaves out None."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple | list):
        return dict(zip(getattr(batch, "_fields", range(len(batch))), batch, strict=True))
    if is_dataclass(batch) and not isinstance(batch, type):
        pairs = ((field.name, getattr(batch, field.name, None)) for field in fields(batch))
        return {name: part for name, part in pairs if part is not None}
    return {}


def with_parts(like: Batch, parts: dict[Any, Any]) -> Batch:
    """A container of the type of `like`, such as a tokenizer's BatchEncoding, that holds these parts."""
    if isinstance(like, tuple | list):
        return type(like)(*parts.values()) if hasattr(like, "_fields") else type(like)(parts.values())
    if type(like) is dict or (isinstance(like, Mapping) and not hasattr(like, "__setitem__")):
        return parts
    made = copy(like)
    put = setitem if isinstance(like, Mapping) else object.__setattr__  # which a frozen dataclass has, too
    for name, part in parts.items():
        put(made, name, part)
    return made


def rebuilt(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """A container of the same type with `change(part)` for each part; any other batch is returned as is."""
    parts = parts_of(batch)
    return with_parts(batch, {name: change(part) for name, part in parts.items()}) if parts else batch


def filled(like: Batch, columns: Iterator[torch.Tensor]) -> Batch:
    """The containers of `like`, with these columns in place of its tensors."""
    if isinstance(like, torch.Tensor):
        return next(columns)
    return rebuilt(like, lambda part: filled(part, columns))


def tensors_in(batch: Batch) -> list[torch.Tensor]:
    """Every tensor in a batch but scalars, in the order of its containers."""
    return [tensor for _, tensor in named_tensors(batch, "")]


def columns_of(batch: Batch) -> dict[str, torch.Tensor]:
    """The columns of a batch's tensors, for statistics: of [n, c, …] c columns, of [n] one. Inputs and
    targets are x and y; tensors in a dict, named tuple or dataclass have its names. TaskError without any."""
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
    parts = parts_of(batch)
    if [*parts] == [0, 1] and isinstance(batch, tuple | list):
        parts = dict(zip("xy", batch, strict=True))
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
    return next((n for n in map(_by_tensor, parts_of(batch).values()) if n is not None), None)


def _by_length(batch: Batch) -> int | None:
    """The length of the first list in a batch without tensors."""
    if not isinstance(batch, tuple | list) and (parts := parts_of(batch)):
        return next((n for n in map(_by_length, parts.values()) if n is not None), None)
    return len(batch) if hasattr(batch, "__len__") and not isinstance(batch, str | bytes) else None


def _cut(batch: Batch, low: int, high: int, count: int) -> Batch:
    if hasattr(batch, "shape"):
        if len(batch.shape) and batch.shape[0] != count:
            raise TaskError(
                f"a tensor of shape {list(batch.shape)} in a batch of {count} examples can't be cut into the "
                f"shares of several ranks: its first dimension is not the examples. Make it a buffer of the "
                f"model, or let data() return a Dataset, and collate() make the batches."
            )
        return batch[low:high] if len(batch.shape) else batch
    own = isinstance(batch, PackedSequence) or hasattr(batch, "batch_size")
    if own or (hasattr(batch, "to") and not parts_of(batch)):
        raise TaskError(
            f"a {type(batch).__name__} can't be cut into the shares of several ranks. Let data() return a "
            f"Dataset, and collate() make the batches: then each rank makes its own."
        )
    listed = isinstance(batch, tuple | list) and len(batch) == count
    if listed and not any(hasattr(v, "shape") or parts_of(v) for v in batch):
        return batch[low:high]  # a list with an entry for each example, such as names
    return rebuilt(batch, lambda part: _cut(part, low, high, count))
