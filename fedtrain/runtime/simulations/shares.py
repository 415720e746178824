"""Which of a simulation's workers trains which sites of a round, and what follows where the task fails at a
site. No bit depends on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from ...aggregation.mean import BLOCK
from ...messages import Failure, Folded, Reply, SiteId
from ..trainers.folding import stacks
from ..trainers.trainer_messages import Failed, good

T = TypeVar("T")
AHEAD = 3  # shares for each worker, where each site's update comes by itself
SHARE_S = 0.005  # a share that takes so long costs next to nothing to ask for
BATCH_SITES, BATCH_BYTES = 50, 16 << 20  # of a share whose updates come one by one, at most
FEW = 10  # sites: where so many fail before any works, the task is wrong
FOLDED_BYTES = 64 << 20  # of the sums of a share, at most, unless one block has more


@dataclass(frozen=True)
class Share:
    """Sites that a worker is given at once."""

    sites: list[SiteId]
    folded: bool = False  # whole blocks, whose sums come; else each site's update
    places: list[int] = field(default_factory=list)  # as in FoldMany
    span: int = 0


def asked_of(shares: Sequence[Share], asked: Collection[SiteId]) -> list[Share]:
    """What is left of the shares of a whole plan where only these of its sites are asked."""
    if sum(len(share.sites) for share in shares) == len(asked):
        return [*shares]
    left = []
    for share in shares:
        places = [place for place, site in enumerate(share.sites) if site in asked]
        if places:
            sites = [share.sites[place] for place in places]
            left.append(Share(sites, share.folded, places, len(share.sites)))
    return left


def singly(sites: Sequence[SiteId], workers: int, at_once: int, nbytes: int, *, stacked: bool) -> list[Share]:
    """Shares whose updates, each of so many bytes, come one by one: small enough that every worker gets some.
    Sites that are `stacked` come by the stack."""
    if stacked:
        return [Share(list(sites[start:stop])) for start, stop in stacks(len(sites), at_once)]
    most = min(BATCH_SITES, BATCH_BYTES // max(1, nbytes))
    size = max(1, min(most, -(-len(sites) // (AHEAD * workers))))
    return [Share(list(sites[at : at + size])) for at in range(0, len(sites), size)]


def folded(
    sites: Sequence[SiteId], workers: int, at_once: int, nbytes: int, block_bytes: int, site_s: float | None,
    *, stacked: bool,
) -> list[Share]:  # fmt: skip
    """Shares of whole blocks, and of single updates where blocks would leave workers without work for long.

    `site_s`: how long a site takes, as far as it is known. Where a block is done sooner than it is worth to
    talk of, there are as few shares as keep all workers busy.
    """
    unit = max(at_once, BLOCK)
    most = max(1, FOLDED_BYTES // max(1, block_bytes * unit // BLOCK))  # units of a share
    if not stacked and (site_s is None or site_s * unit > SHARE_S):
        even = len(sites) // unit // workers * workers
        shares = [Share(list(sites[i * unit : (i + 1) * unit]), folded=True) for i in range(even)]
        return shares + singly(sites[even * unit :], workers, at_once, nbytes, stacked=stacked)
    units = len(stacks(len(sites), unit)) if stacked else -(-len(sites) // unit)
    least = 1 if site_s is None else max(1, round(SHARE_S / (site_s * unit)))
    if least * workers * 2 >= units:  # one for each worker, as even as they can be
        count = min(units, max(workers, -(-units // most)))
        ends = [round(len(sites) * i / count / unit) for i in range(1, count)]
    else:  # smaller and smaller, so that all workers are done at the same time
        ends = []
        while (left := units - (ends[-1] if ends else 0)) > least:
            ends.append(units - left + min(max(least, left // (2 * workers)), most))
    cuts = [0, *(unit * end for end in ends), len(sites)]
    return [Share(list(sites[a:b]), folded=True) for a, b in pairwise(cuts) if a < b]


class Failures:
    """The sites at which the task has failed since a site last worked."""

    def __init__(self) -> None:
        self._failed: dict[SiteId, Failed] = {}
        self._worked = False  # whether a site ever did

    async def told(
        self, results: AsyncGenerator[tuple[Sequence[SiteId], Folded | Reply | Failed], None], sites: int
    ) -> AsyncGenerator[tuple[Sequence[SiteId], Folded | Reply], None]:
        """The results of one exchange, in which a site where the task failed gives a Failure: a simulated
        round goes on without it, as one of a federation does. The task's own error where it failed at all of
        so many `sites`: in a federation each attempt would fail alike, and here it can be mended at once."""
        held, works = list[tuple[Sequence[SiteId], Folded | Reply]](), False
        async with aclosing(results):
            async for of, found in results:
                if isinstance(found, Failed):
                    self._failed[of[0]] = found
                    held.append((of, Failure(reason=found.reason)))
                else:
                    self._worked = works = True
                    self._failed.clear()
                    held.append((of, found))
                while held and works:
                    yield held.pop(0)
        if held and len(self._failed) >= (sites if self._worked else min(sites, FEW)):
            raise self._failed[held[0][0][0]].error()
        for failure in held:
            yield failure


def reply_of(result: T | Failed, reply: Callable[[T], Reply]) -> Reply | Failed:
    """The `reply` that a site's result makes; a Failure where the result can't be used, and Failed where the
    task failed. Raises StoreError where this machine's disk did."""
    if isinstance(result, Failed) and not result.store:
        return Failure(reason=result.reason) if result.update else result
    return reply(good(result))
