"""`fedtrain evaluate --matrix`: what each of several models is worth on the data of each site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import __version__
from ..config import Config
from ..events import Averages
from ..fairness import with_sites
from ..messages import SiteId, summed
from ..tracking.export import completed, filled, model_of, own_models
from ..training.local import Engine
from ..training.task import Task, shown, test_split
from .evaluation import test_sets
from .sites.start import task_for
from .trained import as_trained


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


def matrix(
    config: Config,
    sources: Sequence[Path],
    *,
    site: SiteId | None = None,
    data_dir: Path | None = None,
    rounds: Sequence[int | Literal["best"] | None] = (None,),
    task: Task | None = None,
) -> MatrixReport:
    """Every model of the `sources` in each of the `rounds`, on the test data of one site or of all; of peers
    that were simulated together, the mean and each one's own. Nothing is written. The task and the sites
    are those that the first of the sources was trained with.

    `task`: the one that run.task names, where a program has made it already."""
    config = as_trained(config, sources[0])
    task = task_for(config, site, data_dir, task)
    engine = Engine(task, config.train, config.run.seed)
    data = test_sets(config, task, site)
    by_model: dict[str, dict[SiteId, Averages]] = {}
    over_all: dict[str, Averages] = {}
    for source in dict.fromkeys(sources):
        for name, tensors in _models(source, rounds, engine.initial().views()):
            weights, frozen = filled(source, tensors, engine.schema, engine.frozen.schema)
            engine.freeze(frozen)
            found = {each: engine.evaluate(examples, weights) for each, examples in data.items()}
            metrics, by_site = shown(task, summed(found), found)
            row = name if name not in by_model else f"{name} ({source})"
            by_model[row] = {each: {**own} for each, own in by_site.items()}
            over_all[row] = {**with_sites(metrics, by_site, config.evaluate.lower)}
    return MatrixReport(data=test_split(task), by_model=by_model, metrics=over_all, fedtrain=__version__)


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
