"""Rounds under secure aggregation at the aggregator: it learns sums of updates, and no single update."""

from __future__ import annotations

import asyncio
import operator
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Protocol

import msgspec

from ...aggregation import aggregate, kept
from ...arena import AnyArena
from ...config import Config
from ...digest import seed_of
from ...errors import RoundError, SecAggError, TooFewSites, Unfinished
from ...events import Emit, Notice, UpdateReceived, UpdateRefused
from ...exchange import Cohort
from ...learning import NO_EXTRAS, Extras
from ...messages import Failure, Metrics, Request, SiteId, Update, averages
from ...schema import Schema
from ...secagg import messages as msg
from ...secagg.encoding import Encoding, Total
from ...secagg.masking import Parallel, serial
from ...secagg.roster import Verifies
from ...secagg.server import SecureSum, masked_sum
from ...store import RoundPlan, RunStore
from .answers import NOBODY, Counted, SumCheck, check_failures, rule_of
from .blame import Spoiled
from .enough import waiting_for_all
from .gathered import Aggregate, known_of
from .guard import moving, norm_of, sound, usual
from .mutual import Mutual, Strangers, SumExchanges
from .secure_terms import check_config, check_metric, encoding_of, hash_of, least_sites, policy

if TYPE_CHECKING:
    import torch

PAUSE_S = 0.25  # before another attempt at an evaluation; twice as long before each further one
REPLIES = msg.Keys | msg.Shares | msg.Masked | msg.Agreed | msg.Unmasked | Failure


