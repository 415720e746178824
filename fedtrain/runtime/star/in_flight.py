"""What the sites of an asynchronous run are asked at present, and whose reply is taken next."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Collection, Sequence
from contextlib import aclosing

from ...config import Config
from ...digest import seed_of
from ...exchange import Cohort
from ...messages import Evaluate, Reply, SiteId, Train
from ...store import Turn


class InFlight:
    """What the sites are asked now, each in an exchange of its own. They are heard as they come."""

    def __init__(self, config: Config, cohort: Cohort) -> None:
        self._cohort, self._deadline_s = cohort, config.strategy.round_deadline
        self.under_way: dict[SiteId, Train | Evaluate] = {}
        self._replies: dict[SiteId, asyncio.Task[Reply | None]] = {}

    def may_begin(self, site: SiteId, turn: Turn) -> bool:
        """Whether a new turn may be asked before more sites are heard."""
        return True

    def send(self, site: SiteId, request: Train | Evaluate) -> None:
        self.under_way[site] = request
        self._start(site)

    async def first(
        self, members: Collection[SiteId]
    ) -> tuple[SiteId, Train | Evaluate, Reply | None] | None:
        """Who answered, what he was asked, and the reply if there is one; None when somebody joined who was
        not among the `members`."""
        joining = asyncio.create_task(self._cohort.newcomer({*members, *self.under_way}))
        try:
            await asyncio.wait([joining, *self._replies.values()], return_when=asyncio.FIRST_COMPLETED)
        finally:
            joining.cancel()
        site = next((site for site, reply in self._replies.items() if reply.done()), None)
        return None if site is None else self._answered(site)

    async def close(self) -> None:
        """Call everything off; the sites are told to stop."""
        for reply in self._replies.values():
            reply.cancel()
        await asyncio.gather(*self._replies.values(), return_exceptions=True)

    def _start(self, site: SiteId) -> None:
        if site not in self._replies:
            self._replies[site] = asyncio.create_task(self._exchange(site))

    def _answered(self, site: SiteId) -> tuple[SiteId, Train | Evaluate, Reply | None]:
        return site, self.under_way.pop(site), self._replies.pop(site).result()

    async def _exchange(self, site: SiteId) -> Reply | None:
        request = self.under_way[site]
        async with aclosing(self._cohort.exchange({site: request}, self._deadline_s)) as replies:
            async for _, reply in replies:
                return reply
        return None


class Clocked(InFlight):
    """Simulated sites, on a clock of their own: a training takes `paces[site]`, an evaluation no time.

    A site is always busy, so its n-th turn ends at n times its pace: who is heard next depends on turns
    alone, not on how fast this machine is, nor on when it was stopped. Of those at one moment the first by
    name is heard first, and all of them before anybody begins another turn.
    """

    def __init__(self, config: Config, cohort: Cohort, sites: Sequence[SiteId], ahead: int) -> None:
        """`ahead`: how many trainings are worked at before it is their time."""
        super().__init__(config, cohort)
        self._paces, self._ahead = paces(config, sites), ahead
        self._due: list[tuple[float, SiteId]] = []  # a heap

    def may_begin(self, site: SiteId, turn: Turn) -> bool:
        return not self._due or self._due[0][0] > turn.number * self._paces[site]

    def send(self, site: SiteId, request: Train | Evaluate) -> None:
        self.under_way[site] = request
        due = -math.inf if isinstance(request, Evaluate) else (request.round + 1) * self._paces[site]
        heapq.heappush(self._due, (due, site))

    async def first(
        self, members: Collection[SiteId]
    ) -> tuple[SiteId, Train | Evaluate, Reply | None] | None:
        for _, site in heapq.nsmallest(self._ahead, self._due):
            self._start(site)
        _, site = heapq.heappop(self._due)
        await asyncio.wait([self._replies[site]])
        return self._answered(site)


def paces(config: Config, sites: Sequence[SiteId]) -> dict[SiteId, float]:
    """How long a training takes at each site, as simulate.speeds says."""
    kind, _, value = config.simulate.speeds.partition(":")
    if kind == "lognormal":
        draws = {site: random.Random(seed_of(config.run.seed, "speed", site)) for site in sites}
        return {site: draw.lognormvariate(0.0, float(value)) for site, draw in draws.items()}
    return {site: float(value) if kind == "straggler" and site == sites[-1] else 1.0 for site in sites}
