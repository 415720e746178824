"""From where a run in a datacenter goes on: what makes it the run that it is, its checkpoints, its store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...config import Config
from ...errors import StoreError
from ...events import Emit, Notice
from ...store import RunStore
from ...tracking.export import beginning
from ...training.collectives import firsts
from ...training.mesh import Mesh
from ...training.parallel.engine import MeshEngine
from ...training.parallel.state import State
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


def checkpoints_of(config: Config, emit: Emit) -> Checkpoints:
    """Those of this run: of one with other settings, or other code, they take none."""
    from ...training.checkpoint import Checkpoints

    run = agreed(config) | {"the task's code": code_of(config)}
    return Checkpoints.of(config, run, lambda line: emit(Notice(text=line)))


def some_checkpoint(config: Config, mesh: Mesh) -> bool:
    """Whether there may be one: a folder is looked into, a bucket is asked."""
    where = config.checkpoint_dir
    return isinstance(where, str) or bool(mesh.from_first(where.is_dir() and any(where.iterdir())))


def note_checkpoints(store: RunStore, made: Checkpoints) -> None:
    """In the store, where they are, once there is one: a run without any may begin anew otherwise."""
    if made.written() and store.checkpoints != (where := str(made.place)):
        store.checkpoints = where


def told(why: str, device: torch.device) -> None:
    """StoreError on all ranks where the first has a reason; other ones' reasons are not looked at."""
    if dist.is_initialized():
        why = firsts(why, str, device=device)
    if why:
        raise StoreError(why)


def refuse_lost(config: Config, store: RunStore | None, device: torch.device) -> None:
    """StoreError on all ranks where rounds were committed and checkpoints written, and there is none: the
    folder is another one, its disk is not there, or somebody removed them. Nothing begins anew unasked."""
    why = ""
    if store is not None and (rounds := store.rounds()) and (had := store.checkpoints):
        why = (
            f"{store.folder} has round {rounds[-1].round}, and the run's checkpoints were written to {had}, "
            f"but there is none in {config.checkpoint_dir}. See that its disk is there and checkpoint.dir "
            f"names it. To begin anew, move {store.folder} away. To go on from the last round's model alone, "
            f"begin another run with it: --from {store.folder.name} --set run.name=…"
        )
    told(why, device)


def begin_with(source: Path, engine: MeshEngine, store: RunStore | None) -> None:
    """The last model of another run, on rank 0's disk, is where this one starts."""
    weights, frozen = None, None
    if store is not None:
        weights, frozen = beginning(source, engine.schema, engine.frozen)
    engine.install(weights)
    engine.install(frozen, frozen=True)


def resumes(state: State) -> str:
    """Where a run goes on, in words."""
    if state.step > state.begun:
        return f"goes on after step {state.step}, in round {state.round + 1}"
    return f"goes on after round {state.round}" if state.round else "begins anew"
