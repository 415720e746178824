"""FedAdam: Adam at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import require
from .adaptive import Adaptive

if TYPE_CHECKING:
    from .base import Vector


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """v ← β₂v + (1 − β₂)Δ² (Reddi et al. 2021, Algorithm 2)."""

    b2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.b2 < 1, "strategy.b2", f"{self.b2} must be in [0, 1)")

    def second_moment(self, v: Vector, delta: Vector) -> Vector:
        return (v * self.b2).addcmul_(delta, delta, value=1 - self.b2)
