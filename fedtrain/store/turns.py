"""The turns of an asynchronous run, and the buffer of updates that wait for the next version of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from ..arena import AnyArena, ArenaFile
from ..errors import StoreError, Unreadable
from ..messages import Metrics, SiteId, Update
from .folder import RunFolder

TABLES = """
CREATE TABLE IF NOT EXISTS turns (
  site TEXT PRIMARY KEY, number INTEGER NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS buffer (
  site TEXT NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL,
  num_examples REAL NOT NULL, metrics BLOB NOT NULL, PRIMARY KEY (site, number));
"""


class TurnState(StrEnum):
    """Of a site's latest turn."""

    OWED = "owed"  # asked, not answered yet
    TAKEN = "taken"  # its update is in the buffer, or in a version already
    REFUSED = "refused"  # nothing came of it


@dataclass(frozen=True)
class Turn:
    """A training that one site of an asynchronous run was asked for."""

    number: int  # how often it was asked before
    version: int  # of the model that it trains
    state: TurnState = TurnState.OWED


@dataclass(frozen=True)
class Buffered:
    """An update that waits for the next version."""

    site: SiteId
    turn: Turn
    update: Update


class Turns:
    """The turns and the buffer in a run's folder."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._db = run, run.db

    def latest(self) -> dict[SiteId, Turn]:
        """The latest turn of each site."""
        rows = self._db.all("SELECT site, number, version, state FROM turns")
        return {site: Turn(number, version, TurnState(state)) for site, number, version, state in rows}

    def set(self, site: SiteId, turn: Turn) -> None:
        """Make this the latest turn of a site."""
        self._db.put("turns", site, turn.number, turn.version, turn.state)

    def keep(self, site: SiteId, delta: AnyArena) -> ArenaFile:
        """A delta as a file in its site's inbox, where one that came over a network is already; from any
        thread."""
        inbox = self._run.inbox(site)
        path = inbox.file(delta.digest)
        if not inbox.has(delta.digest, delta.schema.nbytes):
            inbox.put(delta.digest, delta.payload, durable=self._run.durable)
        return ArenaFile(delta.schema, path, delta.digest)

    def take(self, site: SiteId, turn: Turn, update: Update) -> Buffered:
        """Put the update of a turn, its delta being kept, into the buffer. With that the turn is answered."""
        taken = replace(turn, state=TurnState.TAKEN)
        with self._db.transaction():
            self._db.put(
                "buffer", site, turn.number, turn.version, update.delta.digest, update.num_examples,
                msgspec.msgpack.encode(update.metrics),
            )  # fmt: skip
            self.set(site, taken)
        waiting = self._db.all("SELECT digest FROM buffer WHERE site = ?", (site,))
        self._run.inbox(site).keep_only(digest for (digest,) in waiting)
        return Buffered(site, taken, update)

    def discard(self, buffered: Buffered) -> None:
        """Take an update out of the buffer again."""
        key = buffered.site, buffered.turn.number
        self._db.delete("buffer", "site = ? AND number = ?", key)

    def buffered(self) -> list[Buffered]:
        """The buffer as it was left, in the order of (site, turn). What is not whole any more (a power cut)
        is owed again, unless its site has gone on to another turn."""
        rows = self._db.all(
            "SELECT site, number, version, digest, num_examples, metrics FROM buffer ORDER BY site, number"
        )
        found = []
        for site, number, version, digest, num_examples, metrics in rows:
            inbox, turn = self._run.inbox(site), Turn(number, version, TurnState.TAKEN)
            delta = ArenaFile(self._run.schema, inbox.file(digest), digest)
            kept = msgspec.msgpack.decode(metrics, type=Metrics)
            buffered = Buffered(site, turn, Update(delta=delta, num_examples=num_examples, metrics=kept))
            if inbox.has(digest, delta.schema.nbytes, again=True):
                found.append(buffered)
                continue
            with self._db.transaction():
                self.discard(buffered)
                again = {"state": TurnState.OWED}
                owed = self._db.update("turns", again, "site = ? AND number = ?", (site, number))
            how = "is asked for again" if owed else "is lost"
            self._run.back(f"{delta.path} is not whole: turn {number + 1} of {site} {how}.")
        return found

    def refuse_after(self, version: int) -> None:
        """Forget what was trained from later versions."""
        self._db.delete("buffer", "version > ?", (version,))
        self._db.update("turns", {"state": TurnState.REFUSED}, "version > ?", (version,))

    def refuse_unreadable(self, read: Callable[[int], object]) -> None:
        """Give up the turns that are owed from a version that `read` raises StoreError for: its weights are
        damaged, and their sites get another turn."""
        for (version,) in self._db.all("SELECT DISTINCT version FROM turns WHERE state = 'owed'"):
            try:
                read(version)
            except Unreadable:
                raise
            except StoreError as e:
                self._run.back(f"{e} Who was training from it begins another turn.")
                refused = {"state": TurnState.REFUSED}
                self._db.update("turns", refused, "state = 'owed' AND version = ?", (version,))
