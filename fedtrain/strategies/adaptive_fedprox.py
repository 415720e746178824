"""Adaptive FedProx: μ rises where the loss rises, and falls where the loss keeps falling."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.values import AtLeastOne, NotNegative, Positive
from ..learning import Bounded, Context, Contribution, Found, Local, RoundSums, State, Vector
from .fedprox import FedProx


@dataclass(frozen=True)
class AdaptiveFedProx(FedProx):
    """FedProx with the heuristic of Li et al. 2020, §5.3.2 and appendix C.3.3.

    The loss is that of a round's sites at the global weights, weighted by their examples. μ rises by
    `mu_step` after a round with a larger loss than the round before. μ falls by `mu_step`, to 0 at the least,
    when the loss has fallen `patience` times in a row. The paper begins with μ = 0 where sites differ, and
    with 1 where they do not.
    """

    mu: NotNegative = 0.0  # the first
    mu_step: Positive = 0.1
    patience: AtLeastOne = 5
    max_loss: Positive = 1_000.0  # that one site may have
    max_examples: Positive = 10_000.0  # likewise
    down, weighs = ("mu",), ("examples",)

    @property
    def scalars(self) -> tuple[Bounded, ...]:
        return (Bounded("loss", self.max_loss * self.max_examples),)

    def init(self, weights: Vector) -> State:
        zero = weights.new_zeros(1).double()
        return {"mu": zero + self.mu, "loss": zero, "falls": zero - 1}  # -1: there was no round before

    def correct(self, gradient: Vector, weights: Vector, context: Context) -> None:
        gradient.add_((weights - context.start) * context.down["mu"].to(weights.dtype))

    def finish(self, found: Found, local: Local) -> Contribution:
        return Contribution(found.delta, scalars={"loss": local.examples * local.loss(local.start)})

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        loss, mu, falls = round.scalars["loss"] / round.weight, float(state["mu"]), float(state["falls"])
        if falls >= 0 and loss > float(state["loss"]):
            mu, falls = mu + self.mu_step, 0.0
        elif falls >= 0 and loss < float(state["loss"]):
            falls += 1
        else:
            falls = 0.0
        if falls == self.patience:
            mu, falls = max(mu - self.mu_step, 0.0), 0.0
        numbers = {"mu": mu, "loss": loss, "falls": falls}
        return weights.add_(round.mean), {name: state["mu"].new_full((1,), n) for name, n in numbers.items()}
