"""The data that Task.data may return, as batches in a given order.

Tensors are gathered by index, without a loader. A Dataset is read item by item, and collated as in a
DataLoader or by the task's collate(); both ways give the same bits. An iterable of ready batches is used in
its own order.
"""

from __future__ import annotations

import multiprocessing
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np
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
from ..config.project import is_of_project
from ..errors import TaskError, some
from .batches import (
    Batch,
    examples_in,
    filled,
    named_tensors,
    parts_of,
    tensors_in,
    with_parts,
)

SAMPLED_BYTES = 1 << 20  # of a column, about: a few milliseconds of a digest
Collate = Callable[[list[Any]], Batch]  # see Task.collate
Order = Callable[[int], torch.Tensor]  # number of examples -> a permutation of their indices, int64 [count]


class Tensors:
    """Columns with the same first dimension, in the containers of `like`; so is each batch."""

    def __init__(self, like: Batch) -> None:
        self.like, self.columns = like, tensors_in(like)
        self.count = self.columns[0].shape[0]
        if any(c.shape[0] != self.count for c in self.columns):
            sizes = {len(column): name for name, column in named_tensors(like, "")}
            lengths = ", ".join(f"{name} has {size:,}" for size, name in sizes.items())
            raise TaskError(
                f"data() returned columns of different lengths: {lengths}. Give each one entry for each "
                f"example, or return a list of single examples."
            )

    def build(self, columns: Iterable[torch.Tensor]) -> Batch:
        """A batch of these columns, or the form of one example in which collate() takes it."""
        return filled(self.like, iter(columns))

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
        if self.collate is not collated:
            return self.collate(examples)
        try:
            return collated(examples)
        except (TypeError, RuntimeError, KeyError) as e:
            raise TaskError(
                f"no batch can be made of data()'s examples, each a {type(examples[0]).__name__}: let them "
                f"be tensors of equal shape, or tuples or dicts of such, or define Task.collate"
            ) from e


class Stream:
    """Batches in the user's own order: an iterable of batches, or an IterableDataset of examples."""

    def __init__(self, source: Iterable[Any], collate: Collate | None = None) -> None:
        self.source, self.collate = source, collate or collated
        self.count = 0  # examples seen in the first pass
        if isinstance(source, DataLoader) and source.num_workers:
            start_by_fork(source)

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


def start_by_fork(loader: DataLoader[Any]) -> None:
    """Have the worker processes of a DataLoader start by fork, which is not Python 3.14's default, where the
    task says nothing else. TaskError where they start in another way and a worker would import a module of
    the task: it would not have the bytes that this process loaded and the site approved."""
    if loader.multiprocessing_context is None and multiprocessing.get_start_method(True) != "spawn":
        loader.multiprocessing_context = "fork"
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    used = (type(loader.dataset), loader.collate_fn, loader.worker_init_fn)
    if method != "fork" and (own := {each.__module__ for each in used if each and is_of_project(each)}):
        raise TaskError(
            f"data() gives a DataLoader whose workers start by {method}, and that worker would import "
            f"{some([*own])} anew. Leave out multiprocessing_context: its workers then start by fork."
        )


Examples = Tensors | Items | Stream


