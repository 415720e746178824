"""`fedtrain simulate`: many sites on one machine, through the same rounds as a federation.

Sites are trained by a pool of trainer processes, many to a message, and their deltas come back in shared
memory. What a site sends depends on the weights, its data and (seed, round, site) alone, so neither the
number of workers nor their speed changes a bit of the model.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...config import SITE_MODELS, Config, SimulateConfig
from ...errors import ConfigError, Damaged, some
from ...events import Emit, Muted, Notice, SiteState, UpdateReceived, noticed
from ...exchange import Cohort
from ...fairness import SERVER
from ...learning import NO_EXTRAS, Extras
from ...messages import SiteId
from ...modes import check_dealt
from ...pki.identity import LABEL
from ...population import EACH
from ...store import Checkpoint, RunStore
from ...store.disk import lock
from ...store.memory import DataNotes
from ...strategies import beginning, build
from ...training.task import Task
from ..journal import Clock, Journal, Result, no_data, some_of
from ..sites import compressed
from ..sites.spent import Spending
from ..star import asynchronous, federated
from ..star.answers import Answers, InTheOpen, rule_of
from ..star.combinations import check_strategy
from ..trainers.trainer_messages import Description
from ..trainers.workbench import Workbench
from .clock import on_clock
from .clocked_turns import clocked
from .plain_sums import FixedPointSums
from .pool import PoolCohort
from .shares import AHEAD
from .simulated_masks import SimulatedMasks
from .traces import traced

TRIED_SITES = 48  # spread over all; as many as are trained at once
DRAWN_SITES = 1000  # in a picture, at most
TOLD_SITES = 50  # of a round with more, events name only the updates that were refused


async def simulate(
    config: Config,
    *,
    emit: Emit,
    debug: SiteId | None = None,
    fresh: bool = False,
    workers: int | None = None,
    data_dir: Path | None = None,
    start: Path | None = None,
    task: Task | None = None,
) -> Result:
    """Run the whole federation here, from the last committed round on, or from the first when `fresh`.

    `start`: whose last model a new run begins with, a run directory or an export; None: the task's own.
    `debug` names a site that is trained in this very process, so that breakpoint() in the task works.
    `task`: the one that run.task names, where a program has made it; without workers it is what is trained.
    """
    strategy = build(config.strategy.kind, config.strategy.options, config.root)
    check_strategy(config, strategy)
    compressed.check_config(config)
    compressed.check_own(config)
    if config.asynchronous.enabled:
        asynchronous.check_config(config)
    if fresh:
        forget(config.simulate_dir)
    alone = config.asynchronous.enabled
    store = RunStore(
        config.simulate_dir, durable=False, warn=noticed(emit), copies=alone,
        back=cannot_go_back if alone else None,
    )  # fmt: skip
    try:
        notes = DataNotes(store.folder)
        async with await PoolCohort.start(config, workers, store.folder, data_dir, task) as pool:
            about, pool.tell_lost = pool.description, lambda text: emit(Notice(text=text))
            if machines := pool.machines():
                emit(Notice(text=f"trainers: {machines}"))
            check_dealt(config, natural=not about.pooled)
            enough_sites(config, about.sites)
            not_too_many(config, about)
            if len(about.sites) * config.strategy.fraction > TOLD_SITES:
                emit = Muted(emit, (UpdateReceived, SiteState))
            engine: Any = store.meta().get("engine") or await engine_of(config, pool, emit)
            store.begin(
                about.schema, agreed(config) | traced(config), frozen=about.frozen.schema,
                run=config.run.name, task_digest=about.task_digest, local=about.local, engine=engine,
                simulate=config.table()["simulate"],
            )  # fmt: skip
            if store.latest() is None:
                initial, frozen = await pool.beginning(start)
                store.keep_frozen(frozen)
                store.commit(Checkpoint(0, *beginning(strategy, initial)), {})
            elif not store.has_frozen(about.frozen.schema):
                store.keep_frozen((await pool.beginning(None))[1])
            config = replace(config, simulate=replace(config.simulate, engine=engine))
            await pool.train_by(engine)
            if debug is not None:
                pool.debug(debug, Workbench(config, data_dir, simulated=True, task=task))
            if (kept := store.frozen_file()) is not None:
                await pool.freeze(kept)
            if config.compression.down:
                await pool.keep_initial()
            if store.rounds()[-1].round < config.run.rounds:
                for note in filter(None, (names_without_certificate(about), await pool.partition_note())):
                    emit(Notice(text=note))
            evaluators = some_of(config, lambda number, members: about.evaluators)
            at_server = pool.at_server if server_has_data(config, about) else no_data
            clock = Clock() if config.asynchronous.enabled or config.simulate.timed else None
            journal = Journal(config, store, notes.telling(emit), clock=clock)
            cohort: Cohort = pool
            if config.privacy.noise_multiplier:
                cohort = Spending(config, cohort, store.folder, journal.emit)
            if clock is not None and not config.asynchronous.enabled:
                cohort = on_clock(config, clock, about, cohort, pool.examples)
            cohort = compressed.decompressing(config, about.schema, cohort)
            if clock is not None and config.asynchronous.enabled:
                asks = await clocked(config, clock, about, cohort, pool.examples, ahead=AHEAD * pool.workers)
                asks.goes_on(store.turns.latest())
                result = await asynchronous.run(
                    journal, cohort, strategy, asks=asks, evaluate_at=evaluators, shown=pool.shown,
                    at_server=at_server,
                )  # fmt: skip
            else:
                result = await federated.run(
                    journal, answers(config, cohort, emit, about.extras), strategy, evaluate_at=evaluators,
                    shown=pool.shown, at_server=at_server,
                )  # fmt: skip
        journal.finish(result)
        return result
    finally:
        store.close()


async def engine_of(config: Config, pool: PoolCohort, emit: Emit) -> str:
    """The engine of the whole run. "auto": the loop where the task names its sites, for a federation of them
    is foretold to the last bit, and without rounds; else what fits the model's size."""
    sites, asked = pool.description.sites, config.simulate.engine
    if asked != "auto":
        return asked
    if not pool.description.pooled or config.asynchronous.enabled or config.train.command:
        return "loop"
    a_round = max(config.strategy.min_sites, round(config.strategy.fraction * len(sites)))
    few = min(TRIED_SITES, len(sites))
    spread = [sites[i * len(sites) // few] for i in range(few)]
    chosen = await pool.choose(spread, config.run.rounds * a_round)
    if chosen.reason:
        equal = "" if chosen.engine == "loop" else "; equal to the loop to rounding"
        emit(Notice(text=f"simulate.engine: {chosen.engine}, {chosen.reason}{equal}"))
    return chosen.engine


def answers(config: Config, cohort: Cohort, emit: Emit, extras: Extras = NO_EXTRAS) -> Answers:
    """As the real federation would make one of many, with or without the work of hiding them."""
    if not config.secagg.enabled:
        return InTheOpen(config, cohort, emit, extras)
    if not config.simulate.masks:
        return FixedPointSums(config, cohort, emit, extras)
    return SimulatedMasks(config, cohort, emit, extras)


def cannot_go_back(line: str) -> None:
    """Without rounds the next model depends on all that was under way, which no round before it has."""
    raise Damaged(f"{line} A simulation of asynchronous sites can't go on: start it with --fresh.")


def forget(folder: Path) -> None:
    """Remove a run directory, unless some process is at work in it."""
    if folder.exists():
        lock(folder).close()
        shutil.rmtree(folder)


def enough_sites(config: Config, sites: Sequence[SiteId]) -> None:
    if len(sites) < config.strategy.min_sites:
        raise ConfigError(
            f"strategy.min_sites: {config.strategy.min_sites}, but the simulation has {len(sites)} sites. "
            f"Lower it, or raise simulate.sites."
        )
    for site in rule_of(config).must_have:
        if site not in sites:
            raise ConfigError(
                f"aggregation.root: {site!r} is no site of the simulation, which has {some(sites)}."
            )


def names_without_certificate(about: Description) -> str:
    """A line with the names of sites that no certificate takes; "" where there are none."""
    if about.pooled or not (unfit := [s for s in about.sites[:EACH] if not re.fullmatch(LABEL, s)]):
        return ""
    return (
        f"{some(unfit)}: `fedtrain certs issue` takes no such name, but 1 to 63 of a-z, 0-9 and '-', as in "
        f"st-mary-2. Rename them before you compare numbers: seeds come from the names of sites"
    )


def not_too_many(config: Config, about: Description) -> None:
    """ConfigError where something would be done at each site of a large population."""
    if config.asynchronous.enabled and len(about.sites) > EACH:
        raise ConfigError(
            f"asynchronous.enabled: all {len(about.sites):,} sites would train at once. Lower simulate.sites "
            f"to {EACH:,} at most, or go by rounds, with strategy.fraction."
        )
    if config.evaluate.every and not config.evaluate.sites and len(about.evaluators) > EACH:
        raise ConfigError(
            f"evaluate.sites: 0, and all {len(about.evaluators):,} sites would evaluate each time. Draw some "
            f"with evaluate.sites = 1000, say, or set evaluate.every = 0."
        )


def server_has_data(config: Config, about: Description) -> bool:
    """Whether the task's eval_data("server") is evaluated beside the sites' own. ConfigError where it is not
    clear what that would be."""
    if not (config.evaluate.every and config.evaluate.server):
        return False
    if about.pooled:
        raise ConfigError(
            "evaluate.server: the simulated sites share one pool of data, whose eval_data() is evaluated "
            "centrally already. Leave it false, or have the task name its sites in sites()."
        )
    if SERVER in about.sites:
        raise ConfigError(
            f"evaluate.server: the task has a site {SERVER!r}, whose eval_data() would be the server's too. "
            f"Give that site another name, or leave evaluate.server false."
        )
    return True


def agreed(config: Config) -> dict[str, str]:
    """What must not change between the rounds of one simulation. A command trains all sites of it."""
    keys = [f"simulate.{key}" for key in ("sites", "partition", "examples", "engine", *SITE_MODELS)]
    keys += ["train.command"] if config.train.command else []
    if config.simulate.min_examples != SimulateConfig.min_examples:  # runs from before have no such key
        keys.append("simulate.min_examples")
    return config.agreed() | {key: repr(config.value(key)) for key in keys}


def draw_partition(config: Config, path: Path) -> None:
    """A picture of how much of which label every simulated site has, or every so manieth of very many."""
    import numpy as np

    from ...training.partition import SimulatedSites, draw, labels_of
    from ...training.task import load_task

    sites = SimulatedSites(load_task(config.run.task, config.root), config.simulate, config.run.seed)
    check_dealt(config, natural=sites.natural)
    few = sites.names[:: -(-len(sites.names) // DRAWN_SITES)]
    labels = [np.asarray(labels_of(sites.data(name))) for name in few]
    ends = np.cumsum([len(of_site) for of_site in labels])
    parts = dict(zip(few, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
    draw(np.concatenate(labels), parts, path, of=len(sites.names))
