"""The statistics of a run as people get them: what may be shown, as a table, as HTML and as JSON."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from html import escape

import msgspec

from .. import __version__
from ..errors import ConfigError, nearest
from ..messages import SiteId
from ..questions import Column
from .small import close, hidden, shown
from .survey import ALL, ColumnSums, rank

BARS = "▁▂▃▄▅▆▇█"
EQUATIONS, FEW = 3, 8
HIDDEN = "·"  # a bar of a histogram whose count is not shown


class Histogram(msgspec.Struct, frozen=True):
    """Counts below the first edge, between edges, and from the last one on; None: not shown."""

    edges: list[float]
    counts: list[int | None]  # one more than edges

    def __str__(self) -> str:
        most = max(count or 0 for count in self.counts)
        return "".join(
            HIDDEN if count is None else " " if not count else BARS[(len(BARS) - 1) * count // most]
            for count in self.counts
        )


class ColumnStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One column, of all sites or of one. None: not shown, or there is none."""

    name: str
    n: int | None  # values
    missing: int | None
    mean: float | None = None
    sd: float | None = None  # with n - 1
    quantiles: dict[str, float | None] = {}  # "5%", "25%", …: each to within `within`
    within: float | None = None
    frequencies: dict[str, int | None] = {}  # by category; in it None: not shown
    histogram: Histogram | None = None


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of the data of several sites; statistics.json as it stands here.

    >>> found = fedtrain.stats("examples/heart")
    >>> found["age"].mean
    53.12
    """

    run: str
    sites: list[SiteId]  # whose data it is
    left_out: dict[SiteId, str]  # sites left out, with how their columns differ from most sites'
    examples: int
    masks: bool  # only sums over all sites were known
    min_cell: int  # smaller counts are not shown
    bins: int | None = None  # stats.bins; not kept by an older version
    columns: list[ColumnStatistics]
    by_site: dict[SiteId, list[ColumnStatistics]]
    fingerprint: str  # SHA-256 of the columns: names, types, widths and categories
    fedtrain: str = __version__

    def __getitem__(self, name: str) -> ColumnStatistics:
        """A column of all sites. ConfigError for one that is not there."""
        for column in self.columns:
            if column.name == name:
                return column
        raise ConfigError(f"there is no column {name!r}.{nearest(name, [c.name for c in self.columns])}")

    def lines(self) -> Iterator[str]:
        """The table for a terminal."""
        yield f"{self.run}: {self._about()}"
        for heads, rows in self._tables():
            yield ""
            whole = [heads, *rows]
            widths = [max(map(len, cells)) for cells in zip(*whole, strict=True)]
            for row in whole:
                yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for site, why in self.left_out.items():
            yield f"\n{site} is left out: {why}"

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        tables = "".join(
            f"<table><tr>{_html_row('th', heads)}</tr>"
            + "".join(f"<tr>{_html_row('td', row)}</tr>" for row in rows)
            + "</table>"
            for heads, rows in self._tables()
        )
        left_out = "".join(
            f"<p>{escape(site)} is left out: {escape(why)}</p>" for site, why in self.left_out.items()
        )
        return f"<p><b>{escape(self.run)}</b>: {escape(self._about())}</p>{tables}{left_out}"

    def _about(self) -> str:
        sites = f"{len(self.sites)} sites" if len(self.sites) != 1 else self.sites[0]
        how = ", known only as sums over all of them" if self.masks else ""
        small = f"; counts below {self.min_cell} are not shown" if self.min_cell > 1 else ""
        return f"{self.examples:,} examples of {sites}{how}{small}"

    def _tables(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        """Heads and rows, of numbers and of categories; each column first of all sites, then by site."""
        several = bool(self.by_site)
        by_name = [("all", self.columns), *self.by_site.items()]
        numbers, categories = list[list[str]](), list[list[str]]()
        quantiles = next((list(column.quantiles) for column in self.columns if column.quantiles), [])
        for same in zip(*(columns for _, columns in by_name), strict=True):
            for (site, _), column in zip(by_name, same, strict=True):
                row = [column.name, *([site] if several else []), _count(column.n), _count(column.missing)]
                if same[0].frequencies:
                    categories.append([*row, _frequencies(column)])
                else:
                    numbers.append([*row, *_numbers(column, quantiles)])
        heads = ["COLUMN", *(["SITE"] if several else []), "N", "MISSING"]
        if numbers:
            yield [*heads, "MEAN", "SD", *quantiles, "HISTOGRAM"], numbers
        if categories:
            yield [*heads, "FREQUENCIES"], categories


def _numbers(column: ColumnStatistics, quantiles: Sequence[str]) -> list[str]:
    every = [column.mean, column.sd, *(column.quantiles.get(name) for name in quantiles)]
    return [*map(_number, every), "" if column.histogram is None else str(column.histogram)]


def _frequencies(column: ColumnStatistics) -> str:
    if column.frequencies and all(count is None for count in column.frequencies.values()):
        return "hidden"
    return ", ".join(
        f"{name} {_count(count)}" + (f" ({100 * count / column.n:.0f}%)" if count and column.n else "")
        for name, count in column.frequencies.items()
    )


def _count(count: int | None) -> str:
    return "hidden" if count is None else f"{count}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


# --- what may be shown of sums


def fingerprint(columns: Sequence[Column]) -> str:
    """SHA-256 of what the columns are; equal at all sites whose data fits together."""
    return hashlib.sha256(msgspec.json.encode(list(columns))).hexdigest()


def report(
    run: str,
    found: Mapping[SiteId, Sequence[ColumnSums]],
    sites: Sequence[SiteId],
    min_cell: int,
    bins: int,
    *,
    masks: bool,
    left_out: Mapping[SiteId, str],
) -> Statistics:
    """The statistics without what would tell of fewer than `min_cell` examples. `found`: as survey.surveys
    returns it."""
    names = list(found)
    names.sort(key=lambda name: name != ALL)
    columns: dict[SiteId, list[ColumnStatistics]] = {name: [] for name in names}
    for sums in zip(*(found[name] for name in names), strict=True):
        for name, column in zip(names, _columns(sums, min_cell), strict=True):
            columns[name].append(column)
    return Statistics(
        run=run, sites=list(sites), left_out=dict(left_out), examples=found[ALL][0].rows, masks=masks,
        min_cell=min_cell, bins=bins, columns=columns.pop(ALL), by_site=columns,
        fingerprint=fingerprint([sums.column for sums in found[ALL]]),
    )  # fmt: skip


def _columns(every: Sequence[ColumnSums], min_cell: int) -> list[ColumnStatistics]:
    """One column, of all sites first and then by site."""
    column = every[0].column
    least = min_cell * column.width
    used = max((k + 1 for k, count in enumerate(every[0].classes) if count), default=0)
    names = column.labels or tuple(map(str, range(used)))
    there = _shown([[sums.n, sums.missing] for sums in every], least, secret=1)  # few missing are no secret
    classes = _shown([(sums.classes + [0] * len(names))[: len(names)] for sums in every], least)
    found = []
    histograms = [[] if names else _shown([sums.counts], least)[0] for sums in every]
    categories = [bool(sums.classes) for sums in every]
    secret = _secret_moments([sums.n for sums in every], categories, classes if names else histograms)
    for sums, (n, missing), counts, bars, hide in zip(every, there, classes, histograms, secret, strict=True):
        if n is None or sums.n < least or (sums.moments is None and not names):
            found.append(ColumnStatistics(name=column.name, n=n, missing=missing))
            continue
        known = None if hide else sums.moments
        found.append(
            ColumnStatistics(
                name=column.name, n=n, missing=missing,
                mean=None if known is None else known.mean, sd=None if known is None else known.sd,
                quantiles={f"{percent}%": None if known is None else _quantile(sums, percent, least)
                           for percent in sums.quantiles},
                within=max((b - a for a, b in sums.quantiles.values()), default=None),
                frequencies=dict(zip(names, counts, strict=True)),
                histogram=Histogram(list(sums.edges), bars) if bars else None,
            )
        )  # fmt: skip
    return found


def _secret_moments(
    values: Sequence[int], categories: Sequence[bool], counts: Sequence[Sequence[int | None]]
) -> list[bool]:
    """Where the mean and the standard deviation must not be shown: with the sum of a line they are three
    equations for its hidden counts. A histogram with FEW cells in use may be of as many values."""
    secret = []
    for of_categories, line in zip(categories, counts, strict=True):
        few = of_categories or len(line) - line.count(0) <= FEW
        secret.append(few and 0 < line.count(None) <= EQUATIONS)
    if len(values) > 1:  # one site's alone are those of all less the others'
        close(values, secret, 1)
    return secret


def _shown(table: list[list[int]], least: int, secret: int | None = None) -> list[list[int | None]]:
    return [shown(counts, marks) for counts, marks in zip(table, hidden(table, least, secret), strict=True)]


def _quantile(sums: ColumnSums, percent: int, least: int) -> float | None:
    return roundest(*sums.quantiles[percent]) if _may_tell(sums.n, percent, least) else None


def _may_tell(n: int, percent: int, least: int) -> bool:
    """Whether a quantile of n values has `least` of them at each side."""
    return least <= rank(percent, n) <= n - least + 1


def roundest(low: float, high: float) -> float:
    """The number with the fewest digits from `low` to `high`."""
    if low >= high:
        return low
    exact = Decimal(low), Decimal(high)
    digits = -math.floor(math.log10(high - low)) - 1
    while (found := Decimal(low).quantize(Decimal(1).scaleb(-digits), ROUND_CEILING)) > exact[1]:
        digits += 1
    return float(found) + 0.0  # no -0.0


# --- what may be shown of what was shown with a smaller min_cell


def stricter(found: Statistics, min_cell: int) -> Statistics:
    """The same with a larger `min_cell`. A count that is hidden already is taken for 1, less than it is: so
    more may be hidden than `report` would hide of the sums, which nobody has any more."""
    narrowed = [
        _narrowed(every, min_cell, found.examples)
        for every in zip(found.columns, *found.by_site.values(), strict=True)
    ]
    columns, *by_site = (list(each) for each in zip(*narrowed, strict=True))
    return msgspec.structs.replace(
        found, min_cell=min_cell, columns=columns, by_site=dict(zip(found.by_site, by_site, strict=True))
    )


def _narrowed(every: Sequence[ColumnStatistics], min_cell: int, examples: int) -> list[ColumnStatistics]:
    """One column, of all sites first and then by site, as in _columns."""
    first = every[0]
    if first.n is None or first.missing is None:  # nor is known how many values an example has
        return [ColumnStatistics(name=each.name, n=None, missing=None) for each in every]
    least = min_cell * ((first.n + first.missing) // max(1, examples))
    values = [_at_least([each.n, each.missing]) for each in every]
    there = [
        (None if each.n is None else n, None if each.missing is None else missing)
        for each, (n, missing) in zip(every, _shown(values, least, secret=1), strict=True)
    ]
    # what a site whose n is hidden has of each category is not known
    whole = all(each.n is not None for each in every)
    classes = _shown(
        [_at_least([*each.frequencies.values()]) or [0] * len(first.frequencies) for each in every], least
    )
    bars = [_shown([_at_least(each.histogram.counts)], least)[0] if each.histogram else [] for each in every]
    categories = bool(first.frequencies)
    secret = _secret_moments(
        [n for n, _ in values], [categories] * len(every), classes if categories else bars
    )
    return [
        ColumnStatistics(name=old.name, n=n, missing=missing)
        if n is None or n < least or not whole
        else ColumnStatistics(
            name=old.name, n=n, missing=missing, within=old.within,
            mean=None if hide else old.mean, sd=None if hide else old.sd,
            quantiles={percent: None if hide or not _may_tell(n, int(percent[:-1]), least) else at
                       for percent, at in old.quantiles.items()},
            frequencies=dict(zip(old.frequencies, counts, strict=True)),
            histogram=old.histogram and Histogram(old.histogram.edges, cells),
        )
        for old, (n, missing), counts, cells, hide in zip(every, there, classes, bars, secret, strict=True)
    ]  # fmt: skip


def _at_least(counts: Sequence[int | None]) -> list[int]:
    return [1 if count is None else count for count in counts]
