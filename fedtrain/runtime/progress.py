"""What all who move one model by steps share: how a run begins or goes on, what an evaluation decides, and
when it is over."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, TaskError
from ..events import Best, Emit, Evaluated, Notice, RunFinished, RunStarted
from ..messages import Metrics, SiteId, averages
from ..store import Checkpoint, RunStore
from ..wire.frames import Bounds

Evaluators = Callable[[int, Sequence[SiteId]], list[SiteId]]  # who of the members evaluates in a round
Averages = dict[str, float]
# (sums over all sites, each site's own) -> what people are shown of both
Shown = Callable[[Metrics, Mapping[SiteId, Metrics]], Awaitable[tuple[Averages, dict[SiteId, Averages]]]]


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    rounds: int
    reason: str  # "rounds done" or why it stopped early
    metrics: dict[str, float]  # of the last round's evaluation, if it had one
    best_round: int | None
    run_dir: Path


def begin(config: Config, store: RunStore, members: Collection[SiteId], emit: Emit) -> Checkpoint:
    """The last committed round, from which the run goes on; `store` holds the initial model at least.
    `members`: the sites that are there already."""
    import torch

    torch.set_num_threads(1)  # folds wait for memory; a second thread would only spin on the sites' cores
    checkpoint = store.latest()
    assert checkpoint is not None, "the initial model is committed before the first round"
    mode = "simulate" if store.folder == config.simulate_dir else "federated"
    buffer = config.asynchronous.buffer if config.asynchronous.enabled else 0
    emit(RunStarted(
        run=config.run.name, mode=mode, rounds=config.run.rounds, sites=len({*store.joined(), *members}),
        config_digest=config.digest(), resumed_from=checkpoint.round or None, buffer=buffer,
    ))  # fmt: skip
    return checkpoint


async def plain(total: Metrics, by_site: Mapping[SiteId, Metrics]) -> tuple[Averages, dict[SiteId, Averages]]:
    """What is shown where the task has no metrics() of its own."""
    return averages({"": total}), {site: averages({site: own}) for site, own in by_site.items()}


def keep_evaluation(
    config: Config,
    store: RunStore,
    number: int,
    metrics: Averages,
    by_site: Mapping[SiteId, Averages],
    emit: Emit,
) -> None:
    """Write down what a round's model is worth, and whether it is the best so far. ConfigError when
    evaluate.metric is none of the metrics. An evaluation without any is no reason to stop."""
    best_yet = (store.evaluation(store.best_round) or {}).get(config.evaluate.metric)
    check_metric(config, metrics, known=best_yet is not None)
    value = metrics.get(config.evaluate.metric)
    best = value is not None and config.evaluate.better(value, best_yet)
    store.evaluated(number, metrics, best=best)
    if not metrics:
        emit(Notice(text=f"round {number}: nobody evaluated the model"))
        return
    emit(Evaluated(round=number, metrics=metrics, by_site=by_site))
    if best:
        emit(Best(round=number, metric=config.evaluate.metric, value=value))


def check_metric(config: Config, metrics: Averages, *, known: bool) -> None:
    """ConfigError when the task has no evaluate.metric. One that is `known` from earlier evaluations may be
    absent from one, as when it counts nothing there."""
    metric = config.evaluate.metric
    if not metrics or metric in metrics or known:
        return
    near = difflib.get_close_matches(metric, metrics, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"evaluate.metric: the task's evaluate() gives no {metric!r}. "
        f"{hint}It gives {', '.join(sorted(metrics))}."
    )


def check_failures(number: int, asked: Collection[SiteId], failed: Mapping[SiteId, str]) -> None:
    """TaskError when every site that was asked to evaluate said why it can't: it could not later either."""
    if failed and failed.keys() >= set(asked):
        site = min(failed)
        where = f"all {len(failed)} sites. {site}" if len(failed) > 1 else site
        raise TaskError(f"round {number}: evaluation failed at {where}: {failed[site]}")


def evaluation_is_due(config: Config, store: RunStore, number: int) -> bool:
    """Whether the model after `number` rounds should be evaluated now."""
    return number > 0 and is_evaluated(config, number) and store.evaluation(number) is None


def is_evaluated(config: Config, number: int) -> bool:
    """Whether the model after `number` rounds is one of those that evaluate.every means."""
    return not Bounds(trainings=0, rounds=config.run.rounds, every=config.evaluate.every).evaluation(number)


def everyone(number: int, members: Sequence[SiteId]) -> list[SiteId]:
    """Evaluators: all members."""
    return list(members)


def bounds_of(config: Config) -> Bounds:
    """What these settings allow a site to be asked."""
    rounds, asynchronous = config.run.rounds, config.asynchronous
    # A version takes asynchronous.buffer updates, which may all be one site's, and has it refused once.
    turns = rounds * (asynchronous.buffer + 1) if asynchronous.enabled else rounds
    return Bounds(trainings=turns, rounds=rounds, every=config.evaluate.every)


def reason_to_stop(config: Config, store: RunStore, number: int) -> str | None:
    """Why the run is over after `number` rounds; None when it goes on."""
    if number >= config.run.rounds:
        return "rounds done"
    since_best = store.evaluations_since_best()
    if config.evaluate.patience and since_best >= config.evaluate.patience:
        return f"{config.evaluate.metric} has not improved for {since_best} evaluations"
    return None


def finish(store: RunStore, number: int, reason: str, emit: Emit) -> None:
    """Leave the last model in the run directory, as files that need no fedtrain, and say that it is over."""
    from ..tracking.export import export

    model = export(store.folder, store.folder / "model")
    emit(RunFinished(round=number, reason=reason, model=str(model)))
