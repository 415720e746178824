"""Federated training: rounds of sample -> train -> check -> fold -> step -> commit, through any cohort.

`run` is the loop, and is the same for real sites over gRPC (`serve`) and for a simulation
(`simulation.py`): a cohort, a store, a strategy are handed to it. Whatever it was doing when the process
died, it goes on from the last committed round, asks the same sites the same question, and gets the same
model: the plan of a round is kept before it starts, and seeds come from (run, round, site) alone.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .. import __version__, aggregation
from ..aggregation import Rule, WeightedMean, aggregate
from ..config import Config
from ..errors import BadUpdate, CertificateError, JoinRefused, TooFewSites
from ..exchange import Cohort, in_order
from ..store import Checkpoint, Plan, RunStore
from ..strategies import Strategy, build, server_step, state_init
from ..update import (
    Arena,
    ArenaFile,
    Evaluate,
    Evaluation,
    Metrics,
    Reply,
    Schema,
    SiteId,
    Train,
    Update,
    averages,
    seed_of,
)
from ..wire.frames import PROTOCOL, Hello
from . import checks

if TYPE_CHECKING:
    from ..pki import Identity

T = TypeVar("T")
Emit = Callable[..., None]
SMALL_BYTES = 1 << 20  # a model on which one may work on the event loop; on a larger one in a thread


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    rounds: int
    reason: str  # "rounds done" or why it stopped early
    metrics: dict[str, float]  # of the last round's evaluation, if it had one
    best_round: int | None
    run_dir: Path


# --- the loop


async def run(
    config: Config,
    cohort: Cohort,
    store: RunStore,
    strategy: Strategy,
    emit: Emit,
    *,
    evaluate_at: Sequence[SiteId] | None = None,
) -> Result:
    """Rounds until config.run.rounds, an early stop, or TooFewSites; `store` holds the initial model.

    `evaluate_at`: who evaluates, when it is not every member (a simulation evaluates pooled data once).
    """
    import torch

    rule_of(config)  # which refuses now what a round could not keep
    torch.set_num_threads(1)  # folds wait for memory; a second thread would only spin on the sites' cores
    checkpoint = store.latest(warn=lambda line: emit("notice", text=line))
    assert checkpoint is not None, "the initial model is committed before the first round"
    if store.durable:
        checkpoint = store.on_disk(checkpoint)
    emit(
        "run_started",
        run=config.run.name,
        mode="simulate" if store.folder == config.simulate_dir else "federated",
        rounds=config.run.rounds,
        sites=len(store.joined()),
        config_digest=config.digest(),
        resumed_from=checkpoint.round or None,
    )
    while True:
        if _evaluation_is_due(config, store, checkpoint.round):
            await _evaluate(config, cohort, store, checkpoint, emit, evaluate_at)
        if reason := _reason_to_stop(config, store, checkpoint.round):
            break
        emit("waiting", need=config.strategy.min_sites)
        members = await cohort.members(config.strategy.min_sites)
        checkpoint = await _train(config, cohort, store, strategy, checkpoint, members, emit)
    metrics = store.evaluation(checkpoint.round) or {}
    return Result(checkpoint.round, reason, metrics, store.best_round, store.folder)


async def _train(
    config: Config,
    cohort: Cohort,
    store: RunStore,
    strategy: Strategy,
    checkpoint: Checkpoint,
    members: list[SiteId],
    emit: Emit,
) -> Checkpoint:
    """One committed round, tried config.strategy.attempts times."""
    plan = store.plan(checkpoint.round)
    while True:
        if plan is None:
            plan = Plan(checkpoint.round, 0, sample(config, checkpoint.round, 0, members))
        if (
            store.durable or plan.attempt
        ):  # a simulation draws the same first plan again, for nobody leaves it
            store.set_plan(plan)
        emit("round_started", round=plan.round + 1, attempt=plan.attempt + 1, sites=plan.sites)
        try:
            after, record = await federated_round(cohort, plan, config, strategy, checkpoint, emit)
        except TooFewSites as e:
            emit("round_failed", round=plan.round + 1, attempt=plan.attempt + 1, reason=str(e))
            attempt = plan.attempt + 1
            if attempt >= config.strategy.attempts:
                store.set_plan(Plan(plan.round, 0, plan.sites))
                raise
            members = await cohort.members(config.strategy.min_sites)
            plan = Plan(plan.round, attempt, sample(config, plan.round, attempt, members))
            continue
        prepared = await _aside(after.weights.schema.nbytes, store.prepare, after)
        store.commit(after, record, prepared)
        if store.durable:
            after = store.on_disk(after)
            store.clear_inbox()
        emit("round_committed", round=after.round, **record)
        return after


async def federated_round(
    cohort: Cohort, plan: Plan, config: Config, strategy: Strategy, checkpoint: Checkpoint, emit: Emit
) -> tuple[Checkpoint, dict[str, Any]]:
    """Train at the planned sites, fold what they send, step. The checkpoint given is left as it is."""
    began, bytes_in, bytes_out = time.monotonic(), cohort.bytes_in, cohort.bytes_out
    request = Train(
        id=f"{config.run.name}/{plan.round}/{plan.attempt}/train",
        round=plan.round,
        weights=checkpoint.weights,
    )
    rule, schema, trained = rule_of(config), checkpoint.weights.schema, dict[SiteId, Metrics]()
    spooled: list[Update] = []
    mean: WeightedMean | None = None
    replies = cohort.exchange(dict.fromkeys(plan.sites, request), config.strategy.round_deadline)
    checked = _checked(replies, request, cohort, config, emit)
    async with aclosing(in_order(checked, plan.sites)) as ordered:
        async for site, reply in ordered:
            if isinstance(reply, Update):
                trained[site] = reply.metrics
                if isinstance(reply.delta, ArenaFile):
                    spooled.append(reply)  # folded together below, chunk by chunk, from the disk
                elif not rule.linear:
                    spooled.append(kept(reply))
                else:
                    mean = mean or WeightedMean(schema)
                    mean.add(reply)  # in shared memory that is needed again: folded now
    if len(trained) < config.strategy.min_sites:
        raise TooFewSites(f"round {plan.round + 1}", len(trained), config.strategy.min_sites)
    if mean is None:
        delta = await asyncio.to_thread(aggregate, rule, schema, spooled)
    else:
        delta = await _aside(schema.nbytes, mean.result)
    weights, state = await _aside(
        schema.nbytes, server_step, strategy, checkpoint.weights, checkpoint.state, delta
    )
    metrics = averages(trained)
    record = {
        "loss": metrics.get("loss"),
        "metrics": metrics,
        "sites": len(trained),
        "seconds": time.monotonic() - began,
        "bytes_in": cohort.bytes_in - bytes_in,
        "bytes_out": cohort.bytes_out - bytes_out,
    }
    return Checkpoint(plan.round + 1, weights, state), record


def rule_of(config: Config) -> Rule:
    """The rule that makes one delta of a round's updates; ConfigError when min_sites is too few for it."""
    return aggregation.build(config.aggregation.rule, config.aggregation.options, config.strategy.min_sites)


