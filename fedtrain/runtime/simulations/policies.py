"""Policies compared by simulated time, without training: what a round takes, what is lost, what it moves."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_right
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...arena import ArenaFile
from ...config import Config, Seconds
from ...errors import ConfigError
from ...messages import Evaluation, Reply, Request, SiteId
from ...schema import Schema
from ...store import RoundPlan
from ...training.building import build_model
from ...training.examples import examples_of
from ...training.partition import SimulatedSites
from ...training.task import load_task
from ..journal import Clock
from ..sites import compressed
from ..star.answers import train_requests
from ..star.federated import sample
from .clock import Examples, OnClock, arrivals, passes
from .clocked_turns import TurnTimes
from .site_models import SiteModels
from .training_bytes import DIGEST, TrainingBytes

ROUNDS = 50  # that each policy is tried for, at most
MORE = 1.3  # sites asked for one that is needed (Bonawitz et al. 2019)
ON_TIME = 0.8  # of those asked in the first round, whom the shorter deadline lets answer
BUFFERS = (0.1, 0.3, 1.0)  # of asynchronous runs, in updates of a round


@dataclass(frozen=True)
class PolicyPlan:
    """What a policy costs by the models of the simulated sites. Times are seconds of their clock."""

    policy: str
    round_s: float  # of a round, or a version: the mean
    updates: float  # in a round: the mean
    lost: float  # part of the trainings that were asked for and are in no round
    nbytes: int  # through the aggregator in a round, both ways: the mean

    @property
    def updates_per_hour(self) -> float:
        return self.updates / self.round_s * 3600 if self.round_s else math.inf


class Untrained:
    """A cohort whose sites answer at once, with nothing."""

    bytes_in = bytes_out = 0

    def __init__(self, sites: Sequence[SiteId]) -> None:
        self._sites = sites

    async def members(self, at_least: int) -> Sequence[SiteId]:
        return self._sites

    async def newcomer(self, known: Collection[SiteId]) -> None:
        await asyncio.get_running_loop().create_future()

    def tell(self, site: SiteId, line: str) -> None:
        """Nobody listens."""

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        for site in requests:
            yield site, Evaluation(metrics={})


class Policies:
    """Policies over the sites of one simulation."""

    def __init__(
        self, config: Config, sites: Sequence[SiteId], schema: Schema, update: Schema, examples: Examples
    ) -> None:
        """`examples`: that each site trains on in a round."""
        self._config, self._sites, self._schema, self._update = config, sites, schema, update
        self._models, self._examples = SiteModels(config, sites), examples

    def compared(self) -> list[PolicyPlan]:
        """The configured rounds first, then rounds that wait for all, with more sites than they need and with
        a shorter deadline, and asynchronous runs with buffers of several sizes."""
        config, found = replace(self._config, asynchronous=type(self._config.asynchronous)()), []
        keys = config.strategy
        needed = len(sample(config, 0, 0, self._sites))
        tries = {"as it is set": keys} if not self._config.asynchronous.enabled else {}
        tries["wait for all"] = replace(keys, enough=1.0)
        more = min(1.0, keys.fraction * MORE)
        tries[f"ask {more:.3g}, {keys.fraction / more:.2g} are enough"] = replace(
            keys, fraction=more, enough=keys.fraction / more if more > keys.fraction else 1.0
        )
        deadline_s = self._on_time(config)
        tries[f"deadline {deadline_s:.3g} s"] = replace(keys, enough=1.0, round_deadline=Seconds(deadline_s))
        for name, strategy in tries.items():
            found.append(asyncio.run(self._rounds(name, replace(config, strategy=strategy))))
        own = [self._config.asynchronous.buffer] if self._config.asynchronous.enabled else []
        buffers = sorted({max(1, round(part * needed)) for part in BUFFERS} | {*own})
        return [*found, *(self._versions(buffer, needed) for buffer in buffers)]

    def _wire(self, config: Config) -> TrainingBytes:
        return TrainingBytes(config, self._schema, self._update)

    def _on_time(self, config: Config) -> float:
        """When a part of those asked in the first round have answered."""
        load = self._wire(config).load(0, -1, self._sites)
        loads = {site: load.of(self._examples.get(site, 0.0)) for site in sample(config, 0, 0, self._sites)}
        took = arrivals(self._models, 0.0, config.strategy.round_deadline, loads, lambda site: (0, "0"))
        times = [at_s for at_s, _ in took.answers]
        return times[math.ceil(ON_TIME * len(times)) - 1] if times else config.strategy.round_deadline

    async def _rounds(self, name: str, config: Config) -> PolicyPlan:
        clock, wire, weights = Clock(), self._wire(config), ArenaFile(self._schema, Path(), DIGEST)

        async def examples(sites: Sequence[SiteId]) -> Examples:
            return self._examples

        cohort = OnClock(config, Untrained(self._sites), clock, self._models, wire, examples)
        number = attempt = asked = good = nbytes = 0
        rounds = min(ROUNDS, config.run.rounds)
        while number < rounds and attempt < ROUNDS:
            members = await cohort.members(config.strategy.min_sites)
            plan = RoundPlan(number, attempt, sample(config, number, attempt, members))
            requests = train_requests(config, plan, weights)
            inside = [site async for site, _ in cohort.exchange(requests, config.strategy.round_deadline)]
            asked += len(plan.sites)
            load = wire.load(number, number - 1, plan.sites)
            nbytes += len(plan.sites) * load.down_bytes + len(inside) * load.up_bytes
            enough = len(inside) >= config.strategy.min_sites
            good, attempt = good + len(inside) * enough, 0 if enough else attempt + 1
            number += enough
        if not number:
            raise ConfigError(
                f"simulate: in {ROUNDS} attempts at a round strategy.min_sites = {config.strategy.min_sites} "
                f"sites never answered ({name}). Raise strategy.round_deadline or strategy.fraction."
            )
        return PolicyPlan(name, clock.now_s / number, good / number, 1 - good / asked, nbytes // number)

    def _versions(self, buffer: int, needed: int) -> PolicyPlan:
        """Without rounds, and so without masks, for as many updates as in the rounds."""
        config = replace(self._config, secagg=replace(self._config.secagg, enabled=False))
        bound, load = config.asynchronous.max_staleness, self._wire(config).load(0, -1, self._sites)
        times = TurnTimes(self._models, load, self._examples, config.strategy.round_deadline)
        due = [(times.of(site, 0)[1], site, 0) for site in self._sites]
        heapq.heapify(due)
        good, asked, made = 0, 0, list[float]()  # when each version was made
        while good < min(ROUNDS, config.run.rounds) * needed and asked < 100 * ROUNDS * needed:
            at_s, site, turn = heapq.heappop(due)
            begun_s, _, late = times.of(site, turn)
            asked += 1
            if not late and len(made) - bisect_right(made, begun_s) <= bound:
                good += 1
                made += [at_s] if good % buffer == 0 else []
            heapq.heappush(due, (times.of(site, turn + 1)[1], site, turn + 1))
        if not made:
            raise ConfigError(
                f"simulate: of {asked} asynchronous trainings {good} gave an update. Raise "
                f"strategy.round_deadline, or let sites be there for longer."
            )
        nbytes = (asked * load.down_bytes + good * load.up_bytes) // len(made)
        name = f"asynchronous, buffer {buffer}"
        return PolicyPlan(name, made[-1] / len(made), buffer, 1 - good / asked, nbytes)


def policies(config: Config, sites: int | None = None, data_dir: Path | None = None) -> list[PolicyPlan]:
    """Policies compared over the simulated sites of a project; `sites`: how many, as in plan.round_plan."""
    task = load_task(config.run.task, config.root, data_dir)
    if sites is not None:
        config = replace(config, simulate=replace(config.simulate, sites=sites))
    simulated = SimulatedSites(task, config.simulate, config.run.seed)
    schema = Schema.of(build_model(task, config.run.seed, torch.device("cpu")))
    codec, examples = compressed.up_codec(config, schema), dict[SiteId, float]()
    if SiteModels(config, simulated.names).by_examples:
        examples = {
            name: passes(config.train, examples_of(simulated.data(name)).count) for name in simulated.names
        }
    update = codec.coded if codec else schema
    return Policies(config, simulated.names, schema, update, examples).compared()
