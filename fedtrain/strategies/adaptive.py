"""The common part of FedAdagrad, FedAdam and FedYogi: Reddi et al. 2021, Algorithm 2, but the line for v."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import require
from .base import Strategy

if TYPE_CHECKING:
    from .base import State, Vector


@dataclass(frozen=True)
class Adaptive(Strategy):
    """m ← β₁m + (1 − β₁)Δ, w ← w + η m / (√v + τ), given the new v of `second_moment`."""

    server_lr: float = 0.1
    b1: float = 0.9
    tau: float = 1e-3  # adaptivity floor, the paper's τ

    def __post_init__(self) -> None:
        require(0 < self.server_lr < math.inf, "strategy.server_lr", f"{self.server_lr} must be positive")
        require(0 <= self.b1 < 1, "strategy.b1", f"{self.b1} must be in [0, 1)")
        require(0 < self.tau < math.inf, "strategy.tau", f"{self.tau} must be positive")

    def second_moment(self, v: Vector, delta: Vector) -> Vector:
        """The next v, a new vector."""
        raise NotImplementedError("an adaptive strategy says how v moves")

    def init(self, weights: Vector) -> State:
        """m₋₁ = 0, and v₋₁ = τ², the smallest value that the paper allows."""
        return {"m": weights.new_zeros(weights.shape), "v": weights.new_full(weights.shape, self.tau**2)}

    def step(self, weights: Vector, state: State, mean_delta: Vector) -> tuple[Vector, State]:
        v = self.second_moment(state["v"], mean_delta)
        m = (state["m"] * self.b1).add_(mean_delta, alpha=1 - self.b1)
        return weights.addcdiv_(m, v.sqrt().add_(self.tau), value=self.server_lr), {"m": m, "v": v}
