"""`torchrun ... -m fedtrain datacenter`: rounds of steps by all ranks of a mesh together.

A round is what it is in a federation: train.local_epochs passes over the data, or train.local_steps steps.
With parallel.sync = "step" all ranks train one model on the pool of all data, and a round is when it is
committed and evaluated. With "local" each island is a site: it trains on its own data, and [strategy] steps
on the mean of what the islands moved.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from ...config import Config
from ...errors import ConfigError, openly
from ...events import Emit, Notice, Record, noticed
from ...messages import summed
from ...modes import check_dealt
from ...store import Checkpoint, RunStore
from ...strategies import build, corrects
from ...training.elastic import Leave, Left
from ...training.engine import Step, over, steps_in_round
from ...training.mesh import Mesh, Sizes, joined
from ...training.optimizers import schedule
from ...training.parallel.alike import check_training
from ...training.parallel.data import Dealt, data_of, pool_of, sites_of
from ...training.parallel.engine import MeshEngine
from ...training.parallel.outer import Outer
from ...training.parallel.state import State, no_optimizer
from ...training.rank_log import RankLog
from ...training.task import Task, collate_of, folder_of, load_task, shown, user_code
from ..auditing import DATACENTER, audited, datacenter_credentials
from ..journal import Averages, Journal, Result
from ..meeting import advice, meet
from ..star.combinations import beyond, check_islands
from ..star.federated import central_noise
from . import resuming
from .islands import IslandSites, outer_of
from .meter import Meter

if TYPE_CHECKING:
    from ...training.checkpoint import Checkpoints

POOL = "datacenter"  # whose data it is where all ranks share it


@openly()
def run(
    config: Config, *, emit: Emit, data_dir: Path | None = None, start: Path | None = None,
    done: Path | None = None, profile: int = 0,
) -> Result:  # fmt: skip
    """Train to config.run.rounds, from the newest checkpoint on. Called alike by every rank that torchrun
    started, or by one process alone; rank 0 speaks for all, so others are given an `emit` that is silent.
    Told to leave by SIGTERM, all ranks checkpoint and raise Left.

    `start`: whose last model a new run begins with: a run directory (a federation's, say) or an export.
    `done`: see joined. `profile`: steps to be recorded, in the run directory's `profile`.
    """
    if config.privacy.noise_multiplier:
        raise ConfigError("privacy.noise_multiplier: a datacenter adds no noise. Set it to 0.")
    islands = config.parallel.sync == "local"
    with joined(partial(meet, config), config.train.device, config.parallel.backend, done) as device:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        mesh = Mesh(Sizes.of(config.parallel, ranks), device, islands=islands)
        task = load_task(config.run.task, config.root, data_dir)
        for line in advice():
            emit(Notice(text=line))
        log, limit = RankLog(config.datacenter_dir, mesh.rank), config.parallel.step_timeout
        with log, ExitStack() as stack, Leave(hangs_s=limit, log=log) as leave:
            store = None  # but for rank 0
            with resuming.of_first(device):
                if mesh.rank == 0:
                    signer = datacenter_credentials(config)
                    emit = stack.enter_context(closing(audited(config, DATACENTER, emit, signer))).emit
                    store = stack.enter_context(closing(RunStore(config.datacenter_dir, warn=noticed(emit))))
            room = Datacenter(config, task, mesh, store, emit, leave)
            if profile:
                from .profile import Profile

                room.stepped = stack.enter_context(Profile(profile, config.datacenter_dir, mesh)).step
            with resuming.of_first(device):
                if store is not None:
                    resuming.begin(store, config, room.schema, room.engine)
            return room.run(start)


class Datacenter:
    """One run, at one rank of its mesh."""

    def __init__(
        self, config: Config, task: Task, mesh: Mesh, store: RunStore | None, emit: Emit,
        leave: Leave | None = None,
    ) -> None:  # fmt: skip
        """`store` is rank 0's. `leave`: what tells it to; None: nothing does."""
        self.config, self.mesh, self.store, self.emit = config, mesh, store, emit
        self.journal = Journal(config, store, emit, common=mesh.from_first)
        self.leave = leave or Leave()
        self.stepped: Callable[[], None] | None = None  # called after each step
        self.islands = config.parallel.sync == "local"
        strategy = build(config.strategy.kind, config.strategy.options, config.root) if self.islands else None
        if strategy is not None:
            check_islands(config, strategy)
        as_sites = strategy is not None and bool(beyond(strategy))
        self.correct = strategy.correct if strategy is not None and corrects(strategy) else None
        self.afresh = self.islands and not config.parallel.carry
        # An interrupted round is begun again, for where it began is not checkpointed.
        self.from_the_start = self.afresh or self.correct is not None
        self.sites = sites_of(task, config, mesh.islands)
        check_dealt(config, natural=self.islands and self.sites.natural, keys=("partition",))
        self.name, everything = data_of(self.sites, mesh) if self.islands else (POOL, pool_of(self.sites))
        self.data = Dealt(
            everything, config.train, config.run.seed, self.name, mesh.data_rank, mesh.data_ranks,
            collate_of(task), config.parallel.readers, mesh.device,
        )  # fmt: skip
        check_training(task, self.sites, self.data, mesh)
        self.engine = MeshEngine(
            task, config, mesh, example=self.data.example() if mesh.sizes.pp > 1 else None,
            correct=None if as_sites else self.correct,
            shares=strategy.shares if strategy is not None and as_sites else None,
        )  # fmt: skip
        self.engine.steps.factor = schedule(config.train, self._steps_in_all())
        steps = self._steps_in_a_round()
        self.in_step = not self.islands or (mesh.alike(steps or 0) and steps is not None)
        self.outer: Outer | None = None
        self.methods: IslandSites | None = None  # where islands are the sites of a strategy
        if strategy is not None and as_sites:
            noise = central_noise(self.journal, strategy) if store is not None else None
            self.methods = IslandSites(config, strategy, self.engine, self.sites, everything, noise, emit)
        elif strategy is not None:
            self.outer = outer_of(config, strategy, self.engine, self.data.examples, self._meet)
        self.between = self.outer or self.methods  # what islands share
        self.schema = self.engine.schema if self.methods is None else self.methods.weights.schema
        self.meter = Meter(self.engine, config, emit)
        self.state = State(
            self.engine.parts, self.engine.optimizer if self.methods is None else no_optimizer(), self.data,
            self.between, mesh.island if self.islands else None, self.engine.steps.scale, self.meter,
        )  # fmt: skip

    def run(self, start: Path | None) -> Result:
        """Every round that is left."""
        config, state = self.config, self.state
        resumed = resuming.some_checkpoint(config, self.mesh) and self.checkpoints.restore(state)
        if not resumed:
            resuming.refuse_lost(config, self.store, self.mesh.device)
        if not resumed and start is not None:
            resuming.begin_with(start, self.engine, self.store)
            if self.between is not None:
                self.between.begin_anew()
        if self.engine.frozen.tensors:
            frozen = self.engine.gather(frozen=True)
            with resuming.of_first(self.mesh.device):
                if self.store is not None and frozen is not None:
                    self.store.keep_frozen(frozen)
        within = state.step if state.step > state.begun else 0
        self.journal.start("datacenter", self._sites(), state.round, step=within)
        self.emit(Notice(text=f"ranks {self.mesh.sizes.world}, mesh {self.mesh.sizes}"))
        if 0 < (steps := self._steps_in_all() or 0) <= config.train.warmup:
            warmup = f"train.warmup: {config.train.warmup} steps, and the run has {steps}"
            self.emit(Notice(text=f"{warmup}: the learning rate rises to its end"))
        self._agree_with_store()
        metrics = self._evaluate_if_due()
        while (reason := self.journal.reason_to_stop(state.round)) is None:
            self.journal.round_started(state.round)
            if self.methods is None:
                self._round()
            else:
                self._round_of_sites(self.methods)
            with self.leave.during("commit"):
                self._commit(seconds=self.meter.seconds)
            metrics = self._evaluate_if_due()
            if state.round < config.run.rounds and self.leave.asked():
                self._go()
        self.checkpoints.finish(state, self._number())
        self._note_checkpoints()
        self.journal.end(state.round, reason)
        best = self.store.best_round if self.store is not None else None
        return Result(state.round, reason, metrics, best, config.datacenter_dir)

    # --- a round

    def _round(self) -> None:
        """Train to the round's end."""
        engine, state = self.engine, self.state
        self.meter.begin(anew=state.step == state.begun)
        engine.begin_round(state.round, afresh=self.afresh)
        if self.afresh:
            state.optimizer = engine.optimizer
            self.data.begin(state.round)
            engine.seed(state.round, self.name)
        if self.outer is not None:
            self.outer.catch_up(state.step - state.begun, self._steps_in_a_round())
        while not self._round_is_over():
            if not self.afresh:
                engine.seed("step", state.step, self.mesh.island, self.mesh.data_rank)
            doing = f"step {state.step + 1}"
            with self.leave.during("step"):
                with user_code(folder_of(engine.task), doing):
                    shares = self.data.take()
                step = engine.steps.take(shares, doing, state.step)
            self._count(step)
            if self.outer is not None:
                taken = state.step - state.begun
                self.outer.after_step(taken, self._steps_in_a_round(), step.weight, step.examples)
            if not self._round_is_over():  # at the end of a round it counts as done
                if self.outer is None:
                    self._save_if_due()
                if self.leave.asked():
                    self._go()
        engine.steps.check(f"step {state.step}")
        if self.outer is not None:
            self.outer.end_round()
        self._end_round(self.meter.record(self._sites()))
        if self.outer is not None:
            self.checkpoints.save(self._number(), state)
        else:
            self._save_if_due()

    def _round_of_sites(self, methods: IslandSites) -> None:
        """The same where islands are sites: each trains as the strategy says."""
        state = self.state
        self.meter.begin(anew=True)

        def watch(take: Callable[[], Step]) -> Step:
            with self.leave.during("step"):
                step = take()
            self._count(step)
            if self.leave.asked():
                self._go()
            return step

        methods.train(state.round, watch)
        self._meet()
        found = methods.exchange(state.round)
        state.step = max(state.step, state.begun + 1)  # a gradient alone is a step, too
        self._end_round(self.meter.record(self._sites(), found))
        self.checkpoints.save(self._number(), state)

    def _count(self, step: Step) -> None:
        self.state.step += 1
        self.meter.add(step, self.state.step, self.state.round + 1)
        if self.stepped is not None:
            self.stepped()

    def _end_round(self, record: Record) -> None:
        """The checkpoint that follows has the round's record: whoever dies before the commit has it then."""
        state = self.state
        state.round, state.begun, state.record = state.round + 1, state.step, dict(record)

    def _round_is_over(self) -> bool:
        train, state = self.config.train, self.state
        before = 0 if self.afresh or train.local_steps else state.round * train.local_epochs
        return over(train, state.step - state.begun, self.data.epoch - before)

    def _steps_in_a_round(self) -> int | None:
        return steps_in_round(self.config.train, self.data.examples)

    def _steps_in_all(self) -> int | None:
        steps = self._steps_in_a_round()
        return None if steps is None else steps * self.config.run.rounds

    def _meet(self) -> None:
        """Before islands wait for each other: where one takes more steps than another, all wait here for the
        last one, and none in an exchange that would never be if they were told to leave meanwhile."""
        if not self.in_step and self.leave.asked_while_waiting():
            self._go()

    def _go(self) -> NoReturn:
        """All ranks were told to leave: what they have is on the disk before they do."""
        if self.from_the_start:
            self.checkpoints.close()
            where = f"in round {self.state.round + 1}, which the same command begins again"
        else:
            self.checkpoints.finish(self.state, self._number())
            self._note_checkpoints()
            where = f"after step {self.state.step}; the same command goes on from its checkpoint"
        self.emit(Notice(text=f"Told to leave (SIGTERM) {where}."))
        raise Left

    def _number(self) -> int:
        """What the checkpoint of the present state is called: the steps taken, of islands the first one's."""
        return self.mesh.from_first(self.state.step) if self.islands else self.state.step

    # --- checkpoints

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Made when first asked for: what they need of torch takes as long to load as torch itself."""
        return resuming.checkpoints_of(self.config, self.emit)

    def _save_if_due(self) -> None:
        every, step = self.config.checkpoint.every, self.state.step
        if every and step % every == 0:
            self.checkpoints.maybe_save(self.state, step)
        elif step == 1:  # in the meantime
            threading.Thread(target=import_module, args=["fedtrain.training.checkpoint"], daemon=True).start()

    # --- after a round

    def _agree_with_store(self) -> None:
        """A run that goes on, from a checkpoint: rounds that were committed after it are forgotten, for they
        are had again; its own is committed where the process died before it was."""
        rounds, number = self.store.rounds() if self.store is not None else [], self.state.round
        last = self.mesh.from_first(rounds[-1].round if rounds else 0)
        if last > number and self.store is not None:
            lost = f"round {last} was committed, but there is no good checkpoint of it"
            self.emit(Notice(text=f"{lost}: the run {resuming.resumes(self.state)}"))
            self.store.forget_after(number)
        if last < number and self.state.step == self.state.begun:
            self._commit()

    def _commit(self, **took: float) -> None:
        """The last round, whose record the state has. `took`: what is known better."""
        with self._common_model():
            weights = self.engine.gather() if self.methods is None else self.methods.gather()
        if self.store is not None and weights is not None:
            inside = self.methods.names if self.methods is not None else ()
            record = cast(Record, self.state.record | took)
            self.journal.commit(Checkpoint(self.state.round, weights), record, inside=inside)
        self._note_checkpoints()

    def _note_checkpoints(self) -> None:
        if self.store is not None and "checkpoints" in vars(self):  # which all ranks make together
            resuming.note_checkpoints(self.store, self.checkpoints)

    def _evaluate_if_due(self) -> Averages:
        """On all ranks together, between two rounds: what the round's model is worth; empty if that is not to
        be known, or known already."""
        if self.state.step != self.state.begun or not self.journal.evaluation_is_due(self.state.round):
            return {}
        with self.leave.during("evaluation"):
            if self.methods is not None and self.methods.personal:
                found = self.methods.evaluate(self.state.round)
            else:
                with self._common_model():
                    sets = self.sites.eval_data().items()
                    found = {name: self.engine.evaluate(data) for name, data in sets}
            metrics, each = shown(self.engine.task, summed(found), found)
            return self.journal.keep_evaluation(self.state.round, metrics, each)

    def _sites(self) -> int:
        return self.mesh.islands if self.islands else 0

    def _common_model(self) -> AbstractContextManager[None]:
        return self.between.shared() if self.between is not None else nullcontext()
