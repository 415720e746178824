"""Exchanges that let replies come which are not needed any more: cutting them off costs more than they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress

from ..exchange import Cohort
from ..messages import Reply, Request, SiteId

GRACE_S = 0.25  # how long such replies may still come


class Patient:
    """The exchanges of a cohort. When the caller has enough replies, they wait GRACE_S for the others."""

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        async with aclosing(self._cohort.exchange(requests, deadline_s)) as replies:
            try:
                async for pair in replies:
                    yield pair
            except GeneratorExit:
                with suppress(TimeoutError):
                    async with asyncio.timeout(GRACE_S):
                        async for _ in replies:
                            pass
                raise
