"""A site's own model, of a strategy that gives each site one: the global model that the site has, with the
tensors that stay there and what the strategy makes of the site's memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import strategies
from ..arena import Arena, ArenaFile
from ..config import Config
from ..errors import ConfigError, Damaged, StoreError
from ..messages import Metrics, SiteId
from ..store import RunStore
from ..store.disk import read_sealed
from ..store.ledger import NEWEST, Newest
from ..store.memories import Memories, OneMemory
from ..store.memory import NEVER, SiteMemory
from ..tracking.export import write
from ..training.local import Engine
from ..training.partition import SimulatedSites, read
from ..training.site_training import SiteTraining
from ..training.task import Task
from .sites.start import task_for
from .trained import as_trained

Tensors = Mapping[str, torch.Tensor]
# (weights, frozen parameters, round, the last round that each site counted in, of those that did)
Present = tuple[Arena, Arena, int, Mapping[SiteId, int]]


def only_the_newest(round: object) -> None:
    """ConfigError for a round that was asked for."""
    if round is not None:
        raise ConfigError("--round: a site keeps its newest model only. Leave --round out.")


def export(
    config: Config,
    source: Path,
    site: SiteId,
    out: Path,
    task: Task | None = None,
    data_dir: Path | None = None,
) -> Path:
    """Write the site's own model into the folder `out` as a model of a run is written, and return `out`.
    `data_dir`: where the site's data is, on which a strategy may go on from the global model."""
    config = as_trained(config, source)
    tensors, round = personal(config, source, site, task, data_dir)
    about = {
        "run": config.run.name, "round": round, "site": site, "sites": [site], "best": False,
        "strategy": config.strategy.kind, "metrics": {},
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
    }  # fmt: skip
    return write(out, tensors, about, config.agreed())


def personal(
    config: Config, source: Path, site: SiteId, task: Task | None = None, data_dir: Path | None = None
) -> tuple[dict[str, torch.Tensor], int]:
    """(every tensor by its name, the round): of a simulation's run directory, or of the site's.

    The round is the last one whose model the site has. StoreError where the site's memory is not here, or
    none of its updates counted yet."""
    task = task_for(config, site, data_dir, task)
    strategy = strategies.build(config.strategy.kind, config.strategy.options, config.root)
    if not strategies.has_personal(strategy):
        raise ConfigError(
            f"--site {site}: with strategy.kind = {config.strategy.kind!r} all sites have the global model. "
            f"Leave --site out, or name what stays at a site in strategy.local."
        )
    beside = source.with_name(f"{source.name}@{site}")
    source = beside if not (source / "memory").exists() and beside.exists() else source
    models = OwnModels(config, source, site, task)
    return models.tensors(site), models.round


class OwnModels:
    """The sites' own models of a simulation, by its run directory, or that of the one site whose it is."""

    def __init__(self, config: Config, source: Path, site: SiteId, task: Task) -> None:
        """`site`: whose memory has to be here, where sites have one."""
        self._config, self._source, self._task = config, source, task
        self._strategy = strategies.build(config.strategy.kind, config.strategy.options, config.root)
        self._remembers = strategies.remembers(self._strategy)
        self._engine = Engine(task, config.train, config.run.seed, shares=self._strategy.shares)
        first, _ = strategies.beginning(self._strategy, self._engine.initial())
        found = _in_a_store(source, site, self._remembers) or _at_a_site(source, site, self._engine, first)
        self._weights, self._frozen, self.round, self._counted = found
        if difference := first.schema.difference(self._weights.schema):
            raise StoreError(f"{source} holds another model than the task's and [strategy]'s: {difference}.")
        self._engine.freeze(self._frozen)

    def tensors(self, site: SiteId) -> dict[str, torch.Tensor]:
        """Every tensor of the site's model by its name. StoreError where it never counted and has to."""
        if self._remembers and site not in self._counted:
            raise StoreError(
                f"{site} has no model of its own yet: none of its updates counted in {self._source}."
            )
        local = self._at(site)
        found = local.tensors(self._strategy.personal(local)) | self._frozen.views()
        return {name: tensor.cpu() for name, tensor in found.items()}

    def evaluate(self, site: SiteId, dataset: Any) -> Metrics:
        """What the task's evaluate() gives of the site's model; one that never counted has a new site's."""
        local = self._at(site)
        return local.evaluate(dataset, self._strategy.personal(local))

    def _at(self, site: SiteId) -> SiteTraining:
        memory: Tensors = {}
        if self._remembers and site in self._counted:
            memory = _memory(self._source, site).load(self._counted[site]).views()
        data = partial(_data, self._config, self._source, self._task, site, len(self._counted))
        local = SiteTraining(self._engine, site, data, self.round, self._weights, memory)
        if not local.memory:
            local.memory = dict(self._strategy.site_init(local.start))
        return local


def simulated(source: Path) -> bool:
    """Whether it is the run directory of a simulation, in which all sites' memories are."""
    return source.name.endswith("+simulate") and (source / "run.db").exists()


def _data(config: Config, source: Path, task: Task, site: SiteId, islands: int) -> Any:
    """What the site trains on: in a simulation, and on islands, its part of the pool, where the task has no
    natural sites."""
    dealt = config.simulate
    if in_a_datacenter := source.name.endswith("+datacenter"):
        dealt = replace(dealt, sites=islands)
    if simulated(source) or in_a_datacenter:
        return SimulatedSites(task, dealt, config.run.seed).data(site)
    return read(task, "data", site, config.run.seed)


def _memory(source: Path, site: SiteId) -> SiteMemory | OneMemory:
    """A site's states, of a simulation's run directory, of that of islands, or of the site's own."""
    if simulated(source):
        return Memories(source / "memory", read_only=True).of(site)
    return SiteMemory(source / "memory" / site, durable=False)


def _in_a_store(source: Path, site: SiteId, remembers: bool) -> Present | None:
    """That of a simulation."""
    if not (source / "run.db").exists():
        return None
    with closing(RunStore(source, read_only=True)) as store:
        last, counted, frozen = store.latest(), store.counted(), store.load_frozen()
    if last is None:
        raise StoreError(f"{source} has no model yet. Let the run finish its first round.")
    if remembers and not (source / "memory").exists():
        raise StoreError(
            f"{source} has no memory of {site}: what stays at a site is in {source.name}@{site}, on that "
            f"site's machine. Export it there."
        )
    return last.weights.load(), frozen, last.round, counted


def _at_a_site(source: Path, site: SiteId, engine: Engine, first: Arena) -> Present:
    """That at the site itself, of the newest model that the site was sent."""
    if not (source / NEWEST).exists():
        raise StoreError(f"{source} has no model of {site}'s own yet: it has not been sent the global one.")
    try:
        newest = read_sealed(source / NEWEST, Newest)
    except Damaged as e:
        raise StoreError(f"{e} The next round writes it anew.") from None

    def load(digest: str, like: Arena) -> Arena:
        arena = ArenaFile(like.schema, source / "inbox" / digest, digest).load()
        if arena.digest != digest:
            raise StoreError(f"{source / 'inbox' / digest} is damaged. The next round fetches it anew.")
        return arena

    frozen = engine.initial(frozen=True)
    if newest.frozen != engine.frozen.digest:
        frozen = load(newest.frozen, frozen)
    counted = {} if newest.counted == NEVER else {site: newest.counted}
    return load(newest.weights, first), frozen, newest.round, counted
