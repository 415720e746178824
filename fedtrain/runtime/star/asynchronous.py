"""Asynchronous training: whoever is done is asked again at once, with the newest model, and no site waits.

FedBuff (Nguyen et al. 2022, arXiv 2106.06639, Algorithm 1): updates gather in a buffer; K of them move the
model to its next version. An update that was trained from the model of τ versions ago counts (1 + τ)^-½, and
is refused when τ is over a bound. With K = 1 each update moves the model when it comes, weighted as in
FedAsync (Xie et al. 2019, arXiv 1903.03934, its polynomial).

A version is a round in the store and in events. What a site trains is its own *turn*, counted at each site:
seeds come from (run, turn, site), so a site that is asked twice with one version finds two different things.
A turn is written down before it is asked, and is answered in the transaction that puts its update into the
buffer; the buffer is emptied in the one that commits the next version. So a process that is killed goes on
with the same turns: each update counts once, and none that was acknowledged is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...aggregation import aggregate, kept, last
from ...arena import AnyArena
from ...config import Config
from ...errors import BadUpdate, ConfigError, Diverged, RoundError
from ...events import SiteState, UpdateRefused
from ...exchange import Cohort
from ...messages import Evaluate, Failure, Metrics, Reply, SiteId, Train, Update, averages, summed
from ...schema import Section
from ...store import Buffered, Checkpoint, RoundPlan, Turn, TurnState
from ...strategies import Strategy, server_step
from ..journal import AtServer, Evaluators, Journal, Lap, Result, Shown, everyone, no_data, plain
from ..sites import compressed
from ..threads import in_thread
from .answers import (
    InTheOpen,
    alike,
    check_failures,
    checked,
    evaluate_id,
    evaluated,
    received,
    refuse,
    rule_of,
    train_id,
)
from .gathered import Aggregate, known_of
from .guard import REMEMBERED, name_of, stepped
from .in_flight import InFlight

if TYPE_CHECKING:
    import torch


def check_config(config: Config) -> None:
    """ConfigError for what can't be had without rounds."""
    if config.secagg.enabled:
        raise ConfigError(
            "asynchronous.enabled: secure aggregation sums over sites that are fixed before they train, and "
            "here updates come one by one. Set secagg.enabled = false and let the aggregator see each site's "
            "update, or asynchronous.enabled = false."
        )
    if config.strategy.fraction != 1:
        raise ConfigError(
            f"strategy.fraction: {config.strategy.fraction} of the sites can't be drawn where there are no "
            f"rounds: every site that is free is asked. Leave it at 1, or set asynchronous.enabled = false."
        )
    if config.simulate.engine == "stacked":
        raise ConfigError(
            f"simulate.engine: {config.simulate.engine} trains many sites from one model, and asynchronous "
            'sites are asked one by one. Set it to "loop", or asynchronous.enabled = false.'
        )
    rule_of(config)


async def run(
    journal: Journal,
    cohort: Cohort,
    strategy: Strategy,
    *,
    asks: InFlight | None = None,
    evaluate_at: Evaluators = everyone,
    shown: Shown = plain,
    at_server: AtServer = no_data,
) -> Result:
    """Versions until config.run.rounds or an early stop; RoundError when no site gives anything of use.

    `asks`: how sites are heard, when it is not as they come (a simulation has a clock of its own).
    `evaluate_at`, `shown`, `at_server`: as in federated.run.
    """
    newest = journal.begin(await cohort.members(0))
    asks = asks or InFlight(journal.config, cohort)
    loop = Loop(journal, cohort, strategy, asks, evaluate_at, shown, at_server)
    return await loop.run(journal.store.on_disk(newest))


@dataclass
class Evaluating:
    """A version that is evaluated at each site in its turn, between two trainings."""

    number: int
    weights: AnyArena
    asked: list[SiteId]
    waiting: list[SiteId]
    found: dict[SiteId, Metrics] = field(default_factory=dict)
    failed: dict[SiteId, str] = field(default_factory=dict)  # and why
    failures: Counter[SiteId] = field(default_factory=Counter)


