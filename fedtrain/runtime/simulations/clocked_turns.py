"""Asynchronous sites on the run's own clock: whose turn begins and ends when."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Collection, Mapping
from itertools import count

from ...config import Config
from ...exchange import Cohort
from ...messages import Evaluate, Reply, SiteId, Train
from ...store import Turn, TurnState
from ..journal import Clock
from ..star.in_flight import InFlight
from ..trainers.trainer_messages import Description
from .clock import Count, Examples, TrainedOn
from .site_models import Load, SiteModels
from .training_bytes import TrainingBytes

NEWEST = 2  # turns of a site that are remembered: the one under way, and the next


class Clocked(InFlight):
    """Asynchronous sites on the run's own clock.

    A site begins a turn when the one before has ended and it is there, so the moments of its n-th turn follow
    from its model alone: who is heard next depends on turns, not on how fast this machine is, nor on when the
    run was stopped. Of those at one moment the first by name is heard first, and all of them before anybody
    begins another turn. A turn in which the site drops out is done again, and one that takes longer than
    strategy.round_deadline ends then, without an update.
    """

    def __init__(self, config: Config, cohort: Cohort, clock: Clock, times: TurnTimes, ahead: int) -> None:
        """`ahead`: how many trainings are worked at before it is their time."""
        super().__init__(config, cohort)
        self._clock, self._times, self._ahead = clock, times, ahead
        self._due: list[tuple[float, SiteId]] = []  # a heap

    def goes_on(self, turns: Mapping[SiteId, Turn]) -> None:
        """Bring the clock to where a run was stopped: what was answered is in the past."""
        for site, turn in turns.items():
            if turn.state != TurnState.OWED:
                self._clock.reaches(self._times.of(site, turn.number)[1])

    def begins(self, site: SiteId, turn: Turn) -> float:
        return self._times.of(site, turn.number)[0]

    def may_begin(self, site: SiteId, turn: Turn) -> bool:
        return not self._due or self._due[0][0] > self.begins(site, turn)

    def send(self, site: SiteId, request: Train | Evaluate) -> None:
        self.under_way[site] = request
        due = -math.inf if isinstance(request, Evaluate) else self._times.of(site, request.round)[1]
        heapq.heappush(self._due, (due, site))

    async def first(
        self, members: Collection[SiteId]
    ) -> tuple[SiteId, Train | Evaluate, Reply | None] | None:
        for _, site in heapq.nsmallest(self._ahead, self._due):
            if not self._late(site):
                self._start(site)
        due, site = heapq.heappop(self._due)
        self._clock.reaches(due)
        if self._late(site):
            return site, self.under_way.pop(site), None
        await asyncio.wait([self._replies[site]])
        return self._answered(site)

    def _late(self, site: SiteId) -> bool:
        request = self.under_way[site]
        return isinstance(request, Train) and self._times.of(site, request.round)[2]


async def clocked(
    config: Config, clock: Clock, about: Description, cohort: Cohort, count: Count, ahead: int
) -> Clocked:
    """Simulated sites, without rounds."""
    models, examples = SiteModels(config, about.sites), TrainedOn(config, count)
    load = TrainingBytes(config, about.schema, about.update, about.extras).load(0, -1, about.sites)
    known = await examples(about.sites) if models.by_examples else {}
    times = TurnTimes(models, load, known, config.strategy.round_deadline)
    return Clocked(config, cohort, clock, times, ahead)


class TurnTimes:
    """When each turn of each asynchronous site begins and ends on the clock."""

    def __init__(self, models: SiteModels, load: Load, examples: Examples, deadline_s: float) -> None:
        """`load`: of any turn, but for its examples."""
        self._models, self._load, self._examples, self._deadline_s = models, load, examples, deadline_s
        # the newest turns of each site, and the number of the first of them
        self._known: dict[SiteId, tuple[int, list[tuple[float, float, bool]]]] = {}

    def of(self, site: SiteId, number: int) -> tuple[float, float, bool]:
        """(when a turn begins, when it ends, whether its update is too late). ConfigError for a site that is
        never there as long as its training takes."""
        first, known = self._known.get(site, (0, []))
        if number < first:  # of long ago
            first, known = 0, []
        while first + len(known) <= number:
            known.append(self._next(site, first + len(known), known[-1][1] if known else 0.0))
            if len(known) > NEWEST:
                first += 1
                del known[0]
        self._known[site] = first, known
        return known[number - first]

    def _next(self, site: SiteId, number: int, free_s: float) -> tuple[float, float, bool]:
        model, load = self._models[site], self._load.of(self._examples.get(site, 0.0))
        begins = model.there.comes(free_s)
        until, ends = begins + self._deadline_s, begins
        for attempt in count():
            ends = model.arrives(ends, load, until)
            if ends > until:
                return begins, until, True
            if not self._models.drops_out(site, number, attempt):
                return begins, ends, False
        raise AssertionError("a turn ends")
