"""MimeLite: local steps use the server's momentum, which no local step changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config.values import BelowOne, Positive
from ..learning import Bounded, Context, Contribution, Found, Local, RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class MimeLite(Strategy):
    """Karimireddy et al. 2021, "Breaking the centralized barrier", Algorithm 1 (MimeLite) with momentum SGD:
    local steps along (1 − β)g + βm; then m ← (1 − β)∇f(x) + βm, from the sites' full gradients at x."""

    plain_sgd: ClassVar[bool] = True
    momentum: BelowOne = 0.9  # the paper's β
    clip: Positive = 10.0  # bound on a coordinate of a site's gradient
    down, max_weight, weighs = ("m",), 1.0, ("equal",)

    @property
    def up(self) -> tuple[Bounded, ...]:
        return (Bounded("gradient", self.clip),)

    def init(self, weights: Vector) -> State:
        return {"m": weights.new_zeros(len(weights))}

    def correct(self, gradient: Vector, weights: Vector, context: Context) -> None:
        gradient.mul_(1 - self.momentum).add_(context.down["m"], alpha=self.momentum)

    def finish(self, found: Found, local: Local) -> Contribution:
        return Contribution(found.delta, 1.0, {"gradient": local.gradient(local.start)})

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        gradient = (round.sums["gradient"] / round.sites).to(weights.dtype)
        m = (state["m"] * self.momentum).add_(gradient, alpha=1 - self.momentum)
        return weights.add_(round.mean), {"m": m}
