"""`fedtrain evaluate --matrix`: what each of several models is worth on the data of each site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from .. import __version__
from ..config import Config
from ..errors import ConfigError, some
from ..events import Averages
from ..fairness import Lower, averaged, joined, over_sites
from ..messages import SiteId, summed
from ..tracking.export import completed, filled, model_of, own_models
from ..training.examples import Stream, examples_of
from ..training.local import Engine
from ..training.task import Task, collate_of, folder_of, shown, test_split, user_code
from .evaluation import test_sets
from .sites.start import task_for
from .trained import as_trained

ALONE = "Evaluate each by itself; or, where one task fits all, name it: --set run.task=…"


class MatrixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Models against sites; a model's name is its run's, with the round where that was asked for."""

    data: Literal["test_data", "eval_data", "data"]  # the task's method that gave it
    by_model: dict[str, dict[SiteId, Averages]]  # model -> site -> metrics
    metrics: dict[str, Averages]  # model -> metrics over all sites, as of an EvaluationReport
    fedtrain: str  # version

    def of(self, metric: str) -> dict[str, dict[SiteId, float | None]]:
        """One metric as a table, model -> site -> value: pandas.DataFrame(report.of("accuracy")).T."""
        return {model: {site: own.get(metric) for site, own in row.items()}
                for model, row in self.by_model.items()}  # fmt: skip


class Compared(NamedTuple):
    """Whose models are rows, a run directory or an export, and the project that it is of."""

    source: Path
    config: Config
    task: Task | None  # the one that run.task names, where a program has made it already
    data_dir: Path | None


class Yardstick:
    """Measures models that were trained by one task, on its test data."""

    def __init__(self, run: Compared, trained: Config, site: SiteId | None) -> None:
        """`run`: the first of this task. `trained`: as it was."""
        self.name, self._spec, self._given = run.source.name, trained.run.task, run.task
        self._task = task_for(trained, site, run.data_dir, run.task)
        self._data, self.split = test_sets(trained, self._task, site), test_split(self._task)

    def fits(self, run: Compared, trained: Config) -> bool:
        """Whether a run is of this task."""
        return run.task is self._given and trained.run.task == self._spec

    def engine(self, trained: Config) -> Engine:
        """What evaluates the models of one run."""
        return Engine(self._task, trained.train, trained.run.seed)

    def measured(
        self, engine: Engine, source: Path, tensors: dict[str, Any], lower: Lower
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        """(metrics over all sites, each site's) of a model of `source`. `lower`: of which metrics less is
        better."""
        weights, frozen = filled(source, tensors, engine.schema, engine.frozen.schema)
        engine.freeze(frozen)
        found = {site: engine.evaluate(examples, weights) for site, examples in self._data.items()}
        metrics, by_site = shown(self._task, summed(found), found)
        return joined(metrics, over_sites(by_site, lower)), {site: {**own} for site, own in by_site.items()}

    def check_beside(self, first: Yardstick) -> None:
        """ConfigError unless its sites, and how many examples each has, are those of the first one."""
        mine, theirs = self._sizes(), first._sizes()
        if self.split != first.split or mine.keys() != theirs.keys():
            raise ConfigError(
                f"--matrix: {first.name} is measured on {first.split}() of {some([*theirs])}, and "
                f"{self.name} on {self.split}() of {some([*mine])}: what they are worth can't be "
                f"compared. {ALONE}"
            )
        for site, size in mine.items():
            if None not in (size, theirs[site]) and size != theirs[site]:
                raise ConfigError(
                    f"--matrix: at {site} the task of {first.name} has {theirs[site]} examples to be "
                    f"measured on, and that of {self.name} {size}: what they are worth can't be "
                    f"compared. {ALONE}"
                )

    def _sizes(self) -> dict[SiteId, int | None]:
        """How many examples each site has; None of a stream."""
        with user_code(folder_of(self._task), "test data"):
            found = {site: examples_of(data, collate_of(self._task)) for site, data in self._data.items()}
        return {site: None if isinstance(each, Stream) else each.count for site, each in found.items()}


def matrix(
    compared: Sequence[Compared],
    *,
    site: SiteId | None = None,
    rounds: Sequence[int | Literal["best"] | None] = (None,),
) -> MatrixReport:
    """Every model of these in each of the `rounds`, on the test data of one site or of all; of peers that
    were simulated together, the mean and each one's own. Nothing is written.

    Each model is measured by the task that it was trained with, on what that gives as a site's test data.
    ConfigError where two of them have other sites, other numbers of examples there, or other metrics."""
    yardsticks: list[Yardstick] = []
    by_model: dict[str, dict[SiteId, Averages]] = {}
    over_all: dict[str, Averages] = {}
    for run in {each.source: each for each in compared}.values():
        source, trained = run.source, as_trained(run.config, run.source)
        yardstick = next((each for each in yardsticks if each.fits(run, trained)), None)
        if yardstick is None:
            yardsticks.append(yardstick := Yardstick(run, trained, site))
            yardstick.check_beside(yardsticks[0])
        engine = yardstick.engine(trained)
        for name, tensors in _models(source, rounds, engine.initial().views()):
            row = name if name not in by_model else f"{name} ({source})"
            found = yardstick.measured(engine, source, tensors, trained.evaluate.lower)
            over_all[row], by_model[row] = found
    if len(yardsticks) > 1:
        _check_metrics(over_all)
    return MatrixReport(data=yardsticks[0].split, by_model=by_model, metrics=over_all, fedtrain=__version__)


def _check_metrics(over_all: Mapping[str, Averages]) -> None:
    """ConfigError for models of which two have no metric in common but the loss, which is each task's own."""
    (first, wanted), *others = [(row, {*averaged(own)} - {"loss"}) for row, own in over_all.items()]
    for row, names in others:
        if names != wanted and not names & wanted:
            told = [some(sorted(each)) or "nothing" for each in (wanted, names)]
            raise ConfigError(
                f"--matrix: beside the loss, which is each task's own, {first} has {told[0]} and {row} "
                f"{told[1]}: what they are worth can't be compared. {ALONE}"
            )


def _models(
    source: Path, rounds: Sequence[int | Literal["best"] | None], own: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, tensors) of a run's models, or of an export's; `own`: the task's, for what stays at sites."""
    seen = set[str]()
    for round in rounds:
        tensors, about = model_of(source, round)
        tensors = completed(source, tensors, about, own)
        at = "" if round is None else f" round {about['round']}"
        if at not in seen:  # the best round may be one that was asked for by its number
            seen.add(at)
            yield f"{source.stem if source.is_file() else source.name}{at}", tensors
            for owner, each in own_models(source, round).items():
                yield f"{source.name}@{owner}{at}", each
