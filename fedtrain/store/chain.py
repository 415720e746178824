"""Values that are only ever added to: in two files, a line each, every line sealed together with all before
it.

  <SHA-256 of the seal before it and of the value's bytes> {"the value": "in JSON"}

So one file may be lost or damaged, and no line may be changed, left out or put elsewhere. What is missing at
the end of both files, nothing in them shows: whoever keeps a chain asks somebody else how long it must be.
Several processes may add to one chain, each in a block of `alone`. Whoever keeps very many long values has a
part of each in memory, and the others read again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from ..errors import Damaged
from .disk import COPY, Warn, explained, private_folder, set_aside, silent, sync_folder, unshare, write_whole

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Chain:
    """The file `path` and its copy, and the values in them."""

    def __init__(
        self, path: Path, type: Any, remedy: str, warn: Warn = silent,
        kept: Callable[[Any], Any] = lambda value: value,
    ) -> None:  # fmt: skip
        """`type`: of a value, as msgspec reads it from JSON; `remedy`: what to do when both files are
        damaged; `kept`: the part of a value that `values` has.

        Damaged where a value that was added can't be read, or was changed.
        """
        self._paths, self._type, self._remedy = (path, path.with_name(path.name + COPY)), type, remedy
        self.values: list[Any] = []
        self._ends = array("Q")  # of each value's line, in bytes from the start of the file
        self._seal, self._warn, self._kept = b"", warn, kept
        self._named = False  # whether this process has the files' names on the disk
        if path.parent.exists():
            with self.alone():  # what is here now is read
                pass

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What other processes have added is in `values` from here on, and in the block no other process adds
        anything. Damaged where what was read before is there no longer."""
        path, before = self._paths[0], (self.values, self._ends, self._seal)
        with explained(path):
            private_folder(path.parent)
            folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            sizes = {path.stat().st_size if path.exists() else 0 for path in self._paths}
            if sizes != {self._nbytes}:
                self._read(self._warn)
                if not self._goes_on_from(len(before[0]), before[2]):
                    self.values, self._ends, self._seal = before
                    raise self._changed()
            yield
        finally:
            os.close(folder)

    def append(self, value: Any) -> None:
        """On the disk, twice, when this returns."""
        body = msgspec.json.encode(value)
        seal = seal_of(self._seal, body)
        line = seal + b" " + body + b"\n"
        for path in self._paths:  # one is on the disk before the other is touched: a power cut tears one only
            with explained(path):
                unshare(path)
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    if os.fstat(file).st_size > self._nbytes:
                        os.ftruncate(file, self._nbytes)  # what a full disk left of a line
                    at = 0
                    while at < len(line):
                        at += os.pwrite(file, line[at:], self._nbytes + at)
                    os.fsync(file)
                finally:
                    os.close(file)
        if not self._named:
            sync_folder(self._paths[0].parent)
            self._named = True
        self.values.append(self._kept(value))
        self._ends.append(self._nbytes + len(line))
        self._seal = seal

    def stored(self, numbers: Iterable[int]) -> Iterator[Any]:
        """These values, of which 0 is the first, as they were added. Damaged where neither file has one."""
        with explained(self._paths[0]), ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in self._paths if path.exists()]
            for number in numbers:
                for before, seal, body in (self._line(file.fileno(), number) for file in files):
                    if seal == seal_of(before, body):
                        yield msgspec.json.decode(body, type=self._type)
                        break
                else:
                    raise self._changed()

    def settle(self) -> None:
        """What was read is on the disk when this returns, also where a process was killed before its sync."""
        for path in filter(Path.exists, self._paths):
            with explained(path), open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(self._paths[0].parent)

    @property
    def _nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _line(self, file: int, number: int) -> tuple[bytes, bytes, bytes]:
        """The seal of the line before it, its own seal, and its body."""
        first, start, end = ([0, 0, *self._ends[max(0, number - 2) : number + 1]])[-3:]
        text = os.pread(file, end - first, first)
        seal, _, body = text[start - first : -1].partition(b" ")
        return text[: start - first].partition(b" ")[0], seal, body

    def _goes_on_from(self, count: int, seal: bytes) -> bool:
        """Whether what was read begins with so many values that are sealed like this."""
        if not 0 < count <= len(self.values):
            return count == 0
        with explained(self._paths[0]), self._paths[0].open("rb") as file:
            return self._line(file.fileno(), count - 1)[1] == seal

    def _changed(self) -> Damaged:
        return Damaged(f"{self._paths[0]} has been changed while it was in use. {self._remedy}")

    def _read(self, warn: Warn) -> None:
        found: dict[Path, list[bytes]] = {}  # whole lines of the files that are there
        odd = dict.fromkeys(self._paths, "is gone")  # what is to be told of those that are not damaged
        good: dict[Path, list[Any]] = {}
        bad: dict[Path, Exception] = {}
        for path in filter(Path.exists, self._paths):
            with explained(path):
                *found[path], rest = path.read_bytes().split(b"\n")
                odd[path] = f"ends in {len(rest)} bytes that are no line" if rest else ""
            try:
                good[path] = [*map(self._kept, values(found[path], self._type))]
            except UNREADABLE as error:
                bad[path] = error
        if not found:
            self.values, self._ends, self._seal = [], array("Q"), b""
            return
        best = max(good, key=lambda path: len(good[path]), default=None)
        sure = found[best] if best is not None else []
        torn = (best is not None or len(found) == 1) and all(_torn(found[path], sure) for path in bad)
        if (best is None or len(sure) < max(map(len, found.values()))) and not (bad and torn):
            path, why = next(iter(bad.items()))
            raise Damaged(f"{path} is damaged, and its copy doesn't have all of it: {why}. {self._remedy}")
        if other := [path for path in good if found[path] != sure[: len(found[path])]]:
            raise Damaged(f"{other[0]} and {best} tell different things. {self._remedy}")
        for path, why in bad.items():
            warn(f"{path} is damaged ({why}); the other of the two files is used. {set_aside(path)}")
        self.values = good[best] if best is not None else []
        whole = b"".join(line + b"\n" for line in sure)
        self._ends = array("Q", accumulate(len(line) + 1 for line in sure))
        self._seal = b"".join(sure[-1:]).partition(b" ")[0]
        if best is None:
            return
        for path in self._paths:
            if path in bad or found.get(path) != sure or odd[path]:
                write_whole(path, whole, durable=True)
                if path not in bad:
                    warn(f"{path} {odd[path] or 'lacks lines'}. It was made again from {best.name}.")


def values(lines: list[bytes], type: Any) -> Iterator[Any]:
    """The values in a file's whole lines; UNREADABLE where a line is not sealed with those before it."""
    seal = b""
    for number, line in enumerate(lines, 1):
        before, (seal, _, body) = seal, line.partition(b" ")
        if seal != seal_of(before, body):
            raise msgspec.ValidationError(f"line {number} is not sealed with those before it")
        yield msgspec.json.decode(body, type=type)


def _torn(lines: list[bytes], sure: list[bytes]) -> bool:
    """Whether these are `sure` and what a power cut left of one more that was being written: sectors of it
    are missing, and no line has zeros in it. Nothing has depended on it yet: the other file lacks it."""
    return lines[:-1] == sure and b"\0" in lines[-1]


def seal_of(before: bytes, body: bytes) -> bytes:
    """The seal of a line, in hex: of the seal of the line before it (b"" for the first), and of its body."""
    return hashlib.sha256(before + body).hexdigest().encode()
