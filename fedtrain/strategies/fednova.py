"""FedNova: sites that take more local steps do not count for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config.values import Positive
from ..learning import Bounded, Contribution, Found, Local, RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class FedNova(Strategy):
    """Wang et al. 2020, "Tackling the Objective Inconsistency Problem", §4, with plain SGD at the sites:
    w ← w + τ Σ pᵢ Δᵢ/τᵢ, where τᵢ are site i's steps, pᵢ its part of the examples, and τ = Σ pᵢ τᵢ."""

    plain_sgd: ClassVar[bool] = True
    max_examples: Positive = 10_000.0  # that one site may have
    max_steps: Positive = 1_000.0  # that one site may take in a round
    weighs = ("examples",)

    @property
    def max_weight(self) -> float:
        return self.max_examples

    @property
    def scalars(self) -> tuple[Bounded, ...]:
        return (Bounded("weighted_steps", self.max_examples * self.max_steps),)

    def finish(self, found: Found, local: Local) -> Contribution:
        steps, examples = found.steps, local.examples
        return Contribution(found.delta / steps, examples, scalars={"weighted_steps": examples * steps})

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        steps = round.scalars["weighted_steps"] / round.weight
        return weights.add_(round.mean, alpha=steps), state
