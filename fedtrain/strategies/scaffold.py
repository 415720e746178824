"""SCAFFOLD: control variates at the sites and at the server take the drift out of local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config.values import Positive
from ..learning import Bounded, Context, Contribution, Found, Local, RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class Scaffold(Strategy):
    """Karimireddy et al. 2020, Algorithm 1, with option II for cᵢ.

    The server keeps Σ cᵢ exactly, in float64, and sends c = Σ cᵢ / N, N being the sites that ever joined.
    """

    plain_sgd: ClassVar[bool] = True
    server_lr: Positive = 1.0  # the paper's η_g
    clip: Positive = 1.0  # bound on a coordinate of a cᵢ's change in a round
    down, max_weight, exact = ("c",), 1.0, True

    @property
    def up(self) -> tuple[Bounded, ...]:
        return (Bounded("dc", self.clip),)

    def init(self, weights: Vector) -> State:
        return {"c": weights.new_zeros(len(weights)), "sum": weights.new_zeros(len(weights)).double()}

    def site_init(self, start: Vector) -> State:
        return {"c": start.new_zeros(len(start)).double()}

    def correct(self, gradient: Vector, weights: Vector, context: Context) -> None:
        gradient.add_(context.down["c"]).sub_(context.memory["c"])

    def finish(self, found: Found, local: Local) -> Contribution:
        dc = local.as_summed("dc", -local.down["c"] - found.delta / (found.steps * local.lr))
        return Contribution(found.delta, 1.0, {"dc": dc}, memory={"c": local.memory["c"] + dc})

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        total = state["sum"] + round.sums["dc"]
        c = (total / round.registered).to(weights.dtype)
        return weights.add_(round.mean, alpha=self.server_lr), {"c": c, "sum": total}
