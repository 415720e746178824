"""Graphs that are the same in every round. Each function gives, for every index, the indices it sends to."""

from __future__ import annotations

import math

from .mixing import Out


def ring(n: int) -> Out:
    """Each peer exchanges with the peer before it and the peer after it."""
    return [sorted({(i - 1) % n, (i + 1) % n} - {i}) for i in range(n)]


def torus(n: int) -> Out:
    """A grid whose borders meet, as near to a square as n allows; for a prime n, a ring."""
    rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    columns = n // rows
    out = []
    for i in range(n):
        row, column = divmod(i, columns)
        same_row = {row * columns + (column + step) % columns for step in (-1, 1)}
        same_column = {(row + step) % rows * columns + column for step in (-1, 1)}
        out.append(sorted((same_row | same_column) - {i}))
    return out


def complete(n: int) -> Out:
    """Each peer exchanges with all others."""
    return [[j for j in range(n) if j != i] for i in range(n)]


def star(n: int) -> Out:
    """The first member is the hub: it has as many neighbours as an aggregator has sites."""
    return [list(range(1, n)), *([0] for _ in range(n - 1))]


def exponential(n: int) -> Out:
    """i sends to i + 1, i + 2, i + 4, ... (Ying et al. 2021, §3): log₂ n edges, each in one direction."""
    return [[(i + hop) % n for hop in hops(n)] for i in range(n)]


def hops(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << k for k in range((n - 1).bit_length())]
