"""Whose sums under masks may be opened: what an aggregator keeps of them."""

from __future__ import annotations

from collections.abc import Sequence

from ...messages import SiteId
from ...store import RoundPlan, RunStore


class Settled:
    """Whose sums about a model may be opened: no other sites are asked together with them, also when it is
    tried again after a restart. Honest ones would refuse."""

    def __init__(self, store: RunStore | None, *, evaluation: bool) -> None:
        """`evaluation`: sums of what a model is worth, and not of what a round made of it."""
        self._store, self._evaluation = store, evaluation
        self._round, self._sums = -1, list[tuple[SiteId, ...]]()

    def of(self, number: int) -> list[tuple[SiteId, ...]]:
        """The sites of each sum about the model of so many rounds."""
        if self._round != number:
            self._round, self._sums = number, []
            if self._store is not None:
                self._sums = self._store.opened(number, evaluation=self._evaluation)
        return self._sums

    def add(self, plan: RoundPlan, sites: Sequence[SiteId]) -> None:
        if tuple(sites) not in self.of(plan.round):
            self._sums.append(tuple(sites))
            if self._store is not None:
                self._store.opens(plan.round, self._sums, evaluation=self._evaluation)
