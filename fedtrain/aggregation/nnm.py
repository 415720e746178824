"""Nearest-neighbour mixing: each update becomes the mean of those nearest to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ..config.values import Count
from .base import Stack, nearest
from .before import Mixed, PreAggregation

T = TypeVar("T")


@dataclass(frozen=True)
class NearestNeighborMixing(PreAggregation):
    """Each update becomes the plain mean of the n − f nearest to it, itself among them (Allouah et al. 2023,
    Algorithm 2).

    Distances are over the trained floats, and of equal ones the first in site order counts; coordinates that
    are not trained stay each update's own. All updates count alike. It costs n(n − 1)/2 distances, and n − f
    additions for each value that the rule reads.
    """

    f: Count = 1  # hostile updates

    def fewest(self, needs: int) -> int:
        return max(needs, 2 * self.f + 1)

    def over(self, stack: Stack[T]) -> Stack[T]:
        kept = max(1, stack.count - self.f)
        _, order = nearest(stack)
        near = [set(row[:kept]) for row in order.tolist()]
        shares = [[(i in those) / kept for i in range(stack.count)] for those in near]
        return Mixed(stack, shares, rest=False)
