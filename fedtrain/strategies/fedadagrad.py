"""FedAdagrad: Adagrad at the server."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.values import BelowOne
from ..learning import Vector
from .adaptive import Adaptive


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """v ← v + Δ² (Reddi et al. 2021, Algorithm 2)."""

    b1: BelowOne = 0.0  # as in the paper's experiments: Adagrad has no momentum

    def second_moment(self, v: Vector, delta: Vector) -> Vector:
        return v.addcmul(delta, delta)
