"""The log of a run: one JSON line an event, in the run directory's events.jsonl.

When the file is long, it begins anew, and events.1.jsonl keeps what lasts of all earlier lines: without those
whose number grows with the sites, and without the names of a round's sites, so that a log of 10,000 rounds of
1,000 sites is no longer than of one.

The file is for people and programs beside the run (`watch`, `runs`, a dashboard); what the run itself needs
to go on is in store/. Written by one process, read by any, without locks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from .. import events
from ..errors import FedtrainError, writing
from ..events import AnyEvent, Emit, Event, Notice, RunStarted, decode, encode
from ..store.disk import private, private_folder, unshare, whole_file, write_all

TEXT_CHARS = 500  # of a reason or notice; it may come from another site
LOG_BYTES = 64 << 20  # of events.jsonl, before it begins anew


def _begins(kind: type[Event]) -> bytes:
    """How a line with an event of this kind begins."""
    return b'{"kind":"%s"' % str(kind.__struct_config__.tag).encode()


STARTED = _begins(events.RoundStarted)
PASSING = tuple(
    _begins(kind)
    for kind in (
        events.SiteState, events.UpdateReceived, events.UpdateRefused, events.SiteJoined, events.SiteLost,
        events.SiteRefused, events.Admitted, events.CohortAsked, events.ReplySent, events.HeadWitnessed,
        events.Waiting,
    )
)  # fmt: skip
POLL_S = 0.2  # how often a follower looks for new lines


def events_file(run_dir: Path) -> Path:
    return run_dir / "events.jsonl"


def earlier_file(run_dir: Path) -> Path:
    """What lasts of the lines before those of events.jsonl."""
    return run_dir / "events.1.jsonl"


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
        if isinstance(event, RunStarted) or (self._fd is not None and os.fstat(self._fd).st_nlink > 1):
            self.close()  # the run directory may have been made anew since the last event, or copied
        if self._fd is None:
            self._fd = _open(self._path)
        line = encode(event) + b"\n"
        with writing(self._path):
            while line:
                line = line[os.write(self._fd, line) :]
            if os.lseek(self._fd, 0, os.SEEK_CUR) > LOG_BYTES:
                self._begin_anew()
        return event

    def _begin_anew(self) -> None:
        """Keep what lasts of the file, and begin another one."""
        earlier = earlier_file(self._path.parent)
        with whole_file(earlier, durable=False) as kept, self._path.open("rb") as file:
            if earlier.exists():
                with earlier.open("rb") as before:
                    shutil.copyfileobj(before, kept)
            newest = max((n for n, line in enumerate(file) if line.startswith(STARTED)), default=-1)
            file.seek(0)
            for number, line in enumerate(file):
                if not line.startswith(PASSING):
                    write_all(kept, line if number == newest else _without_sites(line))
        self.close()
        fresh = self._path.with_suffix(".new")
        os.close(private(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        fresh.replace(self._path)
        self._fd = _open(self._path)


def _without_sites(line: bytes) -> bytes:
    """A line of the log, but for the names of the sites of a round that is over."""
    if not line.startswith(STARTED) or not isinstance(event := decode(line), events.RoundStarted):
        return line
    return encode(msgspec.structs.replace(event, sites=[], neighbors=[])) + b"\n"


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
    unshare(path)
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
    yield from _earlier(run_dir)
    yield from _in(events_file(run_dir))


def _earlier(run_dir: Path) -> Iterator[AnyEvent]:
    with suppress(FileNotFoundError):
        yield from _in(earlier_file(run_dir))


def _in(path: Path) -> Iterator[AnyEvent]:
    with path.open("rb") as f:
        for line in f:
            if line.endswith(b"\n") and (event := decode(line)) is not None:
                yield event


def follow(run_dir: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[AnyEvent | None]:
    """Every event from the first on, for ever; None each time that there is nothing new.

    Only whole lines are taken, so a line under way, or torn and healed later, is read once, when it is whole.
    A file made anew (`simulate --fresh`, or a long log) is read from its start, after what the file before it
    had that was not read.
    """
    path, at, first, last_s = events_file(run_dir), 0, b"", 0.0
    while True:
        try:
            with path.open("rb") as f:
                if (line := f.readline()) != first:  # its time tells one file of this name from the next
                    at, first = 0, line
                    yield from (event for event in _earlier(run_dir) if event.time > last_s)
                f.seek(at)
                for line in f:
                    if not line.endswith(b"\n"):
                        break
                    at += len(line)
                    if (event := decode(line)) is not None:
                        last_s = event.time
                        yield event
        except FileNotFoundError:
            at, first = 0, b""
        yield None
        sleep(POLL_S)
