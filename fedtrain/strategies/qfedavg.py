"""q-FedAvg: sites with a larger loss count more, which evens out how well the model does at each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config.values import NotNegative, Positive
from ..learning import Bounded, Contribution, Found, Local, RoundSums, State, Vector
from .base import Strategy

LEAST = 1e-10  # of a loss, as in the authors' code: a power below 0 of it is finite


@dataclass(frozen=True)
class QFedAvg(Strategy):
    """Li et al. 2020, "Fair Resource Allocation", Algorithm 2, with L = 1 / train.lr. F is a site's mean loss
    at the global weights; h is the paper's, divided by L. With q = 0 it is FedAvg of equal weights."""

    plain_sgd: ClassVar[bool] = True
    q: NotNegative = 1.0
    max_loss: Positive = 16.0
    max_h: Positive = 1024.0
    weighs = ()

    @property
    def max_weight(self) -> float:
        return float(self.max_loss**self.q)

    @property
    def scalars(self) -> tuple[Bounded, ...]:
        return (Bounded("h", self.max_h),)

    def finish(self, found: Found, local: Local) -> Contribution:
        loss, square = max(local.loss(local.start), LEAST), float(found.delta @ found.delta)
        weight = loss**self.q
        h = self.q * loss ** (self.q - 1) * square / local.lr + weight
        return Contribution(found.delta, weight, scalars={"h": h})

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        h = round.scalars["h"]  # not above 0 where no site has a loss, or one says what is not so
        return weights.add_(round.mean, alpha=round.weight / h if h > 0 else 0.0), state
