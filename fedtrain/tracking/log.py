"""The log of a run: one JSON line an event, in the run directory's events.jsonl.

The file is for people and programs beside the run (`watch`, `runs`, a dashboard); what the run itself needs
to go on is in store/. Written by one process, read by any, without locks.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import FedtrainError, writing
from ..events import AnyEvent, Emit, Event, Notice, RunStarted, decode, encode
from ..store.disk import private, private_folder

TEXT_CHARS = 500  # of a reason or notice; it may come from another site
POLL_S = 0.2  # how often a follower looks for new lines


def events_file(run_dir: Path) -> Path:
    return run_dir / "events.jsonl"


class EventLog:
    """Appends events to a run directory's file and tells subscribers.

    The file is opened by the first event, so whoever is refused the run directory leaves no trace in it.
    Each line is one write: it is with the kernel, and safe from kill -9, when `emit` returns.
    """

    def __init__(self, run_dir: Path, *subscribers: Emit, clock: Callable[[], float] = time.time) -> None:
        """Each subscriber(event) is called after an event is written, in the thread that emits it."""
        self._path, self._subscribers, self._clock = events_file(run_dir), subscribers, clock
        self._fd: int | None = None

    def emit(self, event: Event) -> None:
        """Write an event, with the time and its texts in bounds, and tell the subscribers."""
        event = self._record(event)
        for subscriber in self._subscribers:
            subscriber(event)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # Those who follow the file learn why the run ended; our own terminal is told by whoever catches it.
        if isinstance(error, FedtrainError) and self._fd is not None:
            with suppress(OSError):  # a full disk is the reason, perhaps
                self._record(Notice(text=f"stopped: {error}"))
        self.close()

    def _record(self, event: Event) -> Event:
        texts = {name: one_line(v) for name, v in event.fields().items() if isinstance(v, str)}
        event = msgspec.structs.replace(event, time=self._clock(), **texts)
        if isinstance(event, RunStarted):
            self.close()  # the run directory may have been made anew since the last event
        if self._fd is None:
            self._fd = _open(self._path)
        line = encode(event) + b"\n"
        with writing(self._path):
            while line:
                line = line[os.write(self._fd, line) :]
        return event


def printable(text: str) -> str:
    """Without control characters: what another site wrote must not steer our terminal."""
    if text.isprintable():
        return text
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def one_line(text: str) -> str:
    """Printable, and of bounded length."""
    text = printable(text)
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"


def _open(path: Path) -> int:
    """Open for appending; a last line torn by kill -9 is cut off. The shared lock says "running"."""
    private_folder(path.parent)
    fd = private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    end = size = os.fstat(fd).st_size
    tail = b""
    while end and b"\n" not in tail:
        start = max(0, end - 65536)
        tail, end = os.pread(fd, end - start, start), start
    whole = end + tail.rfind(b"\n") + 1
    if whole != size:
        os.ftruncate(fd, whole)
    return fd


def running(run_dir: Path) -> bool:
    """Whether a live process is writing this run's events now."""
    try:
        fd = os.open(events_file(run_dir), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        for pause_s in (0.005, 0.02, 0.0):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except BlockingIOError:  # the writer, or for an instant another reader asking the same
                time.sleep(pause_s)
        return True
    finally:
        os.close(fd)


def read(run_dir: Path) -> Iterator[AnyEvent]:
    """Every event so far, oldest first; lines that are no events are passed over."""
    with events_file(run_dir).open("rb") as f:
        for line in f:
            if line.endswith(b"\n") and (event := decode(line)) is not None:
                yield event


def follow(run_dir: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[AnyEvent | None]:
    """Every event from the first on, for ever; None each time that there is nothing new.

    Only whole lines are taken, so a line under way, or torn and healed later, is read once, when it is whole.
    A file made anew (`simulate --fresh`) is read from its start.
    """
    path, at, first = events_file(run_dir), 0, b""
    while True:
        try:
            with path.open("rb") as f:
                if (line := f.readline()) != first:  # its time tells one file of this name from the next
                    at, first = 0, line
                f.seek(at)
                for line in f:
                    if not line.endswith(b"\n"):
                        break
                    at += len(line)
                    if (event := decode(line)) is not None:
                        yield event
        except FileNotFoundError:
            at, first = 0, b""
        yield None
        sleep(POLL_S)
