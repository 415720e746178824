"""FedAdam: Adam at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import require
from . import adaptive
from .base import Strategy

if TYPE_CHECKING:
    from .base import State, Vector


@dataclass(frozen=True)
class FedAdam(Strategy):
    """v ← β₂v + (1 − β₂)Δ² (Reddi et al. 2021, Algorithm 2)."""

    server_lr: float = 0.1
    b1: float = 0.9
    b2: float = 0.99
    tau: float = 1e-3  # adaptivity floor, the paper's τ

    def __post_init__(self) -> None:
        adaptive.check(self)
        require(0 <= self.b2 < 1, "strategy.b2", f"{self.b2} must be in [0, 1)")

    def init(self, weights: Vector) -> State:
        return adaptive.init(self, weights)

    def step(self, weights: Vector, state: State, mean_delta: Vector) -> tuple[Vector, State]:
        v = (state["v"] * self.b2).addcmul_(mean_delta, mean_delta, value=1 - self.b2)
        return adaptive.step(self, weights, state, mean_delta, v)
