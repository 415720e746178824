"""What all sites of a simulation keep from one training to the next, in two files that every trainer opens.

    memory/
      index.db     SQLite (WAL): which states of which site there are, and where
      states       the states, one after the other

A site's states are those that memory.SiteMemory keeps, by the same rule: a new one is written into a place
whose state is needed no more, and never over one that counted. So a trainer may be killed at any instant:
what was half written belongs to an update that nobody has. The system's page cache is the cache, and what it
has no room for is on the disk. Nothing waits for the disk, as nowhere in a simulation.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..arena import Arena
from ..digest import digest_of
from ..errors import Forgotten
from ..messages import SiteId
from .database import Database
from .disk import explained, private_folder
from .memory import NEVER, advice, needless, packed, unpacked

TABLES = """
CREATE TABLE IF NOT EXISTS states (
  place INTEGER PRIMARY KEY, room INTEGER NOT NULL, site TEXT NOT NULL, round INTEGER NOT NULL,
  nbytes INTEGER NOT NULL, digest TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_site ON states (site);
"""
INDEX, STATES = "index.db", "states"
TOGETHER_BYTES = 16 << 20  # of states that wait to be written together
ROOM = 64  # bytes; a place is a multiple of it
SPARE = NEVER - 1  # in place of a round: nobody needs what is in the place
REMEDY = "Start the simulation anew with --fresh."


class Memories:
    """The states of all simulated sites. Processes open them together, each for sites of its own."""

    def __init__(self, folder: Path, *, needed: bool = False, read_only: bool = False) -> None:
        """`needed`: as in SiteMemory."""
        self._folder, self._needed = folder, needed
        self._waiting: list[tuple[SiteId, int, int, bytes]] | None = None
        self._waiting_bytes = 0
        with explained(folder):
            if not read_only:
                private_folder(folder)
            flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
            self._file = os.open(folder / STATES, flags, 0o600)
        weakref.finalize(self, os.close, self._file)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # SQLite makes its log for one process at a time
        try:
            self._db = Database(
                folder / INDEX, TABLES, read_only=read_only, durable=False, remedy=REMEDY, shared=True
            )
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def of(self, site: SiteId) -> OneMemory:
        """The states of one site."""
        return OneMemory(self, site)

    def load(self, site: SiteId, counted: int) -> Arena:
        """As SiteMemory.load."""
        sql = "SELECT place, nbytes, digest FROM states WHERE site = ? AND round = ?"
        row = self._db.one(sql, (site, counted))
        if row is None:
            raise Forgotten(
                f"memory/{INDEX} has no state after round {counted + 1}, the last one in which {site} "
                f"counted. {advice(self._needed)}"
            )
        place, nbytes, digest = row
        with explained(self._folder / STATES):
            data = bytearray(max(0, min(nbytes, os.fstat(self._file).st_size - place)))
            got = os.preadv(self._file, [data], place)
        if got < nbytes or _digest(site, counted, data) != digest:
            raise Forgotten(
                f"memory/{STATES} is damaged, or memory/{INDEX}: {site} has another state there than after "
                f"round {counted + 1}. {advice(self._needed)}"
            )
        return unpacked(data)

    def keep(self, site: SiteId, round: int, counted: int, state: Arena) -> None:
        """As SiteMemory.keep; for any other process when this returns or, in `together`, when that ends."""
        alone = self._waiting is None
        waiting = self._waiting = self._waiting or []
        waiting.append((site, round, counted, packed(state)))
        self._waiting_bytes += len(waiting[-1][-1])
        if alone or self._waiting_bytes > TOGETHER_BYTES:
            self._write()
        if alone:
            self._waiting = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write what the block keeps at its end, or when there is much of it: a transaction has a price."""
        self._waiting = []
        try:
            yield
        finally:
            self._write()
            self._waiting = None

    def _write(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting or [], [], 0
        if not waiting:
            return
        with self._db.transaction(), explained(self._folder / STATES):
            for site, round, counted, data in waiting:
                place, room = self._place(site, counted, len(data))
                at = 0
                while at < len(data):
                    at += os.pwrite(self._file, memoryview(data)[at:], place + at)
                digest = _digest(site, round, data)
                self._db.put("states", place, room, site, round, len(data), digest)

    def _place(self, site: SiteId, counted: int, nbytes: int) -> tuple[int, int]:
        """(place, room) for a state: that of one that is needed no more, or the end. Such are forgotten."""
        rows = self._db.all("SELECT round, place, room FROM states WHERE site = ? ORDER BY place", (site,))
        needed_no_more = needless([number for number, _, _ in rows], counted)
        free = [(place, room) for number, place, room in rows if number in needed_no_more]
        chosen = next(((place, room) for place, room in free if room >= nbytes), None)
        for place, _ in free:
            if chosen is None or place != chosen[0]:
                self._db.update("states", {"round": SPARE}, "place = ?", (place,))
        if chosen is None:
            end = self._db.one("SELECT place + room FROM states ORDER BY place DESC LIMIT 1")
            chosen = end[0] if end else 0, -(-nbytes // ROOM) * ROOM
        return chosen


def _digest(site: SiteId, round: int, data: bytes | bytearray) -> str:
    """Of a state and whose it is."""
    return digest_of(f"{site}/{round}/{digest_of(memoryview(data))}".encode())


@dataclass(frozen=True)
class OneMemory:
    """The states of one simulated site, as a SiteMemory."""

    memories: Memories
    site: SiteId

    empty = False  # one that is asked has something, or its file was lost

    def load(self, counted: int) -> Arena:
        """As SiteMemory.load."""
        return self.memories.load(self.site, counted)

    def keep(self, round: int, counted: int, state: Arena) -> None:
        """As SiteMemory.keep."""
        self.memories.keep(self.site, round, counted, state)
