"""A small SQLite database that is believed only when it is what was written.

SQLite finds a page that is no page. It does not find a number that changed in one, nor rows that are gone
because its log was lost. So there is one row more, the digest of all rows: each transaction brings it up to
date, and whoever opens the database compares. A transaction is copied from the log into the database as it
ends, so that a log that is lost or damaged takes none with it; where it is durable, the disk has the copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from ..errors import Damaged, StoreError
from .disk import explained, private

EMPTY = bytes(16)  # the digest of no rows
SEAL = """BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS seal (digest BLOB NOT NULL);
INSERT INTO seal SELECT zeroblob(16) WHERE NOT EXISTS (SELECT 1 FROM seal);
"""
DISK = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
IN_USE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
NOT_OURS = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}
ALONE_S, SHARED_S = 5.0, 600.0  # how long another process that writes is waited for
PRIMARY = 0xFF  # the part of an extended error code that says what kind it is


class Database:
    """Tables with a digest. Every failure is a StoreError that names the file and says what to do."""

    def __init__(
        self, path: Path, tables: str = "", *, read_only: bool = False, durable: bool = True, remedy: str,
        shared: bool = False,
    ) -> None:  # fmt: skip
        """`tables`: CREATE TABLE IF NOT EXISTS ...; `durable`: a transaction waits for the disk, and no power
        cut takes it back; without, one may damage the file. `remedy`: what to do where it is damaged.
        `shared`: several processes write it at once, and it has no digest: what its rows name has its own."""
        self.path, self._durable, self._remedy, self._shared = path, durable, remedy, shared
        wait_s = SHARED_S if shared else ALONE_S
        with self._explained():
            if read_only:
                self._db = sqlite3.connect(f"file:{path}?mode=ro", wait_s, uri=True, isolation_level=None)
            else:
                with explained(path):  # made here, it is for nobody else; SQLite's other files are as it is
                    os.close(private(path, os.O_RDWR | os.O_CREAT))
                self._db = sqlite3.connect(path, wait_s, isolation_level=None)
        try:
            with self._explained():
                if not read_only:
                    self._db.execute("PRAGMA journal_mode=WAL")
                    self._db.execute("PRAGMA wal_autocheckpoint=0")
                    self._db.execute(f"PRAGMA synchronous={'NORMAL' if durable else 'OFF'}")
                    self._create(tables)
                    self._copy_log()
                if not shared:
                    self._compare()
        except BaseException:
            self._db.close()
            raise

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Every row that a SELECT finds."""
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    def one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """The first row that a SELECT finds; None without one."""
        rows = self.all(sql, values)
        return rows[0] if rows else None

    def change(self, sql: str, values: Sequence[Any] = ()) -> int:
        """How many rows an INSERT, UPDATE or DELETE touched; a transaction by itself where none is open."""
        if not self._db.in_transaction:
            with self.transaction():
                return self.change(sql, values)
        with self._explained():
            return self._db.execute(sql, values).rowcount

    def put(self, table: str, *row: Any) -> None:
        """Write a row, in the place of one with the same key; structs, lists and dicts as JSON."""
        plain = [
            v if isinstance(v, str | int | float | bytes | None) else msgspec.json.encode(v).decode()
            for v in row
        ]
        self.change(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", plain)  # noqa: S608

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes of the block or, when it raises, none."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
                self._copy_log()
            except BaseException:
                with suppress(sqlite3.Error):
                    if self._db.in_transaction:  # a full disk has ended it already
                        self._db.execute("ROLLBACK")
                raise

    def _copy_log(self) -> None:
        """Bring what was committed from the log into the database: that waits for the disk, once for each of
        the two, and SQLite's own wait at the commit would be one more. Where a reader still needs the rows of
        before, they stay in the log for now; then a change of no meaning waits for the log."""
        _, logged, copied = self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if self._durable and copied < logged:
            (unused,) = self._db.execute("PRAGMA user_version").fetchone()
            self._db.execute("PRAGMA synchronous=FULL")
            try:
                self._db.execute(f"PRAGMA user_version={1 - unused}")
            finally:
                self._db.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        with self._explained():
            self._db.close()

    # --- the digest

    def _create(self, tables: str) -> None:
        if self._shared:
            self._db.executescript(f"BEGIN IMMEDIATE;{tables};COMMIT;")
            return
        there = self._tables()
        if there and "seal" not in there:
            raise Damaged(
                f"{self.path} has no digest: an earlier fedtrain wrote it, or it is damaged. {self._remedy}"
            )
        self._db.executescript(f"{SEAL}{tables};COMMIT;")
        self._db.create_function("changed", -1, _changed, deterministic=True)
        self._db.execute("PRAGMA recursive_triggers=ON")  # or REPLACE removes rows and tells nobody
        for table in self._tables() - {"seal"}:
            columns = [row[1] for row in self._db.execute(f"PRAGMA table_info({table})")]
            for event, rows in {"INSERT": ["NEW"], "DELETE": ["OLD"], "UPDATE": ["OLD", "NEW"]}.items():
                for row in rows:
                    values = ", ".join([f"'{table}'", *(f"{row}.{column}" for column in columns)])
                    change = f"UPDATE seal SET digest = changed(digest, {values});"  # noqa: S608 - names of ours
                    trigger = f"TEMP TRIGGER {table}_{event}_{row} AFTER {event} ON main.{table}"
                    self._db.execute(f"CREATE {trigger} BEGIN {change} END")

    def _compare(self) -> None:
        """StoreError unless the rows have the digest that they were written with."""
        self._db.execute("BEGIN")  # one moment's rows, where another process writes
        try:
            tables, found = self._tables(), EMPTY
            if "seal" not in tables:
                return  # a reader's: an earlier fedtrain wrote it
            for table in tables - {"seal"}:
                for row in self._db.execute(f"SELECT * FROM {table}"):  # noqa: S608 - a name of ours
                    found = _changed(found, table, *row)
            if self._db.execute("SELECT digest FROM seal").fetchall() != [(found,)]:
                raise Damaged(
                    f"{self.path} is damaged: its rows do not have the digest they were written with. "
                    f"{self._remedy}"
                )
        finally:
            self._db.execute("ROLLBACK")

    def _tables(self) -> set[str]:
        return {
            name
            for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if not name.startswith("sqlite_")
        }

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as e:  # the latter: SQLite's message quotes a damaged name
            raise self._explain(e) from e

    def _explain(self, e: Exception) -> StoreError:
        code = getattr(e, "sqlite_errorcode", 0)
        if code & PRIMARY in DISK and code != sqlite3.SQLITE_IOERR_SHORT_READ:
            free = shutil.disk_usage(self.path.parent).free
            return StoreError(
                f"{self.path} can't be read or written: {e}; {free:,} bytes are free on its disk. Free some, "
                f"or see to the disk: the same command goes on."
            )
        if code & PRIMARY in IN_USE:
            return StoreError(f"{self.path} is in use by another program: {e}. Close it there.")
        if code & PRIMARY in NOT_OURS:
            return StoreError(f"{self.path} can't be written: {e}. Whose folder is {self.path.parent}?")
        return Damaged(f"{self.path} is damaged: {e}. {self._remedy}")


def _changed(digest: bytes, *row: Any) -> bytes:
    """The digest of rows of which one more is there, or one is gone: each row's own, XORed, so that their
    order is of no matter."""
    own = hashlib.blake2b(msgspec.msgpack.encode(row), digest_size=16).digest()
    return (int.from_bytes(digest) ^ int.from_bytes(own)).to_bytes(16)
