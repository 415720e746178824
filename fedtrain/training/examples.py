"""What Task.data may return, as batches in a given order.

Tensors are gathered by index, with no loader between; a Dataset is read item by item and collated as a
DataLoader would; both give the same bits. An iterable of ready batches is taken as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from ..errors import TaskError
from .task import Batch, examples_in

Order = Callable[[int], torch.Tensor]  # how many examples -> a permutation of them


class Tensors:
    """Columns that share their first dimension; `build` makes a batch of the gathered ones."""

    def __init__(self, columns: Sequence[torch.Tensor], build: Callable[[Iterable[Any]], Batch]) -> None:
        self.columns, self.build = columns, build
        self.count = columns[0].shape[0]
        if any(c.shape[0] != self.count for c in columns):
            lengths = ", ".join(str(c.shape[0]) for c in columns)
            raise TaskError(f"data() returned tensors of different lengths ({lengths})")

    def batches(self, size: int, drop_last: bool, order: Order | None) -> Iterator[Batch]:
        if self.count and (size == 0 or size >= self.count):
            yield self.build(self.columns)  # one batch: its order is nobody's concern
            return
        index = None if order is None else order(self.count).to(self.columns[0].device)
        for start, stop in spans(self.count, size, drop_last):
            if index is None:
                yield self.build(c[start:stop] for c in self.columns)
            else:
                chosen = index[start:stop]
                yield self.build([c.index_select(0, chosen) for c in self.columns])


class Items:
    """A map-style dataset: len() and []."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.count = dataset, len(dataset)

    def batches(self, size: int, drop_last: bool, order: Order | None) -> Iterator[Batch]:
        whole = size == 0 or size >= self.count
        index = list(range(self.count)) if order is None or whole else order(self.count).tolist()
        fetch = getattr(self.dataset, "__getitems__", None) or (
            lambda chosen: [self.dataset[i] for i in chosen]
        )
        for start, stop in spans(self.count, size, drop_last):
            yield default_collate(fetch(index[start:stop]))


class Stream:
    """Batches in the user's own order: an iterable of ready ones, or an IterableDataset of examples."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self.count = 0  # examples of the first pass so far

    def batches(self, size: int, drop_last: bool, order: Order | None) -> Iterator[Batch]:
        counting = self.count == 0
        ready = self.source
        if isinstance(ready, IterableDataset):
            items = iter(ready)
            groups = iter(lambda: list(islice(items, size or None)), [])
            ready = (
                default_collate(g) for i, g in enumerate(groups) if not (drop_last and i and len(g) < size)
            )
        for batch in ready:
            if counting:
                self.count += examples_in(batch)
            yield batch


Examples = Tensors | Items | Stream


def examples_of(data: Any) -> Examples:
    """Look at what data() returned; nothing is read or copied yet."""
    if isinstance(data, TensorDataset):
        return Tensors(data.tensors, tuple)
    if isinstance(data, tuple) and data and all(hasattr(c, "shape") for c in data):
        return Tensors([torch.as_tensor(c) for c in data], tuple)
    if isinstance(data, dict) and data and all(hasattr(c, "shape") for c in data.values()):
        names = list(data)
        columns = [torch.as_tensor(c) for c in data.values()]
        return Tensors(columns, lambda chosen: dict(zip(names, chosen, strict=True)))
    if isinstance(data, torch.Tensor):
        return Tensors([data], lambda chosen: next(iter(chosen)))
    if isinstance(data, IterableDataset):
        return Stream(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Items(data)
    if hasattr(data, "__iter__"):
        return Stream(data)
    raise TaskError(
        f"data() returned a {type(data).__name__}: expected a Dataset, a tuple or dict of tensors, "
        f"or an iterable of batches"
    )


def subset(data: Any, indices: Any) -> Any:
    """Some of the examples. Tensors are gathered once, so that the fast path stays."""
    chosen = torch.as_tensor(indices)
    examples = examples_of(data)
    if isinstance(examples, Tensors):
        return examples.build([c.index_select(0, chosen.to(c.device)) for c in examples.columns])
    if isinstance(examples, Items):
        return Subset(data, chosen.tolist())
    raise TaskError(
        f"data() returned a {type(data).__name__}, which can't be partitioned: return tensors or a Dataset"
    )


def spans(count: int, size: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """[start, stop) of each batch. drop_last drops a ragged one, but never a site's only batch."""
    size = size or count
    for start in range(0, count, size or 1):
        stop = min(start + size, count)
        if not (drop_last and stop - start < size and start > 0):
            yield start, stop


def move(batch: Batch, device: torch.device) -> Batch:
    """A batch on the device, tuples, lists and dicts kept as they are."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: move(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)([move(value, device) for value in batch])
    return batch
