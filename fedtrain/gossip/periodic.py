"""Gossip-PGA: gossip with a periodic global average."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import require
from .dpsgd import DPSGD


@dataclass(frozen=True)
class PeriodicAverage(DPSGD):
    """Gossip-PGA (Chen et al. 2021, Algorithm 1): D-PSGD, and every `every` rounds the plain mean of all."""

    every: int = 10  # rounds between two global averages

    def __post_init__(self) -> None:
        require(self.every >= 1, "gossip.every", f"{self.every} must be 1 round or more")

    def everyone(self, t: int) -> bool:
        return (t + 1) % self.every == 0
