"""The coordinate-wise median (Yin et al. 2018, Definition 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .base import Rule, Stack

if TYPE_CHECKING:
    from .base import Rows, Vector

T = TypeVar("T")


@dataclass(frozen=True)
class Median(Rule):
    """The middle value, or the mean of the middle two. While under half of the updates are hostile, each
    coordinate stays within the honest ones."""

    def of(self, stack: Stack[T]) -> T:
        low, high = (stack.count - 1) // 2, stack.count // 2

        def middle(rows: Rows) -> Vector:
            ordered = rows.sort(0).values
            return (ordered[low] + ordered[high]).div_(2)

        return stack.reduce(middle)
