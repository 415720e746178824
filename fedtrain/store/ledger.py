"""What a site remembers: the replies it has finished, so that none is worked out twice.

runs/heart@cleveland/
  ledger.db    SQLite: reply headers by what they answer
  inbox/       the global models being trained on, by digest (see spool.py)
  outbox/      finished updates, by digest
  newest.json  where sites have models of their own: which global model is in the inbox
  sums.json    under masks: the newest rounds that were unmasked, and over whom, by kind of request

What is damaged here is set aside, and trained or fetched again; sums.json, which can't be, has a copy.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import Damaged
from ..messages import SiteId
from .database import Database
from .disk import (
    FREE,
    Kept,
    Warn,
    explained,
    lock,
    read_sealed,
    refuse_network_disk,
    sealed,
    set_aside,
    silent,
    write_whole,
)
from .spool import Spool

DB, LOG = "ledger.db", ("ledger.db-wal", "ledger.db-shm", "ledger.redo")
TABLES = """CREATE TABLE IF NOT EXISTS replies (
  key TEXT PRIMARY KEY, body BLOB NOT NULL, digest TEXT, nbytes INTEGER);
CREATE TABLE IF NOT EXISTS models (number INTEGER PRIMARY KEY, model TEXT NOT NULL)"""
SUMS, NEWEST = "sums.json", "newest.json"
Sum = tuple[int, tuple[SiteId, ...]]  # a round, and over whom its update was summed
Sums = dict[str, tuple[Sum, ...]]
KEEP = 2  # newest replies: this round's and, for an aggregator that was restarted, the one before


class Newest(msgspec.Struct, frozen=True):
    """The newest global model that a site was sent."""

    round: int  # of the request
    weights: str  # digest
    frozen: str  # digest of the run's frozen parameters; "" without any
    counted: int  # the last round in which the site counted, as in messages.Train


class Ledger:
    """One site's directory for one run; held by one process at a time."""

    def __init__(self, folder: Path, warn: Warn = silent, records: Path | None = None) -> None:
        """`warn` hears of what is damaged. `records`: of the site, over all its runs."""
        refuse_network_disk(folder)
        self.folder, self.warn, self._lock = folder, warn, lock(folder)
        self.records = records
        try:
            self.inbox, self.outbox = Spool(folder / "inbox", warn), Spool(folder / "outbox", warn)
            remedy = "Use another run.name: without it this site could give one update into two sums."
            self._sums = Kept(folder / SUMS, Sums, remedy, warn)
            self._db = self._open(warn)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, warn: Warn) -> Database:
        path, remedy = self.folder / DB, "What it knew is worked out again."
        # a power cut may lose replies: they are then trained again, to the same bits
        for last in (False, True):
            try:
                return Database(path, TABLES, durable=False, remedy=remedy, warn=warn)
            except Damaged as e:
                if last:
                    raise
                for name in LOG:
                    (self.folder / name).unlink(missing_ok=True)
                warn(f"{e} {set_aside(path)}")
        raise AssertionError("unreachable")

    def get(self, key: str) -> bytes | None:
        """The header of the finished reply, when the bytes it names are still here, and whole."""
        row = self._db.one("SELECT body, digest, nbytes FROM replies WHERE key = ?", (key,))
        if row is None or not self.outbox.has(row[1], row[2], again=True):
            return None
        return bytes(row[0])

    def put(self, key: str, body: bytes, digest: str, nbytes: int) -> None:
        """Remember a reply whose bytes are in the outbox; the oldest ones are forgotten."""
        with self._db.transaction():
            self._db.put("replies", key, body, digest, nbytes)
            newest = "SELECT rowid FROM replies ORDER BY rowid DESC LIMIT ?"
            self._db.delete("replies", f"rowid NOT IN ({newest})", (KEEP,))
        self.outbox.keep_only([digest for (digest,) in self._db.all("SELECT digest FROM replies")])

    def model_of(self, number: int, model: str) -> str:
        """The model that this site was first asked about after so many rounds: this one, if none was."""
        if row := self._db.one("SELECT model FROM models WHERE number = ?", (number,)):
            return str(row[0])
        self._db.put("models", number, model)
        return model

    def spare(self) -> Path:
        """Where the next update is to be written: over an old one's file, when one is done with."""
        path, free = self.folder / "delta", self.outbox.folder / FREE
        with explained(path):
            if free.exists():
                free.replace(path)
        return path

    def keep_newest(self, newest: Newest) -> None:
        """Say what the model in the inbox is."""
        write_whole(self.folder / NEWEST, sealed(newest), durable=False)

    def newest(self) -> Newest | None:
        """What was given to `keep_newest` last; None where that is gone or damaged: the next one is kept."""
        path = self.folder / NEWEST
        try:
            return read_sealed(path, Newest) if path.exists() else None
        except Damaged:
            return None

    def sums(self) -> dict[str, tuple[Sum, ...]]:
        """kind -> the newest sums, the last one first, as given to `keep_sum`."""
        found = self._sums.read()
        kinds = {kind for each in found for kind in each}
        return {kind: max(each[kind] for each in found if kind in each) for kind in sorted(kinds)}

    def keep_sum(self, kind: str, newest: tuple[Sum, ...]) -> None:
        """On disk when this returns: no power cut makes a site give one update into two sums."""
        self._sums.write(self.sums() | {kind: newest})

    def close(self) -> None:
        self._db.close()
        self._lock.close()
