"""The questions of a survey, without I/O: a generator asks, and is sent what all sites answer together.

Four questions answer everything about up to GROUP columns, whatever is in them:

  1  in which octaves the values lie      how large a sum can get, and whether values are categories
  2  sums of values and of squares        mean and standard deviation; how many there are of each category
  3  cells from mean − 3 sd to mean + 3 sd: a histogram; and CELLS cells for each quantile
  4  CELLS cells in the one of those that has the quantile

A quantile is sought where it can be: a part p of the values lies at mean − sd·√((1−p)/p) or above it, and at
mean + sd·√(p/(1−p)) or below (Cantelli's inequality). So no bounds have to be known, and none is guessed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate

from ..messages import Metrics, SiteId
from ..questions import Cells, Column, Powers, Question, difference
from .sums import BESIDES, Answer, Moments, read, together

ALL = ""  # in place of a site: all of them
QUESTIONS = 4
GROUP = 128  # columns in one question: its numbers stay below messages.MAX_SUMS
PERCENT = (5, 25, 50, 75, 95)  # the quantiles
CELLS = 72  # of a quantile in a question: two of them find a quantile to within 0.001 sd
MOST_BINS = 64  # of stats.bins
CLASSES = 64  # values that are whole numbers from 0 to below it are categories
OCTAVES = [2.0**k for k in range(-120, 129, 2)]
EDGES = (*(-edge for edge in reversed(OCTAVES)), *OCTAVES)


@dataclass(frozen=True)
class ColumnSums:
    """What the sums over some sites say of one column; nothing is left out yet."""

    column: Column
    rows: int  # examples
    n: int  # values
    missing: int
    moments: Moments | None  # None of categories, without values, and for values of 2^128 or more
    classes: list[int] = field(default_factory=list)  # how many values there are of each category
    edges: tuple[float, ...] = ()  # of the histogram
    counts: list[int] = field(default_factory=list)  # below the first edge, between edges, above the last
    quantiles: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # percent -> where it lies


Survey = Generator[Question, Answer, list[ColumnSums]]


def alike(columns: Mapping[SiteId, tuple[Column, ...]]) -> tuple[tuple[Column, ...], dict[SiteId, str]]:
    """The columns of most sites, and how each of the other sites differs."""
    votes = Counter(columns[site] for site in sorted(columns))
    usual = votes.most_common(1)[0][0] if votes else ()
    odd = (site for site in sorted(columns) if columns[site] != usual)
    return usual, {site: f"{difference(usual, columns[site])} (at most sites, here)" for site in odd}


def rounds(columns: int) -> int:
    """How many questions a survey of so many columns has."""
    return QUESTIONS * -(-columns // GROUP)


def most_counts(number: int, column: Column, *, openly: bool) -> int:
    """How many counts of a column question `number` (from 0) asks at most; `openly`: in a survey of the site
    and of all sites at once."""
    quantiles = (CELLS + 1 + 1) * len(PERCENT)
    classes = max(CLASSES, len(column.labels)) + 1 + 1
    most = (len(EDGES) + 1, classes, MOST_BINS + 2 + 1 + quantiles, quantiles)[number % QUESTIONS]
    return most * (1 + openly)


def surveys(
    columns: Sequence[Column], sites: Sequence[SiteId], bins: int, *, openly: bool
) -> Generator[dict[SiteId, Question], Mapping[SiteId, Metrics], dict[SiteId, list[ColumnSums]]]:
    """One survey of all sites; `openly` one of each site too, with the same questions' number.

    It yields what each site is asked, and is sent what each answered; where single answers stay hidden, ALL
    is asked, and the sums over all sites are sent. Returns what it found by site, that of all sites as ALL.
    """
    running = {name: survey(columns, bins) for name in (ALL, *(sites if openly else ()))}
    asked = {name: next(each) for name, each in running.items()}
    found: dict[SiteId, list[ColumnSums]] = {}
    while not found:
        if openly:
            longer = {site: _joined(asked[ALL], asked[site]) for site in sites}
            metrics = yield longer
            parts = {site: read(longer[site], metrics[site]).parts(asked[ALL]) for site in sites}
            answers = {site: own for site, (_, own) in parts.items()}
            answers[ALL] = together(common for common, _ in parts.values())
        else:
            answers = {ALL: read(asked[ALL], (yield {ALL: asked[ALL]})[ALL])}
        for name, each in running.items():
            try:
                asked[name] = each.send(answers[name])
            except StopIteration as end:
                found[name] = end.value
    return found


def _joined(first: Question, then: Question) -> Question:
    return Question((*first.cells, *then.cells), (*first.powers, *then.powers))


def survey(columns: Sequence[Column], bins: int) -> Survey:
    """The questions about all columns."""
    found: list[ColumnSums] = []
    for first in range(0, len(columns), GROUP):
        found += yield from _about(columns, range(first, min(first + GROUP, len(columns))), bins)
    return found


def _about(columns: Sequence[Column], group: Sequence[int], bins: int) -> Survey:
    answer = yield Question(cells=tuple(Cells(i, EDGES) for i in group))
    octaves = {i: Octaves.of(counts) for i, counts in zip(group, answer.counts, strict=True)}

    classes = {i: count for i in group if (count := classes_of(columns[i], octaves[i]))}
    powers = {
        i: Powers(i, exponent)
        for i in group
        if not columns[i].labels and (exponent := octaves[i].exponent) is not None
    }
    coded = tuple(Cells(i, tuple(k - 0.5 for k in range(count + 1))) for i, count in classes.items())
    answer = yield Question(coded, tuple(powers.values()))
    frequencies = dict(zip(classes, (counts[1 : -BESIDES - 1] for counts in answer.counts), strict=True))
    moments = {
        i: Moments.of(asked, pair, octaves[i].n)
        for (i, asked), pair in zip(powers.items(), answer.sums, strict=True)
    }

    histograms = {i: _histogram(m, octaves[i], bins) for i, m in moments.items() if m.spread}
    sought = {(i, percent): edges_around(m, percent) for i, m in moments.items() for percent in PERCENT}
    answer = yield _cells(histograms, sought)
    counts = dict(zip(histograms, (each[:-BESIDES] for each in answer.counts), strict=False))
    sought = _narrowed(sought, moments, answer.counts[len(histograms) :])

    answer = yield _cells({}, sought)
    sought = _narrowed(sought, moments, answer.counts)
    return [
        ColumnSums(
            columns[i], answer.rows, octaves[i].n, octaves[i].missing, moments.get(i), frequencies.get(i, []),
            histograms.get(i, ()), counts.get(i, []),
            {p: (edges[0], edges[-1]) for p in PERCENT if (edges := sought.get((i, p), ()))},
        )
        for i in group
    ]  # fmt: skip


# --- 1


@dataclass(frozen=True)
class Octaves:
    """In which octaves the values of a column lie."""

    n: int
    missing: int
    low: float  # no value is below it
    high: float  # no value is above it
    whole: bool  # all values are whole numbers

    @classmethod
    def of(cls, counts: Sequence[int]) -> Octaves:
        *there, missing, whole = counts
        full = [k for k, count in enumerate(there) if count]
        ends = (-math.inf, *EDGES, math.inf)
        low, high = (ends[full[0]], ends[full[-1] + 1]) if full else (0.0, 0.0)
        return cls(sum(there), missing, low, high, whole == sum(there))

    @property
    def exponent(self) -> int | None:
        """The values lie within ±2^exponent; None without values, and for values of 2^128 or more."""
        most = max(abs(self.low), abs(self.high))
        return None if not self.n or math.isinf(most) else math.frexp(most)[1] - 1


def classes_of(column: Column, octaves: Octaves) -> int:
    """How many categories a column may have; 0 where its values are none."""
    if column.labels:
        return len(column.labels)
    few = octaves.n and octaves.low >= -OCTAVES[0] and octaves.high <= CLASSES
    return max(1, int(octaves.high)) if octaves.whole and few else 0


# --- 3


def _histogram(moments: Moments, octaves: Octaves, bins: int) -> tuple[float, ...]:
    """About `bins` round edges over mean ± 3 sd, as far as there may be values."""
    low = max(moments.mean - 3 * moments.spread, octaves.low)
    high = min(moments.mean + 3 * moments.spread, octaves.high)
    step = round_step(max((high - low) / bins, 1.0 if octaves.whole else 0.0))
    first, last = math.floor(Decimal(low) / step), math.ceil(Decimal(high) / step)
    return tuple(sorted({float(k * step) for k in range(first, last + 1)}))


def round_step(least: float) -> Decimal:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below `least`."""
    power = math.floor(math.log10(least))
    steps = (Decimal(digits).scaleb(power) for digits in ("1", "2", "2.5", "5", "10", "20"))
    return next(step for step in steps if step >= Decimal(least))


