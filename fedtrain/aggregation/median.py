"""The coordinate-wise median."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .base import Rule, Stack
from .trimmed_mean import trimmed

if TYPE_CHECKING:
    from .base import Rows, Vector

T = TypeVar("T")


@dataclass(frozen=True)
class Median(Rule):
    """Each coordinate's middle value, or the mean of the middle two (Yin et al. 2018, Definition 1).

    While less than half of the updates are hostile, each coordinate stays within the honest values.
    """

    @property
    def needs(self) -> int:
        return 3

    def of(self, stack: Stack[T]) -> T:
        return stack.reduce(median)


def median(rows: Rows) -> Vector:
    """The median of each coordinate, [d] of [n, d]; overwrites `rows`."""
    return trimmed(rows, len(rows))
