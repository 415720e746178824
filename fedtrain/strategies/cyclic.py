"""Cyclic training: the weights travel from site to site."""

from __future__ import annotations

from dataclasses import dataclass

from .fedavg import FedAvg


@dataclass(frozen=True)
class Cyclic(FedAvg):
    """Cyclic weight transfer (Chang et al. 2018, "Distributed deep learning networks among institutions"): in
    each round one site trains on from where the last one ended, and each site does so once a cycle."""

    one_by_one, weighs = True, ()
