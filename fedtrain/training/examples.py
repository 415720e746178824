"""The data that Task.data may return, as batches in a given order.

Tensors are gathered by index, without a loader. A Dataset is read item by item, and collated as in a
DataLoader or by the task's collate(); both ways give the same bits. An iterable of ready batches is used in
its own order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from ..config import TrainConfig
from ..errors import TaskError
from .batches import Batch, examples_in, renamed

SAMPLED_BYTES = 1 << 20  # of a column, about: a few milliseconds of a digest
Collate = Callable[[list[Any]], Batch]  # see Task.collate
Order = Callable[[int], torch.Tensor]  # number of examples -> a permutation of their indices, int64 [count]


class Tensors:
    """Columns with the same first dimension; `build` makes a batch of the gathered columns."""

    def __init__(self, columns: Sequence[torch.Tensor], build: Callable[[Iterable[Any]], Batch]) -> None:
        self.columns, self.build = columns, build
        self.count = columns[0].shape[0]
        if any(c.shape[0] != self.count for c in columns):
            lengths = ", ".join(str(c.shape[0]) for c in columns)
            raise TaskError(f"data() returned tensors of different lengths ({lengths})")

    def batches(self, size: int, drop_last: bool, order: Order | None) -> Iterator[Batch]:
        """One pass in batches of `size` (0: one batch of all); `order` None: as stored."""
        if self.count and (size == 0 or size >= self.count):
            yield self.build(self.columns)  # a single batch needs no order
            return
        index = None if order is None else order(self.count)
        if index is not None:  # a GPU is not waited for
            index = index.to(self.columns[0].device, non_blocking=True)
        for start, stop in spans(self.count, size, drop_last):
            if index is None:
                yield self.build(c[start:stop] for c in self.columns)
            else:
                yield self.take(index[start:stop])

    def take(self, index: torch.Tensor) -> Batch:
        """The batch of the examples with these indices."""
        return self.build([c.index_select(0, index.to(c.device)) for c in self.columns])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        """One example, in the form that collate() takes."""
        return self.build([c[i] for c in self.columns])


class Items:
    """A map-style dataset: len() and []; `collate` makes a batch of a list of examples."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.count, self.collate = dataset, len(dataset), collate

    def batches(self, size: int, drop_last: bool, order: Order | None) -> Iterator[Batch]:
        """One pass in batches of `size` (0: one batch of all); `order` None: as stored."""
        whole = size == 0 or size >= self.count
        index = list(range(self.count)) if order is None or whole else order(self.count).tolist()
        for start, stop in spans(self.count, size, drop_last):
            yield self._batch(index[start:stop])

    def take(self, index: torch.Tensor) -> Batch:
        """The batch of the examples with these indices."""
        return self._batch(index.tolist())

    def _batch(self, chosen: list[int]) -> Batch:
        fetch = getattr(self.dataset, "__getitems__", None)
        examples = fetch(chosen) if fetch else [self.dataset[i] for i in chosen]
        if self.collate is not default_collate:
            return self.collate(examples)
        try:
            return default_collate(examples)
        except (TypeError, RuntimeError) as e:
            raise TaskError(
                f"no batch can be made of data()'s examples, each a {type(examples[0]).__name__}: let them "
                f"be tensors of equal shape, or tuples or dicts of such, or define Task.collate"
            ) from e


class Stream:
    """Batches in the user's own order: an iterable of batches, or an IterableDataset of examples."""

    def __init__(self, source: Iterable[Any], collate: Collate = default_collate) -> None:
        self.source, self.collate = source, collate
        self.count = 0  # examples seen in the first pass

    @property
    def batches_in_pass(self) -> int | None:
        """Of a DataLoader over a dataset, whose batches are torch's; None where nobody knows beforehand."""
        loader = self.source
        if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
            return None
        known = type(loader.batch_sampler) is BatchSampler and hasattr(loader.sampler, "__len__")
        return len(loader) if known else None

    def batches(self, size: int, drop_last: bool, order: Order | None) -> Iterator[Batch]:
        """One pass; `order` is ignored, and the others count for an IterableDataset only."""
        counting = self.count == 0
        ready = self.source
        if isinstance(ready, IterableDataset):
            items = iter(ready)
            groups = iter(lambda: list(islice(items, size or None)), [])
            ready = (self.collate(g) for i, g in enumerate(groups) if not (drop_last and i and len(g) < size))
        for batch in ready:
            if counting:
                self.count += examples_in(batch)
            yield batch


