"""Local differential privacy of a site: the noise on its updates, and the count of those that left it.

The noise is added in the trainer (`Workbench.train`), before any other process sees the update. The count is
on disk before the update leaves, so a site that is killed and trains a round again pays for both updates.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

import msgspec

from ...arena import Arena
from ...config import Config, PrivacyConfig
from ...events import Emit, PrivacySpent, noticed
from ...exchange import Cohort, CohortWrapper
from ...messages import Reply, Request, SiteId, Train, Update
from ...privacy import Gaussian, epsilon
from ...store.disk import Kept

FILE = "releases"


def noised(
    config: Config, update: Update, site: SiteId, round: int, weights: Arena, simulated: bool
) -> Update:
    """The update with noise, and without its metrics: the loss would tell of the data as well."""
    assert isinstance(update.delta, Arena), update.delta
    key = os.urandom(16)
    if simulated:  # a run and its repetition are equal
        text = f"noise/{config.run.seed}/{round}/{site}/{weights.digest}"
        key = hashlib.sha256(text.encode()).digest()[:16]
    Gaussian(config.privacy.clip, config.privacy.noise_multiplier).apply(update.delta, key)
    return msgspec.structs.replace(update, metrics={})


class Spent:
    """How many noised updates one site has given away in a run."""

    def __init__(self, config: PrivacyConfig, folder: Path, emit: Emit) -> None:
        self._config, self._emit = config, emit
        remedy = (
            "What was given away must not be forgotten: restore it, or add up the epsilons of two run.names."
        )
        self._kept = Kept(folder / FILE, int, remedy, noticed(emit))
        self.releases: int = max(self._kept.read(), default=0)

    @property
    def epsilon(self) -> float:
        sigma = Gaussian(self._config.clip, self._config.noise_multiplier).sigma
        return epsilon(sigma, self.releases, self._config.delta)

    def one_more(self, site: SiteId, round: int) -> None:
        """Count an update, before it leaves the site; without noise there is nothing to count."""
        if not self._config.noise_multiplier:
            return
        self.releases += 1
        self._kept.write(self.releases)
        self._emit(PrivacySpent(
    site=site, round=round + 1, releases=self.releases, epsilon=self.epsilon,
            delta=self._config.delta,
))  # fmt: skip


class Spending(CohortWrapper):
    """Simulated sites. The one that has given away most updates tells what it spent, as a real site does."""

    def __init__(self, config: Config, others: Cohort, folder: Path, emit: Emit) -> None:
        """`folder` keeps the count. A resumed run takes it for the count of every site."""
        super().__init__(others)
        self._spent = Spent(config.privacy, folder, emit)
        self._begun_with = self._spent.releases
        self._rounds: dict[SiteId, set[int]] = {}  # for which each has given an update away since

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        async with aclosing(self._inner.exchange(requests, deadline_s)) as replies:
            async for site, reply in replies:
                if isinstance(reply, Update):
                    request = requests[site]
                    assert isinstance(request, Train), request
                    rounds = self._rounds.setdefault(site, set())
                    rounds.add(request.round)  # tried again, it is the same update
                    if self._begun_with + len(rounds) > self._spent.releases:
                        self._spent.one_more(site, request.round)
                yield site, reply
