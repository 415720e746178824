"""The audit log of one role: who did what, when, and with what outcome, over all of its runs.

  runs/audit/NAME.jsonl   a line an entry: the SHA-256 of the seal before it and of the entry; the entry
  runs/audit/NAME.head    how many lines there are and the last seal, signed with the key of the role

An edited line, or one that is left out or moved, breaks the seals; lines cut off at the end are missed by the
signed head. Who has the key can sign another head, so each end keeps the heads that the other one has signed
(runtime/auditing.py). An entry is in the file when `append` returns, and safe from kill -9, but for those
that HELD names: they are written, in one piece, with the next one that is not. So a site's round is a few
writes, and each that tells what leaves is in the file before anything leaves that is made of data.
An entry is an event without metrics, and without paths: no data, no keys.

A power cut may take, or tear, the lines that were not on the disk yet. The head says up to where they were,
and under which start of the machine: after another start what is damaged beyond that place is cut off, and an
entry says so. All other damage is somebody's work, and the log is not added to.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from .. import events
from ..config import Config
from ..errors import Damaged
from ..events import Event
from ..store.chain import seal_of
from ..store.disk import explained, sync_folder
from .log import one_line

# What is kept of which events: all of it but these fields.
KEPT: dict[type[Event], tuple[str, ...]] = {
    events.RunStarted: (),
    events.SiteRefused: (),
    events.SiteLost: (),
    events.Admitted: (),
    events.CohortAsked: (),
    events.Denied: (),
    events.ActionApproved: (),
    events.ReplySent: (),
    events.HeadWitnessed: (),
    events.LogDisputed: (),
    events.LineTorn: (),
    events.RoundStarted: ("neighbors",),
    events.UpdateReceived: ("num_examples", "loss"),
    events.UpdateRefused: (),
    events.PrivacySpent: (),
    events.RoundFailed: (),
    events.RoundCommitted: ("loss", "metrics", "doubted", "clock_s", "late", "away", "staleness"),
    events.Evaluated: ("metrics", "by_site"),
    events.PeersAgreed: (),
    events.RunFinished: ("model",),
}
# So many of these come in a round that the head is not signed after each of them, but with what follows.
FREQUENT = (
    events.CohortAsked, events.ReplySent, events.UpdateReceived, events.SiteLost, events.HeadWitnessed,
)  # fmt: skip
NO_DATA = ("Keys", "Shares", "Agreed")  # replies in secure sums that no data is in
BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux: another one after each start of the machine
PART = r"[^\s/'\"`,;:()]"  # a character of a folder's name
PATH = re.compile(
    rf"(?<![\w/])(?:(?:~|\.{{1,2}})?/(?:{PART}+/)*|{PART}+/(?:{PART}+/)+)({PART}+)"
)  # the last part stays
SYNC_S = 5.0
REMEMBERED, HEADS = 4096, 64  # seals of the newest lines, and of heads, in memory: others are in the file
HEAD_BYTES = 4096  # of NAME.head, filled up with zeros


class LogHead(msgspec.Struct, frozen=True, kw_only=True):
    """How an audit log stands. `seen`: how the log of whoever is told stood, as far as the owner knows."""

    log: str
    lines: int
    seal: str = ""
    seen: tuple[int, str] | None = None
    synced: tuple[int, str] = (0, "")  # lines that no power cut takes, and the last one's seal
    boot: str = ""  # of the start of the machine under which it was signed

    @property
    def place(self) -> tuple[int, str]:
        return self.lines, self.seal


def audit_file(config: Config, name: str) -> Path:
    """The audit log of a role of this project: "aggregator", "datacenter", or a site's or peer's name."""
    return config.root / config.run.dir / "audit" / f"{name}.jsonl"


def held(event: Event) -> bool:
    """Whether an entry may wait for the next one that may not: it tells of nothing that leaves with data, or
    of what has no effect before a round is committed."""
    if isinstance(event, events.ReplySent):
        return event.what in NO_DATA
    return isinstance(event, events.CohortAsked | events.UpdateReceived)


def boot() -> str:
    """Names this start of the machine; "" where nothing does."""
    return BOOT.read_text().strip() if BOOT.exists() else ""


def head_file(path: Path) -> Path:
    return path.with_suffix(".head")


class AuditLog:
    """The audit log in `path`, which several processes may add to."""

    def __init__(
        self,
        path: Path,
        sign: Callable[[LogHead], bytes] | None = None,
        clock: Callable[[], float] = time.time,
        known: LogHead | None = None,
    ) -> None:
        """`sign` makes the bytes of NAME.head; None: there is none. `known`: the head that the last process
        signed. Damaged where a line was edited, left out, moved or cut off. A line that its process could not
        finish is cut off, and an entry says so; so is what a power cut took."""
        self.path, self._head, self._lock = path, head_file(path), threading.Lock()
        self._sign, self._clock = sign, clock
        self._lines, self._seals = 0, deque[str](maxlen=REMEMBERED)  # of all lines, and of the newest
        self._held: list[Event] = []
        self._synced_s, self._synced, self._boot = -SYNC_S, (0, ""), boot()
        self._known, self._headed = known, False
        self._head_fd: int | None = None
        self._places: dict[int, str] = {}  # lines, and the last one's seal: of heads, and what was looked up
        self._nbytes, self._signed = 0, 0  # that are in the file, and lines of the last signed head
        self.witnessed: dict[str, events.HeadWitnessed] = {}  # the newest of each
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._append()
        self._known = None

    def append(self, event: Event) -> None:
        """Add an event, or nothing when it is of no kind that is kept."""
        if type(event) in KEPT:
            texts = {name: words(getattr(event, name)) for name in ("reason", "what") if hasattr(event, name)}
            entry = msgspec.structs.replace(event, time=self._clock(), **texts, **_dropped(type(event)))
            if held(entry):
                with self._lock:
                    self._held.append(entry)
            else:
                self._append(entry)

    def stated(self, seen: tuple[int, str] | None = None) -> bytes:
        """The signed head, for somebody whose own log stood like `seen`. All lines are on the disk then, so
        that no power cut makes this role deny what it stated."""
        self._append()
        with self._lock:
            place = self._place
        self._sync(place)
        with self._lock:
            return self._write_head(seen)

    def holds(self, place: tuple[int, str]) -> bool:
        """Whether the log had this seal when it had so many lines."""
        lines, seal = place
        if not 0 < lines <= self._lines:
            return lines == 0
        if (back := self._lines - lines) < len(self._seals):
            return self._seals[-1 - back] == seal
        if (found := self._places.get(lines)) is None:  # all sites ask for the one that they were told last
            line = next(islice(lines_of(self.path), lines - 1, None), None)
            self._remember(lines, found := "" if line is None else line.seal)
        return found == seal

    def _remember(self, lines: int, seal: str) -> None:
        if len(self._places) >= HEADS:
            self._places.pop(next(iter(self._places)), None)
        self._places[lines] = seal

    def close(self) -> None:
        self._append()
        with self._lock:
            self._sync(self._place)
            self._write_head()
            os.close(self._fd)
            if self._head_fd is not None:
                os.close(self._head_fd)

    @property
    def _place(self) -> tuple[int, str]:
        return self._lines, self._seals[-1] if self._seals else ""

    def _sync(self, place: tuple[int, str]) -> None:
        """Have all lines up to there on the disk."""
        if place != self._synced:
            with explained(self.path):
                os.fdatasync(self._fd)
        self._synced, self._synced_s = place, time.monotonic()

    def _append(self, *entries: Event) -> None:
        """Write what was held, and these."""
        with self._lock, explained(self.path):
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                if torn := self._catch_up():
                    os.ftruncate(self._fd, self._nbytes)
                    self._write([torn])
                self._write(added := [*self._held, *entries])
                if self._lines > self._signed and not (added and isinstance(added[-1], FREQUENT)):
                    if time.monotonic() >= self._synced_s + SYNC_S:
                        self._sync(self._place)
                    self._write_head()
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _write(self, entries: Sequence[Event]) -> None:
        """Lines for these, in one write, but on a full disk, where a write may be of a part."""
        seal, lines = self._place[1].encode(), []
        for entry in entries:
            body = events.encode(entry)
            seal = seal_of(seal, body)
            lines.append((seal, entry, seal + b" " + body + b"\n"))
        data, begun, at = b"".join(line for _, _, line in lines), self._nbytes, 0
        try:
            while at < len(data):
                at += os.pwrite(self._fd, data[at:], begun + at)
        finally:
            for each, entry, line in lines:
                if begun + at < self._nbytes + len(line):
                    break
                self._took(each, entry, len(line))
                self._held = [other for other in self._held if other is not entry]

    def _took(self, seal: bytes, entry: Event | None, nbytes: int) -> None:
        self._lines += 1
        self._seals.append(seal.decode())
        self._nbytes += nbytes
        if isinstance(entry, events.HeadWitnessed):
            self.witnessed[entry.of] = entry

    def _catch_up(self) -> events.LineTorn | None:
        """Read what another process has added; what there is to say of lines that are cut off."""
        rest = os.fstat(self._fd).st_size - self._nbytes
        if rest < 0:
            raise Damaged(f"{self.path} has become shorter while it was open. {_MEND}")
        for line in self._finished_lines() if rest else ():
            before = self._seals[-1].encode() if self._seals else b""
            seal, _, body = line.partition(b" ")
            if seal != seal_of(before, body):
                if self._power_was_cut():
                    break
                number = self._lines + 1
                raise Damaged(f"{self.path}: line {number} was changed, or one before it is missing. {_MEND}")
            self._took(seal, events.decode(body) if b'"witnessed"' in body else None, len(line) + 1)
        gone = 0 if self._known is None else max(0, self._known.lines - self._lines)
        if gone and not self._power_was_cut():
            raise Damaged(f"{self.path}: {gone} lines were cut off at its end. {_MEND}")
        torn = os.fstat(self._fd).st_size - self._nbytes
        if not (torn or gone):
            return None
        return events.LineTorn(time=self._clock(), nbytes=torn, lines=gone)

    def _finished_lines(self) -> Iterator[bytes]:
        """Those after what was read, without their line ends; of a long log a few are in memory."""
        with open(os.dup(self._fd), "rb") as file:
            file.seek(self._nbytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield line[:-1]

    def _power_was_cut(self) -> bool:
        """Whether the lines after those read so far may be what a power cut left of lines that were not on
        the disk: the machine was started again since, and all that were on the disk are here."""
        known = self._known
        return (
            known is not None and "" not in (known.boot, self._boot) and known.boot != self._boot
            and self._lines >= known.synced[0] and self.holds(known.synced)
        )  # fmt: skip

    def _write_head(self, seen: tuple[int, str] | None = None) -> bytes:
        """The signed head, which is in its file when this returns: in one write over the last one, which a
        kill does not tear."""
        self._signed = self._lines
        if self._sign is None:
            return b""
        lines, seal = self._place
        self._remember(lines, seal)
        head = LogHead(
            log=self.path.stem, lines=lines, seal=seal, seen=seen, synced=self._synced, boot=self._boot
        )
        signed = self._sign(head)
        with explained(self._head):
            if self._head_fd is None:
                self._head_fd = os.open(self._head, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._head_fd, signed.ljust(HEAD_BYTES, b"\0"), 0)
            if not self._headed:  # later ones get there by themselves: only the start matters after a cut
                os.fsync(self._head_fd)
                sync_folder(self.path.parent)
            self._headed = True
        return signed


_MEND = (
    "`fedtrain audit verify` says all. Move it and its .head away to begin a new one, which the other ends "
    "will notice."
)


@cache
def _dropped(kind: type[Event]) -> dict[str, Any]:
    """The fields that are not kept of this kind, each with its default, which is not written."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    return {
        name: each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
        for name in KEPT[kind]
        if (each := fields[name])
    }


def words(text: str) -> str:
    """One line without the folders of paths."""
    line = one_line(text)
    return PATH.sub(r"\1", line) if "/" in line else line


# --- reading


def signed_head(path: Path) -> bytes | None:
    """What NAME.head of a log holds, as its signer made it; None where there is none."""
    try:
        return head_file(path).read_bytes().rstrip(b"\0")
    except FileNotFoundError:
        return None


class LogLine(msgspec.Struct, frozen=True):
    """A line as it stands in a log."""

    number: int
    seal: str
    good: bool  # sealed with the line before it
    entry: events.AnyEvent | None  # None: no entry, or of a newer fedtrain


def lines_of(path: Path) -> Iterator[LogLine]:
    """All finished lines, changed ones too; each is compared with the seal that stands before it."""
    before = b""
    with explained(path), path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            seal, _, body = text[:-1].partition(b" ")
            good = seal == seal_of(before, body)
            yield LogLine(number, seal.decode(errors="replace"), good, events.decode(body))
            before = seal
