"""A database's redo log: a second file that has every committed row, and tells when the first one lost some.

    run.redo    a line a transaction: <SHA-256 of the rest of the line, in hex> <base64 of MessagePack>

The first line has all rows as they stood, and each later line the rows that one transaction added, and the
digests of those that it removed. A transaction's line is written before the transaction is committed; where
it is durable, the disk has the line. So the database itself waits for no disk: when it is damaged, lost, or
without its newest transactions (its own log was lost, or an old copy was put in its place), it is made again.
"""

from __future__ import annotations

import hashlib
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .disk import explained, private, sync_folder, unshare, whole_file, write_all

Row = tuple[Any, ...]  # the name of its table, then its values
EMPTY = bytes(16)  # the digest of no rows
SPARE_BYTES = 1 << 20  # a log may be this much longer than four times its first line
SEAL_BYTES = 65  # of a line, with the blank after it
PART_BYTES = 64 << 10  # of a first line, that are in memory at a time
ARRAY_OF_4, ARRAY, NO_ITEMS = b"\x94", b"\xdd", b"\x90"  # MessagePack; after ARRAY comes its length


class Transaction(msgspec.Struct, frozen=True, array_like=True):
    """What it did."""

    number: int  # of the transaction
    digest: bytes  # of all rows after it
    added: list[bytes]  # rows, as `packed`
    removed: list[bytes]  # digests of rows


@dataclass(frozen=True)
class Reached:
    """A place in the file, after a line."""

    number: int = -1  # of its transaction
    digest: bytes = EMPTY  # of all rows after it
    end: int = 0  # bytes


@dataclass
class Recovered:
    """All rows at one moment."""

    number: int = -1  # of the last transaction; -1: there was none
    digest: bytes = EMPTY  # of all rows
    rows: dict[bytes, bytes] = field(default_factory=dict)  # digest of a row -> the row, as `packed`
    ends: list[int] = field(default_factory=list)  # of the lines that were read, in bytes
    wrong: str = ""  # what is wrong with the rest of the file


class Redo:
    """The file of one database. Only the process that writes the database holds it."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """`durable`: a transaction's line waits for the disk."""
        self.path, self._durable = path, durable
        self._file: int | None = None
        self._last = self._before = Reached()  # after the last line, and after the one before it
        self._long = 0  # bytes from which the file is too long
        self._added: dict[bytes, bytes] = {}  # by the transaction under way
        self._removed: dict[bytes, None] = {}  # in this order: the file's bytes follow from what was done

    # --- one transaction after the other

    def note(self, added: bool, row: Row) -> bytes:
        """A row is there from now on, or is gone; its digest."""
        own = _digest(data := packed(row))
        if added:
            self._added[own] = data
        elif self._added.pop(own, None) is None:
            self._removed[own] = None
        return own

    @property
    def changed(self) -> bool:
        """Whether the transaction under way changed anything."""
        return bool(self._added or self._removed)

    @property
    def noted(self) -> list[bytes]:
        """The digests of the rows that the transaction under way added or removed."""
        return [*self._added, *self._removed]

    def append(self, number: int, digest: bytes) -> None:
        """Write what was noted as transaction `number`, after which all rows have this digest."""
        assert digest == toggled(self._last.digest, *self.noted), "every change was noted"
        data = _line(Transaction(number, digest, [*self._added.values()], [*self._removed]))
        with explained(self.path):
            at = 0
            while at < len(data):
                at += os.pwrite(self._open(), data[at:], self._last.end + at)
            if self._durable:
                os.fdatasync(self._open())
        self._before, self._last = self._last, Reached(number, digest, self._last.end + len(data))
        self.forget()

    def forget(self) -> None:
        """What was noted is no transaction's."""
        self._added, self._removed = {}, {}

    def take_back(self, number: int) -> None:
        """A transaction was not committed, and `number` is the last one: nothing of it stays."""
        self.forget()
        if self._last.number > number:
            self._last = self._before
        with suppress(OSError):
            os.ftruncate(self._open(), self._last.end)

    @property
    def too_long(self) -> bool:
        """Whether most of it was superseded."""
        return self._last.end > self._long

    def begin(self, number: int, digest: bytes, count: int, rows: Iterable[bytes]) -> None:
        """Write the file anew, with all rows in its first line. They are `count` rows, as `packed`, and have
        this digest together. A few of them are in memory at a time: of a long run they are very many."""
        self.close()
        seal, nbytes = hashlib.sha256(), SEAL_BYTES
        with whole_file(self.path, durable=self._durable) as file:
            write_all(file, bytes(SEAL_BYTES))
            for part in _first_body(number, digest, count, rows):
                seal.update(part)
                write_all(file, part)
                nbytes += len(part)
            write_all(file, b"\n")
            os.pwrite(file.fileno(), seal.hexdigest().encode() + b" ", 0)
        self._last = self._before = Reached(number, digest, nbytes + 1)
        self._long = 4 * (nbytes + 1) + SPARE_BYTES

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is not None and os.fstat(self._file).st_nlink > 1:
            self.close()
        if self._file is None:
            unshare(self.path)
            self._file = private(self.path, os.O_WRONLY)
        return self._file

    # --- when the database is opened

    def read(self) -> Recovered:
        """The rows after the last whole line."""
        with explained(self.path):
            if not self.path.exists():
                return Recovered()
            data = self.path.read_bytes()
            if self._durable:  # a kill may have come before the sync of its last line, or of its name
                os.fdatasync(self._open())
                sync_folder(self.path.parent)
        found = recovered(data)
        if found.ends:
            self._long = 4 * found.ends[0] + SPARE_BYTES
        self._last = self._before = Reached(found.number, found.digest, found.ends[-1] if found.ends else 0)
        return found


