"""Graphs that are the same in every round. Each gives, for every index, the indices that it tells."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .mixing import Out


def ring(n: int) -> Out:
    """Each peer talks to the one before it and the one after it."""
    return [sorted({(i - 1) % n, (i + 1) % n} - {i}) for i in range(n)]


def torus(n: int) -> Out:
    """A grid whose borders meet, as near to a square as n allows; of a prime number of peers, a ring."""
    rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    columns = n // rows
    out = []
    for i in range(n):
        row, column = divmod(i, columns)
        beside = {row * columns + (column + step) % columns for step in (-1, 1)}
        above = {(row + step) % rows * columns + column for step in (-1, 1)}
        out.append(sorted((beside | above) - {i}))
    return out


def complete(n: int) -> Out:
    return [[j for j in range(n) if j != i] for i in range(n)]


def star(n: int) -> Out:
    """The first member is the hub: it has as many neighbours as an aggregator has sites."""
    return [list(range(1, n)), *([0] for _ in range(n - 1))]


def exponential(n: int) -> Out:
    """i tells i + 1, 2, 4, ... (Ying et al. 2021, §3): log₂ n neighbours, and each in one direction."""
    return [[(i + hop) % n for hop in hops(n)] for i in range(n)]


def hops(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << k for k in range((n - 1).bit_length())]
