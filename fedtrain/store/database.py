"""A small SQLite database that is believed only when it is what was written, and made again when it is not.

SQLite finds a page that is no page. It does not find a number that changed in one, nor rows that are gone
because its log was lost. So there is one row more, the digest of all rows: each transaction brings it up to
date, and whoever opens the database compares. Another row counts the transactions, and a second file has them
all (redo.py): of the two, the one that is damaged or behind is made again from the other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from ..errors import Damaged, StoreError, Unreadable
from .disk import Warn, explained, is_shared, private, set_aside, silent, unshare
from .redo import Recovered, Redo, digest_of_rows, packed, toggled

OURS = """
CREATE TABLE IF NOT EXISTS seal (digest BLOB NOT NULL);
INSERT INTO seal SELECT zeroblob(16) WHERE NOT EXISTS (SELECT 1 FROM seal);
CREATE TABLE IF NOT EXISTS commits (number INTEGER PRIMARY KEY, tables BLOB NOT NULL);
"""
DISK = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
IN_USE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
NOT_OURS = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}
ALONE_S, SHARED_S = 5.0, 600.0  # how long another process that writes is waited for
CACHE_KIB = 256  # of pages that SQLite keeps in memory: a transaction is about the newest rows
PRIMARY = 0xFF  # the part of an extended error code that says what kind it is


class Database:
    """Tables with a digest. Every failure is a StoreError that names the file and says what to do."""

    def __init__(
        self, path: Path, tables: str = "", *, read_only: bool = False, durable: bool = True, remedy: str,
        shared: bool = False, warn: Warn = silent,
    ) -> None:  # fmt: skip
        """`tables`: CREATE TABLE IF NOT EXISTS ...; `durable`: a transaction waits for the disk, and no power
        cut takes it back; without, one may damage both files. `remedy`: what to do where both are damaged.
        `warn` hears of one that was, and was made again. `shared`: several processes write the database at
        once, and it has neither a digest nor a second file: what its rows name has its own."""
        self.path, self._remedy = path, remedy
        self._redo = None if read_only or shared else Redo(path.with_suffix(".redo"), durable=durable)
        self._db: sqlite3.Connection
        self._keys: dict[str, dict[str, int]] = {}  # table -> see _key
        self._known: frozenset[str] = frozenset()  # see _tables
        try:
            if self._redo is not None:
                self._open_both(self._redo, tables, warn)
            elif read_only:
                with self._explained():
                    self._connect_to_read()
                    if not shared:
                        self._compare()
            else:
                with self._explained():
                    self._connect(SHARED_S)
                    self._db.executescript(f"BEGIN IMMEDIATE;{tables};COMMIT;")
        except BaseException:
            self.close()
            raise

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Every row that a SELECT finds."""
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    def one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """The first row that a SELECT finds; None without one."""
        rows = self.all(sql, values)
        return rows[0] if rows else None

    # Only these three write, and each is a transaction by itself where none is open.

    def put(self, table: str, *row: Any) -> None:
        """Write a row, in the place of one with the same key; structs, lists and dicts as JSON."""
        plain = [
            v if isinstance(v, str | int | float | bytes | None) else msgspec.json.encode(v).decode()
            for v in row
        ]
        with self._joined():
            key = self._key(table)
            same, own = " AND ".join(f"{name} = ?" for name in key), [plain[at] for at in key.values()]
            self._note(False, table, same, own)
            places = ", ".join("?" * len(row))
            self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({places})", plain)  # noqa: S608 - ours
            self._note(True, table, same, own)

    def delete(self, table: str, where: str = "TRUE", values: Sequence[Any] = ()) -> None:
        """Remove the rows that are so."""
        with self._joined():
            self._note(False, table, where, values)
            self._db.execute(f"DELETE FROM {table} WHERE {where}", values)  # noqa: S608 - names of ours

    def update(self, table: str, new: dict[str, Any], where: str, values: Sequence[Any] = ()) -> int:
        """Give the rows that are so these values, in columns that are no key; how many there are."""
        with self._joined():
            found = self._db.execute(f"SELECT * FROM {table} WHERE {where}", values)  # noqa: S608 - ours
            names, rows = [about[0] for about in found.description], found.fetchall()
            for row in rows:
                self.put(table, *(dict(zip(names, row, strict=True)) | new).values())
        return len(rows)

    def _joined(self) -> AbstractContextManager[None]:
        """The transaction that is open, or one of its own."""
        return nullcontext() if self._db.in_transaction else self.transaction()

    def _key(self, table: str) -> dict[str, int]:
        """The columns of a table's key, each with its place in a row."""
        if table not in self._keys:
            columns = self._db.execute(f"PRAGMA table_info({table})")
            self._keys[table] = {name: at for at, name, *_, is_key in columns if is_key}
        return self._keys[table]

    def _note(self, added: bool, table: str, where: str, values: Sequence[Any]) -> None:
        """The rows that are so have been added, or are about to be removed."""
        if self._redo is not None:
            for row in self._db.execute(f"SELECT * FROM {table} WHERE {where}", values):  # noqa: S608 - ours
                self._redo.note(added, (table, *row))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes of the block or, when it raises, none."""
        with self._explained():
            if self._redo is not None and is_shared(self.path):
                self._db.close()
                self._connect(ALONE_S)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                if self._redo is not None and self._redo.changed:
                    number, tables, digest = self._db.execute("SELECT * FROM commits, seal").fetchone()
                    self._redo.note(False, ("commits", number, tables))
                    self._db.execute("UPDATE commits SET number = ?", (number + 1,))
                    self._redo.append(number + 1, self._seal(self._redo, number + 1, tables, digest))
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    if self._db.in_transaction:  # a full disk has ended it already
                        self._db.execute("ROLLBACK")
                    if self._redo is not None:
                        self._redo.take_back(self._state()[0])
                raise
            self._copy_log()
            if self._redo is not None and self._redo.too_long:
                self._redo.begin(*self._state(), self._count(), self._rows())

    def _copy_log(self) -> None:
        """Bring what was committed from SQLite's log into the database. Where a reader still needs the rows
        of before, they stay in the log for now."""
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        if self._redo is not None:
            self._redo.close()
        if hasattr(self, "_db"):
            with self._explained():
                self._db.close()

    # --- as it is opened

    def _open_both(self, redo: Redo, tables: str, warn: Warn) -> None:
        """The database and its redo log, each as it was; `warn` hears which of them was not."""
        logged, lost = redo.read(), "" if self.path.exists() else f"{self.path} is gone."
        try:
            own = self._open(redo, tables)
        except Damaged as e:
            if logged.number < 0 and redo.path.exists():
                raise
            self._db.close()
            lost = f"{str(e).removesuffix(self._remedy)}{set_aside(self.path)}"
            for end in ("-wal", "-shm"):
                self.path.with_name(self.path.name + end).unlink(missing_ok=True)
            own = self._open(redo, tables)
            if logged.number < 0:  # the log comes before the first transaction: there was none
                warn(f"{lost} There was no {redo.path.name}: it begins anew.")
        number, digest, told = self._db.execute("SELECT number, digest, tables FROM commits, seal").fetchone()
        if logged.number > number:
            self._replace(logged)
            (told,) = self.one("SELECT tables FROM commits")
            last = f"the last {logged.number - number} of its transactions"
            lost = lost or f"{self.path} lacks {last}: a kill, a lost -wal file, or it is an old copy."
            warn(f"{lost} It was made again from {redo.path.name}.")
        elif logged.number == number and logged.digest != digest:
            raise Damaged(f"{self.path} and {redo.path} tell different things. {self._remedy}")
        if logged.wrong or logged.number < number:
            wrong = logged.wrong or f"it lacks the last {number - max(logged.number, 0)} transactions"
            aside = set_aside(redo.path, stays=True) if redo.path.exists() else ""
            self._db.execute("BEGIN")  # one lock for all that is read
            redo.begin(*self._state(), self._count(), self._rows())
            self._db.execute("COMMIT")
            if aside or number > 1:  # else it is new, or an earlier fedtrain had none
                warn(f"{redo.path} is damaged or old: {wrong}. {aside} It was made again.")
        if told != own:  # a later fedtrain has more
            self.update("commits", {"tables": own}, "TRUE")
        with self._explained():
            self._copy_log()  # also of what a killed process had committed

    def _open(self, redo: Redo, tables: str) -> bytes:
        """The database as it is on the disk, with a digest that each change brings up to date; the digest of
        its tables."""
        with self._explained():
            self._connect(ALONE_S)
            before = self._compare()
            if before and "seal" not in before:
                earlier = "has no digest: an earlier fedtrain wrote it, or it is damaged"
                raise Damaged(f"{self.path} {earlier}. {self._remedy}")
            self._db.executescript(f"BEGIN IMMEDIATE;{OURS}{tables}")
            self._known, own = frozenset(), self._definitions()  # it may have more now
            if not self._db.execute("SELECT 1 FROM commits").fetchone():
                self._db.execute("INSERT INTO commits VALUES (?, ?)", (number := int(bool(before)), own))
                self._seal(redo, number, own, *self._db.execute("SELECT digest FROM seal").fetchone())
            self._db.execute("COMMIT")
            redo.forget()
            return own

    def _seal(self, redo: Redo, number: int, tables: bytes, before: bytes) -> bytes:
        """Bring the digest of all rows, which was `before`, up to date; this row says which transaction was
        the last one."""
        redo.note(True, ("commits", number, tables))
        digest = toggled(before, *redo.noted)
        self._db.execute("UPDATE seal SET digest = ?", (digest,))
        return digest

    def _connect(self, wait_s: float) -> None:
        for end in ("", "-wal", "-shm") if self._redo is not None else ():
            unshare(f"{self.path}{end}")
        with explained(self.path):  # made here, it is for nobody else; SQLite's other files are as it is
            os.close(private(self.path, os.O_RDWR | os.O_CREAT))
        self._db, self._known = sqlite3.connect(self.path, timeout=wait_s, isolation_level=None), frozenset()
        self._db.execute("PRAGMA synchronous=OFF")  # the redo log has what must not be lost
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA wal_autocheckpoint=0")
        self._db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")

    def _connect_to_read(self) -> None:
        """Open the file as it is. Beside a file of a folder that can't be written, SQLite can't make what
        readers and writers share; without a log there is no writer either, and the file holds everything."""
        uri = f"{self.path.absolute().as_uri()}?mode=ro"  # as_uri quotes #, ? and %
        log = self.path.with_name(f"{self.path.name}-wal")
        if not (os.access(self.path.parent, os.W_OK) or (log.exists() and log.stat().st_size)):
            uri += "&immutable=1"
        self._db = sqlite3.connect(uri, timeout=ALONE_S, uri=True, isolation_level=None)

    def _replace(self, logged: Recovered) -> None:
        """Have these rows in the place of those that are here."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for table in self._tables() - {"seal"}:
                    self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - a name of ours
                for row in logged.rows.values():
                    table, *values = msgspec.msgpack.decode(row)
                    self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)  # noqa: S608
                self._db.execute("UPDATE seal SET digest = ?", (logged.digest,))
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # as in _compare
                    self._db.execute("ROLLBACK")
                raise
            self._copy_log()
        assert self._redo is not None
        self._redo.forget()

    def _state(self) -> tuple[int, bytes]:
        """The number of the last transaction, and the digest of all rows."""
        found: tuple[int, bytes] = self._db.execute("SELECT number, digest FROM commits, seal").fetchone()
        return found

    def _rows(self) -> Iterator[bytes]:
        """All of them, one after the other, as `packed`."""
        for table in sorted(self._tables() - {"seal"}):
            for row in self._db.execute(f"SELECT * FROM {table}"):  # noqa: S608 - a name of ours
                yield packed((table, *row))

    def _count(self) -> int:
        """How many `_rows` gives."""
        counts = (f"(SELECT COUNT(*) FROM {table})" for table in self._tables() - {"seal"})  # noqa: S608
        found: tuple[int] = self._db.execute(f"SELECT {' + '.join(counts)}").fetchone()
        return found[0]

    def _compare(self) -> frozenset[str]:
        """Damaged unless tables and rows are those that were written; the names of the tables."""
        self._db.execute("BEGIN")  # one moment's rows, where another process writes
        try:
            tables = self._tables()
            if "seal" not in tables:
                return tables  # a new one; or one that an earlier fedtrain wrote
            wrong = " ".join(self._db.execute("PRAGMA integrity_check(1)").fetchone()[0].split())
            if wrong == "ok" and self._db.execute("SELECT digest FROM seal").fetchall() != [
                (digest_of_rows(self._rows()),)
            ]:
                wrong = "its rows do not have the digest they were written with"
            if wrong == "ok" and "commits" in tables:
                own = self._db.execute("SELECT tables FROM commits").fetchone()
                if own not in (None, (self._definitions(),)):
                    wrong = "its tables are not those that were made"
            if wrong != "ok":
                raise Damaged(f"{self.path} is damaged: {wrong}. {self._remedy}")
            return tables
        finally:
            if self._db.in_transaction:  # where the disk failed, SQLite has ended it by itself
                self._db.execute("ROLLBACK")

    def _definitions(self) -> bytes:
        """The digest of what says which tables there are."""
        rows = self._db.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        return hashlib.sha256(msgspec.msgpack.encode(rows)).digest()

    def _tables(self) -> frozenset[str]:
        """Their names, which stay as they are once the database is open."""
        if not self._known:
            found = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self._known = frozenset(name for (name,) in found if not name.startswith("sqlite_"))
        return self._known

    def _explained(self) -> _Explained:
        return _Explained(self)

    def _explain(self, e: Exception) -> StoreError:
        code = getattr(e, "sqlite_errorcode", 0)
        if code & PRIMARY in DISK and code != sqlite3.SQLITE_IOERR_SHORT_READ:
            free = shutil.disk_usage(self.path.parent).free
            return Unreadable(
                f"{self.path} can't be read or written: {e}; {free:,} bytes are free on its disk. Free some, "
                f"or see to the disk and to the limit of open files: the same command goes on."
            )
        if code & PRIMARY in IN_USE:
            return StoreError(f"{self.path} is in use by another program: {e}. Close it there.")
        if code & PRIMARY in NOT_OURS and not os.access(self.path, os.W_OK):
            return StoreError(f"{self.path} can't be written: {e}. Whose folder is {self.path.parent}?")
        for file in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            if file.exists():
                with explained(file):  # of a log that can't be read SQLite says that it is damaged
                    file.read_bytes()
        return Damaged(f"{self.path} is damaged: {e}. {self._remedy}")


class _Explained:
    """What SQLite has against a block is a StoreError."""

    __slots__ = ("_of",)

    def __init__(self, of: Database) -> None:
        self._of = of

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # UnicodeDecodeError: SQLite's message quotes a damaged name.
        if isinstance(error, sqlite3.Error | UnicodeDecodeError):
            raise self._of._explain(error) from error
