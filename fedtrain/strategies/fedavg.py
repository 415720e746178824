"""FedAvg: the global weights move by the mean of the sites' deltas."""

from __future__ import annotations

from dataclasses import dataclass

from ..learning import RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class FedAvg(Strategy):
    """Federated averaging (McMahan et al. 2017, Algorithm 1)."""

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        return weights.add_(round.mean), state
