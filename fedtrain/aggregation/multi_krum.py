"""Multi-Krum: the mean of the m updates with the best Krum scores."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..config.values import Count
from .base import Stack
from .krum import Choosing, by_score


@dataclass(frozen=True)
class MultiKrum(Choosing):
    """The plain mean of the m updates with the best scores (Blanchard et al. 2017, §3); m = 1 is Krum.

    Its result is nearer to the mean than Krum's where most sites are honest and their data differ.
    """

    f: Count = 1  # hostile updates that the rule withstands
    m: Count = 0  # updates that are kept; 0: all but f

    @property
    def needs(self) -> int:
        return max(2 * self.f + 3, self.m + self.f)

    def chosen(self, stack: Stack[Any]) -> Collection[int]:
        m = min(self.m, stack.count) or max(1, stack.count - self.f)
        return set(by_score(stack, self.f)[:m])