def groups_of(
    config: Config, plan: RoundPlan, settled: Sequence[Sequence[SiteId]] = ()
) -> list[Sequence[SiteId]]:
    """The sites of a round in secagg.groups random groups of equal size or one more, redrawn each round.

    Groups that are `settled` stay as they are, and the other sites make up the others, as far as they can.
    """
    sites = sorted(set(plan.sites).difference(*settled))
    random.Random(seed_of(config.run.seed, "groups", plan.round, plan.attempt)).shuffle(sites)
    count = min(config.secagg.groups - len(settled), len(sites) // least_sites(config))
    return [*settled, *(sorted(sites[i::count]) for i in range(count))]


def one_of_groups(
    config: Config, plan: RoundPlan, schema: Schema, totals: Sequence[Total], sites: Sequence[SiteId]
) -> Aggregate:
    """One mean of the groups: their only one, or what the rule makes of several. TooFewSites for too few."""
    metrics = averages({str(i): total.metrics for i, total in enumerate(totals)})
    deltas = [total.delta for total in totals if total.delta is not None]
    weight = sum(total.weight for total in totals)
    sums = {name: sum_of(total.sums[name] for total in totals) for name in totals[0].sums}
    scalars = {name: sum(total.scalars[name] for total in totals) for name in totals[0].scalars}
    if len(totals) == config.secagg.groups == 1:
        return Aggregate(deltas[0], metrics, sites, weight=weight, sums=sums, scalars=scalars)
    rule = rule_of(config)
    if len(deltas) < rule.needs:
        raise TooFewSites(f"groups with a sum, for {config.aggregation.rule}", len(deltas), rule.needs)
    updates = [Update(delta=delta, num_examples=t.weight) for t, delta in zip(totals, deltas, strict=True)]
    delta = aggregate(rule, schema, updates, known_of(config, plan.round, plan.last))
    state = kept(rule, delta)
    return Aggregate(delta, metrics, sites, state=state, weight=weight, sums=sums, scalars=scalars)


def sum_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of one tensor or more."""
    return reduce(operator.add, tensors)


def tell_failed(emit: Emit, plan: RoundPlan, error: BaseException) -> None:
    """Tell that one group of several has no sum."""
    emit(Notice(text=f"round {plan.round + 1}: a group's sum failed: {error}"))


class KnowsCallers(Protocol):
    """Knows the certificates of the sites that called: a pki.callers.Callers."""

    def fingerprints(self, sites: Sequence[SiteId], /) -> Mapping[SiteId, bytes]: ...


class Settled:
    """Whose sums about a model may be opened: no other sites are asked together with them, also when it is
    tried again after a restart. Honest ones would refuse."""

    def __init__(self, store: RunStore | None, *, evaluation: bool) -> None:
        """`evaluation`: sums of what a model is worth, and not of what a round made of it."""
        self._store, self._evaluation = store, evaluation
        self._round, self._sums = -1, list[tuple[SiteId, ...]]()

    def of(self, number: int) -> list[tuple[SiteId, ...]]:
        """The sites of each sum about the model of so many rounds."""
        if self._round != number:
            self._round, self._sums = number, []
            if self._store is not None:
                self._sums = self._store.opened(number, evaluation=self._evaluation)
        return self._sums

    def add(self, plan: RoundPlan, sites: Sequence[SiteId]) -> None:
        if tuple(sites) not in self.of(plan.round):
            self._sums.append(tuple(sites))
            if self._store is not None:
                self._store.opens(plan.round, self._sums, evaluation=self._evaluation)


class UnderMasks:
    """answers.Answers by secure sums: this process learns sums of updates only."""

    def __init__(
        self,
        config: Config,
        cohort: Cohort,
        emit: Emit,
        *,
        federation: str,
        callers: KnowsCallers,
        verifier: Verifies,
        store: RunStore | None = None,
        parallel: Parallel = serial,
        frozen: str = "",
        extras: Extras = NO_EXTRAS,
    ) -> None:
        """
        Args:
            store: Is told the sites of a sum before it is opened: from then on honest sites give their
                updates of this round into no sum over other sites.
            frozen: SHA-256 of the run's frozen parameters.
        """
        check_config(config)
        check_metric(config)
        self._config, self.cohort, self._emit = config, cohort, emit
        self._policy, self._extras = policy(config, federation, extras), extras
        self.mutual = Mutual(cohort, emit, store)
        self._look = SumCheck(config, emit, extras)
        self._verifier, self._parallel = verifier, parallel
        self._callers, self._store, self._frozen = callers, store, frozen
        self._training, self._evaluation = (Settled(store, evaluation=it) for it in (False, True))
        self._shown: dict[tuple[SiteId, ...], AnyArena] = {}  # a round's sums, where sites check sums
        self._dropped: dict[SiteId, tuple[int, str]] = {}  # the round and the reason that were told last
        self._odd: dict[SiteId, set[str]] = {}  # metrics that few have, as they were told

    async def train(self, plan: RoundPlan, weights: AnyArena) -> Aggregate:
        self._shown.clear()
        groups = plan.groups or groups_of(self._config, plan, self._training.of(plan.round))
        alone = len(groups) == self._config.secagg.groups == 1
        sums = await asyncio.gather(
            *(self._sum(plan, sites, weights, msg.Advertise, plan.counted) for sites in groups),
            return_exceptions=True,
        )
        failures = [error for error in sums if isinstance(error, BaseException)]
        for error in failures:
            if alone or not isinstance(error, RoundError):
                raise error
            tell_failed(self._emit, plan, error)
        totals = [s for s in sums if not isinstance(s, BaseException)]
        spoiled = [group for error in failures if isinstance(error, Spoiled) for group in error.groups]
        if plan.groups and not totals:
            raise Spoiled(spoiled, "no group has a sum") if spoiled else failures[0]
        if alone or plan.groups:
            limits = self._config.limits
            totals, spoiled = await asyncio.to_thread(sound, totals, weights, plan, limits, spoiled)
        by = moving(totals, plan, self._policy.verify)
        inside = sorted(site for _, sites in by for site in sites)
        if len(inside) < self._config.strategy.min_sites:
            raise TooFewSites(f"round {plan.round + 1}", len(inside), self._config.strategy.min_sites)
        self._look(plan.round + 1, [total for total, _ in by], len(inside))
        mean = await asyncio.to_thread(
            one_of_groups, self._config, plan, weights.schema.model, [total for total, _ in by], inside
        )
        mean = replace(mean, patch=self._shown.get(tuple(inside)), norm=usual([norm_of(mean.delta)]))
        return replace(mean, summed=[sites for _, sites in totals], spoiled=spoiled) if plan.groups else mean

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena, counted: Counted = NOBODY
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        failed: dict[SiteId, str] = {}
        for attempt in range(self._config.strategy.attempts):
            if attempt:  # some may be gone
                await asyncio.sleep(min(PAUSE_S * 2**attempt, self._config.network.idle))
                await self.cohort.members(self._config.strategy.min_sites)
            settled = self._evaluation.of(number)
            plan = RoundPlan(number, attempt, list(settled[-1] if settled else sites))
            try:
                total, _ = await self._sum(plan, plan.sites, weights, msg.AdvertiseEvaluation, counted)
            except (TooFewSites, SecAggError) as e:
                self._emit(Notice(text=f"round {number}, evaluation, attempt {attempt + 1}: {e}"))
                failed = e.failed if isinstance(e, Unfinished) else {}
                continue
            return total.metrics, {}
        if not self._evaluation.of(number):  # the model was looked at already by those who are asked again
            check_failures(number, sites, failed)
        return {}, {}

    async def _sum(
        self,
        plan: RoundPlan,
        sites: Sequence[SiteId],
        weights: AnyArena,
        ask: type[msg.Advertise | msg.AdvertiseEvaluation],
        counted: Counted,
    ) -> tuple[Total, Sequence[SiteId]]:
        """One session about a model: its sum, and the sites in it."""
        training = ask is msg.Advertise
        settled = self._training if training else self._evaluation

        def requests(terms: msg.Terms) -> Mapping[SiteId, Request]:
            id = terms.request_id("train" if training else "evaluate")
            return {
                site: ask(
                    id=id, round=plan.round, weights=weights, terms=terms, counted=counted.get(site, -1)
                )
                for site in sorted(terms.cohort)
            }

        model = await asyncio.to_thread(hash_of, weights, self._parallel, self._frozen)
        schema = weights.schema.model if training else None
        again = tuple(sites) in settled.of(plan.round)  # over fewer, who gave shares would refuse
        return await self.session(plan, sites, schema, model, requests, settled.add, again=again)

    async def session(
        self,
        plan: RoundPlan,
        sites: Sequence[SiteId],
        schema: Schema | None,
        model: bytes,
        requests: Callable[[msg.Terms], Mapping[SiteId, Request]],
        settle: Callable[[RoundPlan, Sequence[SiteId]], None],
        *,
        again: bool = False,
        whole: bool = False,
    ) -> tuple[Total, Sequence[SiteId]]:
        """One sum, and the sites in it: of those that accept each other, and refuse nothing by own rules.

        Args:
            schema: Of the updates that are summed; None: metrics are.
            model: What all sites must have alike, as a hash.
            requests: Makes step 0's requests.
            settle: Is told the plan and the sites in the sum before it is opened.
            again: These very sites were in such a sum before: each is waited for until the deadline.
            whole: No site may drop out.
        """
        deadline_s, training = self._config.strategy.round_deadline, schema is not None
        while True:
            asked = sites if again or whole else await self.mutual.of(sites, self._policy.min_sites)
            cohort = await self._cohort(asked)
            encoding = encoding_of(self._config, plan.round, len(cohort), schema, self._extras)
            terms = self._terms(plan, cohort, encoding)
            if whole and len(cohort) < len(sites):
                raise TooFewSites("secure sum", len(cohort), len(sites))
            if whole:
                terms = msgspec.structs.replace(terms, quorum=len(sites))
            try:
                masked = await masked_sum(
                    SumExchanges(waiting_for_all(self.cohort) if again else self.cohort, self.mutual),
                    terms, model, requests(terms), self._verifier.verify, deadline_s=deadline_s,
                    step_deadline_s=deadline_s, in_thread=asyncio.to_thread, parallel=self._parallel,
                )  # fmt: skip
                settle(plan, masked.sites)
                found = await masked.unmask()
            except Strangers:
                if again or whole:
                    raise
            except Unfinished as e:
                self._tell_dropped(plan.round + training, e.dropped)
                sites = self.mutual.willing(cohort)
                if again or whole or not self._policy.min_sites <= len(sites) < len(cohort):
                    raise
            else:
                break
        self._tell(plan, found, training=training)
        if terms.verify and self._store is not None:  # a simulation has no sites to be shown anything
            self._shown[found.sites] = msg.shown(terms.sid(model), found.vector)
        vector = found.vector[: terms.numel(found.names)]
        try:
            total = await asyncio.to_thread(
                encoding.decode, vector, len(found.sites), found.names, self._parallel
            )
        except RoundError as e:
            raise Spoiled([found.sites], str(e)) from e
        return total, found.sites

    async def _cohort(self, sites: Sequence[SiteId]) -> dict[SiteId, bytes]:
        """The sites that called since this process began, with their keys' fingerprints. The others
        have the idle time to come; TooFewSites when too few are here then."""
        if not (found := self._callers.fingerprints(sites)).keys() >= set(sites):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.network.idle):
                    while not self._callers.fingerprints(sites).keys() >= set(sites):
                        await self.cohort.newcomer(await self.cohort.members(0))
            found = self._callers.fingerprints(sites)
        if len(found) < self._policy.min_sites:
            raise TooFewSites("secure sum", len(found), self._policy.min_sites)
        return {site: found[site] for site in sites if site in found}

    def _terms(self, plan: RoundPlan, cohort: dict[SiteId, bytes], encoding: Encoding) -> msg.Terms:
        (quorum, threshold, degree), point = self._policy.graph(len(cohort)), encoding.point
        verify = encoding.schema is not None and self._policy.checks(len(cohort))
        return msg.Terms(
            federation=self._policy.federation, run=self._policy.run, round=plan.round, attempt=plan.attempt,
            nonce=secrets.token_bytes(msg.NONCE_BYTES), cohort=cohort, quorum=quorum,
            threshold=threshold, degree=degree, ring_bits=self._config.secagg.ring_bits,
            value_bits=point.value_bits, clip=point.clip, max_weight=point.max_weight, length=encoding.length,
            privacy=self._policy.privacy, verify=verify,
        )  # fmt: skip

    def _tell(self, plan: RoundPlan, found: SecureSum, *, training: bool) -> None:
        number = plan.round + 1 if training else plan.round
        if training:
            for site in found.sites:
                self._emit(UpdateReceived(round=number, site=site, nbytes=found.vector.nbytes))
        self._tell_dropped(number, found.dropped)
        for site in sorted(found.blamed.keys() & set(found.sites)):
            self._emit(Notice(text=f"round {number}: {site} is in the sum, but {found.blamed[site]}"))
        for site, names in sorted(found.odd.items()):
            if not names <= self._odd.setdefault(site, set()):
                self._odd[site] |= names
                why = (
                    f"few sites have the metric {min(names)[:80]!r}, and {len(names) - 1} others that it has"
                )
                self._emit(Notice(text=f"round {number}: {site}: {why}: they are in no sum"))
                self.cohort.tell(
                    site, f"round {number}: {why}: they are in no sum. Let all sites have the same"
                )

    def _tell_dropped(self, number: int, dropped: Mapping[SiteId, str]) -> None:
        for site, reason in sorted(dropped.items()):
            if self._dropped.get(site) == (number, reason):  # at an earlier attempt
                continue
            self._dropped[site] = number, reason
            self._emit(UpdateRefused(round=number, site=site, reason=reason))
            self.cohort.tell(site, f"round {number}: this site is not in the sum: {reason}")
