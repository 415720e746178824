"""DiLoCo: islands take many local steps, and Nesterov momentum moves the model that they share."""

from __future__ import annotations

from dataclasses import dataclass

from .fedavgm import FedAvgM


@dataclass(frozen=True)
class DiLoCo(FedAvgM):
    """The outer optimizer of Douillard et al. 2023 (Algorithm 1), with the rates of its §3."""

    server_lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
