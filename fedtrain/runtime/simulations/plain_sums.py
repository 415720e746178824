"""Simulated rounds with the sums that masks would give, bit for bit, without masks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from ...arena import AnyArena
from ...config import Config
from ...errors import BadUpdate, SecAggError, TooFewSites
from ...events import Emit, Notice, UpdateReceived, UpdateRefused, heard
from ...exchange import Cohort, Folds
from ...learning import NO_EXTRAS, Extras
from ...messages import Evaluation, Failure, Folded, Metrics, Reply, SiteId, Train, Update
from ...store import RoundPlan
from ..sites.gate import NOTHING
from ..star import checks
from ..star.answers import NOBODY, Counted, SumCheck, check_failures, evaluations, train_requests
from ..star.gathered import Aggregate
from ..star.guard import moving, norm_of, sound, usual
from ..star.secure_rounds import groups_of, one_of_groups, tell_failed
from ..star.secure_terms import check_config, policy
from .partial_sums import Exact, PlainSum, add_exactly, scaled_down

if TYPE_CHECKING:
    from ..star.guard import SumOfSites


class FixedPointSums:
    """answers.Answers with the sums that masks would give, bit for bit, and no masks."""

    def __init__(self, config: Config, cohort: Cohort, emit: Emit, extras: Extras = NO_EXTRAS) -> None:
        check_config(config)
        self._config, self.cohort, self._emit, self._extras = config, cohort, emit, extras
        self._policy, self._look = policy(config, "", extras), SumCheck(config, emit, extras)
        # Under masks no evaluation is asked for again where the others are enough.
        self._once = replace(config, strategy=replace(config.strategy, attempts=1))

    async def train(self, plan: RoundPlan, weights: AnyArena) -> Aggregate:
        config, groups, schema = (
            self._config,
            plan.groups or groups_of(self._config, plan),
            weights.schema.model,
        )
        sums = [PlainSum(config, plan.round, schema, len(sites), self._extras) for sites in groups]
        sum_of = {site: each for each, sites in zip(sums, groups, strict=True) for site in sites}
        requests, inside, failed = train_requests(config, plan, weights), list[SiteId](), dict[SiteId, str]()
        replies = self._replies(requests, len(plan.sites) if len(groups) == 1 else 0)
        async with aclosing(replies):
            async for sites, reply in replies:
                sum_of_these, refused = sum_of[sites[0]], dict[int, str]()
                if isinstance(reply, Folded):
                    sum_of_these.add_folded(reply)
                    refused = reply.refused
                else:
                    try:
                        checks.answers(requests[sites[0]], reply, config.limits, self._extras)
                        assert isinstance(reply, Update), reply
                        sum_of_these.add(sites[0], reply)
                    except (BadUpdate, SecAggError) as e:
                        refused = {0: str(e) if isinstance(reply, Failure) else f"{sites[0]} refuses: {e}"}
                inside += self._tell(plan.round + 1, sites, refused, sum_of_these.nbytes)
                failed |= {sites[place]: reason for place, reason in refused.items()}
        enough = list[PlainSum]()
        for one, group in zip(sums, groups, strict=True):
            if one.sites >= (quorum := self._quorum(len(group))):
                enough.append(one)
            elif len(sums) > 1:
                tell_failed(self._emit, plan, TooFewSites("secure sum", one.sites, quorum))
        good, inside = inside, [site for site in inside if sum_of[site] in enough]
        if not enough or len(inside) < config.strategy.min_sites:
            need = max(config.strategy.min_sites, self._quorum(len(groups[0])) if not enough else 0)
            raise TooFewSites("secure sum", len(inside or good), need, failed)
        totals: Sequence[SumOfSites] = [
            (each.total(), [site for site in inside if sum_of[site] is each]) for each in enough
        ]
        spoiled = list[Sequence[SiteId]]()
        if plan.groups or config.secagg.groups == 1:
            totals, spoiled = sound(totals, weights, plan, config.limits)
            inside = sorted(site for _, sites in moving(totals, plan, self._policy.verify) for site in sites)
        by = [total for total, _ in moving(totals, plan, self._policy.verify)]
        self._look(plan.round + 1, by, len(inside))
        mean = one_of_groups(config, plan, schema, by, inside)
        mean = replace(mean, norm=usual([norm_of(mean.delta)]))
        return replace(mean, summed=[s for _, s in totals], spoiled=spoiled) if plan.groups else mean

    async def _replies(
        self, requests: Mapping[SiteId, Train], summands: int
    ) -> AsyncGenerator[tuple[Sequence[SiteId], Folded | Reply], None]:
        """What the sites answer, folded where they are the `summands` of one sum and the cohort folds."""
        deadline_s = self._config.strategy.round_deadline
        if summands and isinstance(self.cohort, Folds):
            async with aclosing(self.cohort.fold(requests, deadline_s, summands)) as folded:
                async for sites, found in folded:
                    yield sites, found
            return
        async with aclosing(self.cohort.exchange(requests, deadline_s)) as replies:
            async for site, reply in replies:
                yield (site,), reply

    def _tell(
        self, number: int, sites: Sequence[SiteId], refused: Mapping[int, str], nbytes: int
    ) -> list[SiteId]:
        """Tell of what came, and return whose updates are in the sum."""
        for place in range(len(sites)) if heard(self._emit, UpdateReceived) else sorted(refused):
            if place in refused:
                self._emit(UpdateRefused(round=number, site=sites[place], reason=refused[place]))
            else:
                self._emit(UpdateReceived(round=number, site=sites[place], nbytes=nbytes))
        return [site for place, site in enumerate(sites) if place not in refused]

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena, counted: Counted = NOBODY
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        several = len(sites) > 1
        config = self._once if several else self._config
        by_site, failed = await evaluations(config, self.cohort, number, sites, weights, self._emit, counted)
        for site in [site for site, found in by_site.items() if Evaluation(metrics=found).of_nothing]:
            if several:  # a sum under masks needs something of each site
                del by_site[site]
                failed[site] = f"{site} refuses: {NOTHING}"
                self._emit(UpdateRefused(round=number, site=site, reason=failed[site]))
        if several and len(by_site) < (quorum := self._quorum(len(sites))):
            error = TooFewSites("secure sum", len(by_site), quorum, failed)
            self._emit(Notice(text=f"round {number}, evaluation, attempt 1: {error}"))
            check_failures(number, sites, failed)
            return {}, {}
        return exact_sums(by_site.values()), by_site

    def _quorum(self, sites: int) -> int:
        return self._policy.graph(sites)[0]


def exact_sums(all_metrics: Iterable[Metrics]) -> Metrics:
    """Sums over sites as scalars in a masked vector add up: exactly, in steps of 2^-20."""
    sums: Exact = {}
    for metrics in all_metrics:
        add_exactly(sums, metrics)
    return scaled_down(sums)
