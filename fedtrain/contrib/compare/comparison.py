"""Runs side by side: how they went, and by which settings they differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from ...tracking.board import Board
from ...tracking.log import read
from ...tracking.runs import Summary, meta_of, settings_of, summary_of

CARRIED_OUT = ("parallel", "simulate")  # sections that a store has whole
Column = list[str | None]  # a value of each run; None where a run has none


class Cost(msgspec.Struct, frozen=True):
    """What a run's committed rounds have taken."""

    seconds: float | None  # None where no round has a time
    bytes: int  # of updates and models, both ways


class Comparison(msgspec.Struct, frozen=True):
    """Of some runs, in the order in which they were named."""

    runs: list[Summary]
    costs: list[Cost]
    settings: dict[str, Column]  # those that decide the model and are not the same in all
    others: dict[str, Column]  # of how it was worked at, such as parallel.zero


def compared(folders: Sequence[Path]) -> Comparison:
    """These run directories side by side. A site's directory, which has no settings, differs in none."""
    settings = [settings_of(folder) for folder in folders]
    deciding = {key for found in settings for key in found}
    others = [_carried_out(folder, deciding) for folder in folders]
    runs, costs = [*map(summary_of, folders)], [*map(_cost, folders)]
    return Comparison(runs, costs, _differing(settings), _differing(others))


def _differing(settings: Sequence[Mapping[str, str]]) -> dict[str, Column]:
    """Those that are not the same in all runs that have any."""
    known = [found for found in settings if found]
    return {
        key: [found.get(key) for found in settings]
        for key in sorted({key for found in known for key in found})
        if len({found.get(key) for found in known}) > 1
    }


def _carried_out(folder: Path, deciding: Collection[str]) -> dict[str, str]:
    meta = meta_of(folder)
    found = {f"{of}.{key}": repr(v) for of in CARRIED_OUT for key, v in meta.get(of, {}).items()}
    return {key: value for key, value in found.items() if key not in deciding}


def _cost(folder: Path) -> Cost:
    rounds = Board.of(read(folder)).history.values()
    seconds = [row.seconds for row in rounds if row.seconds is not None]
    return Cost(sum(seconds) if seconds else None, sum(row.bytes_in + row.bytes_out for row in rounds))
