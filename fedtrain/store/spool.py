"""Bytes that arrive over the network, kept under their digest as they come.

A transfer that breaks goes on from where it stopped, also after a restart of either end; the same bytes
sent twice are stored once. Nothing is visible under its final name before its digest is right.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from ..errors import WireError
from ..update import Digest
from .disk import FREE, open_for_writing, recycle

READ_BYTES = 8 << 20
NOTE, NOTE_BYTES = ".at", 16 << 20  # after a kill a transfer goes on from its last note


class Spool:
    """A folder of files named by digest; `<digest>.part` is one still arriving."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def path(self, digest: str) -> Path:
        if re.fullmatch(r"[0-9a-f]{32}", digest) is None:
            raise WireError(f"{digest[:80]!r} is not a digest")
        return self.folder / digest

    def has(self, digest: str, nbytes: int) -> bool:
        path = self.path(digest)
        return path.exists() and path.stat().st_size == nbytes

    def receive(self, digest: str, nbytes: int) -> Arriving:
        """Open a transfer; `.offset` says how many of its bytes are here already."""
        return Arriving(self.path(digest), digest, nbytes)

    def keep_only(self, digests: Iterable[str]) -> None:
        """Remove every file, whole or partial, that is not one of these."""
        keep = set(digests)
        for path in self.folder.iterdir():
            if path.suffix == NOTE:
                if path.stem not in keep:
                    path.unlink(missing_ok=True)
            elif path.name != FREE and path.name.removesuffix(".part") not in keep:
                recycle(path)


class Arriving:
    """One transfer. `write` each chunk, then `finish`; `close` in any case.

    How far it has come is noted beside it every few chunks: the file itself may be a recycled one, with
    old bytes behind the new.
    """

    def __init__(self, path: Path, digest: str, nbytes: int) -> None:
        self._path, self._digest, self.nbytes = path, digest, nbytes
        self._part, self._note = path.with_name(path.name + ".part"), path.with_name(path.name + NOTE)
        self._hash, self._noted, self.offset = Digest(), 0, 0
        self._file: FileIO | None = None
        if path.exists():
            self.offset = nbytes
            return
        resume = int(self._note.read_text() or 0) if self._note.exists() and self._part.exists() else 0
        self._file = open_for_writing(self._part)
        if resume <= nbytes:  # else it was noted under another claim of this digest
            while self.offset < resume and (block := self._file.read(min(READ_BYTES, resume - self.offset))):
                self._hash.update(block)
                self.offset += len(block)

    @property
    def whole(self) -> bool:
        return self.offset == self.nbytes

    def write(self, chunk: bytes) -> None:
        """The next bytes, in order."""
        if self.offset + len(chunk) > self.nbytes:
            raise WireError(f"more than the {self.nbytes} bytes that were announced")
        assert self._file is not None, "nothing is due for a file that is whole"
        view, at = memoryview(chunk), 0
        self._hash.update(view)
        while at < len(view):
            at += self._file.write(view[at:])
        self.offset += len(chunk)
        if self.offset - self._noted >= NOTE_BYTES and not self.whole:
            self._note_offset()

    def finish(self) -> Path:
        """The file under its final name; with a wrong digest a WireError, and the bytes are forgotten."""
        if self._file is None:
            return self._path
        if not self.whole:
            raise WireError(f"{self.offset} of {self.nbytes} bytes arrived")
        self._note.unlink(missing_ok=True)
        if self._hash.hexdigest() != self._digest:
            recycle(self._part)
            raise WireError(f"the bytes do not have the digest {self._digest[:12]}… that was announced")
        self._file.truncate(self.nbytes)
        os.replace(self._part, self._path)
        return self._path

    def close(self) -> None:
        if self._file is not None:
            if self._part.exists() and not self.whole:
                self._note_offset()
            self._file.close()
            self._file = None

    def _note_offset(self) -> None:
        self._noted = self.offset
        self._note.write_text(str(self.offset))
