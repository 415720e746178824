"""Simulated rounds with the sums that masks would give, bit for bit, without masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from ...arena import AnyArena
from ...config import Config
from ...errors import BadUpdate, SecAggError, TooFewSites
from ...events import Emit, Notice, UpdateReceived, UpdateRefused
from ...exchange import Cohort
from ...learning import NO_EXTRAS, Extras
from ...messages import Metrics, SiteId, Update
from ...schema import Schema
from ...secagg.encoding import StackedUpdate, Total
from ...secagg.fixedpoint import ONE, SCALAR_LIMIT
from ...store import RoundPlan
from ..sites.privacy import simulated_sum_key
from ..star import checks
from ..star.answers import NOBODY, Counted, evaluations, tell_clipped, train_requests
from ..star.gathered import Aggregate
from ..star.secure_rounds import groups_of, one_of_groups, tell_failed
from ..star.secure_terms import check_config, encoding_of, noise_of, policy, round_seed, scale_of


class FixedPointSums:
    """answers.Answers with the sums that masks would give, bit for bit, and no masks."""

    def __init__(self, config: Config, cohort: Cohort, emit: Emit, extras: Extras = NO_EXTRAS) -> None:
        check_config(config)
        self._config, self.cohort, self._emit, self._extras = config, cohort, emit, extras
        self._policy = policy(config, "", extras)

    async def train(self, plan: RoundPlan, weights: AnyArena) -> Aggregate:
        groups = groups_of(self._config, plan)
        schema, extras = weights.schema.model, self._extras
        sums = [PlainSum(self._config, plan.round, schema, len(sites), extras) for sites in groups]
        sum_of = {site: each for each, sites in zip(sums, groups, strict=True) for site in sites}
        requests, inside = train_requests(self._config, plan, weights), list[SiteId]()
        failed: dict[SiteId, str] = {}
        replies = self.cohort.exchange(requests, self._config.strategy.round_deadline)
        async with aclosing(replies):
            async for site, reply in replies:
                try:
                    checks.answers(requests[site], reply, self._config.limits, self._extras)
                    assert isinstance(reply, Update), reply
                    seed = round_seed(self._config, plan.round, site)
                    sum_of[site].add(reply, seed, simulated_sum_key(self._config, site, plan.round))
                except (BadUpdate, SecAggError) as e:
                    self._emit(UpdateRefused(round=plan.round + 1, site=site, reason=str(e)))
                    failed[site] = str(e)
                    continue
                inside.append(site)
                self._emit(UpdateReceived(round=plan.round + 1, site=site, nbytes=sum_of[site].nbytes))
        enough = list[PlainSum]()
        for one, sites in zip(sums, groups, strict=True):
            if one.sites >= (quorum := self._quorum(len(sites))):
                enough.append(one)
            elif len(sums) > 1:
                tell_failed(self._emit, plan, TooFewSites("secure sum", one.sites, quorum))
        good, inside = inside, [site for site in inside if sum_of[site] in enough]
        if not enough or len(inside) < self._config.strategy.min_sites:
            need = max(self._config.strategy.min_sites, self._quorum(len(groups[0])) if not enough else 0)
            raise TooFewSites(f"round {plan.round + 1}", len(inside or good), need, failed)
        totals = [each.total() for each in enough]
        tell_clipped(self._emit, plan.round + 1, sum(total.clipped for total in totals), self._extras)
        return one_of_groups(self._config, plan, weights.schema.model, totals, inside)

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena, counted: Counted = NOBODY
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        by_site = await evaluations(self._config, self.cohort, number, sites, weights, self._emit, counted)
        if len(sites) > 1 and len(by_site) < (quorum := self._quorum(len(sites))):
            failed = TooFewSites("secure sum", len(by_site), quorum)
            self._emit(Notice(text=f"round {number}, evaluation, attempt 1: {failed}"))
            return {}, {}
        return exact_sums(by_site.values()), by_site

    def _quorum(self, sites: int) -> int:
        return self._policy.graph(sites)[0]


class PlainSum:
    """Σ of encoded updates, in the open."""

    def __init__(
        self, config: Config, number: int, schema: Schema, sites: int, extras: Extras = NO_EXTRAS
    ) -> None:
        """Of a round's updates of a model of this schema, of at most so many sites."""
        self._config, self._encoding = config, encoding_of(config, number, sites, schema, extras)
        self._noise = noise_of(config, schema, sites)
        self._sum = np.zeros(self._encoding.length, self._encoding.point.dtype)
        self._room = np.empty_like(self._sum)
        self._rows: list[StackedUpdate] = []  # of one slab, not summed yet
        self._metrics: Exact = {}
        self.nbytes, self.sites = self._sum.nbytes, 0

    def add(self, update: Update, seed: bytes, key: bytes) -> None:
        """With noise of this `key`, where sums have noise. SecAggError or BadUpdate for one that can't be in
        a sum; then it is not."""
        scale = scale_of(self._config, update)
        if not self._encoding.stacks(update.delta):
            self._encoding.encode(update, (), seed, self._room, scale=scale)
            add_exactly(self._metrics, update.metrics)  # raises for what no scalar holds
            self._sum += self._room
        else:
            row = self._encoding.row(update, seed, scale)
            add_exactly(self._metrics, update.metrics)
            if self._rows and self._rows[0].delta.slab is not row.delta.slab:
                self._add_rows()
            self._rows.append(row)
            if row.delta.last:
                self._add_rows()
        self.sites += 1
        if self._noise is not None:
            self._noise.add_to(self._sum, key)

    def _add_rows(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._encoding.add_rows(rows, self._sum)

    def total(self) -> Total:
        self._add_rows()
        return replace(self._encoding.decode(self._sum, self.sites, ()), metrics=scaled_down(self._metrics))


def exact_sums(all_metrics: Iterable[Metrics]) -> Metrics:
    """Sums over sites as scalars in a masked vector add up: exactly, in steps of 2^-20."""
    sums: Exact = {}
    for metrics in all_metrics:
        add_exactly(sums, metrics)
    return scaled_down(sums)


Exact = dict[str, tuple[list[int], bool]]  # name -> (sums and count, in whole 2^-20; whether of several sums)


def add_exactly(sums: Exact, metrics: Metrics) -> None:
    """Each metric's sums and count. SecAggError for one too large; adds nothing."""
    given = {n: [*(v if isinstance(v, list) else [v]), count] for n, (v, count) in metrics.items()}
    for name, values in given.items():
        if not all(abs(value) <= SCALAR_LIMIT for value in values):
            raise SecAggError(f"the sum or count of {name} is not finite, or beyond ±{SCALAR_LIMIT:.3g}")
    for name, values in given.items():
        have, several = sums.get(name, ([0] * len(values), isinstance(metrics[name][0], list)))
        sums[name] = [h + round(v * ONE) for h, v in zip(have, values, strict=True)], several


def scaled_down(sums: Exact) -> Metrics:
    found: Metrics = {}
    for name, (values, several) in sums.items():
        *totals, count = (value / ONE for value in values)
        found[name] = totals if several else totals[0], count
    return found