def edges_around(moments: Moments, percent: int) -> tuple[float, ...]:
    """Edges of CELLS cells that have the quantile, for values of this mean and spread."""
    p = percent / 100
    slack = 1e-9 * moments.spread + 1e-15 * abs(moments.mean) + moments.unit  # for what was rounded
    low = moments.mean - moments.spread * math.sqrt((1 - p) / p) - slack
    high = moments.mean + moments.spread * math.sqrt(p / (1 - p)) + slack
    return _even(low, high) if moments.spread else (moments.mean,)


def _even(low: float, high: float) -> tuple[float, ...]:
    """The edges of CELLS cells; of fewer, where floats are not so close."""
    inner = (low + (high - low) * k / CELLS for k in range(1, CELLS))
    return tuple(sorted({low, high, *(edge for edge in inner if low < edge < high)}))


def rank(percent: int, n: int) -> int:
    """Which of n ascending values is the quantile: the first up to which this part of the values lies."""
    return max(1, -(-percent * n // 100))


Edges = dict[tuple[int, int], tuple[float, ...]]  # (column, percent) -> of cells; one: the quantile itself


def _cells(histograms: Mapping[int, tuple[float, ...]], sought: Edges) -> Question:
    quantiles = (Cells(i, edges) for (i, _), edges in sought.items() if len(edges) > 1)
    return Question((*(Cells(i, edges) for i, edges in histograms.items()), *quantiles))


def _narrowed(sought: Edges, moments: Mapping[int, Moments], counts: Sequence[list[int]]) -> Edges:
    """Edges in the cell that has the quantile; none where it is in no cell, as in changed data."""
    answers, found = iter(counts), dict(sought)
    for (i, percent), edges in sought.items():
        if len(edges) > 1:
            at = bisect_left(list(accumulate(next(answers)[:-BESIDES])), rank(percent, moments[i].n))
            found[i, percent] = _even(edges[at - 1], edges[at]) if 0 < at < len(edges) else ()
    return found
