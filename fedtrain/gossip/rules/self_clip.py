"""Self-centred clipping: the pull of each neighbour on the peer's own model is limited to a radius."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.values import Count, NotNegative
from .base import MixingRule, distances, shortened

if TYPE_CHECKING:
    from ...exchange import Neighborhood, PeerId
    from .base import Rows, Ruling


@dataclass(frozen=True)
class SelfClip(MixingRule):
    """x ← x + Σ wⱼ (xⱼ − x)·min(1, τ/‖xⱼ − x‖), ClippedGossip (He, Karimireddy, Jaggi 2022).

    Without a radius, τ² = Σ wⱼ‖xⱼ − x‖² / δ over all but the f furthest neighbours, where δ is the weight of
    those f: the paper's choice for hostile weight δ, without knowing which peers are hostile. A hostile
    neighbour then moves x by wⱼτ at most, and a peer without hostile neighbours may be slowed down a little.
    """

    f: Count = 1  # hostile neighbours of a peer; 0: none, and the rule is the mean
    radius: NotNegative = 0.0  # τ, an L2 norm; 0: computed from the distances in each round

    @property
    def needs(self) -> int:
        return self.f + 2

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        far = distances(rows)
        radius = self.radius or self._radius(far, [near.incoming[peer] for peer in peers])
        return shortened(rows, peers, [1.0 if d <= radius else radius / d for d in far], near)

    def _radius(self, far: Sequence[float], weights: Sequence[float]) -> float:
        order = sorted(range(len(far)), key=far.__getitem__)
        near, beyond = order[: len(far) - self.f], order[len(far) - self.f :]
        hostile = sum(weights[i] for i in beyond)
        return math.sqrt(sum(weights[i] * far[i] ** 2 for i in near) / hostile) if hostile else math.inf
