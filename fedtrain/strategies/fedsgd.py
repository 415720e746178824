"""FedSGD: each site sends the gradient of all its examples, once a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import TrainConfig
from ..config.values import require
from ..learning import Contribution, Local
from .base import check_own_steps
from .fedavg import FedAvg


@dataclass(frozen=True)
class FedSGD(FedAvg):
    """McMahan et al. 2017, §2: w ← w − train.lr Σ nᵢ∇Fᵢ(w) / Σ nᵢ."""

    plain_sgd: ClassVar[bool] = True

    def check(self, train: TrainConfig) -> None:
        super().check(train)
        check_own_steps(self, train)
        whole = not train.batch_size and train.local_epochs == 1 and not train.local_steps
        require(whole, "train.batch_size", "fedsgd takes one step on all examples of a site: set "
                "train.batch_size = 0, and leave train.local_epochs = 1")  # fmt: skip

    def train(self, local: Local) -> Contribution:
        return Contribution(local.gradient(local.start) * -local.lr)
