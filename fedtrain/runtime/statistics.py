"""`fedtrain stats`: statistics of the data that is here, in this process: of all sites that the task names,
of a pool dealt to simulated sites, or of one site. Nothing is sent.

A federation's are gathered by `fedtrain aggregator --stats` (star/statistics.py), to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, TaskError, TooFewSites
from ..messages import SiteId, summed
from ..modes import check_dealt
from ..population import EACH
from ..questions import Question
from ..statistics.report import Statistics, report
from ..statistics.survey import ALL, alike, surveys
from ..store.disk import private_folder
from ..training.columns import ColumnSource
from ..training.partition import SimulatedSites, read
from ..training.task import Task
from .sites.start import task_for
from .star.statistics import write
from .trainers.counting import tally


def stats(
    config: Config, *, site: SiteId | None = None, data_dir: Path | None = None, task: Task | None = None
) -> Statistics:
    """Statistics of all sites, or of `site` alone, also written to its run directory. As in a federation with
    these settings, with secagg.enabled they are of all sites together, and of no single one.

    `task`: the one that run.task names, where a program has made it already.
    """
    task, size = task_for(config, site, data_dir, task), config.train.eval_batch_size
    sources = _sources(config, task, site)
    usual, left_out = alike({name: source.described(size) for name, source in sources.items()})
    openly = site is None and not config.secagg.enabled
    if openly:
        left_out |= _too_few(config, sources)
    sites = sorted(sources.keys() - left_out.keys())
    if site is None and len(sites) < config.strategy.min_sites:
        raise TooFewSites("statistics", len(sites), config.strategy.min_sites, left_out)
    survey = surveys(usual, sites, config.stats.bins, openly=openly)
    asked = next(survey)
    while True:
        least = config.stats.min_cell if openly else 0
        answers = {name: tally(sources[name], size, asked[name if openly else ALL], least) for name in sites}
        try:
            asked = survey.send(answers if openly else {ALL: summed(answers)})
        except StopIteration as end:
            found = end.value
            break
    masks, folder = (
        site is None and not openly,
        config.simulate_dir if site is None else config.site_dir(site),
    )
    statistics = report(
        config.run.name, found, sites, config.stats.min_cell, config.stats.bins,
        masks=masks, left_out=left_out,
    )  # fmt: skip
    private_folder(folder)
    write(folder, statistics)
    return statistics


def _sources(config: Config, task: Task, site: SiteId | None) -> dict[SiteId, ColumnSource]:
    """Each site's columns. The data of a site is loaded once."""
    if site is not None:
        data = partial(read, task, "data", site, config.run.seed)
        return {site: ColumnSource.at(task, site, cache(data))}
    simulated = SimulatedSites(task, config.simulate, config.run.seed)
    check_dealt(config, natural=simulated.natural)
    if len(simulated.names) > EACH:
        raise ConfigError(
            f"stats: all {len(simulated.names):,} sites would count their data. Lower simulate.sites to "
            f"{EACH:,} at most, or name one of the task's sites with --site."
        )
    every = {name: cache(partial(simulated.data, name)) for name in simulated.names}
    if simulated.natural:
        return {name: ColumnSource.at(task, name, every[name]) for name in every}
    pool = ColumnSource.at(task, simulated.names[0], lambda: simulated.pool)
    return {name: pool.chosen(simulated.part(name), every[name]) for name in every}


def _too_few(config: Config, sources: Mapping[SiteId, ColumnSource]) -> dict[SiteId, str]:
    """The sites that answer in secure sums only, and why."""
    found = {}
    for name, source in sources.items():
        try:
            tally(source, config.train.eval_batch_size, Question(), config.stats.min_cell)
        except TaskError as e:
            found[name] = str(e)
    return found
