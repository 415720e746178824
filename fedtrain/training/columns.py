"""The columns of a site's data: what they are, and their values. They are what the task's columns() gives, or
each column of each tensor of data()."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from ..errors import TaskError
from ..questions import Column, difference
from .batches import columns_of, named_tensors
from .drawn import Indices
from .examples import Stream, Tensors, examples_of
from .task import Task, collate_of, folder_of, user_code

MAX_COLUMNS, MAX_LABELS, MAX_NAME = 1024, 256, 128
AT_ONCE = 1 << 16  # examples of tensors; others come in batches of train.eval_batch_size

ADVICE = "Define columns(site): it says what the columns are."

Values = NDArray[np.float64]  # of a column of one batch, example by example


@dataclass(frozen=True)
class ColumnSource:
    """Where the columns of one site come from: the task's columns(), or data() where that is None."""

    task: Task
    columns: Callable[[], Any]
    data: Callable[[], Any]

    @classmethod
    def at(cls, task: Task, site: str, data: Callable[[], Any]) -> ColumnSource:
        """The task's own columns of a site; `data` gives its data(site)."""

        def columns() -> Any:
            with user_code(folder_of(task), f"columns({site!r})"):
                return task.columns(site)

        return cls(task, columns, data)

    def chosen(self, examples: Indices, data: Callable[[], Any]) -> ColumnSource:
        """The columns of these examples alone, which `data` gives."""

        def columns() -> Any:
            return (
                None if (given := self.columns()) is None else {n: _rows(given[n], examples) for n in given}
            )

        return ColumnSource(self.task, columns, data)

    def described(self, batch_size: int) -> tuple[Column, ...]:
        """What the columns are. TaskError where there are no examples."""
        for columns, _, _ in self.batches(batch_size):
            return columns
        raise TaskError("it has no example, and so no columns")

    def form(self) -> tuple[Column, ...]:
        """What sites compare before a run: names and types of the columns, or of the tensors of data(), and
        shapes, by the first example alone; labels are a digest. () where one example doesn't tell."""
        try:
            if (given := self.columns()) is not None:
                columns, _, _ = _read({name: _rows(given[name], np.zeros(1, np.int64)) for name in given})
                return tuple(replace(each, labels=_digest(each.labels)) for each in columns)
            examples = examples_of(self.data(), collate_of(self.task))
            if isinstance(examples, Stream) or not examples.count:
                return ()
            fixed = isinstance(examples, Tensors)  # items may be of any length, which a collate() evens out
            with user_code(folder_of(self.task), "the first example of data()"):
                found = [*named_tensors(examples.take(torch.tensor([0])), "")]
            return tuple(Column(name, _form(tensor, fixed)) for name, tensor in found)
        except (TaskError, IndexError):  # training, which needs more than this, says why
            return ()

    def batches(self, batch_size: int) -> Iterator[tuple[tuple[Column, ...], list[Values], int]]:
        """One pass: of each batch its columns, always the same ones, their values, and its examples."""
        first: tuple[Column, ...] = ()
        for given in self._given(batch_size):
            columns, values, rows = _read(given)
            if not rows:
                continue
            first = first or columns
            if columns != first:
                raise TaskError(f"data() changes from batch to batch: {difference(first, columns)}. {ADVICE}")
            yield columns, values, rows

    def _given(self, batch_size: int) -> Iterator[Any]:
        if (given := self.columns()) is not None:
            yield given
            return
        examples = examples_of(self.data(), collate_of(self.task))
        size = max(batch_size, AT_ONCE) if isinstance(examples, Tensors) else batch_size
        for batch in examples.batches(size, False, None):
            yield columns_of(batch)


def _form(tensor: torch.Tensor, fixed: bool) -> str:
    """The dtype and, where it is `fixed`, the shape of one example; else its dimensions."""
    shape = tensor.shape[1:]
    each = str(list(shape)) if fixed else f"of {len(shape)} dimensions"
    return f"{str(tensor.dtype).removeprefix('torch.')} {each}"


def _digest(labels: tuple[str, ...]) -> tuple[str, ...]:
    return (hashlib.sha256(repr(labels).encode()).hexdigest()[:12],) if labels else ()


def _rows(value: Any, examples: Indices) -> Any:
    if isinstance(value, tuple) and len(value) == 2:
        return _rows(value[0], examples), value[1]
    if len(value) <= max(examples, default=0):
        raise TaskError("columns() gives fewer examples than data() has, which are dealt to simulated sites")
    return np.asarray(value)[examples]


def _read(given: Any) -> tuple[tuple[Column, ...], list[Values], int]:
    if not isinstance(given, Mapping) or not given:
        raise TaskError(
            f'columns() gives a {type(given).__name__}. Return {{"age": ages}}, with a name each.'
        )
    if len(given) > MAX_COLUMNS:
        raise TaskError(f"there are {len(given)} columns, at most {MAX_COLUMNS} are counted. {ADVICE}")
    columns, every, rows = list[Column](), list[Values](), set[int]()
    for name, value in given.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise TaskError(f"a column's name must be 1 to {MAX_NAME} printable characters. {ADVICE}")
        labels: tuple[str, ...] = ()
        if isinstance(value, tuple) and len(value) == 2:
            value, labels = value[0], tuple(map(str, value[1]))
        numbers = _coded(name, value, labels) if labels else _numbers(name, value)
        rows.add(len(numbers))
        width = numbers[0].size if len(numbers) else 1
        columns.append(Column(name, "category" if labels else numbers.dtype.name, width, labels))
        every.append(numbers.astype(np.float64).reshape(-1))
    if len(rows) > 1:
        raise TaskError("columns() gives columns of different lengths")
    return tuple(columns), every, rows.pop()


def _numbers(name: str, value: Any) -> NDArray[Any]:
    """The values [examples, …]. No error has one in it."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        found = np.asarray(value)
    except ValueError:  # lists of different lengths
        found = np.asarray(None)
    if not found.ndim or found.dtype.kind not in "fiub":
        raise TaskError(
            f"column {name!r} is a {type(value).__name__} of what is no number. Give numbers, with NaN for a "
            f"missing one; or categories as (values, labels)."
        )
    return found


def _coded(name: str, value: Any, labels: tuple[str, ...]) -> NDArray[Any]:
    """Categories, given as codes or as labels; NaN for what has no label."""
    if len(set(labels)) < len(labels) or len(labels) > MAX_LABELS:
        raise TaskError(f"column {name!r}: its labels must differ, and be at most {MAX_LABELS}")
    found = np.asarray(value)
    if found.dtype.kind in "UO" and found.ndim == 1:
        places = {label: float(code) for code, label in enumerate(labels)}
        return np.array([places.get(each, math.nan) for each in map(str, found)])
    codes = _numbers(name, value).astype(np.float64)
    return np.where((codes >= 0) & (codes < len(labels)) & (codes == np.rint(codes)), codes, np.nan)
