"""Centered clipping: the pull of each update on a centre is limited to a radius."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from msgspec import Meta

from ..config.values import AtLeastOne
from .base import Rule, Stack, distances, weighted_sum
from .median import median

if TYPE_CHECKING:
    import torch

    from .base import Rows, Vector

T = TypeVar("T")


@dataclass(frozen=True)
class CenteredClip(Rule):
    """v ← v + mean of (xᵢ − v)·min(1, radius/‖xᵢ − v‖), iterated (Karimireddy et al. 2021, Algorithm 2).

    Distances are over the trained floats; coordinates that are not trained move by the median. A hostile
    update moves v by at most radius/n a step. With start "last" v begins, as in the paper, at what the rule
    made of the last round (before the first round at zero). With start "zero" v begins at the global model
    or, for a peer's neighbours, at the peer's own model (self-centred clipping, He et al. 2022).
    """

    radius: Annotated[float, Meta(ge=0)] = 0.0  # L2 norm; 0: the distances' median, anew in each step
    iterations: AtLeastOne = 3  # steps; each reads all updates once
    start: Literal["median", "zero", "last"] = "median"  # median (of each coordinate) | zero | last aggregate

    @property
    def needs(self) -> int:
        return 3

    @property
    def remembers(self) -> bool:
        return self.start == "last"

    def of(self, stack: Stack[T]) -> T:
        n, left, weights = stack.count, 1.0, [0.0] * stack.count  # v = left·start + Σ weightᵢ·xᵢ
        if self.start == "last":
            stack = stack.with_last()

        def centre(rows: Rows) -> Vector:
            updates = rows[:n]
            if self.start == "zero" or not left:
                return weighted_sum(updates, weights)
            if self.start == "last":
                return weighted_sum(rows, [*weights, left])
            return weighted_sum(updates.clone(), weights).add_(median(updates).mul_(left))

        for _ in range(self.iterations):
            far = distances(stack, centre)[:n]
            shares = _shares(far, self.radius or float(far.median()))
            kept = 1 - math.fsum(shares) / n
            weights = [w * kept + share / n for w, share in zip(weights, shares, strict=True)]
            left *= kept
        return stack.reduce(centre, rest=lambda rows: median(rows[:n]))


def _shares(far: torch.Tensor, radius: float) -> list[float]:
    """min(1, radius/distance) for each distance; 1 for a distance of 0."""
    return [1.0 if d <= radius else radius / d for d in far.tolist()]
