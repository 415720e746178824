"""Rounds under secure aggregation, both ends: a site gives its update into sums only, the aggregator learns
the sums. The protocol itself is `secagg/`; here it meets the round, its configuration and the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from ..aggregation import aggregate
from ..arena import AnyArena
from ..config import Config
from ..digest import seed_of
from ..errors import BadUpdate, ConfigError, FedtrainError, RoundError, SecAggError, TooFewSites, Unfinished
from ..events import Emit, Notice, UpdateReceived, UpdateRefused
from ..exchange import Before, Cohort
from ..messages import (
    MAX_SUMS,
    Evaluation,
    Failure,
    Metrics,
    Reply,
    Request,
    SiteId,
    Update,
    averages,
    sized_names,
)
from ..schema import Schema, chunks_of
from ..secagg.client import NEVER, Client, Opened, Policy, Sign
from ..secagg.encoding import Encoding, StackedUpdate, Total, norm_of, rounding_seed
from ..secagg.fixedpoint import ONE, SCALAR_LIMIT, FixedPoint
from ..secagg.masking import BLOCK_BYTES, RingVector, Spread, each, rooms
from ..secagg.messages import (
    MAX_NAMES,
    NONCE_BYTES,
    Advertise,
    AdvertiseEvaluation,
    Agree,
    Agreed,
    Keys,
    Mask,
    Masked,
    Share,
    Shares,
    Terms,
    Unmask,
    Unmasked,
)
from ..secagg.roster import Verify
from ..secagg.server import SecureSum, secure_sum
from ..store import RoundPlan
from . import checks, compressed
from .answers import Mean, evaluations, rule_of, train_requests
from .crew import Crew
from .progress import check_failures

ECDSA = ec.ECDSA(hashes.SHA256())
GRACE_S = 0.25  # for replies that are needed no more
SITES = 3  # a sum over two is each one's update to the other; an end may insist on more
REQUESTS = Advertise | AdvertiseEvaluation | Share | Mask | Agree | Unmask
REPLIES = Keys | Shares | Masked | Agreed | Unmasked | Failure


def check_config(config: Config) -> None:
    """ConfigError for what secure aggregation cannot give."""
    sites, groups = config.strategy.min_sites, config.secagg.groups
    if sites < SITES * groups:
        where = f" in each of {groups} groups" if groups > 1 else ""
        raise ConfigError(
            f"secagg.enabled: a sum over fewer than {SITES} sites{where} hides nobody, and "
            f"strategy.min_sites is {sites}. Raise it to {SITES * groups}, or set secagg.enabled = false and "
            f"let the aggregator see each site's update."
        )
    if groups == 1 and not rule_of(config).linear:
        raise ConfigError(
            f'aggregation.rule = "{config.aggregation.rule}" compares single updates, which secure '
            f"aggregation hides. Let it compare means of random groups, with secagg.groups = "
            f'{rule_of(config).needs} or more; or set aggregation.rule = "mean", or secagg.enabled = false.'
        )
    compressed.check_config(config)
    rule_of(config, groups if groups > 1 else None)
    each = max(sites // groups, 1)
    encoding_of(config, 0, each, None)
    policy(config, "").graph(each)


def fixed_point(config: Config, sites: int) -> FixedPoint:
    """How numbers become integers in a sum over so many sites."""
    s = config.secagg
    return FixedPoint(sites, s.ring_bits, s.clip, s.max_examples, s.value_bits)


def encoding_of(config: Config, number: int, sites: int, schema: Schema | None) -> Encoding:
    """How an update of a round (without a schema: an evaluation) becomes a vector that so many sites sum."""
    squeeze = compressed.linear(config)
    seed = seed_of(config.run.seed, "compression", number)
    return Encoding(fixed_point(config, sites), schema, squeeze, seed)


def least_sites(config: Config) -> int:
    """Of one sum: the part of a round's fewest sites that is in each group."""
    return max(SITES, config.strategy.min_sites // config.secagg.groups)


def policy(config: Config, federation: str) -> Policy:
    """What an end insists on, from its own fedtrain.toml. `length` is a session's own."""
    s = config.secagg
    return Policy(
        federation=federation, run=config.run.name, ring_bits=s.ring_bits, clip=s.clip,
        max_weight=s.max_examples, length=0, value_bits=s.value_bits,
        min_sites=least_sites(config),
        full_graph=s.full_graph, corrupt=s.corrupt, dropout=s.dropout,
    )  # fmt: skip


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


def round_seed(config: Config, number: int, site: SiteId) -> bytes:
    return rounding_seed(config.run.name, config.run.seed, number, site)


def one_of_groups(config: Config, schema: Schema, totals: Sequence[Total], sites: Sequence[SiteId]) -> Mean:
    """One mean of the groups: their only one, or what the rule makes of several. TooFewSites for too few."""
    metrics = averages({str(i): total.metrics for i, total in enumerate(totals)})
    deltas = [total.delta for total in totals if total.delta is not None]
    if config.secagg.groups == 1:
        return Mean(deltas[0], metrics, sites)
    rule = rule_of(config)
    if len(deltas) < rule.needs:
        raise TooFewSites(f"groups with a sum, for {config.aggregation.rule}", len(deltas), rule.needs)
    updates = [Update(delta=delta, num_examples=t.weight) for t, delta in zip(totals, deltas, strict=True)]
    return Mean(aggregate(rule, schema, updates), metrics, sites)


def tell_clipped(emit: Emit, plan: RoundPlan, totals: Sequence[Total]) -> None:
    """A step can be far off that way."""
    if clipped := sum(total.clipped for total in totals):
        emit(Notice(text=f"round {plan.round + 1}: {clipped:g} values were clipped to secagg.clip"))


def tell_failed(emit: Emit, plan: RoundPlan, error: BaseException) -> None:
    emit(Notice(text=f"round {plan.round + 1}: a group's sum failed: {error}"))


@cache
def spread() -> Spread:
    """Work on masks and signatures, over all cores."""
    return Crew(len(os.sched_getaffinity(0)))


async def in_thread(work: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(work, *args)


def hash_of(weights: AnyArena, spread: Spread = map, frozen: str = "") -> bytes:
    """What a session is bound to, where digest.Digest would not bind: SHA-256 of the SHA-256 of each part of
    a model, so that all cores can work on it, and of its frozen parameters' (Frozen.sha256)."""
    parts = list(chunks_of(weights.schema, BLOCK_BYTES // 8))  # of the longest numbers, a room full
    leaves = [b""] * len(parts)

    def leaf(i: int) -> None:
        with rooms.one() as room:
            leaves[i] = hashlib.sha256(weights.span(*parts[i], room.data)).digest()

    each(spread, leaf, range(len(parts)))
    return hashlib.sha256(b"".join((*leaves, bytes.fromhex(frozen)))).digest()


# --- A site's end


class SecureSite:
    """Gives one site's results into sums, and into nothing else. Its methods are for threads: they work, one
    at a time, for a request that nobody waits for any more may be under way when the next one comes."""

    def __init__(
        self,
        config: Config,
        site: SiteId,
        federation: str,
        *,
        certificate: bytes,
        sign: Sign,
        verify: Verify,
        look: Callable[[], None] = lambda: None,
        spread: Spread = map,
        opened: Mapping[str, Opened] = MappingProxyType({}),
        keep: Callable[[str, Opened], None] = lambda kind, opened: None,
    ) -> None:
        """`look` is called before each session, to see who was revoked. `opened`, `keep`: as of a Client, by
        kind of session."""
        self._config, self._site, self._look, self._spread = config, site, look, spread
        self._policy = policy(config, federation)
        self._clients = {
            kind: Client(
                site, self._policy, certificate=certificate, sign=sign, verify=verify, spread=spread,
                opened=opened.get(kind.__name__, NEVER), keep=partial(keep, kind.__name__),
            )
            for kind in (Advertise, AdvertiseEvaluation)
        }  # each keeps to one sum a round  # fmt: skip
        self._client = self._clients[Advertise]
        self._at_work = threading.Lock()

    def offer(
        self, request: Advertise | AdvertiseEvaluation, model: bytes, result: Update | Evaluation
    ) -> Keys | Failure:
        """Step 0, with the result of work on `model` (hash_of) at hand: keys for a session under these terms,
        or why not."""
        with self._at_work:
            return self._offer(request, model, result)

    def answer(self, request: Share | Mask | Agree | Unmask) -> Reply:
        """Steps 1 to 4."""
        with self._at_work:
            return self._client.answer(request)

    def _offer(
        self, request: Advertise | AdvertiseEvaluation, model: bytes, result: Update | Evaluation
    ) -> Keys | Failure:
        try:
            self._look()
            schema = request.weights.schema if isinstance(result, Update) else None
            encoding = encoding_of(self._config, request.round, len(request.terms.cohort), schema)
            scale = 1.0
            if isinstance(result, Update):
                check_examples(self._config, result)
                scale = scale_of(self._config, result)
        except FedtrainError as e:
            return Failure(reason=f"{self._site} refuses: {e}")

        def encode(names: tuple[str, ...], vector: RingVector) -> None:
            if isinstance(result, Update):
                seed = round_seed(self._config, request.round, self._site)
                encoding.encode(result, names, seed, vector, scale=scale, spread=self._spread)
            else:
                encoding.encode_metrics(result.metrics, names, vector)

        self._client = self._clients[type(request)]
        self._client.policy = replace(self._policy, length=encoding.length)
        names = sized_names(result.metrics)
        return self._client.begin(request, model, names, encode)


def check_examples(config: Config, update: Update) -> None:
    """BadUpdate, without their number, which is nobody's business, for more examples than were agreed on."""
    for key, most in (
        ("secagg.max_examples", config.secagg.max_examples),
        ("limits.max_examples", config.limits.max_examples),
    ):
        if update.num_examples > most:
            raise BadUpdate(
                f"it trained on more examples than {key} = {most:g}. Raise it at the aggregator and all "
                f"sites, to what the largest site has"
            )


def scale_of(config: Config, update: Update) -> float:
    """What shortens a delta to limits.max_norm, which the aggregator can't see. BadUpdate for NaN."""
    most = config.limits.max_norm
    if not most:
        return 1.0
    norm = norm_of(update.delta)
    if not norm < math.inf:
        raise BadUpdate("its update has NaN or infinite values")
    return min(1.0, most / norm) if norm else 1.0


# --- The aggregator's end


def admit(request: Request, reply: Reply, longest: int) -> None:
    """BadUpdate unless the reply is of the step that was asked, of at most `longest` ring elements."""
    due = {Share: Shares, Mask: Masked, Agree: Agreed, Unmask: Unmasked}.get(type(request), Keys)
    if isinstance(reply, Failure):
        return
    if not isinstance(reply, due):
        raise BadUpdate(f"{type(reply).__name__} does not answer {type(request).__name__}")
    if isinstance(reply, Masked) and reply.vector.schema.numel > longest:
        raise BadUpdate(f"a masked vector of {reply.vector.schema.numel} values, at most {longest} are due")


def longest_vector(config: Config, schema: Schema) -> int:
    """Ring elements of the longest vector that a site of this run may send."""
    smallest = replace(fixed_point(config, SITES), value_bits=4)  # has the most limbs
    return Encoding(smallest, schema).numel([""] * MAX_NAMES) + smallest.limbs * MAX_SUMS


class Unhurried(Before):
    """A cohort whose exchanges, when enough has come, let the others finish for a moment."""

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        async with aclosing(self._others.exchange(requests, deadline_s)) as replies:
            try:
                async for pair in replies:
                    yield pair
            except GeneratorExit:
                with suppress(TimeoutError):
                    async with asyncio.timeout(GRACE_S):
                        async for _ in replies:
                            pass
                raise


class UnderMasks:
    """answers.Answers: sums of updates are all that comes to be known here."""

    def __init__(
        self,
        config: Config,
        cohort: Cohort,
        emit: Emit,
        *,
        federation: str,
        fingerprints: Callable[[Sequence[SiteId]], Mapping[SiteId, bytes]],
        verify: Verify,
        settled: Callable[[RoundPlan], None] = lambda plan: None,
        spread: Spread = map,
        frozen: str = "",
    ) -> None:
        """`fingerprints`: of the certificates of those of these sites that called. `settled` keeps a plan
        in which sites that dropped out are left out: from then on honest sites are in no other sum of this
        round. `frozen`: SHA-256 of the run's frozen parameters."""
        check_config(config)
        self._config, self.cohort, self._emit = config, cohort, emit
        self._policy, self._verify, self._spread = policy(config, federation), verify, spread
        self._fingerprints, self._settled = fingerprints, settled
        self._frozen = frozen
        self._round, self._agreed = -1, list[Sequence[SiteId]]()  # its sums that may have been opened

    async def train(self, plan: RoundPlan, weights: AnyArena) -> Mean:
        if self._round != plan.round:
            self._round, self._agreed = plan.round, []
        groups, alone = groups_of(self._config, plan, self._agreed), self._config.secagg.groups == 1

        def agreed(sites: Sequence[SiteId]) -> None:
            if sites not in self._agreed:
                self._agreed.append(sites)
            if alone:
                self._settled(replace(plan, sites=list(sites)))

        sums = await asyncio.gather(
            *(self._sum(plan, sites, weights, Advertise, agreed) for sites in groups), return_exceptions=True
        )
        for error in sums:
            if isinstance(error, BaseException) and (alone or not isinstance(error, RoundError)):
                raise error
            if isinstance(error, BaseException):
                tell_failed(self._emit, plan, error)
        totals = [s for s in sums if not isinstance(s, BaseException)]
        inside = sorted(site for _, sites in totals for site in sites)
        if len(inside) < self._config.strategy.min_sites:
            raise TooFewSites(f"round {plan.round + 1}", len(inside), self._config.strategy.min_sites)
        tell_clipped(self._emit, plan, [total for total, _ in totals])
        return await asyncio.to_thread(
            one_of_groups, self._config, weights.schema, [total for total, _ in totals], inside
        )

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        failed: dict[SiteId, str] = {}
        for attempt in range(self._config.strategy.attempts):
            plan = RoundPlan(number, attempt, list(sites))
            try:
                total, _ = await self._sum(plan, plan.sites, weights, AdvertiseEvaluation)
            except (TooFewSites, SecAggError) as e:
                self._emit(Notice(text=f"round {number}, evaluation, attempt {attempt + 1}: {e}"))
                failed = e.failed if isinstance(e, Unfinished) else {}
                continue
            return total.metrics, {}
        check_failures(number, sites, failed)
        return {}, {}

    async def _sum(
        self,
        plan: RoundPlan,
        sites: Sequence[SiteId],
        weights: AnyArena,
        ask: type[Advertise | AdvertiseEvaluation],
        agreed: Callable[[Sequence[SiteId]], None] = lambda sites: None,
    ) -> tuple[Total, Sequence[SiteId]]:
        """One session, and over which sites it is."""
        schema = weights.schema if ask is Advertise else None
        cohort = await self._cohort(sites)
        encoding = encoding_of(self._config, plan.round, len(cohort), schema)
        terms = self._terms(plan, cohort, encoding)
        request = ask(
            id=terms.request_id("train" if ask is Advertise else "evaluate"),
            round=plan.round, weights=weights, terms=terms,
        )  # fmt: skip
        deadline_s = self._config.strategy.round_deadline
        try:
            found = await secure_sum(
                Unhurried(self.cohort),
                terms,
                await asyncio.to_thread(hash_of, weights, self._spread, self._frozen),
                request,
                self._verify,
                deadline_s=deadline_s,
                step_deadline_s=deadline_s,
                agreed=agreed,
                aside=in_thread,
                spread=self._spread,
            )
        except Unfinished as e:
            self._tell_dropped(plan.round + (ask is Advertise), e.dropped)
            raise
        self._tell(plan, found, training=ask is Advertise)
        total = await asyncio.to_thread(
            encoding.decode, found.vector, len(found.sites), found.names, self._spread
        )
        return total, found.sites

    async def _cohort(self, sites: Sequence[SiteId]) -> dict[SiteId, bytes]:
        """The sites that called since this process began, with their certificates' fingerprints. The others
        have the idle time to come; TooFewSites when too few are here then."""
        if not (found := self._fingerprints(sites)).keys() >= set(sites):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.network.idle):
                    while not self._fingerprints(sites).keys() >= set(sites):
                        await self.cohort.newcomer(await self.cohort.members(0))
            found = self._fingerprints(sites)
        if len(found) < self._policy.min_sites:
            raise TooFewSites("secure sum", len(found), self._policy.min_sites)
        return {site: found[site] for site in sites if site in found}

    def _terms(self, plan: RoundPlan, cohort: dict[SiteId, bytes], encoding: Encoding) -> Terms:
        (quorum, threshold, degree), point = self._policy.graph(len(cohort)), encoding.point
        return Terms(
            federation=self._policy.federation, run=self._policy.run, round=plan.round, attempt=plan.attempt,
            nonce=secrets.token_bytes(NONCE_BYTES), cohort=cohort, quorum=quorum,
            threshold=threshold, degree=degree, ring_bits=self._config.secagg.ring_bits,
            value_bits=point.value_bits, clip=point.clip, max_weight=point.max_weight, length=encoding.length,
        )  # fmt: skip

    def _tell(self, plan: RoundPlan, found: SecureSum, *, training: bool) -> None:
        number = plan.round + 1 if training else plan.round
        if training:
            for site in found.sites:
                self._emit(UpdateReceived(round=number, site=site, nbytes=found.vector.nbytes))
        self._tell_dropped(number, found.dropped)
        for site in sorted(found.blamed.keys() & set(found.sites)):
            self._emit(Notice(text=f"round {number}: {site} is in the sum, but {found.blamed[site]}"))

    def _tell_dropped(self, number: int, dropped: Mapping[SiteId, str]) -> None:
        for site, reason in sorted(dropped.items()):
            self._emit(UpdateRefused(round=number, site=site, reason=reason))
            self.cohort.tell(site, f"round {number}: this site is not in the sum: {reason}")


# --- A simulation's


class FixedPointSums:
    """answers.Answers with the sums that masks would give, bit for bit, and no masks."""

    def __init__(self, config: Config, cohort: Cohort, emit: Emit) -> None:
        check_config(config)
        self._config, self.cohort, self._emit = config, cohort, emit
        self._policy = policy(config, "")

    async def train(self, plan: RoundPlan, weights: AnyArena) -> Mean:
        groups = groups_of(self._config, plan)
        sums = [PlainSum(self._config, plan.round, weights.schema, len(sites)) for sites in groups]
        sum_of = {site: each for each, sites in zip(sums, groups, strict=True) for site in sites}
        requests, inside = train_requests(self._config, plan, weights), list[SiteId]()
        failed: dict[SiteId, str] = {}
        replies = self.cohort.exchange(requests, self._config.strategy.round_deadline)
        async with aclosing(replies):
            async for site, reply in replies:
                try:
                    checks.answers(requests[site], reply, self._config.limits)
                    assert isinstance(reply, Update), reply
                    sum_of[site].add(reply, round_seed(self._config, plan.round, site))
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
        tell_clipped(self._emit, plan, totals)
        return one_of_groups(self._config, weights.schema, totals, inside)

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        by_site = await evaluations(self._config, self.cohort, number, sites, weights, self._emit)
        if len(sites) > 1 and len(by_site) < (quorum := self._quorum(len(sites))):
            failed = TooFewSites("secure sum", len(by_site), quorum)
            self._emit(Notice(text=f"round {number}, evaluation, attempt 1: {failed}"))
            return {}, {}
        return exact_sums(by_site.values()), by_site

    def _quorum(self, sites: int) -> int:
        return self._policy.graph(sites)[0]


class PlainSum:
    """Σ of encoded updates, in the open."""

    def __init__(self, config: Config, number: int, schema: Schema, sites: int) -> None:
        """Of a round's updates, of at most so many sites."""
        self._config, self._encoding = config, encoding_of(config, number, sites, schema)
        self._sum = np.zeros(self._encoding.length, self._encoding.point.dtype)
        self._room = np.empty_like(self._sum)
        self._rows: list[StackedUpdate] = []  # of one slab, not summed yet
        self._metrics: Exact = {}
        self.nbytes, self.sites = self._sum.nbytes, 0

    def add(self, update: Update, seed: bytes) -> None:
        """SecAggError or BadUpdate for one that can't be in a sum; then it is not."""
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
