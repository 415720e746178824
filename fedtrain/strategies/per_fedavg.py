"""Per-FedAvg: a global model from which a gradient step at a site gives that site a model of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..config import TrainConfig
from ..config.values import AtLeastOne, Positive
from ..learning import Contribution, Local, Vector
from .base import check_own_steps
from .fedavg import FedAvg


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """Fallah et al. 2020, Algorithm 1, with equal weights. Of three batches D, D′ and D″ a local step is

        w ← w − β (I − α ∇²F(w; D″)) ∇F(w − α ∇F(w; D); D′),    β being train.lr.

    HF puts (∇F(w + δv) − ∇F(w − δv)) / 2δ for ∇²F(w) v, FO leaves it out. A site's own model comes of
    `personal_steps` gradient steps of α over all of the site's examples, from the global model. There is no
    memory, so a site that never trained has a model of its own, too.
    """

    plain_sgd: ClassVar[bool] = True
    variant: Literal["HF", "FO"] = "HF"
    alpha: Positive = 0.01
    delta: Positive = 1e-3
    personal_steps: AtLeastOne = 1
    max_weight, weighs = 1.0, ("equal", "examples")

    def check(self, train: TrainConfig) -> None:
        super().check(train)
        check_own_steps(self, train)

    def train(self, local: Local) -> Contribution:
        w = local.start.clone()
        draws = [local.batches(draw) for draw in range(3 if self.variant == "HF" else 2)]
        for inner, outer, *further in zip(*draws, strict=True):
            step = local.gradient(w - self.alpha * local.gradient(w, inner), outer)
            for third in further:
                ahead = local.gradient(w + self.delta * step, third)
                behind = local.gradient(w - self.delta * step, third)
                step = step - self.alpha * (ahead - behind) / (2 * self.delta)
            w.sub_(step, alpha=local.lr)
        return Contribution(w - local.start, 1.0)

    def personal(self, local: Local) -> Vector:
        w = local.start
        for _ in range(self.personal_steps):
            w = w - self.alpha * local.gradient(w)
        return w
