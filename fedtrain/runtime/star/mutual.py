"""The sites of a cohort that accept each other in secure sums (policy.pin_members), and which are left out.

A site refuses a sum with a site that it has not pinned, and names it. From then on the members of the cohort
are the largest set of sites of which none refuses another. Where two sets are as large, sites that are in
the model already count more than newcomers, and the site that is refused more than the site that refuses.
What a site refused is forgotten when it joins again, as it does when its pins change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

from ...errors import SecAggError, some
from ...events import Emit, Notice
from ...exchange import Cohort, CohortWrapper
from ...messages import Failure, Reply, Request, SiteId
from ...secagg.messages import Advertise, AdvertiseEvaluation, AdvertiseTally

GRACE_S = 1.0  # how long further refusals may still come after the first one
EXACT = 20  # sites that refuse or are refused: of so many the largest set is found, of more a large one
Conflicts = dict[SiteId, set[SiteId]]


class Strangers(SecAggError):
    """Sites of a sum refuse each other: it is tried again over those that accept each other."""


class MutualCohort(CohortWrapper):
    """A cohort without the sites that refuse others, or are refused."""

    def __init__(
        self,
        inner: Cohort,
        emit: Emit,
        keys: Callable[[Sequence[SiteId]], Mapping[SiteId, bytes]],
        counted: Callable[[Sequence[SiteId]], Mapping[SiteId, int | None]],
    ) -> None:
        """`keys`: the fingerprints of sites' keys; `counted`: those of the sites that are in the model."""
        super().__init__(inner)
        self._emit, self._keys, self._counted = emit, keys, counted
        self._refuses: dict[SiteId, dict[SiteId, bytes]] = {}  # site -> the sites that it refuses, their keys
        self._reported: dict[SiteId, str] = {}  # why a site is left out, as it was logged last
        self._changed = asyncio.Event()
        self.declined: set[SiteId] = set()  # by their own rules, what they were last asked for

    async def members(self, at_least: int) -> Sequence[SiteId]:
        """Of the sites that have joined, those that accept each other; waits until these are `at_least` so
        many."""
        while True:
            here = await self._inner.members(at_least)
            found = self.accepted(here)
            self._report(here, found)
            if len(found) >= at_least:
                return found
            await self._change(here)

    async def newcomer(self, known: Collection[SiteId]) -> None:
        while not {*self.accepted(here := await self._inner.members(0))} - {*known}:
            await self._change([*known, *here])

    async def _change(self, here: Collection[SiteId]) -> None:
        """Returns when a site joins, for the first time or again."""
        waits = [
            asyncio.ensure_future(self._inner.newcomer(here)),
            asyncio.ensure_future(self._changed.wait()),
        ]
        try:
            for done in (await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))[0]:
                done.result()
        finally:
            for each in waits:
                each.cancel()

    def forget(self, site: SiteId) -> None:
        """A site joins, perhaps with other pins than before."""
        self._refuses.pop(site, None)
        self._changed.set()
        self._changed = asyncio.Event()

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        """As the cohort's; Strangers where a site refuses another one of the requests."""
        self.declined -= requests.keys()
        async with aclosing(self._inner.exchange(requests, deadline_s)) as replies:
            async for site, reply in replies:
                if self._refused(site, requests[site], reply):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(GRACE_S):
                            async for other, further in replies:
                                self._refused(other, requests[other], further)
                    raise Strangers(self._why(site))
                yield site, reply

    def _refused(self, site: SiteId, request: Request, reply: Reply) -> bool:
        """Take in a reply; whether it refuses other sites."""
        if not isinstance(reply, Failure):
            return False
        if reply.final:
            self.declined.add(site)
        if not isinstance(request, Advertise | AdvertiseEvaluation | AdvertiseTally):
            return False
        keys = request.terms.cohort
        strangers = {other: keys[other] for other in reply.strangers if other in keys and other != site}
        if strangers:
            self._refuses[site] = self._refuses.get(site, {}) | strangers
        return bool(strangers)

    def accepted(self, sites: Sequence[SiteId]) -> Sequence[SiteId]:
        """The largest set of these sites that accept each other."""
        conflicts = self._conflicts(sites)
        if not conflicts:
            return sites
        inside = self._counted(sorted(conflicts))

        def worth(found: Collection[SiteId]) -> tuple[int, int, int]:
            refusing = sum(bool(self._refuses.get(site)) for site in found)
            return len(found), len(inside.keys() & found), -refusing

        kept = largest(frozenset(conflicts), conflicts, worth)
        return sorted(site for site in sites if site in kept or site not in conflicts)

    def _conflicts(self, sites: Sequence[SiteId]) -> Conflicts:
        """Of the sites that refuse others, or are refused, with the key that they have now: these others."""
        found: Conflicts = {}
        for site in self._refuses.keys() & {*sites} if self._refuses else ():
            now = self._keys([*self._refuses[site]])
            for other, key in self._refuses[site].items():
                if other in sites and now.get(other) == key:
                    found.setdefault(site, set()).add(other)
                    found.setdefault(other, set()).add(site)
        return found

    def _report(self, here: Sequence[SiteId], found: Sequence[SiteId]) -> None:
        """Say at both ends which of these sites are left out, and why; once for each reason."""
        conflicts = self._conflicts(here) if found is not here else {}
        for site in sorted(conflicts.keys() - {*found}):
            if (why := self._why(site, conflicts[site])) != self._reported.get(site):
                self._reported[site] = why
                self._emit(Notice(text=f"{site} is left out of the sums: {why}"))
                self.tell(site, f"this site is left out of the sums: {why}")

    def summed(self, sites: Iterable[SiteId]) -> None:
        """These sites are in a sum."""
        for site in sorted(self._reported.keys() & {*sites}):
            del self._reported[site]
            self._emit(Notice(text=f"{site} is in the sums again"))

    def _why(self, site: SiteId, others: Iterable[SiteId] = ()) -> str:
        refused = sorted(self._refuses.get(site, ()))
        by = sorted(other for other in others if site in self._refuses.get(other, ()))
        if not by:
            return f"{site} has not pinned {some(refused)} (its own policy.pin_members)"
        return (
            f"not pinned at {some(by)} (policy.pin_members). If `fedtrain policy show` prints this key at "
            f"{site}, run there: fedtrain policy pin {site}={self._refuses[by[0]][site].hex()}"
        )


def largest(
    sites: frozenset[SiteId], conflicts: Conflicts, worth: Callable[[Collection[SiteId]], tuple[int, ...]]
) -> frozenset[SiteId]:
    """The set of these sites without conflicts that is worth most; of more than EXACT sites with conflicts
    the one whose members have few. The same for the same sites."""
    while True:
        left = {site: conflicts[site] & sites for site in sites}
        apart = [site for site in sorted(sites) if left[site]]
        if not apart:
            return sites
        most = max(apart, key=lambda site: (len(left[site]), *(-each for each in worth([site]))))
        if len(apart) <= EXACT:
            break
        sites -= {most}
    others = (largest(sites - left_out, conflicts, worth) for left_out in ({most}, left[most]))
    return max(others, key=worth)
