"""Islands as the sites of a strategy that is more than a step and a correction.

An island's half of a round is that of a site (training.site_training). What islands send is shown by each to
all others, one after the other, and folded in the order of their names, as an aggregator folds it: so each
rank makes the step of the server itself, and a run is a simulation of the same sites. A round counts when its
checkpoint is written, which has what islands share and what each one remembers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ... import strategies
from ...aggregation import WeightedMean
from ...arena import Arena, joined
from ...config import Config, LimitsConfig
from ...digest import seed_of
from ...errors import BadUpdate, ConfigError, RoundError
from ...events import Emit
from ...messages import Metrics, SiteId, Update, averages
from ...store.memory import SiteMemory
from ...strategies import Strategy, server_step
from ...strategies.base import WEIGHTS
from ...training.collectives import everyones, firsts
from ...training.examples import Examples
from ...training.parallel.data import pooled
from ...training.parallel.engine import MeshEngine
from ...training.parallel.island import Island, Watch, shown
from ...training.parallel.outer import Outer
from ...training.partition import SimulatedSites
from ...training.site_training import OWN, SiteTraining
from ...training.tensors import model_tensors
from ..journal import Averages
from ..star.answers import tell_clipped
from ..star.central_noise import CentralNoise
from ..star.checks import flaw, inspect
from ..star.combinations import check_optimizer
from ..star.gathered import Aggregate, named_sums
from ..star.secure_terms import grid_of

States = dict[str, torch.Tensor]


def outer_of(
    config: Config, strategy: Strategy, engine: MeshEngine, examples: Examples, meet: Callable[[], None]
) -> Outer:
    """What islands exchange by a strategy that is a step and a correction, each rank its shards."""
    parallel = config.parallel
    return Outer(
        engine, engine.mesh,
        lambda weights, state, mean: sound_step(strategy, weights, state, mean),
        lambda weights: strategies.beginning(strategy, weights)[1],
        size=lambda: examples.count,
        fragments=parallel.fragments, overlap=parallel.overlap, mix=parallel.mix, meet=meet,
    )  # fmt: skip


class IslandSites:
    """What islands share and one of them remembers; and a round of theirs. Every rank calls each method."""

    def __init__(
        self, config: Config, strategy: Strategy, engine: MeshEngine, sites: SimulatedSites, data: Any,
        noise: CentralNoise | None, emit: Emit,
    ) -> None:  # fmt: skip
        """`data`: this island's examples. `noise`: rank 0's, of a strategy that adds it at the server."""
        strategies.check_parts(strategy, [*model_tensors(engine.parts[0])])
        if strategy.plain_sgd:
            check_optimizer(config, engine.own_optimizer([*engine.parts[0].parameters()], 0))
        self._config, self._strategy, self._engine, self._noise = config, strategy, engine, noise
        self._emit = emit
        self._sites, self._data, self.names = sites, data, sites.names[: engine.mesh.islands]
        self.name: SiteId = self.names[engine.mesh.island]
        correct = strategy.correct if strategies.corrects(strategy) else None
        self._island = Island(engine, config.run.rounds, correct)
        self._extras = strategies.extras_of(strategy)
        self._open = replace(config, secagg=replace(config.secagg, enabled=False))
        self.personal = strategies.has_personal(strategy)
        self.weights, self._state, self._memory = self._first()
        self._update = self._extras.update(self.weights.schema)
        self._found: tuple[Update, Mapping[str, torch.Tensor]] | None = None  # of the round under way

    # --- a round

    def train(self, round: int, watch: Watch) -> None:
        """This island's half. `watch`: takes each optimizer step."""
        self._engine.note_frozen()
        self._island.watch = watch
        local = self._local(round, Arena.zeros(self._update))
        own = msgspec.structs.replace(self._extras, max_weight=self._strategy.max_weight)
        update, after = local.sent(self._strategy.train(local), own)
        weight = WEIGHTS.get(self._strategy.weights, update.weight)
        self._found = msgspec.structs.replace(update, weight=weight), after

    def exchange(self, round: int) -> Averages:
        """Sum what the islands found, and step; what their training measured. RoundError for what could not
        be trained on: nothing has changed then."""
        assert self._found is not None, "the islands have trained"
        (update, after), self._found = self._found, None
        sums, everyone = self._summed(update, round)
        seed = self._seed(round, sums)
        new, state = sound_step(
            self._strategy, self.weights, self._state, sums.delta, number=round, sites=len(everyone),
            registered=len(everyone), weight=sums.weight, sums=sums.sums, scalars=sums.scalars, seed=seed,
        )  # fmt: skip
        if self._noise is not None:
            self._noise.releases(round, seed)
        _put(self._state, state, "state at the server")
        if self._memory:
            _put(self._memory, after, "memory at an island")
        self.weights.copy_(new)
        self._keep(round)
        return averages(everyone)

    def _local(self, round: int, out: Arena | None) -> SiteTraining:
        summed = grid_of(self._open, self._extras, seed_of(self._config.run.seed, "summed", round, self.name))
        return SiteTraining(
            self._island, self.name, lambda: self._data, round, self.weights, self._memory, out=out,
            summed=summed,
        )  # fmt: skip

    def _summed(self, update: Update, round: int) -> tuple[Aggregate, dict[SiteId, Metrics]]:
        """The sums over all islands, in their order; and what each one measured."""
        mesh, extras = self._engine.mesh, self._extras
        mean, scalars = WeightedMean(self._update), dict.fromkeys((each.name for each in extras.scalars), 0.0)
        everyone: dict[SiteId, Metrics] = {}
        mine, head = update.delta.load(), torch.tensor(_head(update, scalars), dtype=torch.float64)
        for island, name in enumerate(self.names):
            arena = Arena(self._update, shown(mesh, mine.data, island))
            numbers = shown(mesh, head, island).tolist()
            its = _headed(arena, numbers, scalars, own_weight=extras.max_weight is not None)
            try:
                inspect(msgspec.structs.replace(its, metrics={}), LimitsConfig(), extras)
            except BadUpdate as e:
                raise RoundError(f"island {name}: {e}. Lower train.lr, or set train.clip_norm.") from e
            tell_clipped(self._emit, round + 1, its.clipped, extras, name)
            mean.add(its)
            everyone[name] = its.metrics
            for each in scalars:
                scalars[each] += its.scalars[each]
        nothing = not mean.weight and extras.max_weight is not None
        delta = mean.nothing() if nothing else mean.result()
        sums = named_sums(self._update, mean.sums(), extras)
        return Aggregate(delta, {}, [*everyone], weight=mean.weight, sums=sums, scalars=scalars), everyone

    def _seed(self, round: int, sums: Aggregate) -> int:
        """What the strategy's step draws from: the same at all ranks."""
        if self._strategy.sigma is None:
            return seed_of(self._config.run.seed, "server", round)
        seed = self._noise.seed(round, sums) if self._noise is not None else 0
        if dist.is_initialized():  # 128 bits, which no number of MessagePack has
            seed = int(firsts(f"{seed:x}", str, device=self._engine.mesh.device), 16)
        return seed

    # --- models

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within it, the model is what islands share; a round begins with loading it anyway."""
        self._island.load(self.weights.model, training=True)
        yield

    def gather(self) -> Arena | None:
        """What is committed, on rank 0: the model, and of the server's state what goes out with it."""
        return self.weights.load() if self._engine.gather() is not None else None

    def evaluate(self, round: int) -> dict[SiteId, Metrics]:
        """What each island's own model is worth on that island's data."""
        mesh, names = self._engine.mesh, self._sites.names
        its = pooled([self._sites.eval_set(name) for name in names[mesh.island :: mesh.islands]])
        local = self._local(round, None)
        mine = local.evaluate(its, self._strategy.personal(local))
        everyone = [(self.name, mine)]
        if dist.is_initialized():
            everyone = everyones(everyone[0], tuple[SiteId, Metrics], device=mesh.device)
        return dict(sorted(everyone))

    def _keep(self, round: int) -> None:
        """What an island remembers, beside the run's store: so its own model can be exported there."""
        mesh = self._engine.mesh
        if self.personal and self._memory and not any(mesh.at[axis] for axis in mesh.axes()):
            folder = self._config.datacenter_dir / "memory" / self.name
            SiteMemory(folder, durable=False).keep(round, round - 1, Arena.pack(self._memory))

    # --- a checkpoint, see training.parallel.state.IslandsState

    def tensors(self) -> States:
        """What islands share."""
        parts = {"shared": self.weights.views(), "down": self.weights.extras(), "state": self._state}
        return {f"{part}/{name}": t for part, tensors in parts.items() for name, t in tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """What this island remembers."""
        return dict(self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in self._memory.items():
            tensor.copy_(state[name])
        self.weights.changed()

    def begin_anew(self) -> None:
        """The model was replaced: the strategy begins with it."""
        shared, state, memory = self._first()
        self.weights.copy_(shared)
        _put(self._state, state, "state at the server")
        _put(self._memory, memory, "memory at an island")

    def _first(self) -> tuple[Arena, States, States]:
        """(what goes out, the server's state, an island's memory) before the first round."""
        island = self._island
        model = Arena(island.local.schema, island.local.data.cpu().clone())
        shared, state = strategies.beginning(self._strategy, model)
        own = {OWN + name: view for name, view in island.first_own.views().items()}
        memory = {**self._strategy.site_init(joined(shared.model.trained())), **own}
        return shared, {n: t.clone() for n, t in state.items()}, {n: t.clone() for n, t in memory.items()}


def sound_step(
    strategy: Strategy, weights: Arena, state: States, mean: Arena, **known: Any
) -> tuple[Arena, States]:
    """What islands move to by the mean of what they moved. RoundError where that could not be trained on."""
    try:
        new, after = server_step(strategy, weights, state, mean, **known)
        problem = flaw(new, after)
    except ArithmeticError as e:
        problem = f"the strategy's step: {e}"
    if problem:
        raise RoundError(
            f"the islands' new model is of no use and is not kept: {problem}. Training diverges: lower "
            f"train.lr or the strategy's server_lr, or set train.clip_norm."
        )
    return new, after


def _head(update: Update, scalars: Mapping[str, float]) -> list[float]:
    """What is beside an update's vectors, as numbers."""
    own = math.nan if update.weight is None else update.weight
    loss: Any = update.metrics.get("loss", (0.0, 0.0))
    return [update.num_examples, own, update.clipped, *loss, *(update.scalars[name] for name in scalars)]


def _headed(delta: Arena, head: list[float], scalars: Mapping[str, float], *, own_weight: bool) -> Update:
    examples, weight, clipped, loss, of, *numbers = head
    return Update(
        delta=delta, num_examples=examples, metrics={"loss": (loss, of)},
        weight=weight if own_weight else None, clipped=int(clipped),
        scalars=dict(zip(scalars, numbers, strict=True)),
    )  # fmt: skip


def _put(kept: States, new: Mapping[str, torch.Tensor], what: str) -> None:
    """Write new values where a checkpoint has the old ones."""

    def form(tensors: Mapping[str, torch.Tensor]) -> object:
        return {name: (t.shape, t.dtype) for name, t in tensors.items()}

    if form(kept) != form(new):
        raise ConfigError(
            f"the strategy's {what} changed its names, shapes or dtypes. Islands keep them as they were at "
            f"first: let init and site_init give all entries."
        )
    for name, tensor in kept.items():
        tensor.copy_(new[name])
