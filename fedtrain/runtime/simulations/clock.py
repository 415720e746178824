"""Simulated sites on the run's own clock: who answers a round, and when, follows from their models alone.

`OnClock` decides who answers before anybody trains, so a site that drops out, or that is too late, costs this
machine nothing, and neither the number of workers nor their speed changes who is in a round. An evaluation
takes no time on the clock.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

from ...config import Config, TrainConfig
from ...digest import seed_of
from ...errors import ConfigError
from ...exchange import Cohort, CohortWrapper
from ...messages import Evaluate, Failure, Reply, Request, SiteId, Train
from ...store import Turn, TurnState
from ..journal import Clock
from ..star.answers import rule_of
from ..star.enough import check_config, closes, needed
from ..star.in_flight import InFlight
from ..star.secure_terms import policy
from ..trainers.trainer_messages import Description
from .site_models import Load, SiteModels
from .training_bytes import TrainingBytes

PATIENCE_S = 31 * 86_400.0  # that enough sites are waited for
Count = Callable[[SiteId], Awaitable[float | None]]  # of a site's examples
Examples = Mapping[SiteId, float]  # that a site trains on in a round, once for each epoch


@dataclass(frozen=True)
class Arrivals:
    """What becomes of those that a round asks."""

    answers: Sequence[tuple[float, SiteId]]  # when each update is there, in that order
    late: Sequence[SiteId]  # would answer after the deadline
    away: Sequence[SiteId]  # went away, or was not heard of again


class OnClock(CohortWrapper):
    """A cohort of sites that are there when their models say so, and answer when those say so."""

    def __init__(
        self,
        config: Config,
        others: Cohort,
        clock: Clock,
        models: SiteModels,
        wire: TrainingBytes,
        examples: Callable[[Sequence[SiteId]], Awaitable[Examples]],
    ) -> None:
        """`examples`: how many each of some sites trains on."""
        super().__init__(others)
        check_config(config)
        self._config, self._clock, self._models, self._wire = config, clock, models, wire
        self._examples, self._must_have = examples, rule_of(config).must_have
        self._in_vain_bytes = 0  # sent to sites of which no update came

    @property
    def bytes_out(self) -> int:
        return self._inner.bytes_out + self._in_vain_bytes

    async def members(self, at_least: int) -> Sequence[SiteId]:
        """Those that are there; the clock goes on until there are enough."""
        sites = await self._inner.members(at_least)
        if self._models.always:
            return sites
        begun_s = self._clock.now_s
        while (now := self._clock.now_s) < begun_s + PATIENCE_S:
            comes = {site: self._models[site].there.comes(now) for site in sites}
            here = [site for site in sites if comes[site] == now]
            if len(here) >= at_least:
                return here
            coming = [at_s for at_s in comes.values() if at_s > now]
            self._clock.reaches(heapq.nsmallest(at_least - len(here), coming)[-1])
        raise ConfigError(
            f"simulate.availability: of {len(sites)} sites {at_least} are not there at once within "
            f"{PATIENCE_S / 86_400:g} days. Lower strategy.min_sites, or let sites be there for longer."
        )

    async def newcomer(self, known: Collection[SiteId]) -> None:
        """The clock goes on until a site comes that is not known."""
        others = [site for site in await self._inner.members(0) if site not in known]
        if not others:
            await self._inner.newcomer(known)
        self._clock.reaches(min(self._models[site].there.comes(self._clock.now_s) for site in others))

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        trainings = {site: r for site, r in requests.items() if isinstance(r, Train)}
        if not trainings:
            async with aclosing(self._inner.exchange(requests, deadline_s)) as replies:
                async for pair in replies:
                    yield pair
            return
        until_s = self._clock.now_s + deadline_s
        found = await self._arrivals(trainings, until_s)
        need = needed(self._config, len(trainings), self._quorum(len(trainings)))
        good, heard, waiting = set[SiteId](), set[SiteId](), list(found.answers)
        closed_s = until_s
        try:
            while waiting and not closes(good, need, self._must_have):
                batch, waiting = self._first(waiting, good, need)
                heard |= {site for _, site in batch}
                chosen = {site: requests[site] for site in requests if site in {s for _, s in batch}}
                async with aclosing(self._inner.exchange(chosen, deadline_s)) as replies:
                    async for site, reply in replies:
                        if not isinstance(reply, Failure):
                            good.add(site)
                        yield site, reply
                if closes(good, need, self._must_have) or len(heard) == len(trainings):
                    closed_s = batch[-1][0]
        finally:
            self._clock.reaches(closed_s)
            self._clock.late = sorted([*found.late, *(site for _, site in waiting)])
            self._clock.away = sorted(found.away)
            for site in trainings.keys() - heard:
                request = trainings[site]
                self._in_vain_bytes += self._wire.weights_bytes(request.round, request.counted)

    def _first(
        self, waiting: Sequence[tuple[float, SiteId]], good: Collection[SiteId], need: int
    ) -> tuple[list[tuple[float, SiteId]], list[tuple[float, SiteId]]]:
        """The next answers that a round can't close without, and those after them."""
        answered = set(good)
        for i, (_, site) in enumerate(waiting):
            answered.add(site)
            if closes(answered, need, self._must_have):
                return [*waiting[: i + 1]], [*waiting[i + 1 :]]
        return [*waiting], []

    async def _arrivals(self, requests: Mapping[SiteId, Train], until_s: float) -> Arrivals:
        examples = await self._examples(list(requests)) if self._models.by_examples else {}
        asked, loads = sorted(requests), dict[tuple[int, int], Load]()

        def load(site: SiteId) -> Load:
            key = requests[site].round, requests[site].counted
            if key not in loads:
                loads[key] = self._wire.load(*key, asked)
            return loads[key].of(examples.get(site, 0.0))

        attempt = {site: request.id.split("/")[-2] for site, request in requests.items()}
        return arrivals(
            self._models, self._clock.now_s, until_s, {site: load(site) for site in asked},
            lambda site: (requests[site].round, attempt[site]),
        )  # fmt: skip

    def _quorum(self, sites: int) -> int:
        return policy(self._config, "").graph(sites)[0] if self._config.secagg.enabled else 0


