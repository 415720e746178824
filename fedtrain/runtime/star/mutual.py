"""The sites of a cohort that accept each other in secure sums (policy.pin_members), and which are left out.

A site refuses a sum with a site that it has not pinned, and names it. From then on the members of the cohort
are the largest set of sites of which none refuses another. Where two sets are as large, sites that are in
the model already count more than newcomers, and the site that is refused more than the site that refuses.
What a site refused is forgotten when it joins again, as it does when its pins change.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress

from ...errors import BadUpdate, SecAggError, some
from ...events import Emit, Notice
from ...exchange import Cohort
from ...messages import Failure, Reply, Request, SiteId
from ...secagg.messages import Agree, Agreed, Keys, Mask, Masked, Share, Shares, Terms, Unmask, Unmasked
from ...store import RunStore

GRACE_S = 0.5  # how long further refusals may still come after the first one
SPARE_S = 0.25  # how long replies may still come that are not needed any more
EXACT = 20  # sites that refuse or are refused: of so many the largest set is found, of more a large one
Pair = tuple[SiteId, SiteId]  # the site that refuses, and the other one


class Strangers(SecAggError):
    """Sites of a sum refuse each other: it can be had of those that accept each other."""


class Mutual:
    """Which sites refuse which, and who is left out for that."""

    def __init__(self, cohort: Cohort, emit: Emit, store: RunStore | None) -> None:
        self._cohort, self._emit, self._store = cohort, emit, store
        self._refusals: dict[Pair, bytes] = {}  # with the key that is refused
        self._reported: dict[SiteId, str] = {}  # why a site is left out, as it was logged last
        self._declined: set[SiteId] = set()  # by their own rules, what they were last asked for
        self._checked: set[SiteId] = set()  # the sum that the model was made of, as they said last

    def hear(self, site: SiteId, request: Request, reply: Reply) -> None:
        """A site's reply, as it comes."""
        if isinstance(reply, Failure) and isinstance(terms := getattr(request, "terms", None), Terms):
            cohort = {other: key for other, key in terms.cohort.items() if other != site}
            self._refusals |= {(site, other): cohort[other] for other in reply.strangers if other in cohort}
            self._declined |= {site} if reply.final else set()
        elif isinstance(reply, Keys) and reply.checked:
            self._checked.add(site)

    def forget(self, site: SiteId, key: bytes) -> None:
        """A site joins, with this key and perhaps with other pins than before."""
        self._refusals = {
            (refuses, other): refused
            for (refuses, other), refused in self._refusals.items()
            if refuses != site and (other != site or refused == key)
        }

    def refuses(self, site: SiteId, others: Collection[SiteId]) -> bool:
        """Whether a site is known to refuse one of the others."""
        return any((site, other) in self._refusals for other in others)

    async def of(self, sites: Sequence[SiteId], least: int) -> Sequence[SiteId]:
        """Those of the sites that accept each other. Where no `least` sites that are here do, waits until
        people have pinned them."""
        for said in (self._declined, self._checked):
            said.difference_update(sites)
        if len(self.accepted(sites)) < least <= len(sites):
            await self._cohort.members(least)
        return sorted(self.accepted(sites))

    def willing(self, sites: Collection[SiteId]) -> Sequence[SiteId]:
        """The sites without those that declined. Where some of them said that they checked the model, there
        are at most two others for each: a site takes part where a third of all checked it."""
        left = [site for site in sites if site not in self._declined]
        others = [site for site in left if site not in self._checked]
        spare = {*others[2 * (len(left) - len(others)) :]} if len(others) < len(left) else set()
        return [site for site in left if site not in spare]

    def accepted(self, sites: Collection[SiteId]) -> Collection[SiteId]:
        """The largest set of these sites that accept each other. Who is left out is told why, once for each
        reason, here and there."""
        here = {*sites} if self._refusals else set()
        pairs = [pair for pair in sorted(self._refusals) if here.issuperset(pair)]
        if not pairs:
            return sites
        inside = {} if self._store is None else self._store.counted(sites)

        def worth(found: Collection[SiteId]) -> tuple[int, ...]:
            return len(found), len(inside.keys() & found), -len({site for site, _ in pairs} & {*found})

        kept = largest(frozenset(here), pairs, worth)
        for site in sorted(here - kept):
            if (why := self._why(site, pairs)) != self._reported.get(site):
                self._reported[site] = why
                self._emit(Notice(text=f"{site} is left out of the sums: {why}"))
                self._cohort.tell(site, f"this site is left out of the sums: {why}")
        return sorted(kept)

    def _why(self, site: SiteId, pairs: Sequence[Pair]) -> str:
        if by := [pair for pair in pairs if pair[1] == site]:
            return (
                f"not pinned at {some([other for other, _ in by])} (policy.pin_members). If `fedtrain policy "
                f"show` prints this key at {site}, run there: fedtrain policy pin {site}="
                f"{self._refusals[by[0]].hex()}"
            )
        refused = [other for refuses, other in pairs if refuses == site]
        return f"it has not pinned {some(refused)} (its own policy.pin_members)"


def admit_step(request: Request, reply: Reply, longest: int) -> None:
    """BadUpdate unless the reply is of this step of a secure sum, with at most `longest` ring elements."""
    due = {Share: Shares, Mask: Masked, Agree: Agreed, Unmask: Unmasked}
    if isinstance(reply, Failure):
        return
    if not isinstance(reply, due.get(type(request), Keys)):
        raise BadUpdate(f"{type(reply).__name__} does not answer {type(request).__name__}")
    if isinstance(reply, Masked) and reply.vector.schema.numel > longest:
        raise BadUpdate(f"a masked vector of {reply.vector.schema.numel} values, at most {longest} are due")


class SumExchanges:
    """A cohort's exchanges for secure sums. They end with Strangers where a site refuses another one of them;
    and where the caller has enough replies, they wait SPARE_S for the others, since to cut those off costs
    more."""

    def __init__(self, cohort: Cohort, mutual: Mutual) -> None:
        self._cohort, self._mutual = cohort, mutual

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        async with aclosing(self._cohort.exchange(requests, deadline_s)) as replies:
            try:
                async for site, reply in replies:
                    if isinstance(reply, Failure) and self._mutual.refuses(site, requests):
                        await asyncio.sleep(GRACE_S)  # other sites' refusals are heard meanwhile
                        raise Strangers(reply.reason)
                    yield site, reply
            except GeneratorExit:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SPARE_S):
                        async for _ in replies:
                            pass
                raise


def largest(
    sites: frozenset[SiteId], pairs: Sequence[Pair], worth: Callable[[Collection[SiteId]], tuple[int, ...]]
) -> frozenset[SiteId]:
    """The set of these sites without a pair that is worth most; where more than EXACT sites are in pairs, one
    that is large. The same for the same sites."""
    left = [pair for pair in pairs if sites.issuperset(pair)]
    degree = Counter(site for pair in left for site in pair)
    if not left:
        return sites
    most = max(sorted(degree), key=lambda site: (degree[site], *(-each for each in worth([site]))))
    without = largest(sites - {most}, left, worth)
    if len(degree) > EXACT:
        return without
    others = {site for pair in left if most in pair for site in pair} - {most}
    return max(without, largest(sites - others, left, worth), key=worth)
