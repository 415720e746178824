"""Values that are only ever added to: in two files, a line each, every line sealed together with all before
it.

  <SHA-256 of the seal before it and of the value's bytes> {"the value": "in JSON"}

So one file may be lost or damaged, and no line may be changed, left out or put elsewhere. What is missing at
the end of both files, nothing in them shows: whoever keeps a chain asks somebody else how long it must be.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import Damaged
from .disk import COPY, Warn, explained, set_aside, silent, sync_folder, write_whole


class Chain:
    """The file `path` and its copy, and the values in them."""

    def __init__(self, path: Path, type: Any, remedy: str, warn: Warn = silent) -> None:
        """`type`: of a value, as msgspec reads it from JSON; `remedy`: what to do when both files are
        damaged.

        Damaged where a value that was added can't be read, or was changed.
        """
        self._paths, self._type, self._remedy = (path, path.with_name(path.name + COPY)), type, remedy
        self.values: list[Any] = []
        self._seal, self._nbytes = b"", 0
        self._read(warn)

    def append(self, value: Any) -> None:
        """On the disk, twice, when this returns."""
        body = msgspec.json.encode(value)
        seal = _seal(self._seal, body)
        line = seal + b" " + body + b"\n"
        for path in self._paths:
            with explained(path), open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                file.seek(self._nbytes)
                file.truncate()  # what a full disk left of a line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        if not self.values:
            sync_folder(self._paths[0].parent)
        self.values.append(value)
        self._seal, self._nbytes = seal, self._nbytes + len(line)

    def _read(self, warn: Warn) -> None:
        found: dict[Path, list[bytes]] = {}  # whole lines of the files that are there
        good: dict[Path, list[Any]] = {}
        bad: dict[Path, Exception] = {}
        for path in filter(Path.exists, self._paths):
            with explained(path):
                found[path] = path.read_bytes().split(b"\n")[:-1]  # without a line that was not finished
            try:
                good[path] = list(self._values(found[path]))
            except msgspec.MsgspecError as error:
                bad[path] = error
        if not found:
            return
        best = max(good, key=lambda path: len(good[path]), default=None)
        if best is None or len(good[best]) < max(map(len, found.values())):
            path, why = next(iter(bad.items()))
            raise Damaged(f"{path} is damaged, and its copy doesn't have all of it: {why}. {self._remedy}")
        if other := [path for path in good if found[path] != found[best][: len(found[path])]]:
            raise Damaged(f"{other[0]} and {best} tell different things. {self._remedy}")
        for path, why in bad.items():
            warn(f"{path} is damaged ({why}); the other of the two files is used. {set_aside(path)}")
        self.values, whole = good[best], b"".join(line + b"\n" for line in found[best])
        self._nbytes, self._seal = len(whole), b"".join(found[best][-1:]).partition(b" ")[0]
        for path in self._paths:
            if path in bad or found.get(path) != found[best]:
                write_whole(path, whole, durable=True)

    def _values(self, lines: list[bytes]) -> Iterator[Any]:
        seal = b""
        for number, line in enumerate(lines, 1):
            body = line.partition(b" ")[2]
            seal = _seal(seal, body)
            if line != seal + b" " + body:
                raise msgspec.ValidationError(f"line {number} is not sealed with those before it")
            yield msgspec.json.decode(body, type=self._type)


def _seal(before: bytes, body: bytes) -> bytes:
    return hashlib.sha256(before + body).hexdigest().encode()