def arrivals(
    models: SiteModels,
    asked_s: float,
    until_s: float,
    loads: Mapping[SiteId, Load],
    which: Callable[[SiteId], tuple[object, ...]],
) -> Arrivals:
    """What becomes of sites that are asked at `asked_s`, each with its load; `which` training it is, decides
    who drops out. Of those that answer at the same moment the first one is drawn."""
    answers, late, away = list[tuple[float, int, SiteId]](), list[SiteId](), list[SiteId]()
    for site, load in loads.items():
        model = models[site]
        at_s = model.arrives(asked_s, load, until_s)
        if models.drops_out(site, *which(site)):
            away.append(site)
        elif at_s <= until_s:
            answers.append((at_s, seed_of("arrival", site, *which(site)), site))
        else:
            here = model.there.comes(asked_s) == asked_s
            stays = here and model.there.leaves(asked_s) >= min(asked_s + model.seconds(load), until_s)
            (late if stays else away).append(site)
    return Arrivals([(at_s, site) for at_s, _, site in sorted(answers)], late, away)


class Clocked(InFlight):
    """Asynchronous sites on the run's own clock.

    A site begins a turn when the one before has ended and it is there, so the moments of its n-th turn follow
    from its model alone: who is heard next depends on turns, not on how fast this machine is, nor on when the
    run was stopped. Of those at one moment the first by name is heard first, and all of them before anybody
    begins another turn. A turn in which the site drops out is done again, and one that takes longer than
    strategy.round_deadline ends then, without an update.
    """

    def __init__(
        self,
        config: Config,
        cohort: Cohort,
        clock: Clock,
        times: TurnTimes,
        ahead: int,
    ) -> None:
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


def on_clock(config: Config, clock: Clock, about: Description, cohort: Cohort, count: Count) -> OnClock:
    """Simulated sites, in rounds. `count`: as in TrainedOn."""
    models = SiteModels(config, about.sites)
    wire = TrainingBytes(config, about.schema, about.update, about.extras)
    return OnClock(config, cohort, clock, models, wire, TrainedOn(config, count))


async def clocked(
    config: Config, clock: Clock, about: Description, cohort: Cohort, count: Count, ahead: int
) -> Clocked:
    """Simulated sites, without rounds."""
    models, examples = SiteModels(config, about.sites), TrainedOn(config, count)
    load = TrainingBytes(config, about.schema, about.update, about.extras).load(0, -1, about.sites)
    known = await examples(about.sites) if models.by_examples else {}
    times = TurnTimes(models, load, known, config.strategy.round_deadline)
    return Clocked(config, cohort, clock, times, ahead)


class TrainedOn:
    """How many examples sites train on in a round, each counted as often as it is trained on."""

    def __init__(self, config: Config, count: Count) -> None:
        """`count`: of a site's examples; None where only its training can tell."""
        self._train, self._count, self._known = config.train, count, dict[SiteId, float]()

    async def __call__(self, sites: Sequence[SiteId]) -> Examples:
        new = [site for site in sites if site not in self._known]
        for site, examples in zip(new, await asyncio.gather(*map(self._count, new)), strict=True):
            if examples is None:
                raise ConfigError(
                    f"simulate.example_time: how many examples {site} has is not known before it trains. "
                    f"Leave it 0 (and seconds_per_example out of a trace): then each training takes 1 s."
                )
            self._known[site] = passes(self._train, examples)
        return self._known


def passes(train: TrainConfig, examples: float) -> float:
    """The examples of a round at a site that has so many."""
    if train.local_steps:
        return float(train.local_steps * (train.batch_size or examples) * train.accumulate)
    return examples * train.local_epochs


class TurnTimes:
    """When each turn of each asynchronous site begins and ends on the clock."""

    def __init__(self, models: SiteModels, load: Load, examples: Examples, deadline_s: float) -> None:
        """`load`: of any turn, but for its examples."""
        self._models, self._load, self._examples, self._deadline_s = models, load, examples, deadline_s
        self._known: dict[SiteId, list[tuple[float, float, bool]]] = {}

    def of(self, site: SiteId, number: int) -> tuple[float, float, bool]:
        """(when a turn begins, when it ends, whether its update is too late). ConfigError for a site that is
        never there as long as its training takes."""
        known = self._known.setdefault(site, [])
        while len(known) <= number:
            known.append(self._next(site, len(known), known[-1][1] if known else 0.0))
        return known[number]

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
