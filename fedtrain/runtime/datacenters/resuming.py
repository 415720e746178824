"""From where a run in a datacenter goes on: what makes it the run that it is, its checkpoints, its store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config import Config
from ...events import Emit, Notice
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
