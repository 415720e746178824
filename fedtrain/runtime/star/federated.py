"""Federated training: rounds of sample -> train -> check -> fold -> step -> commit, through any cohort.

`run` is the loop, and is the same for real sites over gRPC (`aggregator.py`) and for a simulation
(`simulation.py`): a journal, a cohort, a strategy are handed to it. Whatever it was doing when the process
died, it goes on from the last committed round, asks the same sites the same question, and gets the same
model: the plan of a round is kept before it starts, and seeds come from (run, round, site) alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from ...aggregation import last
from ...config import Config
from ...digest import seed_of
from ...errors import Diverged, SecAggError, TooFewSites, some
from ...events import Notice, Record
from ...exchange import Cohort
from ...messages import SiteId
from ...population import Names, Without
from ...store import Checkpoint, RoundPlan, RunStore
from ...strategies import Strategy, has_personal, server_step
from ..journal import AtServer, Evaluators, Journal, Lap, Result, Shown, everyone, no_data, plain
from ..sites import compressed
from ..threads import in_thread
from . import checks
from .answers import Answers, refuse, rule_of
from .blame import Spoiled, Suspects, nudged
from .central_noise import CentralNoise
from .gathered import Aggregate
from .guard import REMEMBERED, RESTS
from .secure_terms import least_sites, verifies

CatchUp = Callable[[Checkpoint, CentralNoise | None], Awaitable[Checkpoint]]


async def run(
    journal: Journal,
    answers: Answers,
    strategy: Strategy,
    *,
    evaluate_at: Evaluators = everyone,
    shown: Shown = plain,
    at_server: AtServer = no_data,
    catch_up: CatchUp | None = None,
) -> Result:
    """Rounds until run.rounds, an early stop, or TooFewSites; the journal's store holds the initial model.

    `evaluate_at`: who evaluates (a simulation evaluates pooled data once).
    `shown`: what the task makes of an evaluation.
    `at_server`: what a model is worth on data that the server holds.
    `catch_up`: a later round than the store has, where sites hold its model.
    """
    cohort, need = answers.cohort, journal.config.strategy.min_sites
    noise, journal.traffic = central_noise(journal, strategy), cohort
    checkpoint = at_hand(journal.store, journal.begin(await cohort.members(0)))
    if catch_up is not None and journal.goes_on(checkpoint.round):
        checkpoint = at_hand(journal.store, await catch_up(checkpoint, noise))
    while True:
        number = checkpoint.round
        if journal.evaluation_is_due(number):
            sites = evaluate_at(number, unnamed(journal, await cohort.members(need), number))
            counted = journal.store.counted(sites) if has_personal(strategy) else {}
            found = await answers.evaluate(number, sites, checkpoint.weights, counted) if sites else ({}, {})
            metrics, by_site = await shown(*found) if sites else ({}, {})
            journal.keep_evaluation(number, metrics, by_site, await at_server(number, checkpoint.weights))
        if reason := journal.reason_to_stop(number):
            return journal.result(number, reason)
        journal.waiting(need)
        members = await _members(journal, cohort, number)
        checkpoint = await _train(journal, answers, strategy, checkpoint, members, noise)


async def _members(journal: Journal, cohort: Cohort, number: int) -> Sequence[SiteId]:
    """The members of a round, once there are enough, and the sites among them that its rule must have. Those
    that were named for spoiling sums or steps are left out."""
    need, must_have = journal.config.strategy.min_sites, rule_of(journal.config).must_have
    members = await cohort.members(need)
    while True:
        missing = [site for site in sorted(must_have) if site not in members]
        if missing:
            journal.emit(Notice(text=f"waiting for {some(missing)}, without which the rule can't decide"))
        elif len(good := unnamed(journal, members, number)) >= need:
            return good
        await cohort.newcomer(members)
        members = await cohort.members(need)


async def _another(journal: Journal, cohort: Cohort) -> None:
    """Wait for a site that is not here yet, for network.idle at most: those that were asked fail alike. In a
    simulation there are no others; for sites that are silent an attempt has waited itself."""
    idle_s = journal.config.network.idle
    text = (
        f"the same sites failed alike twice: the next attempt is in {idle_s:g} s, or when another site joins"
    )
    journal.emit(Notice(text=text))
    with suppress(TimeoutError):
        async with asyncio.timeout(idle_s):
            await cohort.newcomer(await cohort.members(0))


def central_noise(journal: Journal, strategy: Strategy) -> CentralNoise | None:
    """Where the noise of a strategy that adds it at the server comes from; None: there is none."""
    if strategy.sigma is None:
        return None
    journal.noise.sigma = strategy.sigma
    delta = float(getattr(strategy, "delta", journal.config.privacy.delta))
    return CentralNoise(journal.config, journal.store, journal.emit, strategy.sigma, delta)


async def _train(
    journal: Journal, answers: Answers, strategy: Strategy, checkpoint: Checkpoint, members: Sequence[SiteId],
    noise: CentralNoise | None,
) -> Checkpoint:  # fmt: skip
    """One committed round, tried strategy.attempts times; without the sites whose updates made the model
    useless in an earlier one, which are asked for nothing for a while."""
    config, store = journal.config, journal.store
    seed = seed_of(config.run.seed, "server", checkpoint.round)
    plan, left_out = store.plan(checkpoint.round), dict[SiteId, int]()
    said: tuple[str, Sequence[SiteId]] = "", ()  # by the attempt before, and of whom
    while True:
        if plan is None:
            plan = first_plan(journal, strategy, checkpoint.round, members)
            if store.durable:  # a simulation draws its first plan again: nobody leaves it
                store.set_plan(plan)
        journal.round_started(plan.round, plan.sites, plan.attempt)
        try:
            planned = replace(
                plan, counted=store.counted(plan.sites), groups=searching(journal, plan),
                earlier=store.norms(REMEMBERED),
            )  # fmt: skip
            after, record, inside, suspects = await searched(
                journal, answers, planned, strategy, checkpoint, seed, noise
            )
        except (TooFewSites, SecAggError, Diverged) as e:
            journal.round_failed(plan.round, plan.attempt, e)
            attempt = plan.attempt + 1
            culprits = e.culprits if isinstance(e, Diverged) else []
            if attempt >= config.strategy.attempts or (isinstance(e, Diverged) and not culprits):
                store.set_plan(replace(plan, attempt=0))
                raise
            for culprit in culprits:
                left_out[culprit] = plan.round + 1 + RESTS
                why = f"{e} It is asked again after round {left_out[culprit]}"
                refuse(answers.cohort, journal.emit, culprit, plan.round + 1, why)
            before, said = said, (str(e), plan.sites)
            if said == before and isinstance(e, TooFewSites) and e.told and store.durable:
                await _another(journal, answers.cohort)
            if len(await answers.cohort.members(0)) < config.strategy.min_sites:
                journal.waiting(config.strategy.min_sites)
            members = await _members(journal, answers.cohort, plan.round)
            members = without(members, left_out)
            if len(members) < config.strategy.min_sites:
                store.set_plan(replace(plan, attempt=0))
                raise
            sites = asked(config, strategy, plan.round, attempt, members, store)
            plan = replace(plan, attempt=attempt, sites=sites, registered=store.registered(members))
            store.set_plan(plan)
            continue
        nbytes = after.weights.schema.nbytes
        if config.compression.down:
            after = await in_thread(nbytes, compressed.shortened, config, checkpoint, after)
        prepared = await in_thread(nbytes, store.prepare, after)
        following = None
        if left_out:
            suspects = (suspects or store.suspects(Suspects)).with_resting(left_out, after.round)
        if suspects is None:
            following = await _following(journal, answers.cohort, strategy, after.round)
        journal.commit(after, record, prepared, inside, following, suspects)
        if store.durable:
            store.clear_inbox()
        return at_hand(store, after)


async def _following(journal: Journal, cohort: Cohort, strategy: Strategy, number: int) -> RoundPlan | None:
    """The plan of the round after one that is not committed yet, where it begins at once and depends on
    nothing in that commit: one write, and one wait for the disk, is for both."""
    need, must_have = journal.config.strategy.min_sites, rule_of(journal.config).must_have
    if not journal.store.durable or strategy.one_by_one:
        return None
    if journal.evaluation_is_due(number) or journal.reason_to_stop(number):
        return None
    members = unnamed(journal, await cohort.members(0), number)
    if len(members) < need or not {*must_have} <= {*members}:
        return None
    return first_plan(journal, strategy, number, members)


def unnamed(journal: Journal, members: Sequence[SiteId], number: int) -> Sequence[SiteId]:
    """The members but for those that were named for spoiling sums, or not long before round `number` for a
    step."""
    suspects = journal.store.suspects(Suspects)
    named = [*suspects.named, *(site for site, until in suspects.resting.items() if until > number)]
    return without(members, [site for site in named if site in members])


def searching(journal: Journal, plan: RoundPlan) -> Sequence[Sequence[SiteId]]:
    """The groups of a round that looks for who spoils sums; () where nobody is suspected."""
    suspects, config = journal.store.suspects(Suspects), journal.config
    if not suspects.parts:
        return ()
    return suspects.groups(plan.sites, least_sites(config), seed_of(config.run.seed, "suspects", plan.round))


async def searched(
    journal: Journal, answers: Answers, plan: RoundPlan, strategy: Strategy, checkpoint: Checkpoint,
    seed: int, noise: CentralNoise | None,
) -> tuple[Checkpoint, Record, Sequence[SiteId], Suspects | None]:  # fmt: skip
    """As federated_round; and who is suspected then, where the round tells something of it. When all of its
    sums were spoiled, the next model is the same but for a bit."""
    inside, lap = list[SiteId](), Lap()
    try:
        after, record, mean = await federated_round(answers, plan, strategy, checkpoint, seed, noise)
        inside, good, spoiled = [*mean.sites], mean.summed, mean.spoiled
    except Spoiled as e:
        if not plan.groups and len(plan.sites) < 2 * least_sites(journal.config):  # too few for two sums
            raise
        journal.round_failed(plan.round, plan.attempt, e)
        weights = await in_thread(checkpoint.weights.schema.nbytes, nudged, checkpoint.weights, plan.round)
        after, record = Checkpoint(plan.round + 1, weights, checkpoint.state), lap.record({}, 0)
        good, spoiled = (), e.groups
    if not (good or spoiled):
        return after, record, inside, None
    before = journal.store.suspects(Suspects)
    suspects = before.after(spoiled, good, inside or [*spoiled[0]] if verifies(journal.config) else ())
    for site in sorted({*suspects.named} - {*before.named}):
        why = "it spoiled the sums that it was in, and those without it were good: it is asked no more"
        refuse(answers.cohort, journal.emit, site, plan.round + 1, why)
    if left := some(sorted(site for part in suspects.parts for site in part)):
        text = (
            f"round {plan.round + 1}: one of {left} spoiled a sum; smaller sums of the next round tell more"
        )
        journal.emit(Notice(text=text))
    return after, record, inside, suspects


def first_plan(journal: Journal, strategy: Strategy, number: int, members: Sequence[SiteId]) -> RoundPlan:
    """Who of the members is asked for a round at first."""
    suspected = journal.store.suspects(Suspects).parts
    sites = list(members) if suspected else asked(journal.config, strategy, number, 0, members, journal.store)
    return RoundPlan(number, 0, sites, registered=journal.store.registered(members))


def at_hand(store: RunStore, checkpoint: Checkpoint) -> Checkpoint:
    """A committed round as the next one starts from it; weights that stay are in their file."""
    if store.durable:
        return store.on_disk(checkpoint)
    checkpoint.weights.patches = store.patches(checkpoint.round)
    return checkpoint


async def federated_round(
    answers: Answers, plan: RoundPlan, strategy: Strategy, checkpoint: Checkpoint, seed: int = 0,
    noise: CentralNoise | None = None,
) -> tuple[Checkpoint, Record, Aggregate]:  # fmt: skip
    """Train at the planned sites, make one delta of what they found, step. The checkpoint given is left.
    Returns the next one, what the log says of it, and what the sites found."""
    lap = Lap()
    plan = replace(plan, last=last(checkpoint.weights.schema.model, checkpoint.state))
    mean = await answers.train(plan, checkpoint.weights)
    if noise is not None:
        seed = await in_thread(checkpoint.weights.schema.nbytes, noise.seed, plan.round, mean)
    step = partial(
        server_step, strategy, checkpoint.weights, checkpoint.state, mean.delta,
        number=plan.round, sites=len(mean.sites), registered=plan.registered, weight=mean.weight,
        sums=mean.sums, scalars=mean.scalars, seed=seed,
    )  # fmt: skip
    try:
        weights, state = await in_thread(checkpoint.weights.schema.nbytes, step)
    except ArithmeticError as e:  # of numbers that each are within their bounds
        raise Diverged(f"the strategy's step: {e}", mean.sizes) from e
    if problem := await in_thread(weights.schema.nbytes, checks.flaw, weights, state):
        raise Diverged(problem, mean.sizes)
    if noise is not None:
        noise.releases(plan.round, seed)
    record = lap.record(mean.metrics, len(mean.sites))
    record["norm"] = mean.norm
    return Checkpoint(plan.round + 1, weights, state | mean.state, mean.patch), record, mean


def asked(
    config: Config, strategy: Strategy, number: int, attempt: int, members: Sequence[SiteId], store: RunStore
) -> list[SiteId]:
    """The sites of a round: a sample, or the one that waited longest."""
    if not strategy.one_by_one:
        return sample(config, number, attempt, members)
    turn, counted = attempt % len(members), store.counted()
    new = next(islice((site for site in members if site not in counted), turn, None), None)
    if new is not None:
        return [new]
    return [sorted(members, key=lambda site: (counted.get(site, -1), site))[turn]]


def sample(config: Config, number: int, attempt: int, members: Sequence[SiteId]) -> list[SiteId]:
    """The sites of a round, sorted; drawn by (seed, round, attempt), so a repeated round asks the same. Those
    that the rule must have are always in it. Of a population it costs what the drawn sites cost."""
    members = members if isinstance(members, Names) else sorted(members)
    count = max(config.strategy.min_sites, round(config.strategy.fraction * len(members)))
    if count >= len(members):
        return list(members)
    draw = random.Random(seed_of(config.run.seed, "cohort", number, attempt))
    always = [site for site in rule_of(config).must_have if site in members]
    others = members.without(always) if isinstance(members, Names) else Without(members, always)
    return sorted([*always, *others.draw(draw, count - len(always))])


def without(members: Sequence[SiteId], left_out: Collection[SiteId]) -> Sequence[SiteId]:
    """The members but for a few."""
    if not left_out:
        return members
    return members.without(left_out) if isinstance(members, Names) else Without(members, left_out)
