"""Which runs a folder holds, from their events alone: a look never touches a run's database or its lock."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from ..errors import ConfigError, nearest
from ..events import Averages
from .board import Board, State
from .log import events_file, read, running

NONE_YET = " Start one: fedtrain simulate"


class Summary(msgspec.Struct, frozen=True):
    """One line of `fedtrain runs`; with --json as it stands here."""

    run: str  # the folder's name
    mode: str
    state: State
    round: int  # committed
    rounds: int  # planned; 0 where nobody knows: at a site of an asynchronous run `round` is its turn
    loss: float | None
    metrics: Averages
    best_round: int | None
    best_value: float | None
    started: float | None  # seconds since 1970
    updated: float | None
    dir: str
    clock_s: float | None = None  # of a simulation with a clock of its own: seconds since it began
    own_model: bool = False  # of a peer that was to agree with others on one model, and ended with its own


def summaries(runs_dir: Path) -> list[Summary]:
    """Every run in the folder, the last one written to last."""
    found = [summary_of(path.parent) for path in runs_dir.glob("*/events.jsonl")]
    return sorted(found, key=lambda s: (s.updated or 0, s.run))


def summary_of(run_dir: Path) -> Summary:
    """A run at a glance."""
    alive = running(run_dir)  # asked first: a run that finishes meanwhile is finished, never stopped
    board = Board.of(read(run_dir))
    return Summary(
        run=run_dir.name,
        mode=board.mode,
        state=board.state(alive),
        round=board.round,
        rounds=board.rounds,
        loss=board.last.loss if board.last else None,
        metrics=board.metrics,
        best_round=board.best.round if board.best else None,
        best_value=board.best.value if board.best else None,
        started=board.started,
        updated=board.updated,
        dir=str(run_dir),
        clock_s=board.last.clock_s if board.last else None,
        own_model=board.finished.own_model if board.finished else False,
    )


def find(runs_dir: Path, name: str) -> Path:
    """The directory of a run that was named by a person: its folder's name, with or without +simulate,
    +gossip or +datacenter, or a path."""
    run, at, peer = name.partition("@")
    kinds = (runs_dir / f"{run}+{kind}{at}{peer}" for kind in ("simulate", "gossip", "datacenter"))
    for path in (runs_dir / name, *kinds, Path(name)):
        if events_file(path).exists():
            return path
    there = [path.parent.name for path in runs_dir.glob("*/events.jsonl")]
    raise ConfigError(f"{runs_dir} has no run {name!r}.{nearest(name, there) or NONE_YET}")


def newest(runs_dir: Path) -> Path:
    """The run that was written to last. What a site of it wrote, NAME@SITE, is none beside the run itself."""
    files = {path.parent.name: path for path in runs_dir.glob("*/events.jsonl")}
    runs = [path for name, path in files.items() if "+" in name or _run_of(name, files) == name]
    if not runs:
        raise ConfigError(f"{runs_dir} has no run yet.{NONE_YET}")
    return max(runs, key=lambda path: path.stat().st_mtime).parent


def _run_of(name: str, there: Collection[str]) -> str:
    """The run that a site's folder is of, where it is there; else the folder itself."""
    run, _, _ = name.partition("@")
    return run if run in there else name
