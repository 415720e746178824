"""FedProx: a proximal term in the loss keeps each site's model near the global model."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.values import NotNegative
from ..learning import Context, RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class FedProx(Strategy):
    """Sites minimise F(w) + μ/2 ‖w − w_t‖²; the server averages (Li et al. 2020, Algorithm 2)."""

    mu: NotNegative = 0.01

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        return weights.add_(round.mean), state

    def correct(self, gradient: Vector, weights: Vector, context: Context) -> None:
        gradient.add_(weights - context.start, alpha=self.mu)
