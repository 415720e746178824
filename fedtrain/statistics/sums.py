"""Exact counts and sums: a site's half, which makes whole numbers of values, and the other, which reads them.

A value is a whole number of units of 2^(exponent − 54), so that none within ±2^exponent loses a bit of a
float64 that is not below a unit. Whole numbers add up exactly, in any order and however the values are dealt
to sites. Sums and sums of squares have up to 148 bits and travel in limbs of 32, which masks and float64
hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..errors import BadUpdate
from ..messages import Metrics
from ..questions import Column, Powers, Question

Values = NDArray[np.float64]  # 1-D, of one column; NaN and infinite ones are missing

DIGIT_BITS = 18  # a value has three digits: products of two, of CHUNK values, add up exactly in float64
VALUE_BITS = 3 * DIGIT_BITS
CHUNK = 1 << 17
LIMB_BITS, LIMBS = 32, (3, 5)  # of a sum, and of a sum of squares, of 2^40 values
BESIDES = 2  # further counts of each Cells: the missing values, and those that are whole numbers
ROWS, COUNTS, SUMS = "rows", "counts", "sums"  # names of metrics in an answer


@dataclass(frozen=True)
class Answer:
    """The answer to a question, of one site or of several."""

    rows: int  # examples
    counts: list[list[int]]  # of each Cells: below the first edge, between edges, above the last; BESIDES
    sums: list[tuple[int, int]]  # of each Powers: Σq and Σq², for values q in units

    def parts(self, question: Question) -> tuple[Answer, Answer]:
        """The answer to `question` with which a longer one begins, and the answer to the rest of that."""
        cells, powers = len(question.cells), len(question.powers)
        return (
            Answer(self.rows, self.counts[:cells], self.sums[:powers]),
            Answer(self.rows, self.counts[cells:], self.sums[powers:]),
        )


# --- The site's end


class Tallies:
    """One site's answer, made batch by batch."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._columns: Sequence[Column] = ()
        self._asked = {cells.column for cells in question.cells} | {part.column for part in question.powers}
        self._edges = [np.array(cells.edges) for cells in question.cells]
        self._counts = [np.zeros(len(edges) + 1 + BESIDES, np.int64) for edges in self._edges]
        self._sums = [(0, 0)] * len(question.powers)
        self.rows, self._there = 0, Counter[int]()  # examples, and values by column

    def add(self, columns: Sequence[Column], values: Sequence[Values], rows: int) -> None:
        """Take in the values of all columns of so many more examples."""
        self._columns = columns
        self.rows += rows
        there = {column: np.sort(values[column][np.isfinite(values[column])]) for column in self._asked}
        besides = {
            column: (len(values[column]) - len(found), int(np.count_nonzero(found == np.rint(found))))
            for column, found in there.items()
        }
        self._there.update({column: len(found) for column, found in there.items()})
        for cells, edges, counts in zip(self._question.cells, self._edges, self._counts, strict=True):
            counts[:-BESIDES] += counted(there[cells.column], edges)
            counts[-BESIDES:] += besides[cells.column]
        for i, powers in enumerate(self._question.powers):
            first, second = power_sums(there[powers.column], powers.exponent)
            self._sums[i] = self._sums[i][0] + first, self._sums[i][1] + second

    def metrics(self, least: int = 0) -> Metrics:
        """What is answered. A column with fewer values than `least` examples have gives them as missing."""
        numbers: Metrics = {ROWS: (float(self.rows), 0.0)}
        few = {i for i, there in self._there.items() if there < least * self._columns[i].width}
        counts, sums = list[float](), list[float]()
        for cells, found in zip(self._question.cells, self._counts, strict=True):
            if cells.column in few:
                gone = found[: -BESIDES + 1].sum()
                found = np.zeros_like(found)
                found[-BESIDES] = gone
            counts += map(float, found)
        for powers, pair in zip(self._question.powers, self._sums, strict=True):
            for total, limbs in zip(pair if powers.column not in few else (0, 0), LIMBS, strict=True):
                sums += limbs_of(total, limbs)
        return numbers | ({COUNTS: (counts, 0.0)} if counts else {}) | ({SUMS: (sums, 0.0)} if sums else {})


def counted(ascending: Values, edges: Values) -> NDArray[np.int64]:
    """The values below, between and above the edges [len(edges) + 1]."""
    below = np.searchsorted(ascending, edges, side="left")
    return np.diff(below, prepend=0, append=len(ascending))