class Loop:
    """All that goes on in a run, from its newest version on."""

    def __init__(
        self, journal: Journal, cohort: Cohort, strategy: Strategy, asks: InFlight, evaluate_at: Evaluators,
        shown: Shown, at_server: AtServer,
    ) -> None:  # fmt: skip
        self._journal, self._cohort, self._strategy = journal, cohort, strategy
        self._config, self._store, self._emit = journal.config, journal.store, journal.emit
        self._answers = InTheOpen(journal.config, cohort, journal.emit)
        store = journal.store
        self._asks, self._evaluate_at, self._shown, self._at_server = asks, evaluate_at, shown, at_server
        self._buffer, self._turns = store.turns.buffered(), store.turns.latest()
        self._counted, self._norms = store.counted(), dict[str, float]()  # of updates, by name_of
        self._evaluating: Evaluating | None = None
        self._attempt = 1  # of the next version: how often all sites were asked for it
        self._lap, journal.traffic = Lap(), cohort

    async def run(self, newest: Checkpoint) -> Result:
        config, journal, asks = self._config, self._journal, self._asks
        self._newest, need = newest, config.strategy.min_sites
        try:
            while (reason := journal.reason_to_stop(self._newest.round)) is None:
                if len(self._buffer) >= config.asynchronous.buffer:
                    await self._step()
                    continue
                if not asks.under_way:
                    journal.waiting(need)
                members = await self._cohort.members(0 if asks.under_way else need)
                need = 1  # it has begun, and goes on with whoever is there
                await self._ask(members)
                if heard := await asks.first(members):
                    await self._hear(*heard)
        finally:
            await asks.close()
        await self._evaluate_last()
        return journal.result(self._newest.round, reason)

    # --- asking

    async def _ask(self, members: Sequence[SiteId]) -> None:
        """Give all who are free something to do: an evaluation that waits for them, else a turn."""
        asks, number = self._asks, self._newest.round
        if self._evaluating is None and self._journal.evaluation_is_due(number):
            if asked := self._evaluate_at(number, members):
                self._evaluating = Evaluating(number, self._newest.weights, [*asked], [*asked])
                self._store.evaluating = number
            else:
                await self._keep_evaluation(number, self._newest.weights, {}, {})
        if (evaluating := self._evaluating) is not None:
            for site in evaluating.waiting:
                if site not in asks.under_way:
                    id = evaluate_id(self._config, evaluating.number, evaluating.failures[site])
                    asks.send(site, Evaluate(id=id, round=evaluating.number, weights=evaluating.weights))
        free = {site: self._next(site) for site in members if site not in asks.under_way}
        debts_first = lambda site: (free[site] != self._turns.get(site), asks.begins(site, free[site]))
        for site in sorted(free, key=debts_first):
            turn = free[site]
            owes = turn == self._turns.get(site)
            if turn.state == TurnState.OWED and (owes or asks.may_begin(site, turn)):
                self._send(site, turn)
        if not asks.under_way:
            await self._try_again(members)

    def _next(self, site: SiteId) -> Turn:
        """What a site that is free is to train: what it owes, when that may still be used; else a turn from
        the newest version. One of which nothing came is not repeated before there is a newer version."""
        last, number = self._turns.get(site), self._newest.round
        if last is None:
            return Turn(0, number)
        if last.state == TurnState.OWED and number - last.version <= self._config.asynchronous.max_staleness:
            return last
        if last.state == TurnState.REFUSED and last.version == number:
            return last
        return Turn(last.number + 1, number)

    def _send(self, site: SiteId, turn: Turn) -> None:
        if turn != self._turns.get(site):
            self._set_turn(site, turn)
        weights = self._store.weights(turn.version)
        request = train_id(self._config, RoundPlan(turn.number, 0, [site]))
        counted = self._counted.get(site, -1)
        self._asks.send(site, Train(id=request, round=turn.number, weights=weights, counted=counted))
        self._emit(SiteState(site=site, state="training", round=turn.version + 1))

    async def _try_again(self, members: Sequence[SiteId]) -> None:
        """Nobody here gave anything of use: ask them anew. RoundError when that was so in each attempt."""
        for site in members:
            self._set_turn(site, replace(self._turns[site], state=TurnState.TAKEN))
        if self._attempt >= self._config.strategy.attempts:
            raise RoundError(
                f"version {self._newest.round + 1}: none of the sites here ({', '.join(members[:5])}) gave "
                f"an update that can be used, and the log says why. The same command tries again."
            )
        self._attempt += 1
        await self._ask(members)

    def _set_turn(self, site: SiteId, turn: Turn) -> None:
        self._store.turns.set(site, turn)
        self._turns[site] = turn

    # --- hearing

    async def _hear(self, site: SiteId, request: Train | Evaluate, reply: Reply | None) -> None:
        if isinstance(request, Evaluate):
            await self._evaluated(site, request, reply)
            return
        turn, number = self._turns[site], self._newest.round + 1
        if reply is None and site not in await self._cohort.members(0):
            return  # it was lost, and owes this turn still
        try:
            update, self._norms[name_of(site, turn)] = await self._good(request, turn, reply)
        except BadUpdate as e:
            self._set_turn(site, replace(turn, state=TurnState.REFUSED))
            refuse(self._cohort, self._emit, site, number, str(e), noun="version")
            return
        delta = await in_thread(update.delta.schema.nbytes, self._store.turns.keep, site, update.delta)
        taken = self._store.turns.take(site, turn, msgspec.structs.replace(update, delta=delta))
        self._turns[site], self._counted[site] = taken.turn, turn.number
        self._buffer.append(taken)
        self._emit(received(number, site, update, self._staleness(turn)))

    async def _good(self, request: Train, turn: Turn, reply: Reply | None) -> tuple[Update, float]:
        """The reply, which can be used, and its norm; else BadUpdate."""
        deadline_s, bound = self._config.strategy.round_deadline, self._config.asynchronous.max_staleness
        if reply is None:
            raise BadUpdate(f"none came within strategy.round_deadline = {deadline_s:g} s")
        if (staleness := self._staleness(turn)) > bound:
            raise BadUpdate(f"{staleness} versions old, over asynchronous.max_staleness = {bound}")
        return await checked(request, reply, self._config)

    def _staleness(self, turn: Turn) -> int:
        return self._newest.round - turn.version

    async def _evaluated(self, site: SiteId, request: Evaluate, reply: Reply | None) -> None:
        """Take in what a site found; the last one's closes the evaluation. Whoever failed is asked again."""
        evaluating = self._evaluating
        assert evaluating is not None, "an evaluation is open as long as a site is asked for it"
        try:
            if reply is not None:
                evaluating.found[site] = evaluated(request, reply, self._config)
                evaluating.failed.pop(site, None)
        except BadUpdate as e:
            self._emit(UpdateRefused(round=request.round, site=site, reason=str(e)))
            evaluating.failed[site] = str(e)
            if isinstance(reply, Failure):
                evaluating.failures[site] += 1
                if evaluating.failures[site] < self._config.strategy.attempts:
                    return
        evaluating.waiting.remove(site)
        if not evaluating.waiting:
            check_failures(request.round, evaluating.asked, evaluating.failed)
            found = alike(request.round, evaluating.found, self._emit)
            await self._keep_evaluation(request.round, evaluating.weights, summed(found), found)
            self._evaluating = self._store.evaluating = None

    async def _evaluate_last(self) -> None:
        """The model of the last version, at all sites at once: they have nothing else to do."""
        number = self._newest.round
        if number < self._config.run.rounds or not self._journal.evaluation_is_due(number):
            return
        if sites := self._evaluate_at(number, await self._cohort.members(1)):
            found = await self._answers.evaluate(number, sites, self._newest.weights)
            await self._keep_evaluation(number, self._newest.weights, *found)

    async def _keep_evaluation(
        self, number: int, weights: AnyArena, total: Metrics, by_site: dict[SiteId, Metrics]
    ) -> None:
        metrics, each = await self._shown(total, by_site)
        self._journal.keep_evaluation(number, metrics, each, await self._at_server(number, weights))

    # --- the next version

    async def _step(self) -> None:
        """What the buffer holds moves the model. The order of arrival doesn't matter, only what came."""
        buffer = sorted(self._buffer, key=lambda b: (b.site, b.turn.number))
        before, nbytes = self._newest, self._newest.weights.schema.nbytes
        updates = [self._discounted(b) for b in buffer]
        known = known_of(self._config, before.round, last(before.weights.schema, before.state))
        delta = await in_thread(nbytes, aggregate, self._answers.rule, before.weights.schema, updates, known)
        step = partial(server_step, self._strategy, before.weights, before.state, delta)
        named = {name_of(b.site, b.turn): b for b in buffer}
        found = Aggregate(delta, {}, (), norms={name: self._norms.get(name, 0.0) for name in named})
        given, earlier = {name: b.update for name, b in named.items()}, self._store.norms(REMEMBERED)
        try:
            weights, state, norm = await in_thread(
                nbytes, stepped, step, found, given, before.weights, earlier, self._config.limits
            )
        except Diverged as e:
            self._blame(named, e)
            return
        metrics = averages({f"{i:09}": b.update.metrics for i, b in enumerate(buffer)})
        record = self._lap.record(metrics, len({b.site for b in buffer}))
        record["norm"] = norm
        record["staleness"] = sum(self._staleness(b.turn) for b in buffer) / len(buffer)
        after = Checkpoint(before.round + 1, weights, state | kept(self._answers.rule, delta))
        after = await in_thread(nbytes, compressed.shortened, self._config, before, after)
        prepared = await in_thread(nbytes, self._store.prepare, after)
        self._journal.commit(after, record, prepared)
        self._newest, self._lap, self._attempt = self._store.on_disk(after), Lap(), 1
        self._buffer, self._norms = [], {}
        self._forget_lost()

    def _blame(self, buffer: dict[str, Buffered], error: Diverged) -> None:
        """Take the update out of the buffer that spoils the model. Diverged when no single one does."""
        if not error.culprits and len(buffer) > 1:
            raise error
        worst = buffer[next(iter(error.culprits or buffer))]
        self._store.turns.discard(worst)
        self._buffer.remove(worst)
        self._counted = self._store.counted()
        if self._turns[worst.site] == worst.turn:  # not asked again before there is a newer version
            self._set_turn(worst.site, replace(worst.turn, state=TurnState.REFUSED))
        refuse(self._cohort, self._emit, worst.site, self._newest.round + 1, str(error), noun="version")

    def _forget_lost(self) -> None:
        """What a site that went away owes is of no use any more when it is too old: its version's weights,
        which are on disk for its sake, may go."""
        bound = self._config.asynchronous.max_staleness
        for site, turn in self._turns.items():
            lost = turn.state == TurnState.OWED and site not in self._asks.under_way
            if lost and self._staleness(turn) > bound:
                self._set_turn(site, replace(turn, state=TurnState.REFUSED))

    def _discounted(self, buffered: Buffered) -> Update:
        """A stale update as it counts: the paper's s(τ)·Δ. The weights of the mean stay the examples."""
        weight = (1.0 + self._staleness(buffered.turn)) ** -self._config.asynchronous.staleness_exponent
        return msgspec.structs.replace(buffered.update, delta=Scaled(buffered.update.delta, weight))


class Scaled(AnyArena):
    """A delta that is multiplied as it is read."""

    def __init__(self, delta: AnyArena, factor: float) -> None:
        self.schema, self._delta, self._factor = delta.schema, delta, factor

    def chunk(self, section: Section, start: int, stop: int) -> torch.Tensor:
        return self._delta.chunk(section, start, stop).double() * self._factor
