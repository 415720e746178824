"""Krum: the single update that is closest to its nearest neighbours."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..config.values import Count
from .base import Rule, Stack, Vectors, nearest, weighted_sum
from .median import median

if TYPE_CHECKING:
    from .base import Vector

T = TypeVar("T")


class Choosing(Rule):
    """Base of rules that take the plain mean of some updates and ignore the others; they define `chosen`."""

    def chosen(self, stack: Stack[Any]) -> Collection[int]:
        """The indices of the updates that count, at least one."""
        raise NotImplementedError("a rule says which it chooses")

    def of(self, stack: Stack[T]) -> T:
        return self._mean(stack, self.chosen(stack))

    def judged(self, rows: Vector) -> tuple[Vector, Sequence[float]]:
        stack = Vectors(rows)
        chosen = self.chosen(stack)
        return self._mean(stack, chosen), [float(i in chosen) for i in range(stack.count)]

    def _mean(self, stack: Stack[T], chosen: Collection[int]) -> T:
        weights = [float(i in chosen) for i in range(stack.count)]
        return stack.reduce(lambda rows: weighted_sum(rows, weights).div_(len(chosen)), rest=median)


@dataclass(frozen=True)
class Krum(Choosing):
    """The update with the least summed squared distance to its n − f − 2 nearest (Blanchard et al. 2017, §3).

    Distances are over the trained floats; coordinates that are not trained move by the median. Ties go to the
    first in site order. With fewer than f + 3 updates, each one's distance to its single nearest counts.
    """

    f: Count = 1  # hostile updates that the rule withstands

    @property
    def needs(self) -> int:
        return 2 * self.f + 3

    def chosen(self, stack: Stack[Any]) -> Collection[int]:
        return by_score(stack, self.f)[:1]


def by_score(stack: Stack[Any], f: int) -> list[int]:
    """Indices of the rows, the best Krum score first."""
    squares, _ = nearest(stack)
    closest = squares[:, 1 : 1 + max(1, stack.count - f - 2)]
    order: list[int] = closest.sum(dim=1).sort(stable=True).indices.tolist()
    return order
