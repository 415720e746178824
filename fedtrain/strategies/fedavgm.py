"""FedAvgM: momentum at the server. With Nesterov's look-ahead it is DiLoCo's outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.values import BelowOne, Positive
from ..learning import RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class FedAvgM(Strategy):
    """v ← βv + Δ, w ← w + ηv (Hsu et al. 2019, §3.3, where η is 1); nesterov: w ← w + η(βv + Δ)."""

    server_lr: Positive = 1.0
    momentum: BelowOne = 0.9
    nesterov: bool = False

    def init(self, weights: Vector) -> State:
        return {"momentum": weights.new_zeros(weights.shape)}

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        v = (state["momentum"] * self.momentum).add_(round.mean)
        if self.nesterov:
            weights.add_(round.mean, alpha=self.server_lr).add_(v, alpha=self.server_lr * self.momentum)
        else:
            weights.add_(v, alpha=self.server_lr)
        return weights, {"momentum": v}
