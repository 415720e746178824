"""FedAdagrad: Adagrad at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.values import BelowOne
from .adaptive import Adaptive

if TYPE_CHECKING:
    from ..learning import Vector


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """v ← v + Δ² (Reddi et al. 2021, Algorithm 2)."""

    b1: BelowOne = 0.0  # as in the paper's experiments: Adagrad has no momentum

    def second_moment(self, v: Vector, delta: Vector) -> Vector:
        return v.addcmul(delta, delta)
