"""What a round asks of its sites, and how their answers become one: in the open here, under masks in
`secure_rounds.py`. The loop (`federated.py`) is given one or the other, and can't tell which.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from ... import aggregation
from ...aggregation import Rule
from ...arena import AnyArena
from ...config import Config
from ...errors import BadUpdate, ConfigError, TaskError, grouped, some
from ...events import Emit, Notice, UpdateReceived, UpdateRefused, heard
from ...exchange import Cohort, Folds, in_order
from ...learning import NO_EXTRAS, Extras
from ...messages import (
    Evaluate,
    Evaluation,
    Failure,
    Folded,
    Metrics,
    Reply,
    SiteId,
    Train,
    Update,
    averages,
    misfits,
    sized_names,
    summed,
)
from ...store import RoundPlan
from ..threads import in_thread
from . import checks
from .gathered import Aggregate, Gathering
from .guard import guarded

if TYPE_CHECKING:
    from ...secagg.encoding import Total

FEW_BITS, LEAST_BITS = 12, 8  # of a value under masks: with fewer there is a notice, and an error
OWN_BOUNDS = {"fednova": "strategy.max_examples", "qfedavg": "strategy.max_loss"}  # on a site's weight
T = TypeVar("T")
Counted = Mapping[SiteId, int]  # site -> the last round in which an update of its is in the model
NOBODY: Counted = {}


class Answers(Protocol):
    """How many answers become one."""

    cohort: Cohort

    async def train(self, plan: RoundPlan, weights: AnyArena) -> Aggregate:
        """Have the planned sites train. TooFewSites when fewer than the round needs give a good update."""

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena, counted: Counted = NOBODY
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        """Sums over all sites, and each one's own where they may be known. `counted`: where sites have models
        of their own, the last round in which each of them is."""


def train_id(config: Config, plan: RoundPlan) -> str:
    return f"{config.run.name}/{plan.round}/{plan.attempt}/train"


def train_requests(config: Config, plan: RoundPlan, weights: AnyArena) -> dict[SiteId, Train]:
    """What each planned site is asked: one request for all that counted last in the same round."""
    counted = {site: plan.counted.get(site, -1) for site in plan.sites}
    request = {
        last: Train(id=train_id(config, plan), round=plan.round, weights=weights, counted=last)
        for last in set(counted.values())
    }
    return {site: request[last] for site, last in counted.items()}


def evaluate_id(config: Config, number: int, attempt: int = 0) -> str:
    return f"{config.run.name}/{number}/{attempt}/evaluate"


class InTheOpen:
    """Each site's update comes as it is, is checked, and then folded."""

    def __init__(self, config: Config, cohort: Cohort, emit: Emit, extras: Extras = NO_EXTRAS) -> None:
        """ConfigError for a rule that could not keep its promise with so few sites."""
        self._config, self.cohort, self._emit, self._extras = config, cohort, emit, extras
        self.rule = rule_of(config)

    async def train(self, plan: RoundPlan, weights: AnyArena) -> Aggregate:
        requests, found = train_requests(self._config, plan, weights), Gathering(plan, weights, self._extras)
        if self.rule.linear and isinstance(self.cohort, Folds):
            async with aclosing(self.cohort.fold(requests, self._config.strategy.round_deadline)) as replies:
                async for sites, reply in replies:
                    if isinstance(reply, Folded):
                        self._tell(sites, reply, found)
                        found.add_folded(sites, reply)
                    elif (update := await self._good(sites[0], requests[sites[0]], reply, found)) is not None:
                        found.add(sites[0], update, linear=True)
        else:
            async with aclosing(in_order(self._checked(requests, found), plan.sites)) as ordered:
                async for site, reply in ordered:
                    assert isinstance(reply, Update), reply
                    found.add(site, reply, linear=self.rule.linear)
        found.check(self._config, self.rule)
        mean, limits = await found.aggregate(self._config, self.rule), self._config.limits
        return await in_thread(weights.schema.nbytes, guarded, mean, weights, plan.earlier, limits)

    async def _checked(
        self, requests: Mapping[SiteId, Train], found: Gathering
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        """The good updates, as they come."""
        replies = self.cohort.exchange(requests, self._config.strategy.round_deadline)
        async with aclosing(replies):
            async for site, reply in replies:
                if (update := await self._good(site, requests[site], reply, found)) is not None:
                    yield site, update

    async def _good(self, site: SiteId, request: Train, reply: Reply, found: Gathering) -> Update | None:
        """The reply when it is an update that can be used. A bad one is named here, in `found` and at its
        site, and the round goes on."""
        try:
            update, norm = await checked(request, reply, self._config, self._extras)
        except BadUpdate as e:
            self._refuse(site, str(e), found)
            return None
        self._emit(received(request.round + 1, site, update))
        tell_clipped(self._emit, request.round + 1, update.clipped, self._extras, site)
        found.found(site, norm, update.counts)
        return update

    def _tell(self, sites: Sequence[SiteId], folded: Folded, found: Gathering) -> None:
        """Tell of updates that were checked where they were folded, and name the bad ones likewise."""
        number, told = found.plan.round + 1, sorted({*folded.refused, *folded.clipped})
        for place in range(len(sites)) if heard(self._emit, UpdateReceived) else told:
            site = sites[place]
            if place in folded.refused:
                self._refuse(site, folded.refused[place], found)
                continue
            loss = averages({"": folded.metrics_at(place)}).get("loss")
            self._emit(UpdateReceived(
                round=number, site=site, num_examples=folded.num_examples[place], loss=loss,
                nbytes=found.schema.nbytes,
            ))  # fmt: skip
            tell_clipped(self._emit, number, folded.clipped.get(place, 0), self._extras, site)

    def _refuse(self, site: SiteId, reason: str, found: Gathering) -> None:
        found.failed[site] = reason
        refuse(self.cohort, self._emit, site, found.plan.round + 1, reason)

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena, counted: Counted = NOBODY
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        by_site, _ = await evaluations(self._config, self.cohort, number, sites, weights, self._emit, counted)
        return summed(by_site), by_site


async def evaluations(
    config: Config,
    cohort: Cohort,
    number: int,
    sites: Sequence[SiteId],
    weights: AnyArena,
    emit: Emit,
    counted: Counted = NOBODY,
) -> tuple[dict[SiteId, Metrics], dict[SiteId, str]]:
    """What each site found, and why the others found nothing. A site that says why is asked again, in
    config.strategy.attempts altogether. TaskError when all of them failed in the last."""
    by_site: dict[SiteId, Metrics] = {}
    failed: dict[SiteId, str] = {}
    asked: Sequence[SiteId] = sites
    for attempt in range(config.strategy.attempts):
        id, again = evaluate_id(config, number, attempt), list[SiteId]()
        requests = {
            site: Evaluate(id=id, round=number, weights=weights, counted=counted.get(site, -1))
            for site in asked
        }
        replies = cohort.exchange(requests, config.strategy.round_deadline)
        async with aclosing(replies):
            async for site, reply in replies:
                try:
                    by_site[site] = evaluated(requests[site], reply, config)
                    failed.pop(site, None)
                except BadUpdate as e:
                    emit(UpdateRefused(round=number, site=site, reason=str(e)))
                    failed[site] = str(e)
                    if isinstance(reply, Failure):
                        again.append(site)
        if not again:
            break
        asked = sorted(again)
    check_failures(number, sites, failed)
    return alike(number, by_site, emit), failed


def check_failures(number: int, asked: Collection[SiteId], failed: Mapping[SiteId, str]) -> None:
    """TaskError when every site that was asked to evaluate said why it can't: it could not later either."""
    if failed and failed.keys() >= set(asked):
        raise TaskError(f"round {number}: evaluation failed at {grouped(failed)}")


def alike(number: int, by_site: Mapping[SiteId, Metrics], emit: Emit) -> dict[SiteId, Metrics]:
    """Evaluations that can be added up, by site: without those in other sizes than most have."""
    odd = misfits({site: sized_names(metrics) for site, metrics in by_site.items()})
    for site, reason in odd.items():
        emit(UpdateRefused(round=number, site=site, reason=reason))
    return {site: by_site[site] for site in sorted(by_site) if site not in odd}


async def checked(
    request: Train, reply: Reply, config: Config, extras: Extras = NO_EXTRAS
) -> tuple[Update, float]:
    """The reply, which is an update that can be used, and its norm; else BadUpdate."""
    checks.answers(request, reply, config.limits, extras)
    assert isinstance(reply, Update), reply
    return reply, await in_thread(reply.delta.schema.nbytes, checks.inspect, reply, config.limits, extras)


def evaluated(request: Evaluate, reply: Reply, config: Config) -> Metrics:
    """What a site found; BadUpdate when it found nothing that can be used."""
    checks.answers(request, reply, config.limits)
    assert isinstance(reply, Evaluation), reply
    return reply.metrics


def refuse(cohort: Cohort, emit: Emit, site: SiteId, number: int, reason: str, noun: str = "round") -> None:
    """Tell people, and the site itself, that its update is not used in round `number`, the first of which
    is 1."""
    emit(UpdateRefused(round=number, site=site, reason=reason))
    cohort.tell(site, f"{noun} {number}: the update was refused: {reason}")


def tell_clipped(emit: Emit, number: int, clipped: float, extras: Extras, site: SiteId = "") -> None:
    """Tell of the values that were clipped in round `number`, of which the first is 1: a step can be far off
    through them. `site`: whose they are; "": of the sites in a sum under masks, where nobody knows whose."""
    if not clipped:
        return
    bounds = ", ".join(f"{each.name}: {each.bound:g}" for each in extras.up)
    own = [f"the strategy's bounds ({bounds})"] if bounds else []
    to = " or ".join(own if site and own else ["secagg.clip", *own])
    emit(Notice(text=f"round {number}: {clipped:g} values{f' of {site}' * bool(site)} were clipped to {to}"))


class SumCheck:
    """Looks at a round's sums under masks: at values that were clipped, and at weights so far below their
    bound that hardly a digit of what they multiply is left."""

    def __init__(self, config: Config, emit: Emit, extras: Extras) -> None:
        self._emit, self._extras, self._told = emit, extras, False
        self._key = OWN_BOUNDS.get(config.strategy.kind, "the strategy's max_weight")
        self._bound = extras.max_weight or 1.0
        if extras.max_weight is None and not config.privacy.in_sums:  # with noise in sums sites count alike
            self._bound, self._key = config.secagg.max_examples, "secagg.max_examples"

    def __call__(self, number: int, totals: Sequence[Total], sites: int) -> None:
        """Of round `number`, the first of which is 1, with so many sites. ConfigError below LEAST_BITS."""
        tell_clipped(self._emit, number, sum(total.clipped for total in totals), self._extras)
        bits, usual = min(total.bits for total in totals), sum(total.weight for total in totals) / sites
        if bits >= FEW_BITS or not 0 < usual <= self._bound / 4:  # then a lower bound would not help
            return
        text = (
            f"the sites' updates weigh {usual:.3g} on average, and may weigh {self._bound:g}, so that a "
            f"value keeps {max(int(bits), 0)} bits under masks. Lower {self._key} to what the largest site "
            f"has (its examples, or the weights that loss() gives), at the aggregator and all sites"
        )
        if bits < LEAST_BITS <= bits + math.log2(self._bound / usual):
            raise ConfigError(f"{self._key}: {text}; {LEAST_BITS} bits are the least.")
        if not self._told:
            self._emit(Notice(text=f"round {number}: {text}."))
            self._told = True


def received(number: int, site: SiteId, update: Update, staleness: int | None = None) -> UpdateReceived:
    """The event of an update that arrived for round `number`, of which the first is 1."""
    return UpdateReceived(
        round=number, site=site, num_examples=update.num_examples,
        loss=averages({"": update.metrics}).get("loss"),
        nbytes=update.delta.sent_bytes or update.delta.schema.nbytes, staleness=staleness,
    )  # fmt: skip


def rule_of(config: Config, updates: int | None = None) -> Rule:
    """The rule that makes one delta of many; ConfigError when `updates`, or as few as there may be, are too
    few for it."""
    fewest = config.asynchronous.buffer if config.asynchronous.enabled else config.strategy.min_sites
    keys = config.aggregation
    rule = aggregation.build(keys.rule, keys.options, updates or fewest, keys.before, config.root)
    if rule.must_have and (config.asynchronous.enabled or config.secagg.enabled):
        switch = "asynchronous" if config.asynchronous.enabled else "secagg"
        raise ConfigError(
            f"aggregation.rule: {keys.rule} compares each site with {some(rule.must_have)}, in the open and "
            f"from the same model. Set {switch}.enabled = false."
        )
    return rule


def compares(config: Config) -> str:
    """What of [aggregation] reads updates one by one, for a message."""
    keys = config.aggregation
    return f"aggregation.before = {keys.before}" if keys.before else f'aggregation.rule = "{keys.rule}"'
