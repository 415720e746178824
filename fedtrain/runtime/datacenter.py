"""`torchrun ... -m fedtrain datacenter`: rounds of steps by all ranks of a mesh together.

A round is what it is in a federation: train.local_epochs passes over the data, or train.local_steps steps.
With parallel.sync = "step" all ranks train one model on the pool of all data, and a round is when it is
committed and evaluated. With "local" each island is a site: it trains on its own data, and [strategy] steps
on the mean of what the islands moved.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .. import events
from ..arena import Arena
from ..config import Config
from ..errors import ConfigError, RoundError
from ..events import Emit, Record, noticed
from ..messages import SiteId, summed
from ..store import Checkpoint, RunStore
from ..strategies import Strategy, build, corrects, server_step, state_init
from ..tracking.export import beginning
from ..training.elastic import Leave, Left, shares_store
from ..training.engine import Step, over, steps_in_round
from ..training.mesh import AXES, Mesh, Sizes, joined
from ..training.optimizers import schedule
from ..training.parallel.data import Dealt, pooled
from ..training.parallel.engine import MeshEngine
from ..training.parallel.estimate import estimate
from ..training.parallel.outer import Outer
from ..training.parallel.state import State
from ..training.partition import SimulatedSites
from ..training.task import Task, collate_of, folder_of, load_task, shown, task_digest, user_code
from .checks import flaw
from .progress import Result, check_metric, is_evaluated, keep_evaluation

if TYPE_CHECKING:
    from ..training.checkpoint import Checkpoints

POOL = "datacenter"  # whose data it is where all ranks share it


def run(
    config: Config,
    *,
    emit: Emit,
    data_dir: Path | None = None,
    start: Path | None = None,
    done: Path | None = None,
) -> Result:
    """Train to config.run.rounds, from the newest checkpoint on. Called alike by every rank that torchrun
    started, or by one process alone; rank 0 speaks for all, so others are given an `emit` that is silent.
    Told to leave by SIGTERM, all ranks checkpoint and raise Left.

    `start`: whose last model a new run begins with: a run directory (a federation's, say) or an export.
    `done`: see joined.
    """
    if config.privacy.noise_multiplier:
        raise ConfigError("privacy.noise_multiplier: a datacenter adds no noise. Set it to 0.")
    islands = config.parallel.sync == "local"
    own = [config.strategy.kind] if islands and ":" in config.strategy.kind else []
    digest = task_digest(config.run.task, config.root, *own)
    with joined(config.parallel, config.train.device, done) as device:
        sizes = Sizes.of(config.parallel, int(os.environ.get("WORLD_SIZE", "1")))
        mesh = Mesh(sizes, device, islands=islands)
        task = load_task(config.run.task, config.root, data_dir)
        if shares_store() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            mend = "Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            lost = "ranks may not find each other again after a machine has come or gone"
            emit(events.Notice(text=f"{mend}: without it, {lost}."))
        with _store(config, mesh, emit) as store, Leave() as leave:
            room = Datacenter(config, task, mesh, store, emit, leave)
            if store is not None:
                store.begin(
                    room.engine.schema, agreed(config), frozen=room.engine.frozen, run=config.run.name,
                    task_digest=digest,
                )  # fmt: skip
            return room.run(start)


def plan(config: Config, ranks: int, data_dir: Path | None = None) -> tuple[str, dict[str, int]]:
    """The mesh of so many ranks, and the bytes that the one with most will want, by what they are for."""
    task = load_task(config.run.task, config.root, data_dir)
    sites = sites_of(task, config, 1)
    memory = estimate(task, config, ranks, sites.data(sites.names[0]))
    return str(Sizes.of(config.parallel, ranks)), {**asdict(memory), "total": memory.total}


def sound_step(
    strategy: Strategy, weights: Arena, state: dict[str, torch.Tensor], mean: Arena
) -> tuple[Arena, dict[str, torch.Tensor]]:
    """What islands move to by the mean of what they moved. RoundError where that could not be trained on."""
    new, after = server_step(strategy, weights, state, mean)
    if problem := flaw(new, after):
        raise RoundError(
            f"the islands' new model is of no use and is not kept: {problem}. Training diverges: lower "
            f"train.lr or the strategy's server_lr, or set train.clip_norm."
        )
    return new, after


class Datacenter:
    """One run, at one rank of its mesh."""

    def __init__(
        self,
        config: Config,
        task: Task,
        mesh: Mesh,
        store: RunStore | None,
        emit: Emit,
        leave: Leave | None = None,
    ) -> None:
        """`store` is rank 0's. `leave`: what tells it to; None: nothing does."""
        self.config, self.mesh, self.store, self.emit = config, mesh, store, emit
        self.leave = leave or Leave()
        self.islands = config.parallel.sync == "local"
        strategy = build(config.strategy.kind, config.strategy.options, config.root) if self.islands else None
        self.correct = strategy.correct if strategy is not None and corrects(strategy) else None
        self.afresh = self.islands and not config.parallel.carry
        # An interrupted round is begun again, for where it began is not checkpointed.
        self.from_the_start = self.afresh or self.correct is not None
        self.sites = sites_of(task, config, mesh.islands)
        self.name, everything = data_of(self.sites, mesh) if self.islands else (POOL, pool_of(self.sites))
        self.data = Dealt(
            everything, config.train, config.run.seed, self.name, mesh.data_rank, mesh.data_ranks,
            collate_of(task),
        )  # fmt: skip
        self.engine = MeshEngine(task, config, mesh, example=self.data.example(), correct=self.correct)
        self.engine.steps.factor = schedule(config.train, self._steps_in_all())
        steps = self._steps_in_a_round()
        self.in_step = not self.islands or (mesh.alike(steps or 0) and steps is not None)
        self.outer = None if strategy is None else self._outer(strategy)
        self.state = State(
            self.engine.parts, self.engine.optimizer, self.data,
            self.outer, mesh.island if self.islands else None, self.engine.steps.scale,
        )  # fmt: skip

    def run(self, start: Path | None) -> Result:
        """Every round that is left."""
        config, state = self.config, self.state
        resumed = self._some_checkpoint() and self.checkpoints.restore(state)
        if not resumed and start is not None:
            self._begin_with(start)
        if self.engine.frozen.tensors:
            frozen = self.engine.gather(frozen=True)
            if self.store is not None and frozen is not None:
                self.store.keep_frozen(frozen)
        self.emit(events.RunStarted(
            run=config.run.name, mode="datacenter", rounds=config.run.rounds,
            sites=self.mesh.islands if self.islands else 0, config_digest=config.digest(),
            resumed_from=state.round or None,
        ))  # fmt: skip
        self.emit(events.Notice(text=f"ranks {self.mesh.sizes.world}, mesh {self.mesh.sizes}"))
        metrics = self._agree_with_store()
        while (reason := self._reason_to_stop()) is None:
            self.emit(events.RoundStarted(round=state.round + 1))
            record = self._round()
            with self.leave.during("commit"):
                self._commit(record)
            if self._evaluation_is_due():
                with self.leave.during("evaluation"):
                    metrics = self._evaluate()
            if state.round < config.run.rounds and self.leave.asked():
                self._go()
        self.checkpoints.finish(state, self._number())
        best = self.store.best_round if self.store is not None else None
        self.emit(events.RunFinished(round=state.round, reason=reason))
        return Result(state.round, reason, metrics, best, config.datacenter_dir)

    # --- a round

    def _round(self) -> Record:
        """Train to the round's end; what its row in the store says."""
        began, engine, state = time.monotonic(), self.engine, self.state
        meter = Meter(engine, self.config, self.emit)
        engine.begin_round(afresh=self.afresh)
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
            state.step += 1
            meter.add(step, state.step, state.round + 1)
            if self.outer is not None:
                taken = state.step - state.begun
                self.outer.after_step(taken, self._steps_in_a_round(), step.weight, step.examples)
            if not self._round_is_over():  # at the end of a round it counts as done
                if self.outer is None:
                    self._save_if_due()
                if self.leave.asked():
                    self._go()
        if self.outer is not None:
            self.outer.end_round()
        state.round, state.begun = state.round + 1, state.step
        if self.outer is not None:
            self.checkpoints.save(self._number(), state)
        else:
            self._save_if_due()
        loss = meter.loss_of_round()
        sites = self.mesh.islands if self.islands else 0
        return {"loss": loss, "metrics": {"loss": loss}, "sites": sites, "seconds": time.monotonic() - began}

    def _round_is_over(self) -> bool:
        train, state = self.config.train, self.state
        before = 0 if self.afresh or train.local_steps else state.round * train.local_epochs
        return over(train, state.step - state.begun, self.data.epoch - before)

    def _steps_in_a_round(self) -> int | None:
        return steps_in_round(self.config.train, self.data.examples)

    def _steps_in_all(self) -> int | None:
        steps = self._steps_in_a_round()
        return None if steps is None else steps * self.config.run.rounds

    def _outer(self, strategy: Strategy) -> Outer:
        parallel = self.config.parallel
        return Outer(
            self.engine, self.mesh,
            lambda weights, state, mean: sound_step(strategy, weights, state, mean),
            lambda weights: state_init(strategy, weights),
            size=lambda: self.data.examples.count,
            fragments=parallel.fragments, overlap=parallel.overlap, mix=parallel.mix, meet=self._meet,
        )  # fmt: skip

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
            where = f"after step {self.state.step}; the same command goes on from its checkpoint"
        self.emit(events.Notice(text=f"Told to leave (SIGTERM) {where}."))
        raise Left

    def _number(self) -> int:
        """What the checkpoint of the present state is called: the steps taken, of islands the first one's."""
        return self.mesh.from_first(self.state.step) if self.islands else self.state.step

    def _begin_with(self, source: Path) -> None:
        """The last model of another run, on rank 0's disk, is where this one starts."""
        engine, weights, frozen = self.engine, None, None
        if self.store is not None:
            weights, frozen = beginning(source, engine.schema, engine.frozen)
        engine.install(weights)
        engine.install(frozen, frozen=True)
        if self.outer is not None:
            self.outer.begin_anew()

    # --- checkpoints

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Made when first asked for: what they need of torch takes as long to load as torch itself."""
        from ..training.checkpoint import Checkpoints

        config = self.config.checkpoint
        return Checkpoints(
            self.config.checkpoint_dir,
            every=config.every,
            keep=config.keep,
            background=config.background,
            format="full" if config.format == "full" else "sharded",
            patience_s=config.patience,
            notice=lambda line: self.emit(events.Notice(text=line)),
        )

    def _some_checkpoint(self) -> bool:
        """Whether there may be one: a folder is looked into, a bucket is asked."""
        where = self.config.checkpoint_dir
        return isinstance(where, str) or bool(self.mesh.from_first(where.is_dir() and any(where.iterdir())))

    def _save_if_due(self) -> None:
        every, step = self.config.checkpoint.every, self.state.step
        if every and step % every == 0:
            self.checkpoints.maybe_save(self.state, step)
        elif step == 1:  # in the meantime
            threading.Thread(
                target=import_module, args=("fedtrain.training.checkpoint",), daemon=True
            ).start()

    # --- after a round

    def _agree_with_store(self) -> dict[str, float]:
        """A run that goes on, from a checkpoint: rounds that were committed after it are forgotten, for they
        are had again; its own is committed where the process died before it was. That one's evaluation."""
        rounds, number = self.store.rounds() if self.store is not None else [], self.state.round
        last = self.mesh.from_first(rounds[-1].round if rounds else 0)
        if last > number and self.store is not None:
            lost = f"round {last} was committed, but there is no good checkpoint of it"
            begins = f"goes on after round {number}" if number else "begins anew"
            self.emit(events.Notice(text=f"{lost}: the run {begins}"))
            self.store.forget_after(number)
        if last >= number or self.state.step != self.state.begun:
            return {}
        self._commit({"loss": None, "metrics": {}, "sites": self.mesh.islands if self.islands else 0})
        return self._evaluate() if self._evaluation_is_due() else {}

    def _commit(self, record: Record) -> None:
        with self._common_model():
            weights = self.engine.gather()
        if self.store is not None and weights is not None:
            self.store.commit(Checkpoint(self.state.round, weights), record)
            self.emit(events.RoundCommitted(round=self.state.round, **record))

    def _evaluate(self) -> dict[str, float]:
        """On all ranks together: what is shown of all sites, and of each."""
        with self._common_model():
            found = {name: self.engine.evaluate(data) for name, data in self.sites.eval_data().items()}
        metrics, each = shown(self.engine.task, summed(found), found)
        best_round = self.store.best_round if self.store is not None else None
        check_metric(self.config, metrics, known=self.mesh.from_first(best_round or 0) > 0)  # on all ranks
        if self.store is not None:
            keep_evaluation(self.config, self.store, self.state.round, metrics, each, self.emit)
        return metrics

    def _evaluation_is_due(self) -> bool:
        return is_evaluated(self.config, self.state.round)

    def _reason_to_stop(self) -> str | None:
        """Rank 0 has the evaluations, and all must agree."""
        evaluate = self.config.evaluate
        since = self.store.evaluations_since_best() if self.store is not None else 0
        since = self.mesh.from_first(since) if evaluate.patience else 0
        if evaluate.patience and since >= evaluate.patience:
            return f"{evaluate.metric} has not improved for {since} evaluations"
        return "rounds done" if self.state.round >= self.config.run.rounds else None

    def _common_model(self) -> AbstractContextManager[None]:
        return self.outer.shared() if self.outer is not None else nullcontext()


class Meter:
    """Losses and times of a round's steps. Losses are read when they are shown: no step waits for one."""

    def __init__(self, engine: MeshEngine, config: Config, emit: Emit) -> None:
        self.engine, self.config, self.emit = engine, config, emit
        self._loss: list[torch.Tensor] = []  # since the last event
        self._weight = 0.0
        self._round = torch.zeros(2, dtype=torch.float64, device=engine.mesh.device)  # Σ loss, Σ weight
        self._examples = self._steps = self._skipped = 0
        self._since = time.monotonic()

    def add(self, step: Step, number: int, round: int) -> None:
        """Take a step in; every parallel.log_every of them is a `step` event."""
        self._loss.append(step.loss)
        self._weight += step.weight
        self._examples += step.examples
        self._steps += 1
        self._skipped += not step.taken
        if number % self.config.parallel.log_every == 0:
            self._tell(number, round)

    def loss_of_round(self) -> float:
        """Over all examples that the round's steps saw, of every island."""
        self._take_losses()
        mesh = self.engine.mesh
        axes = tuple(axis for axis in AXES if axis != "tp" and getattr(mesh.sizes, axis) > 1)
        loss, weight = mesh.sum(self._round, axes).tolist()
        return loss / weight if weight else math.nan

    def _take_losses(self) -> torch.Tensor:
        """Σ loss and Σ weight since the last time, of this rank."""
        loss = torch.stack(self._loss).sum() if self._loss else self._round.new_zeros(())
        found = torch.stack([loss, torch.full_like(loss, self._weight)])
        self._round += found
        self._loss, self._weight = [], 0.0
        return found

    def _tell(self, number: int, round: int) -> None:
        engine, mesh = self.engine, self.engine.mesh
        axes = mesh.averaging_axes + (("pp",) if mesh.sizes.pp > 1 else ())
        loss, weight = mesh.sum(self._take_losses(), axes).tolist()
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        waiting = engine.waiting_s()
        self.emit(events.Stepped(
            step=number, round=round, loss=loss / weight if weight else None,
            lr=float(engine.optimizer.param_groups[0]["lr"]), seconds=seconds / self._steps,
            examples_per_s=self._examples / seconds, items_per_s=weight / seconds,
            mfu=engine.flops * self._steps / (seconds * engine.peak) if engine.flops else None,
            comm_share=None if waiting is None else min(1.0, waiting * self._steps / seconds),
            memory_bytes=memory_bytes(mesh.device), skipped=self._skipped,
        ))  # fmt: skip
        self._examples = self._steps = self._skipped = 0


def memory_bytes(device: torch.device) -> int:
    """The most that this rank has had so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- whose data


def sites_of(task: Task, config: Config, islands: int) -> SimulatedSites:
    """The task's natural sites, or its pool; with islands, dealt to them as [simulate] deals it to sites."""
    return SimulatedSites(task, replace(config.simulate, sites=islands), config.run.seed)


def data_of(sites: SimulatedSites, mesh: Mesh) -> tuple[SiteId, Any]:
    """An island's name and examples. Where there are more natural sites than islands, they are dealt out."""
    if len(sites.names) < mesh.islands:
        raise ConfigError(
            f"parallel.sync = local: {mesh.islands} islands, but the task has {len(sites.names)} sites. "
            f"Use parallel.replicate = {len(sites.names)} or fewer."
        )
    names = sites.names[mesh.island :: mesh.islands]
    return names[0], pooled([sites.data(name) for name in names])


def pool_of(sites: SimulatedSites) -> Any:
    """The data of all sites."""
    return pooled([sites.data(name) for name in sites.names]) if sites.natural else sites.pool


# --- the run directory


@contextmanager
def _store(config: Config, mesh: Mesh, emit: Emit) -> Iterator[RunStore | None]:
    """Rank 0's; others have none."""
    if mesh.rank != 0:
        yield None
        return
    with closing(RunStore(config.datacenter_dir, warn=noticed(emit))) as store:
        yield store


def agreed(config: Config) -> dict[str, str]:
    """What must not change between two starts of one run; the mesh may."""
    return config.agreed() | {
        f"parallel.{key}": repr(getattr(config.parallel, key))
        for key in ("sync", "carry", "fragments", "overlap")
    }
