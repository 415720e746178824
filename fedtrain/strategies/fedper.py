"""FedPer: the last layers stay at their sites."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import TrainConfig
from ..config.values import require
from .fedavg import FedAvg


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedAvg of the base layers (Arivazhagan et al. 2019, Algorithms 1 and 2); `local` names the others."""

    def check(self, train: TrainConfig) -> None:
        require(self.local, "strategy.local", 'name the personal layers, as in ["head.*"]')
