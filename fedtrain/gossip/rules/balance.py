"""BALANCE: a neighbour's model counts when it is close enough to the peer's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config import require
from .base import MixingRule, distances, shortened

if TYPE_CHECKING:
    from ...exchange import Neighborhood, PeerId
    from .base import Rows, Ruling


@dataclass(frozen=True)
class Balance(MixingRule):
    """xⱼ counts if ‖xⱼ − x‖ ≤ γ·exp(−κ·t/T)·‖x‖, else its weight returns to self (Fang et al. 2024, Alg. 1).

    The paper averages the accepted models plainly and takes a part α of that mean; here the graph's weights
    do both, so with all models accepted the result is the graph's mean. The bound falls over T rounds.
    """

    gamma: float = 0.3
    kappa: float = 1.0
    rounds: int = 0  # T; 0: run.rounds

    def __post_init__(self) -> None:
        require(0 < self.gamma < math.inf, "gossip.rule", f"balance:gamma={self.gamma}: it must be positive")
        require(self.kappa >= 0, "gossip.rule", f"balance:kappa={self.kappa}: it must be 0 or more")
        require(self.rounds >= 0, "gossip.rule", f"balance:rounds={self.rounds}: it must be 0 or more")

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        close = self.gamma * math.exp(-self.kappa * t / max(self.rounds, 1)) * float(rows[0].double().norm())
        return shortened(rows, peers, [float(d <= close) for d in distances(rows)], near)