def kept(update: Update) -> Update:
    """A copy for rules that look at all updates together: shared memory is needed again before that."""
    return msgspec.structs.replace(update, delta=update.delta.load())


async def _checked(
    replies: AsyncGenerator[tuple[SiteId, Reply], None],
    request: Train,
    cohort: Cohort,
    config: Config,
    emit: Emit,
) -> AsyncGenerator[tuple[SiteId, Reply], None]:
    """The good updates, as they come. A bad one is named here and at its site, and the round goes on."""
    async with aclosing(replies):
        async for site, reply in replies:
            try:
                checks.answers(request, reply, config.limits)
                assert isinstance(reply, Update), reply
                if reply.delta.schema.nbytes <= SMALL_BYTES:
                    checks.inspect(reply, config.limits)
                else:
                    await asyncio.to_thread(checks.inspect, reply, config.limits)
            except BadUpdate as e:
                emit("update_refused", round=request.round + 1, site=site, reason=str(e))
                cohort.tell(site, f"round {request.round + 1}: the update was refused: {e}")
                continue
            value, count = reply.metrics.get("loss", (math.nan, 0.0))
            emit(
                "update_received", round=request.round + 1, site=site, num_examples=reply.num_examples,
                loss=value / count if count else None, nbytes=reply.delta.schema.nbytes,
            )  # fmt: skip
            yield site, reply


async def _aside(nbytes: int, work: Callable[..., T], *args: Any) -> T:
    """Work on a model of so many bytes, in a thread where it would hold up the event loop."""
    return work(*args) if nbytes <= SMALL_BYTES else await asyncio.to_thread(work, *args)


async def _evaluate(
    config: Config,
    cohort: Cohort,
    store: RunStore,
    checkpoint: Checkpoint,
    emit: Emit,
    evaluate_at: Sequence[SiteId] | None,
) -> None:
    """Ask for (sum, count) pairs; their averages decide which model is the best and when to stop early."""
    number = checkpoint.round
    sites = list(evaluate_at or await cohort.members(config.strategy.min_sites))
    request = Evaluate(id=f"{config.run.name}/{number}/0/evaluate", round=number, weights=checkpoint.weights)
    by_site: dict[SiteId, Metrics] = {}
    replies = cohort.exchange(dict.fromkeys(sites, request), config.strategy.round_deadline)
    async with aclosing(replies):
        async for site, reply in replies:
            try:
                checks.answers(request, reply, config.limits)
                assert isinstance(reply, Evaluation), reply
                by_site[site] = reply.metrics
            except BadUpdate as e:
                emit("update_refused", round=number, site=site, reason=str(e))
    metrics = averages(by_site)
    value = metrics.get(config.evaluate.metric)
    best_yet = (store.evaluation(store.best_round) or {}).get(config.evaluate.metric)
    best = value is not None and config.evaluate.better(value, best_yet)
    store.evaluated(number, metrics, best=best)
    each = {site: averages({site: by_site[site]}) for site in sorted(by_site)}
    emit("evaluated", round=number, metrics=metrics, by_site=each)
    if best:
        emit("best", round=number, metric=config.evaluate.metric, value=value)


