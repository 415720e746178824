"""SCAFFOLD: control variates at the sites and at the server take the drift out of local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..config.values import Positive
from ..learning import Bounded, Context, Contribution, Found, Local, RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class Scaffold(Strategy):
    """Karimireddy et al. 2020, Algorithm 1, with option II for cᵢ.

    The server keeps Σ cᵢ exactly, in float64, and sends c = Σ cᵢ / N, N being the sites that ever joined.
    With weights = "examples" c is Σ nᵢcᵢ / Σ nᵢ, the gradient of the loss over all examples: a site sends
    nᵢ / max_examples times the change of its cᵢ, by the nᵢ of its first round. A site that has not trained
    yet is taken for one of as many examples as the others have on average, with cᵢ = 0.
    """

    plain_sgd: ClassVar[bool] = True
    server_lr: Positive = 1.0  # the paper's η_g
    clip: Positive = 1.0  # bound on a coordinate of a cᵢ's change in a round
    max_examples: Positive = 10_000.0  # that one site may have, where sites count by them
    down, max_weight, weighs, exact = ("c",), 1.0, ("equal", "examples"), True

    @property
    def up(self) -> tuple[Bounded, ...]:
        return (Bounded("dc", self.clip),)

    @property
    def scalars(self) -> tuple[Bounded, ...]:
        by_examples = (Bounded("examples", self.max_examples), Bounded("sites", 1.0))
        return by_examples if self.weights == "examples" else ()

    def init(self, weights: Vector) -> State:
        state = {"c": weights.new_zeros(len(weights)), "sum": weights.new_zeros(len(weights)).double()}
        return state | {each.name: weights.new_zeros(1).double() for each in self.scalars}

    def site_init(self, start: Vector) -> State:
        memory = {"c": start.new_zeros(len(start)).double()}
        return memory | ({"examples": start.new_zeros(1).double()} if self.scalars else {})

    def correct(self, gradient: Vector, weights: Vector, context: Context) -> None:
        gradient.add_(context.down["c"]).sub_(context.memory["c"])

    def finish(self, found: Found, local: Local) -> Contribution:
        memory, share, scalars = dict(local.memory), 1.0, {}
        if self.scalars:
            known = float(memory["examples"])
            count = known or local.examples
            share, scalars = count / self.max_examples, {"examples": count - known, "sites": float(not known)}
            memory["examples"] = memory["examples"].new_full((1,), count)
        change = -local.down["c"] - found.delta / (found.steps * local.lr)
        dc = local.as_summed("dc", change * share)
        return Contribution(found.delta, 1.0, {"dc": dc}, scalars, memory | {"c": memory["c"] + dc / share})

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        after = {"sum": state["sum"] + round.sums["dc"]}
        after |= {each.name: state[each.name] + round.scalars[each.name] for each in self.scalars}
        count: Any = round.registered
        if self.scalars:
            count = count * after["examples"] / self.max_examples / after["sites"]
        c = (after["sum"] / count).to(weights.dtype)
        return weights.add_(round.mean, alpha=self.server_lr), {"c": c, **after}
