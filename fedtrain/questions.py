"""What sites are asked about their data without training: its columns, counts and sums of their values.

Each answer is an Evaluation, whose numbers are whole and below 2^53. Their sums over sites are exact, in the
open and under masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .messages import Message, Request


class Column(msgspec.Struct, frozen=True):
    """What one column of a site's data is; it has nothing of the values."""

    name: str
    dtype: str  # "float32", "int64", "bool"
    width: int = 1  # values of each example
    labels: tuple[str, ...] = ()  # of categories, in the order of their codes; (): it has no names for codes


def difference(some: Sequence[Column], others: Sequence[Column]) -> str:
    """The first difference between two lists of columns, in words; "" where there is none."""
    for mine, other in zip(some, others, strict=False):
        if mine.name != other.name:
            return f"a column is {mine.name!r} and {other.name!r}"
        for what in ("dtype", "width", "labels"):
            if (here := getattr(mine, what)) != (there := getattr(other, what)):
                verb = "are" if what == "labels" else "is"
                return f"the {what} of column {mine.name!r} {verb} {here} and {there}"
    return "" if len(some) == len(others) else f"there are {len(some)} and {len(others)} columns"


class Cells(msgspec.Struct, frozen=True, array_like=True):
    """Count the values below, between and from the last of ascending edges on, and those that are missing."""

    column: int  # its place in Described.columns
    edges: tuple[float, ...]  # a value that is equal to an edge is above it


class Powers(msgspec.Struct, frozen=True, array_like=True):
    """Add up the values and their squares, which lie within ±2^exponent."""

    column: int
    exponent: int


class Question(msgspec.Struct, frozen=True):
    cells: tuple[Cells, ...] = ()
    powers: tuple[Powers, ...] = ()


class Describe(Request, frozen=True, kw_only=True, tag=True):
    """Say which columns the data has."""


class Described(Message, frozen=True, kw_only=True, tag=True):
    columns: tuple[Column, ...]


class Tally(Request, frozen=True, kw_only=True, tag=True):
    """Answer one question, the `round`-th of a run."""

    round: int
    question: Question
    min_cell: int  # counts below it, and what they would tell, are left out of what people are shown