def sample(config: Config, number: int, attempt: int, members: Sequence[SiteId]) -> list[SiteId]:
    """The sites of a round, sorted; drawn by (seed, round, attempt), so a repeated round asks the same."""
    members = sorted(members)
    count = max(config.strategy.min_sites, round(config.strategy.fraction * len(members)))
    if count >= len(members):
        return members
    draw = random.Random(seed_of(config.run.seed, "cohort", number, attempt))
    return sorted(draw.sample(members, count))


def _evaluation_is_due(config: Config, store: RunStore, number: int) -> bool:
    every = config.evaluate.every
    if number == 0 or not every or (number % every and number < config.run.rounds):
        return False
    return store.evaluation(number) is None


def _reason_to_stop(config: Config, store: RunStore, number: int) -> str | None:
    if number >= config.run.rounds:
        return "rounds done"
    since_best = store.evaluations_since_best()
    if config.evaluate.patience and since_best >= config.evaluate.patience:
        return f"{config.evaluate.metric} has not improved for {since_best} evaluations"
    return None


# --- the aggregator


async def serve(config: Config, *, emit: Emit) -> Result:
    """`fedtrain aggregator`: the loop over sites that join by mutual TLS."""
    from ..pki import Credentials, identity_of
    from ..tracking.export import export
    from ..transport.grpc import GrpcCohort
    from ..transport.tls import Tls
    from .trainer import Trainer

    credentials = Credentials.load(config.root / config.network.certs / "aggregator")
    store = RunStore(config.run_dir)
    try:
        strategy = build(config.strategy.kind, config.strategy.options, config.root)
        async with await Trainer.start(config, scratch=store.folder) as trainer:
            about = trainer.description
            store.begin(about.schema, config.agreed(), run=config.run.name, task_digest=about.task_digest)
            if store.latest() is None:
                _begin(store, strategy, (await trainer.initial(store.folder / "initial")).load())
        (store.folder / "initial").unlink(missing_ok=True)

        def welcome(site: SiteId, hello: Hello) -> None:
            agree(site, hello, config, about.schema, about.task_digest)
            store.join(site, hello.examples)

        cohort = GrpcCohort(
            listen=config.network.listen,
            tls=Tls(credentials.key, credentials.chain, credentials.root),
            identify=lambda pem: site_name(identity_of(pem), credentials.identity.federation),
            welcome=welcome,
            admit=lambda site, request, reply: checks.admit(
                request, reply, about.schema, config.limits, store.joined().get(site)
            ),
            inbox=store.inbox,
            heartbeat_s=config.network.heartbeat,
            idle_s=config.network.idle,
            emit=emit,
        )
        await cohort.start()
        emit("notice", text=f"listening on {config.network.listen}")
        try:
            result = await run(config, cohort, store, strategy, emit)
        except BaseException:
            await cohort.stop()
            raise
        model = export(store.folder, store.folder / "model")
        emit("run_finished", round=result.rounds, reason=result.reason, model=str(model))
        await cohort.stop(result.reason)
        return result
    finally:
        store.close()


def _begin(store: RunStore, strategy: Strategy, initial: Arena) -> None:
    store.commit(Checkpoint(0, initial, state_init(strategy, initial)), {})


def site_name(identity: Identity, federation: str) -> SiteId:
    """The caller's name; CertificateError unless it is a site of this federation."""
    if identity.role != "site" or identity.federation != federation:
        raise CertificateError(f"{identity} is not a site of {federation}")
    return identity.name


def agree(site: SiteId, hello: Hello, config: Config, schema: Schema, task_digest: str) -> None:
    """JoinRefused, in one line that reads well at both ends, unless both would train the same thing."""
    if hello.protocol != PROTOCOL:
        raise JoinRefused(
            f"{site} speaks protocol {hello.protocol} (fedtrain {hello.version[:20]}), the aggregator "
            f"{PROTOCOL} (fedtrain {__version__}). Install the same fedtrain at both."
        )
    mine = config.agreed()
    for key in sorted({*mine, *hello.agreed}):
        here, there = mine.get(key), hello.agreed.get(key)
        if here != there:
            raise JoinRefused(
                f"{site} and the aggregator differ in {key[:64]}: {str(there)[:64]} at the site, "
                f"{str(here)[:64]} at the aggregator. Use the same fedtrain.toml at both."
            )
    if hello.task_digest != task_digest:
        raise JoinRefused(
            f"{site} and the aggregator have different task code: {hello.task_digest[:12]} at the site, "
            f"{task_digest[:12]} at the aggregator. Copy the same task file to both."
        )
    hello.schema.check()
    if difference := schema.difference(hello.schema):
        raise JoinRefused(
            f"{site} and the aggregator have different models: {difference} (aggregator here, site there). "
            f"Make model() the same at both."
        )
