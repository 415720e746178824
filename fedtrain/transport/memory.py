"""The star seam in this process: public, for simulations and tests with seeded faults."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from inspect import isawaitable

from ..update import Reply, Request, SiteId

Handler = Callable[[Request], Reply | Awaitable[Reply]]


class LocalCohort:
    """Sites are functions. `loses(site, request)` says which requests get no reply."""

    def __init__(
        self,
        handlers: Mapping[SiteId, Handler],
        loses: Callable[[SiteId, Request], bool] = lambda site, request: False,
    ) -> None:
        self._handlers, self._loses = handlers, loses
        self.bytes_in = self.bytes_out = 0
        self.told: list[tuple[SiteId, str]] = []

    async def members(self, at_least: int) -> list[SiteId]:
        return sorted(self._handlers)

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        for site, request in requests.items():
            if not self._loses(site, request):
                reply = self._handlers[site](request)
                yield site, (await reply if isawaitable(reply) else reply)

    def tell(self, site: SiteId, line: str) -> None:
        self.told.append((site, line))
