"""Bytes that arrive over the network, kept under their digest as they come.

A transfer that breaks goes on from where it stopped, also after a restart of either end; the same bytes
sent twice are stored once. Nothing is visible under its final name before its digest is right, and nothing
that was there before this process is believed before its digest was taken again: the disk is not waited for,
so after a power cut a file may hold anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from ..digest import Digest
from ..errors import Broken, WireError
from .disk import (
    FREE,
    Warn,
    copy_whole,
    explained,
    open_for_writing,
    private_folder,
    recycle,
    set_aside,
    silent,
    write_whole,
)

READ_BYTES = 8 << 20
NOTE, NOTE_BYTES = ".at", 16 << 20  # after a kill a transfer goes on from its last note
DIGEST = re.compile(r"[0-9a-f]{32}")
UNFINISHED = 4  # transfers that may be kept to go on with; of more the oldest are given up


class Spool:
    """A folder of files named by digest; `<digest>.part` is one still arriving."""

    def __init__(self, folder: Path, warn: Warn = silent, copies: Path | None = None) -> None:
        """`warn` hears of damaged files, which are set aside. `copies`: a folder of second copies of what is
        `put`, from which they are made again."""
        with explained(folder):
            private_folder(folder)
        self.folder, self._warn = folder, warn
        self._prefix = os.path.join(folder, "")
        self._copies = None if copies is None else Spool(copies)
        self.limit: int | None = None  # bytes that may lie here; the oldest files make room for new ones
        self._whole: set[str] = set()  # digests that this process has taken itself

    def file(self, digest: str) -> str:
        """Where these bytes lie when they are here; no Path, see ArenaFile."""
        if not is_digest(digest):
            raise WireError(f"{digest[:80]!r} is not a digest")
        return f"{self._prefix}{digest}"

    def has(self, digest: str, nbytes: int, *, again: bool = False) -> bool:
        """Whether these bytes are here. They are read once in a process, or each time with `again`."""
        path = self.file(digest)
        if digest in self._whole and not again and os.path.exists(path):
            return True
        if wrong := self.wrong(digest, nbytes, again=again):
            self._warn(wrong)
        return not wrong and os.path.exists(path)

    def wrong(self, digest: str, nbytes: int, *, again: bool = False) -> str:
        """What is wrong with the file, which was set aside for it; "" when its bytes are right, or gone."""
        path = self.file(digest)
        with explained(path):
            if os.path.exists(path) and digest in self._whole and not again:
                return ""
            files = [path] if self._copies is None else [path, self._copies.file(digest)]
            found = {each: damage(each, digest, nbytes) if os.path.exists(each) else "gone" for each in files}
            good = [each for each in files if not found[each]]
            for each in files if good else []:
                if found[each]:
                    line = _aside(each, found[each])
                    copy_whole(Path(good[0]), Path(each))
                    self._warn(f"{line} It was made again from its copy.")
            if not good:
                return _aside(path, found[path]) if os.path.exists(path) else ""
        self._whole.add(digest)
        return ""

    def put(self, digest: str, data: memoryview, *, durable: bool) -> str:
        """The file with these bytes, written unless they are here."""
        path = self.file(digest)
        if not self.has(digest, len(data)):
            write_whole(path, data, durable=durable)
            self.arrived(digest)
        if self._copies is not None:
            self._copies.put(digest, data, durable=durable)
        return path

    def receive(self, digest: str, nbytes: int) -> Arriving:
        """Open a transfer; `.offset` says how many of its bytes are here already."""
        whole = self.has(digest, nbytes)
        with explained(self.file(digest)):
            if not whole:
                self._make_room(digest, nbytes)
            return Arriving(self, digest, nbytes, whole)

    def _make_room(self, digest: str, nbytes: int) -> None:
        """Whoever sends may begin any number of transfers, and end none: what lies here stays bounded."""
        if self.limit is not None and nbytes > self.limit:
            raise WireError(
                f"{nbytes:,} bytes are announced, and {self.limit:,} may lie in {self.folder.name}"
            )
        own = {f"{digest}.part", digest + NOTE}
        there: list[tuple[int, int, str]] = []  # when it was written to, bytes, its name
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another thread's
                    if entry.name not in own and entry.is_file():
                        there.append(((found := entry.stat()).st_mtime_ns, found.st_size, entry.name))
        parts = sorted(file for file in there if file[2].endswith(".part"))
        over = sum(size for _, size, _ in there) + nbytes - (self.limit or 0)
        for file in sorted(there):
            if (self.limit is not None and over > 0) or file in parts[:-UNFINISHED]:
                with suppress(FileNotFoundError):
                    os.unlink(self._prefix + file[2])
                over -= file[1]
                self._whole.discard(file[2])

    def arrived(self, digest: str) -> None:
        """A file has its final name, and its digest was right."""
        self._whole.add(digest)

    def keep_only(self, digests: Iterable[str]) -> None:
        """Remove every file, whole or partial, that is not one of these."""
        keep = set(digests)
        self._whole &= keep
        if self._copies is not None:
            self._copies.keep_only(keep)
        keep.add(FREE)
        with explained(self.folder):
            for name in os.listdir(self.folder):
                if name.removesuffix(NOTE).removesuffix(".part") in keep:
                    continue
                if name.endswith(NOTE):
                    with suppress(FileNotFoundError):
                        os.unlink(self._prefix + name)
                elif os.path.isfile(path := self._prefix + name):
                    recycle(path)


def is_digest(name: str) -> bool:
    return DIGEST.fullmatch(name) is not None


def damage(path: str | Path, digest: str, nbytes: int) -> str:
    """What is wrong with a file; "" when its bytes have this digest."""
    if (size := os.stat(path).st_size) != nbytes:
        return f"{size:,} bytes of {nbytes:,}"
    found = Digest()
    with open(path, "rb", buffering=0) as f:
        while block := f.read(READ_BYTES):
            found.update(block)
    return "" if found.hexdigest() == digest else f"its digest is not {digest[:12]}…"


def _aside(path: str, wrong: str) -> str:
    """A line about a file that is not what it should be, and is set aside."""
    if not os.path.exists(path):
        return f"{path} is gone."
    return f"{path} is damaged ({wrong}). {set_aside(Path(path))}"


class Arriving:
    """One transfer. `write` each chunk, then `finish`; `close` in any case.

    How far it has come is noted beside it every few chunks: the file itself may be a recycled one, with
    old bytes behind the new.
    """

    def __init__(self, spool: Spool, digest: str, nbytes: int, whole: bool) -> None:
        """`whole`: it is here already."""
        self._spool, self._path, self._digest, self.nbytes = spool, spool.file(digest), digest, nbytes
        self._part, self._note = (self._path + end for end in (".part", NOTE))
        self._hash, self._noted, self.offset = Digest(), 0, 0
        self._file: FileIO | None = None
        if whole:
            self.offset = nbytes
            return
        resume = self._noted_before() if os.path.exists(self._part) else 0
        self._file = open_for_writing(self._part)
        if resume <= nbytes:  # else it was noted under another claim of this digest
            while self.offset < resume and (block := self._file.read(min(READ_BYTES, resume - self.offset))):
                self._hash.update(block)
                self.offset += len(block)
        self._resumed = self.offset > 0

    @property
    def whole(self) -> bool:
        return self.offset == self.nbytes

    def write(self, chunk: bytes | memoryview) -> None:
        """The next bytes, in order."""
        if self.offset + len(chunk) > self.nbytes:
            raise WireError(f"more than the {self.nbytes} bytes that were announced")
        assert self._file is not None, "nothing is due for a file that is whole"
        view, at = memoryview(chunk), 0
        self._hash.update(view)
        with explained(self._path):
            while at < len(view):
                at += self._file.write(view[at:])
            self.offset += len(chunk)
            if self.offset - self._noted >= NOTE_BYTES and not self.whole:
                self._note_offset()

    def finish(self) -> str:
        """The file under its final name. With a wrong digest the bytes are forgotten, and it is a WireError;
        Broken where some of them lay here from before: those may be the wrong ones, so it is tried again."""
        if self._file is None:
            return self._path
        if not self.whole:
            raise Broken(f"{self.offset} of {self.nbytes} bytes arrived")
        if not os.path.exists(self._part):
            raise Broken("the transfer was given up for later ones")
        with explained(self._path):
            with suppress(FileNotFoundError):
                os.unlink(self._note)
            if self._hash.hexdigest() != self._digest:
                recycle(self._part)
                line = f"the bytes do not have the digest {self._digest[:12]}… that was announced"
                raise Broken(f"{line}, and some lay in {self._part}") if self._resumed else WireError(line)
            self._file.truncate(self.nbytes)
            os.replace(self._part, self._path)
        self._spool.arrived(self._digest)
        return self._path

    def close(self) -> None:
        if self._file is not None:
            try:
                with explained(self._note):
                    if os.path.exists(self._part) and not self.whole:
                        self._note_offset()
            finally:
                self._file.close()
                self._file = None

    def _noted_before(self) -> int:
        try:
            return max(int(Path(self._note).read_text()), 0)
        except (FileNotFoundError, ValueError):  # damaged: it begins again
            return 0

    def _note_offset(self) -> None:
        self._noted = self.offset
        with open(os.open(self._note, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as note:
            note.write(b"%20d" % self.offset)  # over the last: ext4 begins to write a file that was emptied
