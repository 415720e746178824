"""FedBN: normalisation layers stay at their sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..learning import ModelTensor, Share
from .fedavg import FedAvg


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg of all but the normalisation layers, parameters and statistics (Li et al. 2021, Algorithm 1)."""

    keeps: ClassVar[str] = "keeps normalisation layers (with Norm in their class's name) at their sites"

    def shares(self, tensor: ModelTensor) -> Share:
        return "local" if "Norm" in tensor.module else super().shares(tensor)
