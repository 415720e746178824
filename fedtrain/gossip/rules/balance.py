"""BALANCE: a neighbour's model counts when it is close enough to the peer's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.values import Count, NotNegative, Positive
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

    gamma: Positive = 0.3
    kappa: NotNegative = 1.0
    rounds: Count = 0  # T; 0: run.rounds

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        close = self.gamma * math.exp(-self.kappa * t / max(self.rounds, 1)) * float(rows[0].double().norm())
        return shortened(rows, peers, [float(d <= close) for d in distances(rows)], near)
