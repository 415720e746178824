"""A trace: measured sites in a file of CSV or JSON lines, one site a line.

    site,seconds_per_example,down_mbit,up_mbit,latency_s,dropout,available,period_s
    phone-1,0.012,40,8,0.05,0.02,0-25200 79200-86400,86400

All columns may be left out, and cells may be empty: there simulate's keys decide. Without the column `site`
each simulated site is one of the lines, drawn by run.seed. `available` has the windows in which a site is
there, in seconds of each period; in JSON lines they are pairs, as in [[0, 25200], [79200, 86400]].
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...config import Config, SimulateConfig
from ...digest import seed_of
from ...errors import ConfigError, nearest
from ...messages import SiteId

NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
INSTEAD = {  # column -> the keys of [simulate] that it stands in place of
    "seconds_per_example": ("speeds", "example_time"),
    "down_mbit": ("down_mbit",),
    "up_mbit": ("up_mbit",),
    "latency_s": ("latency",),
    "dropout": ("dropout",),
    "available": ("availability",),
}


class Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One site as it was measured; None: the trace does not say."""

    site: SiteId | None = None
    seconds_per_example: Positive | None = None
    down_mbit: Positive | None = None
    up_mbit: Positive | None = None
    latency_s: NotNegative | None = None
    dropout: Annotated[float, Meta(ge=0, lt=1)] | None = None
    available: list[tuple[NotNegative, NotNegative]] | None = None
    period_s: Positive = 86_400.0


class Trace:
    """The lines of a trace, and who is which."""

    def __init__(self, path: Path, seed: int, lines: dict[int, Line]) -> None:
        """`lines`: by their numbers in the file. ConfigError where they don't fit each other."""
        self._path, self._seed, self._lines = path, seed, list(lines.values())
        self.columns = {c for line in self._lines for c in INSTEAD if getattr(line, c) is not None}
        self._by_site: dict[SiteId, Line] = {}
        for number, line in lines.items():
            if line.site in self._by_site:
                raise mistake(path, number, f"the site {line.site} has a line already")
            if (line.site is None) != (self._lines[0].site is None):
                raise mistake(path, number, "either all lines name a site, or none does")
            if line.site is not None:
                self._by_site[line.site] = line

    def check(self, sites: Sequence[SiteId]) -> None:
        """ConfigError unless there is a line for each of these sites."""
        if self._by_site and (unknown := next((s for s in sites if s not in self._by_site), None)):
            raise ConfigError(
                f"simulate.trace: {self._path} has no line for the site {unknown}."
                f"{nearest(unknown, self._by_site)} Without the column site, lines are drawn."
            )

    def __getitem__(self, site: SiteId) -> Line:
        """What was measured of a site."""
        return self._by_site.get(site) or self._lines[seed_of(self._seed, "trace", site) % len(self._lines)]


def read_trace(config: Config) -> Trace:
    """The file that simulate.trace names; ConfigError with the number of a line that is wrong."""
    path, text = config.root / config.simulate.trace, _text(config)
    lines = dict(_lines(path, text))
    if not lines:
        raise ConfigError(f"simulate.trace: {path} has no line for any site.")
    trace, default = Trace(path, config.run.seed, lines), SimulateConfig()
    for column in sorted(trace.columns):
        for key in INSTEAD[column]:
            if getattr(config.simulate, key) != getattr(default, key):
                raise ConfigError(
                    f"simulate.{key}: the trace {path} has it in its column {column}. Leave one of them out."
                )
    return trace


def traced(config: Config) -> dict[str, str]:
    """The trace's SHA-256, which must not change between the rounds of a run; {} without a trace."""
    if not config.simulate.trace:
        return {}
    return {"simulate.trace": hashlib.sha256(_text(config).encode()).hexdigest()}


def _text(config: Config) -> str:
    path = config.root / config.simulate.trace
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"simulate.trace: {path} can't be read: {e}.") from None


def _lines(path: Path, text: str) -> Iterator[tuple[int, Line]]:
    """Each site's line with its number."""
    rows = _json_rows(path, text) if text.lstrip()[:1] == "{" else _csv_rows(path, text)
    for number, row in rows:
        try:
            line = msgspec.convert(row, Line, strict=False)
        except msgspec.ValidationError as e:
            raise mistake(path, number, str(e)) from None
        figures = [getattr(line, name) for name in ("period_s", *INSTEAD) if name != "available"]
        figures += [moment for window in line.available or () for moment in window]
        if not all(math.isfinite(figure) for figure in figures if figure is not None):
            raise mistake(path, number, "numbers must be finite")
        if line.available is not None:
            line.period_s = exact(line.period_s)
            line.available = [(exact(begin), exact(end)) for begin, end in line.available]
            _check_windows(path, number, line)
        yield number, line


def _check_windows(path: Path, number: int, line: Line) -> None:
    """ConfigError for windows that are empty, that meet, or that are not in order in the period."""
    windows = line.available or []
    if not windows:
        raise mistake(path, number, "available is empty: the site would never be there. Leave the line out")
    for begin, end in windows:
        if not begin < end <= line.period_s:
            raise mistake(
                path, number, f"the window {begin:g}-{end:g} must begin before its end, and end "
                f"within period_s = {line.period_s:g}",
            )  # fmt: skip
    for (_, end), (begin, _) in pairwise(windows):
        if begin <= end:
            raise mistake(path, number, f"the window from {begin:g} must begin after {end:g}")


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line)
            except msgspec.DecodeError as e:
                raise mistake(path, number, f"no JSON: {e}") from None


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, object]]:
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    for name in rows.fieldnames or ():
        if name not in Line.__struct_fields__:
            raise mistake(path, 1, f"unknown column {name!r}.{nearest(name, Line.__struct_fields__)}")
    for row in rows:
        if None in row or None in row.values():
            raise mistake(path, rows.line_num, f"it must have {len(rows.fieldnames or ())} cells")
        cells: dict[str, Any] = {name: cell.strip() for name, cell in row.items() if cell.strip()}
        if "available" in cells:
            cells["available"] = [window.split("-") for window in cells["available"].split()]
        yield rows.line_num, cells


def exact(seconds: float) -> float:
    """The nearest whole number of 2^-10 s, of which sums are exact."""
    return round(seconds * 1024) / 1024


def mistake(path: Path, number: int, what: str) -> ConfigError:
    """The error of one line."""
    return ConfigError(f"simulate.trace: {path}, line {number}: {what}.")
