"""The geometric median: the point with the least sum of distances to the updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..config.values import AtLeastOne
from .base import Rule, Stack, distances, weighted_sum
from .median import median

if TYPE_CHECKING:
    from .base import Rows, Vector

T = TypeVar("T")


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """Smoothed Weiszfeld steps from the coordinate-wise median (Pillutla et al. 2022, Algorithm 1).

    Distances are over the trained floats; coordinates that are not trained move by the median. All updates
    have the same weight: the paper weights them by examples, but a hostile site may claim any number.
    """

    iterations: AtLeastOne = 8  # Weiszfeld steps; each reads all updates once

    @property
    def needs(self) -> int:
        return 3

    def of(self, stack: Stack[T]) -> T:
        weights: list[float] = []

        def centre(rows: Rows) -> Vector:
            return weighted_sum(rows, weights) if weights else median(rows)

        for _ in range(self.iterations):
            far = distances(stack, centre)
            inverse = far.clamp(min=max(1e-6 * float(far.median()), 1e-300)).reciprocal()
            weights = (inverse / inverse.sum()).tolist()
        return stack.reduce(centre, rest=median)
