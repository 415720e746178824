"""A small value that must not be lost or changed: in two files, each with its digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..digest import digest_of
from ..errors import Damaged
from .disk import Warn, explained, set_aside, silent, write_whole

COPY = ".copy"


class Sealed(msgspec.Struct, frozen=True):
    digest: str  # of the value's bytes as they stand
    value: msgspec.Raw


class Kept:
    """The file `path` and its copy. One of them may be lost or damaged."""

    def __init__(self, path: Path, type: Any, remedy: str, warn: Warn = silent) -> None:
        """`type`: of the value, as msgspec reads it from JSON; `remedy`: what to do when both are damaged."""
        self._paths, self._type = (path, path.with_name(path.name + COPY)), type
        self._remedy, self._warn = remedy, warn

    def read(self) -> list[Any]:
        """What the files hold, of two where a process died between writing them; [] where none was written.
        Damaged when all that is there is damaged."""
        found, damaged = [], []
        for path in self._paths:
            if not path.exists():
                continue
            try:
                found.append(self._read(path))
            except (msgspec.MsgspecError, UnicodeDecodeError) as e:
                damaged.append((path, e))
        if damaged and not found:
            raise Damaged(f"{damaged[0][0]} is damaged, and so is its copy: {damaged[0][1]}. {self._remedy}")
        for path, _ in damaged:
            self._warn(f"{path} is damaged; the other of the two files is used. {set_aside(path)}")
            self.write(found[0])
        return found

    def write(self, value: Any) -> None:
        """On the disk, twice, when this returns."""
        body = msgspec.json.encode(value)
        text = msgspec.json.encode(Sealed(digest_of(body), msgspec.Raw(body)))
        for path in self._paths:
            write_whole(path, text, durable=True)

    def _read(self, path: Path) -> Any:
        with explained(path):
            text = path.read_bytes()
        sealed = msgspec.json.decode(text, type=Sealed)
        if digest_of(bytes(sealed.value)) != sealed.digest:
            raise msgspec.ValidationError(f"its digest is not {sealed.digest[:12]}…")
        return msgspec.json.decode(sealed.value, type=self._type)