def examples_of(data: Any, collate: Collate | None = None) -> Examples:
    """Classify the result of data(), by the table in docs/training.md. No example is read, and nothing is
    copied but lists that are columns. `collate`: the task's own, if it has one; columns are then split into
    examples for it, too. What was classified before stays as it is. TaskError for data of any other
    type, for a generator, and for a list that may be columns."""
    if isinstance(data, Examples):
        return data
    if isinstance(data, Iterator) and type(data).__module__ in ("builtins", "itertools"):
        raise TaskError(
            f"data() returned a {type(data).__name__}, which can be read only once, and each round reads the "
            f"data again: return a DataLoader, a Dataset, or an object that begins anew in each __iter__()"
        )
    own = getattr(type(data), "__getitem__", None)
    data = data.tensors if own is TensorDataset.__getitem__ else data
    columns = isinstance(data, tuple | Mapping) or (
        is_dataclass(data) and own is None and not hasattr(data, "__iter__")
    )
    one = isinstance(data, torch.Tensor | np.ndarray) or hasattr(data, "iloc")
    if one or (columns and parts_of(data)):
        found = Tensors(_columns(data, "data()"))
        return found if collate is None else Items(found, collate)
    if isinstance(data, IterableDataset):
        return Stream(data, collate)
    if own and hasattr(data, "__len__"):
        few = data if isinstance(data, list) and len(data) in (2, 3) else ()
        sizes = {len(x) if isinstance(x, list) or getattr(x, "shape", False) else -1 for x in few}
        if len(sizes) == 1 and sizes != {-1}:
            raise TaskError(
                f"data() returned a list of {len(data)} items of one length (the first is a "
                f"{type(data[0]).__name__}): columns or examples? If they are columns, make a tuple of them: "
                f"return x, y. If they are examples, return torch.stack(examples), or a tuple (x,) for each."
            )
        return Items(data, collate or collated)
    if hasattr(data, "__iter__"):
        return Stream(data)
    raise TaskError(
        f"data() returned a {type(data).__name__}: expected a Dataset, a tuple or dict of tensors, a list of "
        f"examples, or an iterable of batches"
    )


def as_tensors(data: Any) -> tuple[Any, int]:
    """The result of data() with tensors in place of arrays and lists that are columns, made once, and the
    bytes of these columns: 0 of a Dataset, which may well lie on disk."""
    found = examples_of(data)
    if not isinstance(found, Tensors):
        return data, 0
    return data if isinstance(data, TensorDataset) else found.like, sum(c.nbytes for c in found.columns)


def collated(examples: list[Any]) -> Batch:
    """A batch of examples as a DataLoader makes it; also of dataclasses, alone or in a tuple or dict."""
    parts = parts_of(examples[0])
    if not any(map(is_dataclass, (examples[0], *parts.values()))):
        return default_collate(examples)
    each = [parts_of(example) for example in examples]
    return with_parts(examples[0], {name: collated([one[name] for one in each]) for name in parts})


def _columns(data: Any, name: str) -> Batch:
    """The containers of `data` with a tensor for each column. TaskError for what is none."""
    if isinstance(data, torch.Tensor) and data.ndim:
        return data
    if hasattr(data, "iloc"):
        raise TaskError(
            f"data() returned a {type(data).__name__}. Make a tensor of it: torch.tensor(table.to_numpy())"
        )
    parts = {} if isinstance(data, list) else parts_of(data)
    if not all(isinstance(part, Number) for part in parts.values()):
        return with_parts(data, {key: _columns(part, f"{name}[{key!r}]") for key, part in parts.items()})
    first = data[0] if isinstance(data, list) and data else None
    found = torch.zeros(())
    with suppress(TypeError, ValueError, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of arrays that pandas shares: we only read them
        if isinstance(first, torch.Tensor):
            found = torch.stack(data)
        elif isinstance(data, list | tuple) or hasattr(data, "shape"):
            found = torch.as_tensor(np.stack(data) if hasattr(first, "shape") else data)
    if not found.ndim:
        kind = type(data).__name__ + ("" if first is None else f" of {type(first).__name__}")
        raise TaskError(
            f"{name} is a {kind}, which is no column. The parts of a tuple, dict or dataclass are columns: "
            f"tensors, arrays or lists of numbers, with an entry of one shape for each example. For single "
            f"examples return a list of them; collate() may pad those of different lengths."
        )
    return found


def subset(data: Any, indices: Any) -> Any:
    """The examples with these indices. Tensors stay tensors, gathered once. TaskError for an iterable."""
    chosen = torch.as_tensor(indices)
    examples = examples_of(data)
    if isinstance(examples, Tensors):
        return examples.take(chosen)
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
    for column in (c.detach() for c in columns if c.layout is torch.strided and c.numel()):
        rows = column[:: max(1, column.nbytes // SAMPLED_BYTES)].flatten()[:SAMPLED_BYTES].contiguous()
        found = zlib.crc32(rows.cpu().view(torch.uint8).numpy().tobytes(), found)
    return f"{found:08x}"
