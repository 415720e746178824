"""Gossip-PGA: gossip with a periodic global average."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.values import AtLeastOne
from .dpsgd import DPSGD


@dataclass(frozen=True)
class PeriodicAverage(DPSGD):
    """Gossip-PGA (Chen et al. 2021, Algorithm 1): D-PSGD, and every `every` rounds the plain mean of all."""

    every: AtLeastOne = 10  # rounds between two global averages

    def everyone(self, t: int) -> bool:
        return (t + 1) % self.every == 0
