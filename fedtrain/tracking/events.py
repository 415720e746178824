"""What happened in a run, one JSON line an event, in the run directory's events.jsonl.

The file is for people and programs beside the run (`watch`, `runs`, a dashboard); what the run itself needs
to go on is in store/. Written by one process, read by any, without locks. An event holds names, counts and
averages: never data values, never keys. Rounds and attempts count from 1, as people do: round 3 is the third.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec

from ..errors import FedtrainError, writing
from ..messages import SiteId

TEXT_CHARS = 500  # of a reason or notice; it may come from another site
POLL_S = 0.2  # how often a follower looks for new lines

Averages = dict[str, float | None]  # JSON has no NaN: a metric that was NaN or Inf is read back as None


class Event(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True):
    """Something that happened, at `time` seconds since 1970."""

    time: float


class RunStarted(Event, frozen=True, tag="run_started"):
    """A process began, or went on with, a run; `resumed_from` is the number of rounds already committed."""

    run: str
    mode: str  # simulate | gossip | federated | site | datacenter
    rounds: int
    sites: int = 0  # known so far
    config_digest: str = ""
    resumed_from: int | None = None
    buffer: int = 0  # of an asynchronous run, updates that make a version of its model; 0: it goes by rounds


class Waiting(Event, frozen=True, tag="waiting"):
    """The next round begins when `need` sites have joined."""

    need: int
    have: int | None = None


class SiteJoined(Event, frozen=True, tag="site_joined"):
    """A site connected and agreed on task, model and config."""

    site: SiteId


class SiteLost(Event, frozen=True, tag="site_lost"):
    """A site's connection broke or fell silent; it may come back. At a site, the site is "aggregator"."""

    site: SiteId
    reason: str = ""


class JoinRefused(Event, frozen=True, tag="join_refused"):
    """A site connected but trains something else, or may not take part."""

    site: SiteId
    reason: str = ""


class RoundStarted(Event, frozen=True, tag="round_started"):
    """The sites of a round are being asked; a higher attempt repeats a failed round."""

    round: int
    attempt: int = 1
    sites: list[SiteId] = []
    neighbors: list[SiteId] = []  # at a peer: those of the sites with which it exchanges in this round


class SiteState(Event, frozen=True, tag="site_state"):
    """What a site is doing: waiting, training, uploading, evaluating, done, lost or refused."""

    site: SiteId
    state: str
    round: int | None = None


class UpdateReceived(Event, frozen=True, tag="update_received"):
    """A site's update arrived whole and passed every check."""

    round: int
    site: SiteId
    num_examples: float | None = None
    loss: float | None = None
    nbytes: int = 0
    staleness: int | None = None  # of an asynchronous run: versions since the one that it was trained from


class UpdateRefused(Event, frozen=True, tag="update_refused"):
    """A site's update was quarantined; the round goes on with the others."""

    site: SiteId
    round: int | None = None
    reason: str = ""


class PrivacySpent(Event, frozen=True, tag="privacy_spent"):
    """A site gave away one more noised update: what all of them together tell of its data, at most."""

    site: SiteId
    round: int
    releases: int
    epsilon: float
    delta: float


class RoundFailed(Event, frozen=True, tag="round_failed"):
    """An attempt at a round ended without a result; the global weights are unchanged."""

    round: int
    attempt: int = 1
    reason: str = ""


class RoundCommitted(Event, frozen=True, tag="round_committed"):
    """A round's model is on disk: from here on a crash goes on after it."""

    round: int
    loss: float | None = None  # training loss, the exact mean over the sites
    metrics: Averages = {}
    seconds: float | None = None
    sites: int = 0  # whose updates are in it
    bytes_in: int = 0
    bytes_out: int = 0
    staleness: float | None = None  # of an asynchronous run: the mean over the updates in it
    doubted: dict[SiteId, float] = {}  # the part that counted of models that a robust rule clipped; 0: none


class Stepped(Event, frozen=True, tag="step"):
    """Of a datacenter: the optimizer steps since the last such event. Times are per step, of all ranks."""

    step: int
    round: int
    loss: float | None = None
    lr: float | None = None
    seconds: float | None = None
    examples_per_s: float | None = None
    items_per_s: float | None = None  # in units of the loss's weight: tokens, say
    mfu: float | None = None  # share of the devices' peak that the model's arithmetic used
    comm_share: float | None = None  # of a step's time, in which gradients were under way
    memory_bytes: int | None = None  # rank 0's most so far
    skipped: int = 0  # steps left out because their gradient was not finite


class Evaluated(Event, frozen=True, tag="evaluated"):
    """A round's model was evaluated at the sites: exact averages, and each site's own."""

    round: int
    metrics: Averages = {}
    by_site: dict[SiteId, Averages] = {}


class Best(Event, frozen=True, tag="best"):
    """An evaluation was better than all before it; that round's weights are kept."""

    round: int
    metric: str
    value: float | None


class Notice(Event, frozen=True, tag="notice"):
    """One line for a person that no other kind says."""

    text: str


class RunFinished(Event, frozen=True, tag="run_finished"):
    """The run is over: all rounds done, or stopped early for `reason`."""

    round: int | None = None
    reason: str = ""
    model: str | None = None  # where it was exported to


AnyEvent = (
    RunStarted | Waiting | SiteJoined | SiteLost | JoinRefused | RoundStarted | SiteState | UpdateReceived
    | UpdateRefused | PrivacySpent | RoundFailed | RoundCommitted | Stepped | Evaluated | Best | Notice
    | RunFinished
)  # fmt: skip
KINDS: dict[str, type[Event]] = {str(c.__struct_config__.tag): c for c in get_args(AnyEvent)}

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """One line of events.jsonl, without its line end."""
    return msgspec.json.encode(event)


def decode(line: bytes) -> AnyEvent | None:
    """The event of a line; None for a torn line, or a kind that only a newer fedtrain knows."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def events_file(run_dir: Path) -> Path:
    return run_dir / "events.jsonl"


class EventLog:
    """Appends events to a run directory's file and tells subscribers.

    The file is opened by the first event, so whoever is refused the run directory leaves no trace in it.
    Each line is one write: it is with the kernel, and safe from kill -9, when `emit` returns.
    """

    def __init__(
        self, run_dir: Path, *subscribers: Callable[[Event], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._subscribers, self._clock = events_file(run_dir), list(subscribers), clock
        self._fd: int | None = None

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """`subscriber(event)` runs after each event is written, in the thread that emits it."""
        self._subscribers.append(subscriber)

    def emit(self, kind: str, **fields: Any) -> None:
        """Write an event and tell the subscribers. Kinds and their fields are the classes above."""
        event = self._record(kind, fields)
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
                self._record("notice", {"text": f"stopped: {error}"})
        self.close()

    def _record(self, kind: str, fields: dict[str, Any]) -> Event:
        cls = KINDS[kind]
        assert all(name in cls.__struct_fields__ for name in fields), (kind, sorted(fields))
        fields = {k: one_line(v) if isinstance(v, str) else v for k, v in fields.items()}
        event = msgspec.convert({**fields, "time": self._clock(), "kind": kind}, cls)
        if kind == "run_started":
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
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
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
