"""`fedtrain evaluate`: what a finished model is worth on test data, once, in this process.

At a site it is the site's own data; elsewhere, all sites that the task names or the one pool, as in a
simulation. Nothing is sent: a federation's model is evaluated at each site, from an export.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .. import __version__, strategies
from ..config import Config, one_of
from ..digest import seed_of
from ..errors import ConfigError
from ..fairness import joined, over_sites
from ..messages import Metrics, SiteId, summed
from ..population import EACH
from ..schema import Schema, unique_tensors
from ..tracking.export import EvaluationReport, completed, filled, keep_evaluated, model_of
from ..training.building import build_model
from ..training.local import Engine
from ..training.partition import SimulatedSites, read
from ..training.task import Task, shown, test_split
from .personal import OwnModels, only_the_newest, personal, simulated
from .sites.start import task_for
from .trained import as_trained


def evaluate(
    config: Config,
    source: Path,
    *,
    site: SiteId | None = None,
    data_dir: Path | None = None,
    round: int | Literal["best"] | None = None,
    task: Task | None = None,
) -> EvaluationReport:
    """The model of `source`, a run directory (of its last round, or of `round`) or an export, on the test
    data of one site or of all; of a simulation in which sites have models of their own each of these, on its
    site's part. What is found is written down there, and in the model card.

    `task`: the one that run.task names, where a program has made it already."""
    config = as_trained(config, source)
    task = task_for(config, site, data_dir, task)
    strategy = strategies.build(config.strategy.kind, config.strategy.options, config.root)
    if simulated(source) and strategies.has_personal(strategy):
        only_the_newest(round)
        return _own_models(config, source, site, task)
    tensors, about = model_of(source, round)
    engine = Engine(task, config.train, config.run.seed)
    tensors = completed(source, tensors, about, engine.initial().views())
    weights, frozen = filled(source, tensors, engine.schema, engine.frozen.schema)
    engine.freeze(frozen)
    found = {name: engine.evaluate(each, weights) for name, each in test_sets(config, task, site).items()}
    return _reported(config, source, task, about, found)


def _own_models(config: Config, source: Path, site: SiteId | None, task: Task) -> EvaluationReport:
    """Of a simulation's sites, or of one; no model card is of these models."""
    sites = SimulatedSites(task, config.simulate, config.run.seed, finished=True)
    if site is not None:
        one_of("--site", site, sites.names)
    names = drawn(config, sites.names) if site is None else [site]
    models, whole = OwnModels(config, source, names[0], task), sites.eval_data(names) if sites.natural else {}
    found = {
        name: models.evaluate(name, whole[name] if sites.natural else sites.eval_set(name)) for name in names
    }
    about = {"run": source.name, "round": models.round, "weights_digest": None}
    return _reported(config, source, task, about, found, own_models=True)


def _reported(
    config: Config, source: Path, task: Task, about: Mapping[str, Any], found: dict[SiteId, Metrics],
    own_models: bool = False,
) -> EvaluationReport:  # fmt: skip
    """What was found at each site, with what it says over sites; it is written down beside the model."""
    metrics, by_site = shown(task, summed(found), found)
    evaluated = EvaluationReport(
        run=about["run"], round=about["round"], weights_digest=about["weights_digest"],
        data=test_split(task), metrics=joined(metrics, over_sites(by_site, config.evaluate.lower)),
        by_site={name: {**own} for name, own in by_site.items()}, fedtrain=__version__, own_models=own_models,
    )  # fmt: skip
    keep_evaluated(source, evaluated)
    return evaluated


def test_sets(config: Config, task: Task, site: SiteId | None) -> dict[SiteId, Any]:
    """The test data of one site; of all (None), each natural site's or that of the one pool as "central"."""
    if site is None:
        sites = SimulatedSites(task, config.simulate, config.run.seed, finished=True)
        return sites.eval_data(drawn(config, sites.names) if sites.natural else None)
    return {site: read(task, test_split(task), site, config.run.seed)}


def drawn(config: Config, names: Sequence[SiteId]) -> Sequence[SiteId]:
    """Who evaluates a finished model: all, or of very many evaluate.sites of them."""
    if len(names) <= EACH:
        return names
    if not config.evaluate.sites:
        raise ConfigError(
            f"evaluate.sites: 0, and all {len(names):,} sites would evaluate. Draw some with "
            f"--set evaluate.sites=1000, say, or name one with --site."
        )
    draw = random.Random(seed_of(config.run.seed, "evaluators", "finished"))
    return sorted(draw.sample(names, min(len(names), config.evaluate.sites)))


def model_with_weights(
    config: Config,
    source: Path,
    round: int | Literal["best"] | None,
    task: Task | None,
    site: SiteId | None = None,
) -> nn.Module:
    """The task's model() with the weights of `source`, as in `evaluate`, or with those of a site's own model;
    on the CPU, in evaluation mode."""
    config = as_trained(config, source)
    task = task_for(config, site, None, task)
    about: dict[str, Any] = {}
    if site is None:
        tensors, about = model_of(source, round)
    else:
        only_the_newest(round)
        tensors, _ = personal(config, source, site, task)
    model = build_model(task, config.run.seed, torch.device("cpu"))
    tensors = completed(source, tensors, about, unique_tensors(model))
    weights, frozen = filled(source, tensors, Schema.of(model), Schema.of(model, frozen=True))
    views = weights.views() | frozen.views()
    with torch.no_grad():
        for name, tensor in unique_tensors(model).items():
            tensor.copy_(views[name])
    return model.eval()