Examples = Tensors | Items | Stream


def examples_of(data: Any, collate: Collate | None = None) -> Examples:
    """Classify the result of data(), without reading or copying examples. `collate`: the task's own, if it
    has one; tensors are then split into examples for it, too. TaskError for data of any other type."""
    parts = [data, *(data if isinstance(data, tuple) else data.values() if isinstance(data, Mapping) else ())]
    if table := next((type(part).__name__ for part in parts if hasattr(part, "iloc")), None):
        raise TaskError(f"data() returned a {table}. Make a tensor of it: torch.tensor(table.to_numpy())")
    found = _tensors_of(data)
    if found is not None:
        return found if collate is None else Items(found, collate)
    if isinstance(data, IterableDataset):
        return Stream(data, collate or default_collate)
    columns = isinstance(data, Mapping) and any(isinstance(name, str) for name in data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not columns:
        return Items(data, collate or default_collate)
    if hasattr(data, "__iter__") and not columns:
        return Stream(data)
    raise TaskError(
        f"data() returned a {type(data).__name__}: expected a Dataset, a tuple or dict of tensors, "
        f"or an iterable of batches"
    )


def _tensors_of(data: Any) -> Tensors | None:
    if isinstance(data, TensorDataset):
        return Tensors(data.tensors, tuple)
    if isinstance(data, torch.Tensor):
        return Tensors([data], lambda chosen: next(iter(chosen)))
    if isinstance(data, tuple) and data and all(hasattr(c, "shape") for c in data):
        return Tensors([torch.as_tensor(c) for c in data], getattr(data, "_make", tuple))
    if isinstance(data, Mapping) and data and all(hasattr(c, "shape") for c in data.values()):
        names = list(data)
        columns = [torch.as_tensor(c) for c in data.values()]
        return Tensors(columns, lambda chosen: renamed(data, dict(zip(names, chosen, strict=True))))
    return None


def subset(data: Any, indices: Any) -> Any:
    """The examples with these indices. Tensors stay tensors, gathered once. TaskError for an iterable."""
    chosen = torch.as_tensor(indices)
    examples = examples_of(data)
    if isinstance(examples, Tensors):
        return examples.build([c.index_select(0, chosen.to(c.device)) for c in examples.columns])
    if isinstance(examples, Items):
        return Subset(data, chosen.tolist())
    raise TaskError(
        f"data() returned a {type(data).__name__}, which can't be partitioned: return tensors or a Dataset"
    )


def in_groups(examples: Examples, config: TrainConfig, order: torch.Generator) -> Iterator[list[Batch]]:
    """One shuffled pass over the examples: the batches of each optimizer step, where the data has them."""
    shuffled = partial(torch.randperm, generator=order)
    batches = iter(examples.batches(config.batch_size, config.drop_last, shuffled))
    while group := list(islice(batches, config.accumulate)):
        yield group


def spans(count: int, size: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """[start, stop) of each batch. `drop_last` drops a short last batch, but never a site's only batch."""
    size = size or count
    for start in range(0, count, size or 1):
        stop = min(start + size, count)
        if not (drop_last and stop - start < size and start > 0):
            yield start, stop


def data_digest(data: Any) -> str:
    """Of the number of examples, their shapes and types, and a sample of their values, in a few milliseconds;
    of a Dataset the number alone. "" of a stream."""
    examples = examples_of(data)
    if isinstance(examples, Stream):
        return ""
    columns = examples.columns if isinstance(examples, Tensors) else []
    found = zlib.crc32(repr((examples.count, [(c.shape, c.dtype) for c in columns])).encode())
    for column in (c.detach() for c in columns if c.layout is torch.strided):
        rows = column[:: max(1, column.nbytes // SAMPLED_BYTES)].flatten()[:SAMPLED_BYTES].contiguous()
        found = zlib.crc32(rows.cpu().view(torch.uint8).numpy().tobytes(), found)
    return f"{found:08x}"
