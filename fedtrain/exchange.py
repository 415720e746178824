"""The star seam: the one thing a coordinator asks of the network.

Real over gRPC in `transport/grpc.py`, in memory in `transport/memory.py`; both behave the same, and code
that is given a cohort (a round, an evaluation, secure aggregation) can't tell which.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from .update import Reply, Request, SiteId


class Cohort(Protocol):
    """The sites that can be asked."""

    bytes_in: int  # model bytes received and sent so far, for the log
    bytes_out: int

    async def members(self, at_least: int) -> list[SiteId]:
        """The sites that have joined, sorted; waits until there are `at_least` so many."""

    def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        """Send each site its request; yield (site, reply) as replies come, until all came or the deadline.

        A site that stays silent, or is lost for longer than the idle time, simply does not appear.
        A request with the same id may be sent again (after a restart, say): sites answer it once.
        """

    def tell(self, site: SiteId, line: str) -> None:
        """One line for the people at a site: why its update was refused, say. Best effort."""


async def gather(
    cohort: Cohort, requests: Mapping[SiteId, Request], deadline_s: float
) -> dict[SiteId, Reply]:
    """All the replies of one exchange, for those small enough to hold at once."""
    return {site: reply async for site, reply in cohort.exchange(requests, deadline_s)}


async def in_order(
    replies: AsyncGenerator[tuple[SiteId, Reply], None], sites: list[SiteId]
) -> AsyncGenerator[tuple[SiteId, Reply], None]:
    """The same replies in the order of `sites`: an early one waits (spooled or shared) for its turn.

    A float sum folded in this order has the same bits whatever the order of arrival.
    """
    held: dict[SiteId, Reply] = {}
    turn = iter(sites)
    due = next(turn, None)
    async for site, reply in replies:
        held[site] = reply
        while due is not None and due in held:
            yield due, held.pop(due)
            due = next(turn, None)
    for site in sites:
        if site in held:
            yield site, held[site]
