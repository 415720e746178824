"""FedDyn: a regulariser that each site adapts makes the sites' minima that of the whole."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.values import NotNegative
from ..learning import Context, Contribution, Found, Local, RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class FedDyn(Strategy):
    """Acar et al. 2021, Algorithm 1.

    A site remembers the sum of its counted deltas, `moved`, and the server that of all sites. The paper's
    ∇Lₖ(θₖ) is −α · moved at site k, and its h is −α · moved / m at the server. With α = 0 there is no
    regulariser and no h, which leaves FedAvg of equal weights.
    """

    alpha: NotNegative = 0.01
    max_weight, weighs, exact = 1.0, ("equal",), True

    def init(self, weights: Vector) -> State:
        return {"moved": weights.new_zeros(len(weights)).double()}

    def site_init(self, start: Vector) -> State:
        return {"moved": start.new_zeros(len(start)).double()}

    def correct(self, gradient: Vector, weights: Vector, context: Context) -> None:
        gradient.add_(context.memory["moved"] + weights - context.start, alpha=self.alpha)

    def finish(self, found: Found, local: Local) -> Contribution:
        delta = local.as_summed("delta", found.delta)
        return Contribution(delta, 1.0, memory={"moved": local.memory["moved"] + delta})

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        moved = state["moved"] + round.sums["delta"]
        weights.add_(round.mean)
        if self.alpha:  # −h/α does not depend on α, so α = 0 is no limit of it
            weights.add_((moved / round.registered).to(weights.dtype))
        return weights, {"moved": moved}
