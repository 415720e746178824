"""FedAdam: Adam at the server."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.values import BelowOne
from ..learning import Vector
from .adaptive import Adaptive


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """v ← β₂v + (1 − β₂)Δ² (Reddi et al. 2021, Algorithm 2)."""

    b2: BelowOne = 0.99

    def second_moment(self, v: Vector, delta: Vector) -> Vector:
        return (v * self.b2).addcmul_(delta, delta, value=1 - self.b2)
