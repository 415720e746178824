"""What the sites of an asynchronous run are asked at present, and whose reply is taken next."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import aclosing

from ...config import Config
from ...exchange import Cohort
from ...messages import Evaluate, Reply, SiteId, Train
from ...store import Turn


class InFlight:
    """What the sites are asked now, each in an exchange of its own. They are heard as they come."""

    def __init__(self, config: Config, cohort: Cohort) -> None:
        self._cohort, self._deadline_s = cohort, config.strategy.round_deadline
        self.under_way: dict[SiteId, Train | Evaluate] = {}
        self._replies: dict[SiteId, asyncio.Task[Reply | None]] = {}

    def begins(self, site: SiteId, turn: Turn) -> float:
        """When the site can begin a new turn; of two sites the earlier one is asked first."""
        return 0.0

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
