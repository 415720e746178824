"""Small cells: counts of so few examples that they might be recognized, and counts that would tell those.

A count from 1 to least − 1 is hidden. The sum of a line (categories of one site, or one category over all
sites) is known, so a hidden count alone would be that sum less the others: each line hides none, or two or
more that make up `least` together, the smallest first. A count of 0 is no secret. (Complementary suppression,
as statistical offices do it: Hundepool et al., Statistical Disclosure Control, 2012, chapter 4.)
"""

from __future__ import annotations

from collections.abc import Sequence

Table = Sequence[Sequence[int]]  # [rows][cells]


def hidden(table: Table, least: int, secret: int | None = None) -> list[list[bool]]:
    """Which counts must not be shown [rows][cells], where the sums of rows are known. Of several rows the
    first is the sum of the others. `secret`: only so many cells of a row are for being small; None: all."""
    hide = [[0 < count < least and i < (secret or len(row)) for i, count in enumerate(row)] for row in table]
    before = -1
    while before != (before := sum(map(sum, hide))):
        for counts, marks in zip(table, hide, strict=True):
            close(counts, marks, least)
        if len(table) > 1:
            for cell in range(len(table[0])):
                column = [row[cell] for row in hide]
                close([row[cell] for row in table], column, least, first=list(map(any, hide)))
                for row, mark in zip(hide, column, strict=True):
                    row[cell] = mark
    return hide


def close(counts: Sequence[int], marks: list[bool], least: int, first: Sequence[bool] = ()) -> None:
    """Mark more counts of a line, the smallest of the `first` ones before others, until no marked one follows
    from those that are not."""
    later = [not mark for mark in first] or [False] * len(counts)
    for i in sorted(range(len(counts)), key=lambda i: (later[i], counts[i])):
        marked = [count for count, mark in zip(counts, marks, strict=True) if mark]
        if not marked or (len(marked) > 1 and sum(marked) >= least):
            return
        if counts[i]:
            marks[i] = True


def shown(counts: Sequence[int], marks: Sequence[bool]) -> list[int | None]:
    """The counts of a line as people see them; None for a hidden one."""
    return [None if mark else count for count, mark in zip(counts, marks, strict=True)]
