"""The common part of FedAdagrad, FedAdam and FedYogi: Reddi et al. 2021, Algorithm 2, but the line for v."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.values import BelowOne, Positive
from ..learning import RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class Adaptive(Strategy):
    """m ← β₁m + (1 − β₁)Δ, w ← w + η m / (√v + τ), given the new v of `second_moment`."""

    server_lr: Positive = 0.1
    b1: BelowOne = 0.9
    tau: Positive = 1e-3  # adaptivity floor, the paper's τ

    def second_moment(self, v: Vector, delta: Vector) -> Vector:
        """The next v, a new vector."""
        raise NotImplementedError("an adaptive strategy says how v moves")

    def init(self, weights: Vector) -> State:
        """m₋₁ = 0, and v₋₁ = τ², the smallest value that the paper allows."""
        return {"m": weights.new_zeros(weights.shape), "v": weights.new_full(weights.shape, self.tau**2)}

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        v = self.second_moment(state["v"], round.mean)
        m = (state["m"] * self.b1).add_(round.mean, alpha=1 - self.b1)
        return weights.addcdiv_(m, v.sqrt().add_(self.tau), value=self.server_lr), {"m": m, "v": v}