def recovered(data: bytes) -> Recovered:
    """The rows in the bytes of a file, after the last whole line."""
    found, at = Recovered(), 0
    while (end := data.find(b"\n", at)) >= 0 and (line := _read(data[at:end])):
        if found.number not in (-1, line.number - 1) or not found.rows.keys() >= {*line.removed}:
            break
        for own in line.removed:
            del found.rows[own]
        added = {_digest(row): row for row in line.added}
        found.rows |= added
        found.digest = toggled(found.digest, *added, *line.removed)
        if found.digest != line.digest:
            return Recovered(wrong="its rows do not have the digest they were written with")
        found.number, at = line.number, end + 1
        found.ends.append(at)
    if at < len(data):
        found.wrong = f"its last {len(data) - at:,} bytes are no transaction"
    return found


def toggled(digest: bytes, *own: bytes) -> bytes:
    """The digest of rows of which some more are there, or some are gone: each row's own, XORed, so that their
    order is of no matter."""
    found = int.from_bytes(digest)
    for each in own:
        found ^= int.from_bytes(each)
    return found.to_bytes(16)


def packed(row: Row) -> bytes:
    """A row as it is written."""
    return msgspec.msgpack.encode(row)


def digest_of_rows(rows: Iterable[bytes]) -> bytes:
    """The digest of these, and of no others."""
    found = EMPTY
    for row in rows:
        found = toggled(found, _digest(row))
    return found


def _digest(row: bytes) -> bytes:
    return hashlib.blake2b(row, digest_size=16).digest()


def _line(line: Transaction) -> bytes:
    body = b64encode(msgspec.msgpack.encode(line))
    return hashlib.sha256(body).hexdigest().encode() + b" " + body + b"\n"


def _first_body(number: int, digest: bytes, count: int, rows: Iterable[bytes]) -> Iterator[bytes]:
    """The body of a line that adds all these rows, in parts: `_line` would hold them all at once."""
    head = map(msgspec.msgpack.encode, (number, digest))
    begun = bytearray(b"".join([ARRAY_OF_4, *head, ARRAY, count.to_bytes(4)]))
    for row in rows:
        begun += msgspec.msgpack.encode(row)
        if len(begun) >= PART_BYTES:
            whole = len(begun) // 3 * 3  # of which base64 needs no filling up
            yield b64encode(begun[:whole])
            del begun[:whole]
    yield b64encode(begun + NO_ITEMS)


def _read(text: bytes) -> Transaction | None:
    """None for one that was not written like this."""
    seal, _, body = text.partition(b" ")
    if hashlib.sha256(body).hexdigest().encode() != seal:
        return None
    try:
        return msgspec.msgpack.decode(b64decode(body), type=Transaction)
    except (ValueError, msgspec.MsgspecError):
        return None
