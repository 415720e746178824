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
    """In each coordinate the middle value, or the mean of the middle two (Yin et al. 2018, Definition 1).

    While less than half of the updates are hostile, each coordinate stays within the honest ones.
    """

    @property
    def needs(self) -> int:
        return 3

    def of(self, stack: Stack[T]) -> T:
        return stack.reduce(median)


def median(rows: Rows) -> Vector:
    """What the other robust rules make of coordinates that are not trained, as well."""
    return trimmed(rows, len(rows))
