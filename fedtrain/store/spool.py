"""Bytes that arrive over the network, kept under their digest as they come.

A transfer that breaks goes on from where it stopped, also after a restart of either end; the same bytes
sent twice are stored once. Nothing is visible under its final name before its digest is right.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import WireError
from ..update import Digest

READ_BYTES = 8 << 20


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
            if path.name.removesuffix(".part") not in keep:
                path.unlink(missing_ok=True)


class Arriving:
    """One transfer. `write` each chunk, then `finish`; `close` in any case."""

    def __init__(self, path: Path, digest: str, nbytes: int) -> None:
        self._path, self._digest, self.nbytes = path, digest, nbytes
        self._part = path.with_name(path.name + ".part")
        self._hash = Digest()
        self._file: Any = None
        if path.exists():
            self.offset = nbytes
            return
        self._file = open(self._part, "r+b" if self._part.exists() else "w+b", buffering=0)  # noqa: SIM115  closed by close()
        self.offset = 0
        while block := self._file.read(READ_BYTES):
            self._hash.update(block)
            self.offset += len(block)
        if self.offset > nbytes:  # left by another claim of this digest: start over
            self._file.truncate(0)
            self._file.seek(0)
            self._hash, self.offset = Digest(), 0

    @property
    def whole(self) -> bool:
        return self.offset == self.nbytes

    def write(self, chunk: bytes) -> None:
        """The next bytes, in order. Hashing and writing release the GIL: call it from a thread."""
        if self.offset + len(chunk) > self.nbytes:
            raise WireError(f"more than the {self.nbytes} bytes that were announced")
        view, at = memoryview(chunk), 0
        self._hash.update(view)
        while at < len(view):
            at += self._file.write(view[at:])
        self.offset += len(chunk)

    def finish(self) -> Path:
        """The file under its final name; with a wrong digest a WireError, and the bytes are forgotten."""
        if self._file is None:
            return self._path
        if not self.whole:
            raise WireError(f"{self.offset} of {self.nbytes} bytes arrived")
        if self._hash.hexdigest() != self._digest:
            self._file.truncate(0)
            self._part.unlink(missing_ok=True)
            raise WireError(f"the bytes do not have the digest {self._digest[:12]}… that was announced")
        os.replace(self._part, self._path)
        return self._path

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