def power_sums(values: Values, exponent: int) -> tuple[int, int]:
    """Σq and Σq² over finite values, each q whole units; one beyond ±2^exponent counts as that."""
    first = second = 0
    for start in range(0, len(values), CHUNK):
        part = values[start : start + CHUNK]
        whole = np.rint(part * 2.0 ** (VALUE_BITS - exponent))  # scaling by a power of two is exact
        low = np.clip(whole, -(2.0**VALUE_BITS), 2.0**VALUE_BITS)
        digits = list[Values]()
        for unit in (4.0**DIGIT_BITS, 2.0**DIGIT_BITS):
            digits.append(np.floor(low / unit))
            low = low - digits[-1] * unit
        high, mid = digits
        for place, digit in ((2, high), (1, mid), (0, low)):
            first += int(digit.sum()) << (place * DIGIT_BITS)
        for place, times, a, b in (
            (4, 1, high, high), (3, 2, high, mid), (2, 2, high, low), (2, 1, mid, mid), (1, 2, mid, low),
            (0, 1, low, low),
        ):  # fmt: skip
            second += times * int(np.dot(a, b)) << (place * DIGIT_BITS)
    return first, second


def limbs_of(total: int, limbs: int) -> list[float]:
    """A whole number in limbs, the lowest first; the last one has the sign."""
    low = [(total >> (i * LIMB_BITS)) & ((1 << LIMB_BITS) - 1) for i in range(limbs - 1)]
    return [float(limb) for limb in (*low, total >> ((limbs - 1) * LIMB_BITS))]


# --- The aggregator's end


def sizes(question: Question) -> dict[str, int]:
    """How many numbers each metric of an answer has."""
    counts = sum(len(cells.edges) + 1 + BESIDES for cells in question.cells)
    found = {COUNTS: counts, SUMS: sum(LIMBS) * len(question.powers)}
    return {ROWS: 1} | {name: size for name, size in found.items() if size}


def read(question: Question, metrics: Metrics) -> Answer:
    """What the metrics of a site, or their sums over sites, answer. BadUpdate for what is no answer."""
    found = {
        name: [int(value) for value in (total if isinstance(total, list) else [total]) if value.is_integer()]
        for name, (total, _) in metrics.items()
    }
    if {name: len(numbers) for name, numbers in found.items()} != sizes(question):
        raise BadUpdate("its statistics are no answer to what was asked")
    if min((*found[ROWS], *found.get(COUNTS, ()))) < 0:
        raise BadUpdate("its statistics have a count below 0")
    counts, limbs = iter(found.get(COUNTS, ())), iter(found.get(SUMS, ()))

    def total(size: int) -> int:
        return sum(next(limbs) << (i * LIMB_BITS) for i in range(size))

    return Answer(
        found[ROWS][0],
        [[next(counts) for _ in range(len(cells.edges) + 1 + BESIDES)] for cells in question.cells],
        [(total(LIMBS[0]), total(LIMBS[1])) for _ in question.powers],
    )


def together(answers: Iterable[Answer]) -> Answer:
    """The answer of all sites, to a question that all of them had."""
    every = list(answers)
    counts = zip(*(answer.counts for answer in every), strict=True)
    sums = zip(*(answer.sums for answer in every), strict=True)
    return Answer(
        sum(answer.rows for answer in every),
        [list(map(sum, zip(*of, strict=True))) for of in counts],
        [(sum(first for first, _ in of), sum(second for _, second in of)) for of in sums],
    )


@dataclass(frozen=True)
class Moments:
    """The mean and the standard deviations of n values, each rounded once."""

    n: int
    mean: float
    spread: float  # of the n values themselves: the root of the mean square distance from the mean
    sd: float | None  # of what they are drawn from, with n - 1; None of a single value
    unit: float = 0.0  # each value was rounded to a multiple of it

    @classmethod
    def of(cls, powers: Powers, sums: tuple[int, int], n: int) -> Moments:
        """From Σq and Σq²; whole numbers have no cancellation in n·Σq² − (Σq)²."""
        first, second = sums
        unit = Fraction(2) ** (powers.exponent - VALUE_BITS)
        square = (n * second - first * first) * unit * unit
        return cls(
            n, float(first * unit / n), math.sqrt(square / (n * n)),
            math.sqrt(square / (n * (n - 1))) if n > 1 else None, float(unit),
        )  # fmt: skip
