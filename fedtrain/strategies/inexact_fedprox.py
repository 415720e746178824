"""Inexact FedProx: sites that have no time for all passes send what they have, and it counts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Annotated

from msgspec import Meta

from ..config import TrainConfig
from ..config.values import require
from ..learning import Contribution, Local
from .fedprox import FedProx


@dataclass(frozen=True)
class InexactFedProx(FedProx):
    """FedProx with γ-inexact solutions (Li et al. 2020, Algorithm 2), as in the paper's experiments.

    In each round a site is a straggler by chance, and then makes 1 to train.local_epochs passes over its
    data, all equally likely. What a site draws depends on the run's seed, the round and the site.
    """

    stragglers: Annotated[float, Meta(ge=0, le=1)] = 0.5  # 0, 0.5 and 0.9 in the paper

    def check(self, train: TrainConfig) -> None:
        require(not train.local_steps and train.local_epochs > 1, "train.local_epochs", "a straggler makes "
                "fewer passes than others: set it to 2 or more, and leave train.local_steps out")  # fmt: skip
        require(not train.warmup and train.decay == "none", "train.decay", "a straggler would be elsewhere "
                "in the schedule: leave train.warmup and train.decay out")  # fmt: skip

    def train(self, local: Local) -> Contribution:
        draw = Random(local.seed)
        straggles = draw.random() < self.stragglers
        return self.finish(local.train(epochs=draw.randint(1, local.epochs) if straggles else 0), local)
