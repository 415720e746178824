"""What a site remembers: the replies it has finished, so that none is worked out twice.

runs/heart@cleveland/
  ledger.db    SQLite: reply headers by what they answer
  inbox/       the global models being trained on, by digest (see spool.py)
  outbox/      finished updates, by digest
  sums.json    under masks: the newest round that was unmasked, and over whom, by kind of request
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from ..errors import StoreError
from ..update import SiteId
from .disk import FREE, lock, refuse_network_disk, write_whole
from .spool import Spool

TABLE = """CREATE TABLE IF NOT EXISTS replies (
  key TEXT PRIMARY KEY, body BLOB NOT NULL, digest TEXT, nbytes INTEGER)"""
SUMS = "sums.json"
KEEP = 2  # newest replies: this round's and, for an aggregator that was restarted, the one before


class Ledger:
    """One site's directory for one run; held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        refuse_network_disk(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder)
        self.folder, self.inbox, self.outbox = folder, Spool(folder / "inbox"), Spool(folder / "outbox")
        self._db = sqlite3.connect(folder / "ledger.db", isolation_level=None)
        # A power cut may lose the newest reply: it is then trained again, to the same bits.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(TABLE)

    def get(self, key: str) -> bytes | None:
        """The header of the finished reply, when the bytes it names are still here."""
        row = self._db.execute("SELECT body, digest, nbytes FROM replies WHERE key = ?", (key,)).fetchone()
        if row is None or not self.outbox.has(row[1], row[2]):
            return None
        return bytes(row[0])

    def put(self, key: str, body: bytes, digest: str, nbytes: int) -> None:
        """Remember a reply whose bytes are in the outbox; the oldest ones are forgotten."""
        self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", (key, body, digest, nbytes))
        self._db.execute(
            "DELETE FROM replies WHERE rowid NOT IN (SELECT rowid FROM replies ORDER BY rowid DESC LIMIT ?)",
            (KEEP,),
        )
        self.outbox.keep_only(digest for (digest,) in self._db.execute("SELECT digest FROM replies"))

    def spare(self) -> Path:
        """Where the next update is to be written: over an old one's file, when one is done with."""
        path, free = self.folder / "delta", self.outbox.folder / FREE
        if free.exists():
            free.replace(path)
        return path

    def sums(self) -> dict[str, tuple[int, tuple[SiteId, ...]]]:
        """kind -> (round, sites), as last given to `keep_sum`."""
        path = self.folder / SUMS
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[int, tuple[SiteId, ...]]])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as e:
            raise StoreError(f"{path} is damaged: {e}. Use another run.name.") from None

    def keep_sum(self, kind: str, newest: tuple[int, tuple[SiteId, ...]]) -> None:
        """On disk when this returns: no power cut makes a site give one update into two sums."""
        found = self.sums() | {kind: newest}
        write_whole(self.folder / SUMS, msgspec.json.encode(found), durable=True)

    def close(self) -> None:
        self._db.close()
        self._lock.close()
