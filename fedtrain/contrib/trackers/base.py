"""Trackers: what a run's events become elsewhere, in TensorBoard say; one file each, one class each.

A tracker is told of a run from its event log, by `fedtrain track`, in a process of its own: it can neither
slow a run down nor change it, and takes a finished run as well as one that goes on.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from ... import events as e
from ...config.project import load, reached
from ...errors import ConfigError, nearest, writing
from ...events import AnyEvent, Event
from ...tracking.log import events_file

TRACKERS = {
    "tensorboard": "tensorboard:TensorBoard",
    "mlflow": "mlflow:MLflow",
    "wandb": "wandb:WandB",
    "opentelemetry": "opentelemetry:OpenTelemetry",
}
WHOLE = (e.RoundCommitted, e.Stepped, e.Evaluated, e.RunFinished)  # after which a tracker has all it needs


class Tracker:
    """What a run's events are told to. A tracker of your own is a class like this one: `__call__` is all
    that it must have."""

    extra: ClassVar[str] = ""  # what to install for it

    def __init__(self, run_dir: Path, where: str, kept: dict[str, str]) -> None:
        """`where`: what the user wrote behind the tracker's name; "": where it suits. `kept`: {} at first,
        then what this object has put in, when the command is started again."""
        self.run_dir, self.where, self.kept = run_dir, where, kept

    def __call__(self, event: Event) -> None:
        """Take an event in, in the order in which they were written; its `time` says when."""
        raise NotImplementedError("a tracker says what it does with an event")

    def flush(self) -> None:
        """All events up to now are safe when this returns: they are not told again, unless this process is
        killed before that is written down."""

    def close(self) -> None:
        """No more events come."""


def scalars(event: Event) -> tuple[int, dict[str, float]]:
    """The numbers of an event by name, and the round (or, under "step/", the step) that they belong to."""
    found: dict[str, float | None] = {}
    at = 0
    match event:
        case e.RoundCommitted():
            at, found = event.round, {"train/loss": event.loss}
            found |= {f"train/{name}": value for name, value in event.metrics.items()}
            for name in (
                "seconds",
                "commit_s",
                "sites",
                "bytes_in",
                "bytes_out",
                "staleness",
                "norm",
                "clock_s",
            ):
                found[f"round/{name}"] = getattr(event, name)
        case e.Evaluated():
            at, found = event.round, {f"eval/{name}": value for name, value in event.metrics.items()}
            found |= {
                "round/evaluation_bytes_in": event.bytes_in,
                "round/evaluation_bytes_out": event.bytes_out,
            }
            for site, own in event.by_site.items():
                found |= {f"site/{site}/eval/{name}": value for name, value in own.items()}
        case e.UpdateReceived():
            at, found = event.round, {f"site/{event.site}/train/loss": event.loss}
        case e.PrivacySpent():
            at, found = event.round, {f"site/{event.site}/epsilon": event.epsilon}
        case e.Stepped():
            at = event.step
            found = {f"step/{k}": v for k, v in event.fields().items() if k not in ("step", "round")}
    return at, {name: float(value) for name, value in found.items() if value is not None}


def tracker_of(name: str, root: Path) -> type[Tracker]:
    """The tracker of this name: of the table, or a class of the user's as "module:Class", beside the
    project's settings. ConfigError names the extra that is missing."""
    path = TRACKERS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ConfigError(f"there is no tracker {name!r}.{nearest(name, TRACKERS)} Yours is MODULE:CLASS.")
    try:
        if name in TRACKERS:
            found = importlib.import_module(f".{module}", __package__)
        else:
            found = load(module, reached([module], root, f"--to {name}"))
    except ModuleNotFoundError as missing:
        mend = f"pip install 'fedtrain[{name}]'" if name in TRACKERS else f"it is looked for in {root}"
        raise ConfigError(f"the tracker {name} needs {missing.name}: {mend}.") from None
    made: type[Tracker] | None = getattr(found, attribute, None)
    if not callable(made):
        raise ConfigError(f"{module} has no class {attribute}, which --to {name} names.")
    return made


class Progress(msgspec.Struct):
    """How far a tracker has been told of a run; a file in the run directory."""

    log: str = ""  # digest of the first line, which another log has another of
    events: int = 0
    kept: dict[str, str] = {}


class Telling:
    """Tells a tracker what it has not been told of a run."""

    def __init__(self, run_dir: Path, name: str, where: str, root: Path) -> None:
        self._run_dir, kind = run_dir, tracker_of(name, root)
        self._file = (
            run_dir / "trackers" / f"{hashlib.sha256(f'{name}={where}'.encode()).hexdigest()[:16]}.json"
        )
        self._told, self._at, self._batch = self._progress(), 0, list[Event]()
        self.tracker = kind(run_dir, where, self._told.kept)

    def take(self, event: AnyEvent | None) -> None:
        """One event of the log, from its first on; they are told when a round or a step is whole."""
        if event is None:
            return
        if self._at < self._told.events:
            self._at += 1
            return
        self._batch.append(event)
        if isinstance(event, WHOLE):
            self.tell()

    def tell(self) -> None:
        """Tell all that was taken, and write down that it was told."""
        if not self._batch:
            return
        for event in self._batch:
            self.tracker(event)
        self.tracker.flush()
        self._at += len(self._batch)
        self._batch.clear()
        self._told.events = self._at
        partial = self._file.with_suffix(".new")
        with writing(self._file):
            self._file.parent.mkdir(mode=0o700, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(self._told))
            os.replace(partial, self._file)

    def close(self) -> None:
        """Tell the rest, and let the tracker go."""
        self.tell()
        self.tracker.close()

    def _progress(self) -> Progress:
        first = _first_line(self._run_dir)
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=Progress)
        except (FileNotFoundError, msgspec.DecodeError):
            return Progress(log=first)
        return found if found.log == first else Progress(log=first)


def _first_line(run_dir: Path) -> str:
    with events_file(run_dir).open("rb") as f:
        return hashlib.sha256(f.readline()).hexdigest()


def tell(
    run_dir: Path, events: Iterable[AnyEvent | None], to: Mapping[str, str], root: Path
) -> Iterator[Any]:
    """Tell trackers, by name with where, of a run's events from the first on; yields each event, or None,
    when they were told of it."""
    telling = [Telling(run_dir, name, where, root) for name, where in to.items()]
    try:
        for event in events:
            for each in telling:
                each.take(event)
            yield event
    finally:
        for each in telling:
            each.close()
