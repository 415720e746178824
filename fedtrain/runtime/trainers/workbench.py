"""What a trainer does with the task: it loads the code and the data, and trains and evaluates sites.

A Workbench needs no process of its own: `simulate --debug` has one inline. This file imports torch only
inside functions, since a site's supervisor imports it too.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...arena import Arena, ArenaFile, Slab
from ...config import Config
from ...errors import BadUpdate, ConfigError, TaskError
from ...messages import Evaluation, Metrics, SiteId, Update
from ...store.disk import new_file
from ...store.memory import NEVER, DataNotes
from ..journal import Averages
from ..own_code import source_digest
from ..simulations.shared_memory import Mapped
from ..sites import compressed
from ..sites.privacy import check_config, streams_of
from ..threads import torch_threads
from . import trainer_messages as msg
from .rank_monitor import GiveUp, nobody

if TYPE_CHECKING:
    from ...training.stacked import Stacked
    from ...training.task import Task
    from .command import OwnTrainer

T = TypeVar("T")
CACHED_SITES = 1024  # the data of so many sites stays loaded, of those used last
CACHED_BYTES = 2 << 30  # and no more tensors than this many bytes


class Workbench:
    """The task, its engine, and the data of the sites used last."""

    def __init__(
        self,
        config: Config,
        data_dir: Path | None = None,
        *,
        simulated: bool,
        give_up: GiveUp = nobody,
        task: Task | None = None,
    ) -> None:
        """`give_up`: see rank_monitor. `task`: that of run.task, where a program has made it already."""
        from ... import strategies
        from ...training.dp_sgd import PrivateEngine
        from ...training.local import Engine
        from ...training.partition import CENTRAL, SimulatedSites
        from ...training.task import derives, load_task
        from ...training.tensors import model_tensors
        from ..star.combinations import check_command, check_noise
        from .folding import Folding
        from .learner import Learner

        check_config(config)
        private = config.privacy
        digest = source_digest(config)  # before a line of it runs
        self._config = config
        self._task = task or load_task(config.run.task, config.root, data_dir)
        self._simulated = SimulatedSites(self._task, config.simulate, config.run.seed) if simulated else None
        self.notes = DataNotes(config.simulate_dir)
        strategy = strategies.build(config.strategy.kind, config.strategy.options, config.root)
        strategy.check(config.train)
        check_noise(config, strategy)
        if config.train.command:
            check_command(config, strategy)
        correct = strategy.correct if strategies.corrects(strategy) else None
        extras = strategies.extras_of(strategy)
        self._ranks = None
        if not simulated and config.parallel.ranks > 1:
            from .ranks import start_ranks

            self._ranks = start_ranks(config, self._task, self._load, data_dir, give_up)
        elif private.noise_multiplier and private.unit == "example":
            self._engine: Engine = PrivateEngine(
                self._task, config.train, config.run.seed, correct, config.run.rounds,
                clip=private.clip, noise_multiplier=private.noise_multiplier,
                streams=streams_of(config, simulated),
            )  # fmt: skip
        else:
            self._engine = Engine(
                self._task, config.train, config.run.seed, correct, config.run.rounds, strategy.shares
            )
        self._strategy = strategy
        self._stacked: Stacked | None = None  # where sites are trained many at a time
        self._data: OrderedDict[tuple[str, SiteId], tuple[Any, int]] = OrderedDict()
        self._data_bytes = 0
        self._weights: tuple[msg.ModelFile, Arena] | None = None
        self._mapped = Mapped()
        engine = self._ranks or self._engine
        goes, kept = engine.schema, list[str]()
        if self._ranks is None:
            strategies.check_parts(strategy, [*model_tensors(self._engine.model)])
            goes = strategies.beginning(strategy, self._engine.local)[0].schema
            kept = [spec.name for spec in self._engine.own.schema.tensors]
        encoder = compressed.UpEncoder.of(config, engine.schema)
        self.description = msg.Description(
            goes, digest, frozen=engine.frozen, extras=extras, local=kept,
            comes=encoder.codec.coded if encoder is not None else extras.update(engine.schema),
            personal=strategies.has_personal(strategy),
        )  # fmt: skip
        self._command: OwnTrainer | None = None
        if config.train.command:
            from .command import OwnTrainer

            still = partial(getattr, self._engine, "frozen_weights")
            self._command = OwnTrainer(config, self._task.data_dir, self._simulated, still)
        alone = None if self._ranks is not None else self._engine
        self._learner = Learner(config, strategy, extras, alone, encoder, simulated=simulated)
        self.description.remembers = self._learner.remembers
        if self._simulated is not None:
            names = self.description.sites = self._simulated.names
            self.description.pooled = pooled = not self._simulated.natural
            at_sites = not pooled or strategies.has_personal(strategy)
            self.description.evaluators = names if at_sites else [CENTRAL]
        self.description.derives = derives(self._task)
        self.description.on_gpu = alone is not None and alone.device.type == "cuda"
        self._folding = Folding(config, self.description, self._train_sites)
        if simulated and config.simulate.engine != "auto":
            self.train_by(config.simulate.engine)

    def train_by(self, engine: str) -> None:
        """Train by this engine from here on, as in config.simulate. ConfigError where it can't."""
        self._stacked = None if engine == "loop" else self._stack()

    def _stack(self) -> Stacked:
        from .engines import stack_of

        samples = partial(map, partial(self._load, "data"), self.description.sites)
        return stack_of(self._config, self._engine, self._strategy, samples)

    def initial(self, *, frozen: bool = False) -> Arena:
        """The weights that a run starts from, equal at all sites; or the frozen parameters."""
        from ... import strategies

        initial = (self._ranks or self._engine).initial(frozen=frozen)
        if frozen or not self.description.schema.extras:
            return initial
        return strategies.beginning(self._strategy, initial)[0]

    def freeze(self, frozen: ArenaFile) -> None:
        """As Trainer.freeze; BadUpdate when they are not those that were announced."""
        if frozen.digest == self.description.frozen.digest:
            return
        found = frozen.load()
        if found.digest != frozen.digest:
            raise BadUpdate(f"{frozen.path}, the frozen parameters, is damaged: not {frozen.digest[:12]}…")
        (self._ranks or self._engine).freeze(found)

    def train(self, site: SiteId, round: int, weights: Arena, out: Arena, counted: int = NEVER) -> Update:
        """Train one site; its update, in `out`, as it leaves."""
        if (trains := self._ranks or self._command) is not None:
            memory = self._learner.memory(site, counted)
            update = trains.train(site, round, weights, self._learner.room(out))
            return self._learner.finished(update, site, round, weights, out, counted, memory, {})
        return self._learner.train(site, self._load("data", site), round, weights, out, counted)

    def train_peers(self, round: int, peers: Sequence[tuple[SiteId, Arena]]) -> list[Update]:
        """Train each from weights of its own, all at once, by the engine of simulate.engine."""
        import torch

        assert self._stacked is not None
        pairs = [(peer, self._load("data", peer)) for peer, _ in peers]
        own = Slab(self._engine.schema, torch.stack([weights.data for _, weights in peers]))
        return self._stacked.train(pairs, round, self._engine.local, torch.empty_like(own.data), own=own)

    def evaluate(self, site: SiteId, round: int, weights: Arena, counted: int = NEVER) -> Evaluation:
        if self._ranks is not None:
            return Evaluation(metrics=self._ranks.evaluate(site, weights))
        data, own = self._load("eval_data", site), partial(self._load, "data", site)
        return Evaluation(metrics=self._learner.evaluate(site, data, own, round, weights, counted))

    def examples(self, site: SiteId) -> float | None:
        from ...training.examples import Stream, examples_of

        if self._command is not None:
            return None
        data = self._load("data", site)
        examples = examples_of(data)
        if isinstance(examples, Stream) or (self._ranks or self._engine).weighs_items(data):
            return None
        return float(examples.count)

    def partition_note(self) -> str:
        """What simulate.min_examples changed, for people; where data() fails, its training will tell."""
        with suppress(TaskError, ConfigError):
            return "" if self._simulated is None else self._simulated.note()
        return ""

    def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        """The averages that people see of an evaluation; see task.shown."""
        from ...training.task import shown

        return shown(self._task, total, by_site)

    def answer(self, command: msg.Command) -> msg.Outcome:
        """Do what is asked. What sites keep of it is written before this returns."""
        with torch_threads(self._config.train.threads), self._learner.together():
            return self._answer(command)

    def _answer(self, command: msg.Command) -> msg.Outcome:
        match command:
            case msg.Initial(out, frozen):
                initial = self.initial(frozen=frozen)
                with new_file(initial.schema, Path(out)) as arena:
                    return msg.Saved(arena.copy_(initial).digest)
            case msg.Freeze(place):
                self.freeze(ArenaFile(self.description.frozen.schema, Path(place.path), place.digest))
                return msg.Saved(place.digest)
            case msg.Apply():
                with new_file(self.description.schema, Path(command.out)) as arena:
                    from .applied import applied

                    arena.copy_(applied(self._config, self._strategy, self.description, command))
                    return msg.Saved(arena.digest)
            case msg.Examples(site):
                return msg.Counted(self.examples(site))
            case msg.TrainOne(site, round, place, out, counted):
                weights = self._at(place)
                with new_file(self.description.update, Path(out)) as arena:
                    update = self.train(site, round, weights, arena, counted)
                    return msg.Done([msg.Trained.of(update, arena.digest)])
            case msg.TrainMany(sites, round, place, slab, offset, counted):
                rows = self._rows(slab, offset, len(sites))
                found = self._train_sites(sites, round, self._at(place), rows, counted)
                return msg.Done([r if isinstance(r, msg.Failed) else msg.Trained.of(r) for r in found])
            case msg.FoldMany():
                return self._folding.fold(command, self._at(command.weights), self._mapped)
            case msg.EvaluateMany(sites, round, place, counted):
                each = zip(sites, counted, strict=True)
                weights = self._at(place)
                given = [tried(partial(self.evaluate, site, round, weights, last)) for site, last in each]
                return msg.Done([r if isinstance(r, msg.Failed) else msg.Measured(r.metrics) for r in given])
            case msg.Choose(sites, updates):
                from .engines import choose

                pairs, weights = [(site, self._load("data", site)) for site in sites], self.initial()
                rehearse = lambda: self._learner.rehearse(self._stack(), pairs, weights)
                return choose(weights.schema.nbytes, updates, rehearse)
            case msg.TrainBy(engine):
                self.train_by(engine)
                return msg.Saved("")
            case msg.NotePartition():
                return msg.Noted(self.partition_note())
            case msg.ColumnsOf(site) | msg.TallyOne(site):
                from .counting import told

                return told(self._task, command, partial(self._load, "data", site), self._config)
            case msg.Show(total, by_site):
                return msg.Showing(*self.shown(total, by_site))

    def _train_sites(
        self, sites: list[SiteId], round: int, weights: Arena, slab: Slab, counted: list[int]
    ) -> list[Update | msg.Failed]:
        """A folding.TrainSites."""
        rows = slab.arenas()
        if self._stacked is None:
            each = zip(sites, rows, counted, strict=True)
            return [tried(partial(self.train, site, round, weights, row, last)) for site, row, last in each]
        try:
            pairs = [(site, self._load("data", site)) for site in sites]
            return [*self._learner.train_many(self._stacked, pairs, round, weights, slab.data, rows, counted)]
        except Exception as e:  # torch and the user's code run in this block
            if len(sites) == 1:
                return [msg.Failed.of(e)]
            # One by one, so that only those fail whose fault it is.
            alone = [
                self._train_sites([site], round, weights, Slab(slab.schema, slab.data[i : i + 1]), [last])
                for i, (site, last) in enumerate(zip(sites, counted, strict=True))
            ]
            return [result for results in alone for result in results]

    def _load(self, what: str, site: SiteId) -> Any:
        """The site's data() or eval_data(), loaded once while it is among those used last."""
        from ...training.examples import as_tensors

        key = what, site
        if key in self._data:
            self._data.move_to_end(key)
            return self._data[key][0]
        loaded, nbytes = as_tensors(self._call_task(what, site))
        self._data[key] = loaded, nbytes
        self._data_bytes += nbytes
        while len(self._data) > 1 and (len(self._data) > CACHED_SITES or self._data_bytes > CACHED_BYTES):
            _, (_, freed) = self._data.popitem(last=False)
            self._data_bytes -= freed
        return loaded

    def _call_task(self, what: str, site: SiteId) -> Any:
        from ...training.examples import data_digest
        from ...training.partition import read

        pooled = self._simulated is not None and not self._simulated.natural
        if self._simulated is not None and (what == "data" or pooled):
            if what != "data":
                return self._simulated.eval_set(site)
            loaded = self._simulated.data(site)
            whose, of = ("the pool", self._simulated.pool) if pooled else (site, loaded)
            self.notes.note(whose, partial(data_digest, of))
            return loaded
        return read(self._task, what, site, self._config.run.seed)

    def _at(self, place: msg.ModelFile) -> Arena:
        """Global weights, looked at where they lie; writing to them would not reach the file."""
        if self._weights is None or self._weights[0] != place:
            with open(place.path, "rb") as f:
                mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
                self._weights = place, Arena.wrap(self.description.schema, mapped)
        return self._weights[1]

    def _rows(self, slab: str, offset: int, sites: int) -> Slab:
        """Updates as they travel, in shared memory."""
        import torch

        schema = self.description.update
        flat = torch.frombuffer(self._mapped.bytes_at(slab, offset, sites * schema.nbytes), dtype=torch.uint8)
        return Slab(schema, flat.view(sites, schema.nbytes))


def tried(work: Callable[[], T]) -> T | msg.Failed:
    """What the work at a site gives, or how it failed."""
    try:
        return work()
    except Exception as e:  # torch and the user's code run in this block
        return msg.Failed.of(e)
