"""Federated training: rounds of sample -> train -> check -> fold -> step -> commit, through any cohort.

`run` is the loop, and is the same for real sites over gRPC (`serve`) and for a simulation
(`simulation.py`): a cohort, a store, a strategy are handed to it. Whatever it was doing when the process
died, it goes on from the last committed round, asks the same sites the same question, and gets the same
model: the plan of a round is kept before it starts, and seeds come from (run, round, site) alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from .. import __version__, events
from ..config import Config
from ..digest import seed_of
from ..errors import Diverged, JoinRefused, SecAggError, TooFewSites
from ..events import Emit, Record, noticed
from ..malloc import keep_freed
from ..messages import Found, Metrics, Reply, Request, SiteId
from ..schema import Schema
from ..store import Checkpoint, RoundPlan, RunStore
from ..strategies import Strategy, build, server_step, state_init
from ..wire.frames import PROTOCOL, Bounds, Hello
from . import asynchronous, checks, compressed
from .answers import Answers, InTheOpen
from .progress import (
    Averages,
    Evaluators,
    Result,
    Shown,
    begin,
    bounds_of,
    evaluation_is_due,
    everyone,
    finish,
    keep_evaluation,
    plain,
    reason_to_stop,
)
from .threads import all_cores, in_thread, while_torch_loads

# --- the loop


async def run(
    config: Config,
    answers: Answers,
    store: RunStore,
    strategy: Strategy,
    emit: Emit,
    *,
    evaluate_at: Evaluators = everyone,
    shown: Shown = plain,
) -> Result:
    """Rounds until config.run.rounds, an early stop, or TooFewSites; `store` holds the initial model.

    `evaluate_at`: who evaluates (a simulation evaluates pooled data once).
    `shown`: what the task makes of an evaluation.
    """
    checkpoint = begin(config, store, await answers.cohort.members(0), emit)
    checkpoint = at_hand(store, checkpoint)
    while True:
        if evaluation_is_due(config, store, checkpoint.round):
            await _evaluate(config, answers, store, checkpoint, emit, evaluate_at, shown)
        if reason := reason_to_stop(config, store, checkpoint.round):
            break
        emit(events.Waiting(need=config.strategy.min_sites))
        members = await answers.cohort.members(config.strategy.min_sites)
        checkpoint = await _train(config, answers, store, strategy, checkpoint, members, emit)
    metrics = store.evaluation(checkpoint.round) or {}
    return Result(checkpoint.round, reason, metrics, store.best_round, store.folder)


async def _train(
    config: Config,
    answers: Answers,
    store: RunStore,
    strategy: Strategy,
    checkpoint: Checkpoint,
    members: list[SiteId],
    emit: Emit,
) -> Checkpoint:
    """One committed round, tried config.strategy.attempts times; without a site whose update made the model
    useless in an earlier one."""
    plan, left_out = store.plan(checkpoint.round), dict[SiteId, str]()
    while True:
        if plan is None:
            plan = RoundPlan(checkpoint.round, 0, sample(config, checkpoint.round, 0, members))
        if store.durable or plan.attempt:  # a simulation draws its first plan again: nobody leaves it
            store.set_plan(plan)
        emit(events.RoundStarted(round=plan.round + 1, attempt=plan.attempt + 1, sites=plan.sites))
        try:
            planned = replace(plan, counted=store.counted())
            after, record, inside = await federated_round(answers, planned, strategy, checkpoint)
        except (TooFewSites, SecAggError, Diverged) as e:
            emit(events.RoundFailed(round=plan.round + 1, attempt=plan.attempt + 1, reason=str(e)))
            attempt = plan.attempt + 1
            culprit = e.culprit if isinstance(e, Diverged) else None
            if attempt >= config.strategy.attempts or (isinstance(e, Diverged) and culprit is None):
                store.set_plan(RoundPlan(plan.round, 0, plan.sites))
                raise
            if culprit is not None:
                left_out[culprit] = str(e)
                emit(events.UpdateRefused(round=plan.round + 1, site=culprit, reason=str(e)))
                answers.cohort.tell(culprit, f"round {plan.round + 1}: the update was refused: {e}")
            members = await answers.cohort.members(config.strategy.min_sites)
            members = [site for site in members if site not in left_out]
            if len(members) < config.strategy.min_sites:
                store.set_plan(RoundPlan(plan.round, 0, plan.sites))
                raise
            plan = RoundPlan(plan.round, attempt, sample(config, plan.round, attempt, members))
            continue
        nbytes = after.weights.schema.nbytes
        if config.compression.down:
            after = await in_thread(nbytes, compressed.shortened, config, checkpoint, after)
        prepared = await in_thread(nbytes, store.prepare, after)
        store.commit(after, record, prepared, inside)
        if store.durable:
            store.clear_inbox()
        after = at_hand(store, after)
        emit(events.RoundCommitted(round=after.round, **record))
        return after


def at_hand(store: RunStore, checkpoint: Checkpoint) -> Checkpoint:
    """A committed round as the next one starts from it; weights that stay are in their file."""
    if store.durable:
        return store.on_disk(checkpoint)
    checkpoint.weights.patches = store.patches(checkpoint.round)
    return checkpoint


async def federated_round(
    answers: Answers, plan: RoundPlan, strategy: Strategy, checkpoint: Checkpoint
) -> tuple[Checkpoint, Record, Sequence[SiteId]]:
    """Train at the planned sites, make one delta of what they found, step. The checkpoint given is left.
    Returns the next one, what the log says of it, and whose updates are in it."""
    began, cohort = time.monotonic(), answers.cohort
    bytes_in, bytes_out = cohort.bytes_in, cohort.bytes_out
    mean = await answers.train(plan, checkpoint.weights)
    weights, state = await in_thread(
        checkpoint.weights.schema.nbytes,
        server_step, strategy, checkpoint.weights, checkpoint.state, mean.delta,
    )  # fmt: skip
    if problem := await in_thread(weights.schema.nbytes, checks.flaw, weights, state):
        raise Diverged(problem, mean.sizes)
    record: Record = {
        "loss": mean.metrics.get("loss"),
        "metrics": mean.metrics,
        "sites": len(mean.sites),
        "seconds": time.monotonic() - began,
        "bytes_in": cohort.bytes_in - bytes_in,
        "bytes_out": cohort.bytes_out - bytes_out,
    }
    return Checkpoint(plan.round + 1, weights, state), record, mean.sites


async def _evaluate(
    config: Config,
    answers: Answers,
    store: RunStore,
    checkpoint: Checkpoint,
    emit: Emit,
    evaluate_at: Evaluators,
    shown: Shown,
) -> None:
    """Ask for sums over the sites; what they show decides which model is the best and when to stop early."""
    number = checkpoint.round
    sites = evaluate_at(number, await answers.cohort.members(config.strategy.min_sites))
    found = await shown(*await answers.evaluate(number, sites, checkpoint.weights)) if sites else ({}, {})
    keep_evaluation(config, store, number, *found, emit)


def sample(config: Config, number: int, attempt: int, members: Sequence[SiteId]) -> list[SiteId]:
    """The sites of a round, sorted; drawn by (seed, round, attempt), so a repeated round asks the same."""
    members = sorted(members)
    count = max(config.strategy.min_sites, round(config.strategy.fraction * len(members)))
    if count >= len(members):
        return members
    draw = random.Random(seed_of(config.run.seed, "cohort", number, attempt))
    return sorted(draw.sample(members, count))


# --- the aggregator


async def serve(config: Config, *, emit: Emit, start: Path | None = None) -> Result:
    """`fedtrain aggregator`: the loop over sites that join by mutual TLS.

    `start`: whose last model a new run begins with, a run directory or an export; None: the task's own.
    """
    from ..pki import Credentials, Verifier
    from ..pki.callers import Callers
    from ..transport.endpoints import TRANSPORTS, RemoteCohort
    from ..transport.tls import Tls
    from . import secure_rounds

    keep_freed()
    compressed.check_config(config)
    if config.asynchronous.enabled:
        asynchronous.check_config(config)
    credentials = Credentials.load(config.root / config.network.certs / "aggregator")
    store = RunStore(config.run_dir, warn=noticed(emit))
    try:
        strategy = build(config.strategy.kind, config.strategy.options, config.root)
        schema, task_digest = await while_torch_loads(_begin(config, store, strategy, start))
        frozen = store.frozen
        callers = Callers(credentials, config.root / config.network.certs)
        codec = compressed.up_codec(config, schema)
        due = schema if codec is None else codec.coded  # as an update comes

        def admit(site: SiteId, request: Request, reply: Reply) -> None:
            if config.secagg.enabled:
                secure_rounds.admit(request, reply, longest)
            else:
                checks.admit(request, reply, due, config.limits, store.joined().get(site))

        bounds: dict[SiteId, Bounds] = {}

        def welcome(site: SiteId, hello: Hello) -> None:
            agree(site, hello, config, schema, task_digest, frozen.schema)
            store.join(site, hello.examples)
            if hello.bounds is not None and bounds.get(site) != hello.bounds:
                bounds[site] = hello.bounds
                for why in differences(hello.bounds, bounds_of(config)):
                    emit(events.Notice(text=f"{site}: {why}"))

        def evaluators(number: int, members: Sequence[SiteId]) -> list[SiteId]:
            return [site for site in members if site not in bounds or not bounds[site].evaluation(number)]

        tls = Tls(credentials.key, credentials.chain, credentials.root)
        cohort = RemoteCohort(
            TRANSPORTS["grpc"](tls, config.network.heartbeat),
            listen=config.network.listen,
            identify=callers.identify,
            welcome=welcome,
            admit=admit,
            inbox=store.inbox,
            replies=secure_rounds.REPLIES if config.secagg.enabled else Found,
            frozen=store.frozen_file(),
            idle_s=config.network.idle,
            emit=emit,
        )
        sites = compressed.decompressing(config, schema, cohort, store.keep)
        answers: Answers
        if config.secagg.enabled:
            longest = secure_rounds.longest_vector(config, schema)
            answers = secure_rounds.UnderMasks(
                config, cohort, emit,
                federation=credentials.identity.federation,
                callers=callers,
                verifier=Verifier(
                    credentials.root, credentials.identity.federation, revoked=callers.revoked
                ),
                plans=store,
                parallel=all_cores(),
                frozen=frozen.sha256,
            )  # fmt: skip
        else:
            answers = InTheOpen(config, sites, emit)
        await cohort.start()
        emit(events.Notice(text=f"listening on {config.network.listen}"))
        watching = asyncio.create_task(callers.watch(cohort.cut, emit))
        over: str | None = None
        try:
            async with shown_by_task(config, store, task_digest) as shown:
                if config.asynchronous.enabled:
                    result = await asynchronous.run(
                        config, sites, store, strategy, emit, evaluate_at=evaluators, shown=shown
                    )
                else:
                    result = await run(
                        config, answers, store, strategy, emit, evaluate_at=evaluators, shown=shown
                    )
            finish(store, result.rounds, result.reason, emit)
            over = result.reason
            return result
        finally:
            watching.cancel()
            await cohort.stop(over, filter(callers.may_call, store.joined()))
    finally:
        store.close()


async def _begin(
    config: Config, store: RunStore, strategy: Strategy, start: Path | None
) -> tuple[Schema, str]:
    """The run's model and its task's digest, with an initial model in the store. A new run asks a process
    that loads the task; one that goes on with the same source knows."""
    from .trainer import Trainer
    from .workbench import source_digest

    if (known := store.begun()) is not None and known[1] == source_digest(config):
        store.begin(
            known[0], config.agreed(), frozen=store.frozen.schema, run=config.run.name, task_digest=known[1]
        )
        if store.latest() is not None and store.has_frozen(store.frozen.schema):
            return known
    async with await Trainer.start(config, scratch=store.folder) as trainer:
        about = trainer.description
        store.begin(
            about.schema, config.agreed(), frozen=about.frozen.schema, run=config.run.name,
            task_digest=about.task_digest, derives=about.derives,
        )  # fmt: skip
        if store.latest() is None:
            initial, frozen = await trainer.beginning(start, store.folder)
            store.keep_frozen(frozen)
            store.commit(Checkpoint(0, initial, state_init(strategy, initial)), {})
        elif not store.has_frozen(about.frozen.schema):
            store.keep_frozen(await trainer.frozen(store.folder))
    return about.schema, about.task_digest


@asynccontextmanager
async def shown_by_task(config: Config, store: RunStore, task_digest: str) -> AsyncGenerator[Shown, None]:
    """What the task's metrics() makes of evaluations. The task's code never runs in this process, which has
    the aggregator's key: with the first evaluation a process is started for it, if there is a metrics()."""
    from .supervised import Supervised, unchanged
    from .trainer import Trainer
    from .trainer_messages import Description

    process: Supervised | None = None

    async def shown(
        total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        nonlocal process
        if not total:
            return {}, {}
        if process is None:
            process = await Supervised.begin(
                lambda: Trainer.start(config, scratch=store.folder, metrics_only=True)
            )
            unchanged(Description(Schema(()), task_digest, derives=True), process.description)
        return await process.shown(total, by_site)

    try:
        yield shown if store.meta().get("derives") else plain
    finally:
        if process is not None:
            await process.close()


def differences(site: Bounds, run: Bounds) -> list[str]:
    """Where a site lets itself be asked less than this run asks: first why it sits evaluations out."""
    evaluated = [number for number in range(1, min(run.rounds, 1000) + 1) if not run.evaluation(number)]
    refused = filter(None, (site.evaluation(number) for number in evaluated))
    return [*list(refused)[:1], *filter(None, [site.training(run.trainings - 1)])]


def agree(
    site: SiteId,
    hello: Hello,
    config: Config,
    schema: Schema,
    task_digest: str,
    frozen: Schema = Schema(()),
) -> None:
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
    hello.frozen.check()
    if difference := schema.difference(hello.schema) or frozen.difference(hello.frozen):
        raise JoinRefused(
            f"{site} and the aggregator have different models: {difference} (aggregator here, site there). "
            f"Make model() the same at both."
        )
