"""FedYogi: Yogi at the server, whose v changes by no more than Δ² at a time."""

from __future__ import annotations

from dataclasses import dataclass

from ..learning import Vector
from .fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """v ← v − (1 − β₂) Δ² sign(v − Δ²) (Reddi et al. 2021, Algorithm 2)."""

    def second_moment(self, v: Vector, delta: Vector) -> Vector:
        square = delta * delta
        return v - square * (v - square).sign_() * (1 - self.b2)
