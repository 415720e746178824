"""`fedtrain evaluate`: what a finished model is worth on test data, once, in this process.

At a site it is the site's own data; elsewhere, all sites that the task names or the one pool, as in a
simulation. Nothing is sent: a federation's model is evaluated at each site, from an export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .. import __version__
from ..config import Config
from ..messages import SiteId, summed
from ..tracking.export import Evaluated, filled, keep_evaluated, model_of
from ..training.local import Engine
from ..training.partition import SimulatedSites
from ..training.task import folder_of, load_task, shown, test_split, user_code


def evaluate(
    config: Config,
    source: Path,
    *,
    site: SiteId | None = None,
    data_dir: Path | None = None,
    round: int | Literal["best"] | None = None,
) -> Evaluated:
    """The model of `source`, a run directory (of its last round, or of `round`) or an export, on the test
    data of one site or of all. What is found is written down there, and in the model card."""
    tensors, about = model_of(source, round)
    task = load_task(config.run.task, config.root, data_dir)
    engine = Engine(task, config.train, config.run.seed)
    weights, frozen = filled(source, tensors, engine.schema, engine.frozen.schema)
    engine.freeze(frozen)
    if site is not None:
        with user_code(folder_of(task), f"test_data({site!r})"):
            data = {site: task.test_data(site)}
    else:
        data = SimulatedSites(task, config.simulate, config.run.seed).test_data()
    found = {name: engine.evaluate(each, weights) for name, each in data.items()}
    metrics, by_site = shown(task, summed(found), found)
    evaluated = Evaluated(
        run=about["run"], round=about["round"], weights_digest=about["weights_digest"],
        data=test_split(task), metrics={**metrics},
        by_site={name: {**own} for name, own in by_site.items()}, fedtrain=__version__,
    )  # fmt: skip
    keep_evaluated(source, evaluated)
    return evaluated
