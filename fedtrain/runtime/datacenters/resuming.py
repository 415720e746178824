"""From where a run in a datacenter goes on: what makes it the run that it is, its checkpoints, its store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...config import Config
from ...errors import FedtrainError, StoreError
from ...events import Emit, Notice
from ...schema import Schema
from ...store import RunStore
from ...tracking.export import beginning
from ...training.collectives import firsts
from ...training.mesh import Mesh
from ...training.parallel.engine import MeshEngine
from ...training.parallel.state import State
from ...training.places import try_to_write
from ...training.task import task_digest
from ..own_code import named_in

if TYPE_CHECKING:
    from ...training.checkpoint import Checkpoints


def agreed(config: Config) -> dict[str, str]:
    """What must not change between two starts of one run; the mesh may."""
    keys = ("sync", "carry", "fragments", "overlap")
    return config.agreed() | {f"parallel.{key}": repr(getattr(config.parallel, key)) for key in keys}


def code_of(config: Config) -> str:
    """The digest of the task's code, and of a strategy's of the user's own where it is used."""
    own = named_in(config, "strategy") if config.parallel.sync == "local" else {}
    return task_digest(config.run.task, config.root, own)


def begin(store: RunStore, config: Config, schema: Schema, engine: MeshEngine) -> None:
    """Say in the store what this run is; StoreError where it holds another one."""
    store.forget_if_unused()  # checkpoints before the first round know their settings themselves
    store.begin(
        schema, agreed(config), frozen=engine.frozen, run=config.run.name, task_digest=code_of(config),
        local=sorted(engine.kept), parallel=config.table()["parallel"],
    )  # fmt: skip


def checkpoints_of(config: Config, emit: Emit) -> Checkpoints:
    """Those of this run: of one with other settings, or other code, they take none."""
    from ...training.checkpoint import Checkpoints

    run = agreed(config) | {"the task's code": code_of(config)}
    return Checkpoints.of(config, run, lambda line: emit(Notice(text=line)))


def some_checkpoint(config: Config, mesh: Mesh) -> bool:
    """Whether there may be one: a folder is looked into, a bucket is asked. StoreError where no folder can be
    written: before the steps that would be lost."""
    where = config.checkpoint_dir
    if isinstance(where, str):
        return True
    try_to_write(where)
    return bool(mesh.from_first(any(where.iterdir()) if where.is_dir() else False))


def note_checkpoints(store: RunStore, made: Checkpoints) -> None:
    """In the store, where they are, once there is one: a run without any may begin anew otherwise."""
    if made.written() and store.checkpoints != (where := str(made.place)):
        store.checkpoints = where


@contextmanager
def of_first(device: torch.device) -> Iterator[None]:
    """What the first rank does for all: where it fails, all do, for the same reason."""
    failed: Exception | None = None
    try:
        yield
    except (FedtrainError, OSError) as e:
        failed = e
    why = str(failed or "")
    if dist.is_initialized():
        why = firsts(why, str, device=device)
    if failed is not None:
        raise failed
    if why:
        raise StoreError(why)


def refuse_lost(config: Config, store: RunStore | None, device: torch.device) -> None:
    """StoreError on all ranks where rounds were committed and checkpoints written, and there is none: the
    folder is another one, its disk is not there, or somebody removed them. Nothing begins anew unasked."""
    with of_first(device):
        if store is not None and (rounds := store.rounds()) and (had := store.checkpoints):
            raise StoreError(
                f"{store.folder} has round {rounds[-1].round}, and the run's checkpoints were written to "
                f"{had}, but there is none in {config.checkpoint_dir}. See that its disk is there and "
                f"checkpoint.dir names it. To begin anew, move {store.folder} away. To go on from the last "
                f"round's model alone, begin another run with it: --from {store.folder.name} --set run.name=…"
            )


def begin_with(source: Path, engine: MeshEngine, store: RunStore | None) -> None:
    """The last model of another run, on rank 0's disk, is where this one starts."""
    weights, frozen = None, None
    with of_first(engine.mesh.device):
        if store is not None:
            weights, frozen = beginning(source, engine.schema, engine.frozen)
    engine.install(weights)
    engine.install(frozen, frozen=True)


def resumes(state: State) -> str:
    """Where a run goes on, in words."""
    if state.step > state.begun:
        return f"goes on after step {state.step}, in round {state.round + 1}"
    return f"goes on after round {state.round}" if state.round else "begins anew"
