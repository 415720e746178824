"""FedSGD: each site sends the gradient of all its examples, once a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.values import require
from ..learning import Contribution, Local
from .base import sgd_only
from .fedavg import FedAvg

if TYPE_CHECKING:
    from ..config import TrainConfig


@dataclass(frozen=True)
class FedSGD(FedAvg):
    """McMahan et al. 2017, §2: w ← w − train.lr Σ nᵢ∇Fᵢ(w) / Σ nᵢ."""

    def check(self, train: TrainConfig) -> None:
        sgd_only("fedsgd", train)
        whole = not train.batch_size and train.local_epochs == 1 and not train.local_steps
        require(whole, "train.batch_size", "fedsgd takes one step on all examples of a site: set "
                "train.batch_size = 0, and leave train.local_epochs = 1")  # fmt: skip

    def train(self, local: Local) -> Contribution:
        return Contribution(local.gradient(local.start) * -local.lr)
