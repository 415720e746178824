"""Simulated sites on the run's own clock: who answers a round, and when, follows from their models alone.

`OnClock` decides who answers before anybody trains, so a site that drops out, or that is too late, costs this
machine nothing, and neither the number of workers nor their speed changes who is in a round. An evaluation
takes no time on the clock.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from random import Random

from ...config import Config, TrainConfig
from ...digest import seed_of
from ...errors import ConfigError
from ...exchange import Cohort, CohortWrapper, Folds
from ...messages import Failure, Folded, Reply, Request, SiteId, Train
from ...population import EACH, Present
from ..journal import Clock
from ..star.answers import rule_of
from ..star.enough import check_config, closes, needed
from ..star.secure_terms import policy
from ..trainers.trainer_messages import Description
from .site_models import Load, SiteModels
from .training_bytes import TrainingBytes

LOOKED_AT = 4096  # of more than EACH sites, for how many of them are there
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
        begun_s, looked = self._clock.now_s, self._looked_at(sites)
        need = -(-at_least * len(looked) // len(sites))
        while (now := self._clock.now_s) < begun_s + PATIENCE_S:
            comes = {site: self._models[site].there.comes(now) for site in looked}
            here = [site for site in looked if comes[site] == now]
            if len(here) >= need:
                return here if looked is sites else self._present(sites, len(here) / len(looked))
            coming = [at_s for at_s in comes.values() if at_s > now]
            self._clock.reaches(heapq.nsmallest(need - len(here), coming)[-1])
        raise ConfigError(
            f"simulate.availability: of {len(sites)} sites {at_least} are not there at once within "
            f"{PATIENCE_S / 86_400:g} days. Lower strategy.min_sites, or let sites be there for longer."
        )

    def _looked_at(self, sites: Sequence[SiteId]) -> Sequence[SiteId]:
        """The sites that tell how many are there: all, or of very many a few, always the same ones."""
        if len(sites) <= EACH:
            return sites
        return Random(seed_of(self._config.run.seed, "looked at")).sample(sites, LOOKED_AT)

    def _present(self, sites: Sequence[SiteId], part: float) -> Present:
        """The sites that are there now, which are about this part of them."""
        now = self._clock.now_s
        count = round(part * len(sites))
        return Present(sites, count, lambda site: self._models[site].there.comes(now) == now)

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
        async with self._round(trainings, deadline_s) as round:
            while batch := round.next_batch():
                chosen = {site: request for site, request in requests.items() if site in batch}
                async with aclosing(self._inner.exchange(chosen, deadline_s)) as replies:
                    async for site, reply in replies:
                        if not isinstance(reply, Failure):
                            round.answered.add(site)
                        yield site, reply

    @asynccontextmanager
    async def _round(self, trainings: Mapping[SiteId, Train], deadline_s: float) -> AsyncGenerator[Round]:
        """A round in which these sites are asked; at the end of the block it is told who was late or away."""
        until_s = self._clock.now_s + deadline_s
        found = await self._arrivals(trainings, until_s)
        need = needed(self._config, len(trainings), self._quorum(len(trainings)))
        round = Round(found.answers, until_s, len(trainings), need, self._must_have)
        try:
            yield round
        finally:
            self._clock.reaches(round.closes_s)
            self._clock.late = sorted([*found.late, *(site for _, site in round.waiting)])
            self._clock.away = sorted(found.away)
            for site in trainings.keys() - round.heard:
                request = trainings[site]
                self._in_vain_bytes += self._wire.weights_bytes(request.round, request.counted)

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


class Round:
    """Whom a round on the clock has heard, and for whom it waits."""

    def __init__(
        self, answers: Sequence[tuple[float, SiteId]], until_s: float, asked: int, need: int,
        must_have: Collection[SiteId],
    ) -> None:  # fmt: skip
        """`answers`: as in Arrivals; `need` of them close the round, with those that it must have."""
        self.waiting, self._asked, self._need, self._must_have = [*answers], asked, need, must_have
        self.heard, self.answered = set[SiteId](), set[SiteId]()  # all, and those that did not fail
        self.closes_s, self._last_s = until_s, until_s

    @property
    def open(self) -> bool:
        return not closes(self.answered, self._need, self._must_have)

    def next_batch(self) -> set[SiteId]:
        """The sites whose answers the round can't close without; empty when it closes, or nobody is left.
        Those of the batch before have all been heard."""
        if not self.open or len(self.heard) == self._asked:
            self.closes_s = self._last_s
        expected, batch = {*self.answered}, set[SiteId]()
        while self.waiting and not closes(expected, self._need, self._must_have):
            self._last_s, site = self.waiting.pop(0)
            expected.add(site)
            batch.add(site)
        self.heard |= batch
        return batch


class FoldsOnClock(OnClock):
    """The same over a cohort whose sites' updates are summed where they are trained."""

    _twice_bytes = 0  # of updates that came twice, which a federation sends once

    @property
    def bytes_in(self) -> int:
        return self._inner.bytes_in - self._twice_bytes

    async def fold(
        self, requests: Mapping[SiteId, Train], deadline_s: float, summands: int = 0,
        plan: Sequence[SiteId] = (),
    ) -> AsyncGenerator[tuple[Sequence[SiteId], Folded | Reply], None]:  # fmt: skip
        """See exchange.Folds. Where a site fails another one takes its place, perhaps in a block that is
        summed already: then all are summed again. Exact sums, those of `summands`, are only added to."""
        assert isinstance(self._inner, Folds), self._inner
        chosen, nbytes = set[SiteId](), self._wire.vector_bytes(len(requests))
        async with self._round(requests, deadline_s) as round:
            while batch := round.next_batch():
                chosen, held = batch if summands else chosen | batch, []
                round.answered = round.answered if summands else set()
                asked = {site: request for site, request in requests.items() if site in chosen}
                async with aclosing(self._inner.fold(asked, deadline_s, summands, list(requests))) as replies:
                    async for sites, found in replies:
                        given = found.updates if isinstance(found, Folded) else not isinstance(found, Failure)
                        round.answered |= {
                            *sites[:given]
                        }  # a linear rule must have so many, whoever they are
                        if round.waiting and not summands:
                            held.append((sites, found))
                        else:
                            yield sites, found
                if held and round.open:
                    self._twice_bytes += len(round.answered) * nbytes
                    continue
                for sites, found in held:
                    yield sites, found


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


def on_clock(config: Config, clock: Clock, about: Description, cohort: Cohort, count: Count) -> OnClock:
    """Simulated sites, in rounds. `count`: as in TrainedOn."""
    models = SiteModels(config, about.sites)
    wire = TrainingBytes(config, about.schema, about.update, about.extras)
    made = FoldsOnClock if isinstance(cohort, Folds) else OnClock
    return made(config, cohort, clock, models, wire, TrainedOn(config, count))


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
