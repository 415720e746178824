"""The run directory of whoever coordinates: every committed round, whole or not at all.

    runs/heart/
      run.db         SQLite (WAL): what the run is, its rounds, its plan for the round under way
      blobs/         models and strategy states under their digest, written before the row that names them;
                     a model's frozen parameters once
      inbox/SITE/    updates of the round under way, or of an asynchronous run's buffer (see spool.py)
      events.jsonl   what happened, for people (tracking/)

A round's row is its commit. A crash at any instant leaves the last row's round: its blobs were complete
before it, and nothing that an older row needs is removed until after it. Nothing is used before its digest
is right: a damaged blob is set aside, and the run goes on from the round before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..arena import PATCHES, AnyArena, Arena, ArenaFile, Frozen, Patch
from ..errors import Damaged, StoreError
from ..messages import Metrics, SiteId, Update
from ..schema import Schema
from .database import Database
from .disk import Warn, explained, lock, refuse_network_disk, silent
from .spool import Spool, damage, is_digest

if TYPE_CHECKING:
    import torch

VERSION = 2
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (
  round INTEGER PRIMARY KEY, weights TEXT NOT NULL, state TEXT, state_schema TEXT,
  record TEXT NOT NULL, committed_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (
  round INTEGER PRIMARY KEY, metrics TEXT NOT NULL, best INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS plan (round INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, sites TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sites (name TEXT PRIMARY KEY, examples REAL);
CREATE TABLE IF NOT EXISTS turns (
  site TEXT PRIMARY KEY, number INTEGER NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS buffer (
  site TEXT NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL,
  num_examples REAL NOT NULL, metrics BLOB NOT NULL, PRIMARY KEY (site, number));
CREATE TABLE IF NOT EXISTS patches (round INTEGER PRIMARY KEY, digest TEXT NOT NULL, schema TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counted (round INTEGER PRIMARY KEY, sites BLOB NOT NULL);
"""
ANEW = "give the new run its own run.name, or (a simulation) start it with --fresh."  # of one that differs
KEEP = 2  # newest rounds whose weights and plans stay, beside the best one's weights
IN_A_COMMIT = 3  # blobs: the weights, the strategy's state and a patch


@dataclass(frozen=True)
class Checkpoint:
    """All that the next round starts from."""

    round: int  # rounds done
    weights: AnyArena
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    patch: AnyArena | None = None  # what made the weights of those of the round before, if anything did


@dataclass(frozen=True)
class Round:
    """A committed round, without its tensors."""

    round: int
    weights: str  # digest
    committed_at: float  # seconds since 1970, for people
    record: dict[str, Any]  # loss, sites, seconds, ...
    metrics: dict[str, float] | None  # of its evaluation, when there was one
    best: bool


@dataclass(frozen=True)
class RoundPlan:
    """Who was asked for the round under way: fixed before the first request goes out."""

    round: int
    attempt: int
    sites: list[SiteId]
    counted: Mapping[SiteId, int] = field(default_factory=dict)  # RunStore.counted, when it begins


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


class RunStore:
    """One run's directory. The writer holds its lock; readers open it read-only, beside a live run too."""

    def __init__(
        self, folder: Path, *, read_only: bool = False, durable: bool = True, warn: Warn = silent
    ) -> None:
        """`durable` waits for the disk at each commit, so that a power cut loses nothing either. `warn` hears
        of what is damaged and how the run goes on; a reader, who can't repair it, gets a StoreError."""
        if read_only and not (folder / "run.db").exists():
            raise StoreError(f"{folder} is not a run directory. `fedtrain runs` lists those that are.")
        if not read_only:
            refuse_network_disk(folder)
        self.folder, self.durable, self._lock = folder, durable, None
        self._warn = warn
        self.evaluating: int | None = None  # a round whose weights are needed until its evaluation is done
        self.blobs, self._models = folder / "blobs", Spool(folder / "blobs", warn)
        self._inboxes: dict[SiteId, Spool] = {}
        self._remedy = f"Restore it from a copy, or move {folder} away to start the run anew."
        if read_only:
            self._db = Database(folder / "run.db", read_only=True, remedy=self._remedy)
            return
        self._lock = lock(folder)
        try:
            self._db = Database(
                folder / "run.db", TABLES, sync="FULL" if durable else "OFF", remedy=self._remedy
            )
            self._check_that_nothing_is_lost()
        except BaseException:
            self._lock.close()
            raise

    def _check_that_nothing_is_lost(self) -> None:
        """StoreError where there are models and the database never heard of a round."""
        begun, strangers = self._db.one("SELECT 1 FROM rounds"), self._strangers()
        if strangers > (IN_A_COMMIT if self.meta() else 0) and not begun:
            raise StoreError(
                f"{self.folder / 'run.db'} knows of no round, though {self.blobs} has {strangers} files of "
                f"some: the database was lost. {self._remedy}"
            )

    def _strangers(self) -> int:
        """Blobs that no round names: those of a commit that a process died in. More: run.db is an old one."""
        named = {digest for row in self._db.all("SELECT weights, state FROM rounds") for digest in row}
        named |= {self.frozen.digest, *(digest for (digest,) in self._db.all("SELECT digest FROM patches"))}
        return sum(is_digest(path.name) and path.name not in named for path in self.blobs.iterdir())

    def inbox(self, site: SiteId) -> Spool:
        """Where what this site sends is kept, apart from what others send."""
        if site not in self._inboxes:
            self._inboxes[site] = Spool(self.folder / "inbox" / site, self._warn)
        return self._inboxes[site]

    def clear_inbox(self) -> None:
        """The round is committed: what was sent for it is not needed any more."""
        for folder in (self.folder / "inbox").glob("*"):
            self.inbox(folder.name).keep_only(())

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    # --- what the run is

    def meta(self) -> dict[str, Any]:
        return {k: msgspec.json.decode(v) for k, v in self._db.all("SELECT key, value FROM meta")}

    def begun(self) -> tuple[Schema, str] | None:
        """The model and the task's digest of the run that is here; None without one that we can read."""
        have = self.meta()
        if have.get("version") != VERSION:
            return None
        return self._schema, have.get("task_digest", "")

    def begin(
        self, schema: Schema, agreed: Mapping[str, str], *, frozen: Schema = Schema(()), **meta: Any
    ) -> None:
        """Say what this run is, or check that it is the one begun here. `frozen`: schema of what
        `keep_frozen` keeps."""
        have = self.meta()
        if not have:
            have = {"version": VERSION, "schema": schema, "agreed": dict(agreed), **meta}
            with self._transaction():
                for key, value in have.items():
                    self._db.change(
                        "INSERT INTO meta VALUES (?, ?)", (key, msgspec.json.encode(value).decode())
                    )
            return
        if have["version"] != VERSION:
            raise StoreError(
                f"{self.folder} has store version {have['version']}; this fedtrain has {VERSION}."
            )
        changed = [k for k in sorted({*have["agreed"], *agreed}) if have["agreed"].get(k) != agreed.get(k)]
        if changed:
            was = ", ".join(f"{k} was {have['agreed'].get(k)}, is {agreed.get(k)}" for k in changed[:3])
            raise StoreError(
                f"{self.folder} holds a run of another configuration: {was}. Change it back, {ANEW}"
            )
        kept = self.frozen.schema if "frozen" in have else frozen
        if difference := self._schema.difference(schema) or kept.difference(frozen):
            raise StoreError(
                f"{self.folder} holds a run of another model: {difference}. Change it back, {ANEW}"
            )
        if have.get("task_digest") != meta.get("task_digest"):
            raise StoreError(
                f"{self.folder} was begun with other task code (comments and layout don't count). "
                f"Change it back, {ANEW}"
            )

    def keep_frozen(self, arena: Arena) -> None:
        """Keep the run's frozen parameters, before its first round; later StoreError for others. An arena
        without any is not kept."""
        found = Frozen.of(arena)
        if found != self.frozen and self._db.one("SELECT 1 FROM rounds"):
            raise StoreError(
                f"{self.blobs / self.frozen.digest}, the run's frozen parameters, is gone, and the task's "
                f"model() gives others. {self._remedy}"
            )
        if found.digest:
            self._put(arena)
            with self._transaction():
                text = msgspec.json.encode(found).decode()
                self._db.change("INSERT OR REPLACE INTO meta VALUES ('frozen', ?)", (text,))
            self.__dict__.pop("frozen", None)

    @cached_property
    def frozen(self) -> Frozen:
        """What names the run's frozen parameters."""
        row = self._db.one("SELECT value FROM meta WHERE key = 'frozen'")
        return msgspec.json.decode(row[0], type=Frozen) if row else Frozen()

    def has_frozen(self, schema: Schema) -> bool:
        """Whether the run's frozen parameters, of this schema, are here; damaged ones are not."""
        frozen = self.frozen
        return not schema.tensors or (bool(frozen.digest) and self._models.has(frozen.digest, schema.nbytes))

    def frozen_file(self) -> ArenaFile | None:
        """Where they lie; None of a model without any."""
        frozen = self.frozen
        return ArenaFile(frozen.schema, self.blobs / frozen.digest, frozen.digest) if frozen.digest else None

    def load_frozen(self) -> Arena:
        """Their bytes; StoreError when they are damaged."""
        file = self.frozen_file()
        if file is None:
            return Arena.zeros(Schema(()))
        wrong = damage(file.path, file.digest, file.schema.nbytes) if file.path.exists() else "gone"
        if wrong:
            raise Damaged(f"{file.path}, the frozen parameters of {self.folder}, is damaged ({wrong}).")
        return file.load()

    # --- committed rounds

    def prepare(self, checkpoint: Checkpoint) -> tuple[str, Arena | None]:
        """Bring a round's bytes onto the disk; from any thread. `commit` is quick with what this returns."""
        packed = Arena.pack(checkpoint.state) if checkpoint.state else None
        if packed is not None:
            self._put(packed)
        if checkpoint.patch is not None:
            self._put(checkpoint.patch)
        return self._put(checkpoint.weights), packed

    def commit(
        self,
        checkpoint: Checkpoint,
        record: Mapping[str, Any],
        prepared: tuple[str, Arena | None] | None = None,
        sites: Iterable[SiteId] = (),
    ) -> None:
        """Make a round the last one. Before this returns the round before it is; after it, this one.

        `prepared` is what `prepare` returned for it, where that was called before; `sites`: whose updates are
        in it, unless they were in the buffer.
        """
        weights, packed = prepared or self.prepare(checkpoint)
        state = state_schema = None
        if packed is not None:
            state, state_schema = packed.digest, msgspec.json.encode(packed.schema).decode()
        with self._transaction():
            self._db.change(
                "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?, ?)",
                (checkpoint.round, weights, state, state_schema,
                 msgspec.json.encode(dict(record)).decode(), time.time()),
            )  # fmt: skip
            self._db.change("DELETE FROM plan WHERE round <= ?", (checkpoint.round - KEEP,))
            if counted := self.counted() | dict.fromkeys(sites, checkpoint.round - 1):
                self._db.change(
                    "INSERT OR REPLACE INTO counted VALUES (?, ?)",
                    (checkpoint.round, msgspec.msgpack.encode(counted)),
                )
            self._db.change("DELETE FROM counted WHERE round <= ?", (checkpoint.round - KEEP,))
            if (patch := checkpoint.patch) is not None:
                most = min(PATCHES, checkpoint.weights.schema.nbytes // max(patch.schema.nbytes, 1))
                schema = msgspec.json.encode(patch.schema).decode()
                self._db.change(
                    "INSERT OR REPLACE INTO patches VALUES (?, ?, ?)",
                    (checkpoint.round, patch.digest, schema),
                )
                self._db.change("DELETE FROM patches WHERE round <= ?", (checkpoint.round - most,))
            self._db.change("DELETE FROM buffer")  # all of it is in this version
        self._sweep()

    def on_disk(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same committed round with its weights left in their file: sent from there, read by the next
        step, so that between rounds no model is held in memory."""
        digest = checkpoint.weights.digest
        weights = ArenaFile(checkpoint.weights.schema, self.blobs / digest, digest)
        weights.patches = self.patches(checkpoint.round)
        return Checkpoint(checkpoint.round, weights, checkpoint.state)

    def patches(self, number: int) -> tuple[Patch, ...]:
        """Those that lead to the weights of a round, one after the other, as far as they are kept."""
        rows = self._db.all(
            "SELECT r.round, r.weights, p.digest, p.schema FROM patches p JOIN rounds r "
            "ON r.round = p.round - 1 WHERE p.round <= ? ORDER BY p.round DESC",
            (number,),
        )
        found: list[Patch] = []
        for i, (before, base, digest, text) in enumerate(rows):
            schema = msgspec.json.decode(text, type=Schema)
            if before != number - 1 - i or not self._models.has(digest, schema.nbytes):
                break
            found.append(Patch(base, ArenaFile(schema, self.blobs / digest, digest)))
        return tuple(reversed(found))

    def latest(self) -> Checkpoint | None:
        """The newest round whose bytes are whole; those after it are forgotten, and `warn` is told. None
        before the first one, also where the initial model's own bytes are damaged."""
        rounds = [number for (number,) in self._db.all("SELECT round FROM rounds ORDER BY round DESC")]
        damaged: list[StoreError] = []
        for number in rounds:
            try:
                checkpoint = self.load(number)
            except StoreError as e:
                if self._lock is None:
                    raise
                damaged.append(e)
                continue
            if damaged:
                self._warn(f"{damaged[0]} The run goes on after round {number}.")
                self.forget_after(number)
            elif self._lock and (strangers := self._strangers()) > IN_A_COMMIT:
                self._warn(
                    f"{self.folder / 'run.db'} may be an old copy: {strangers} files in {self.blobs} are of "
                    f"none of its rounds. The run goes on after round {number}."
                )
            if self._lock is not None:
                self._forget_owed()
            return checkpoint
        if damaged and rounds != [0]:
            old = f"{self.folder / 'run.db'} may be an old copy. " if self._strangers() > IN_A_COMMIT else ""
            raise StoreError(f"{damaged[0]} {old}{self._remedy}")
        if damaged:
            self._warn(f"{damaged[0]} The run begins anew.")
            self.forget_after(-1)
        return None

    def forget_after(self, number: int) -> None:
        """A round is the last one again: the run goes on from there."""
        with self._transaction():
            self._db.change("DELETE FROM rounds WHERE round > ?", (number,))
            self._db.change("DELETE FROM evaluations WHERE round > ?", (number,))
            self._db.change("DELETE FROM plan WHERE round > ?", (number,))
            self._db.change("DELETE FROM counted WHERE round > ?", (number,))
            self._db.change("DELETE FROM patches WHERE round > ?", (number,))
            self._db.change("DELETE FROM buffer WHERE version > ?", (number,))
            self._db.change("UPDATE turns SET state = 'refused' WHERE version > ?", (number,))

    def _forget_owed(self) -> None:
        """A turn whose version's weights are damaged can't be had any more; its site gets another one."""
        for (version,) in self._db.all("SELECT DISTINCT version FROM turns WHERE state = 'owed'"):
            try:
                self.weights(version)
            except StoreError as e:
                self._warn(f"{e} Who was training from it begins another turn.")
                with self._transaction():
                    self._db.change(
                        "UPDATE turns SET state = 'refused' WHERE state = 'owed' AND version = ?", (version,)
                    )

    def weights(self, number: int) -> ArenaFile:
        """The weights of a committed round that are still kept, left in their file."""
        row = self._db.one("SELECT weights FROM rounds WHERE round = ?", (number,))
        if row is None:
            raise StoreError(f"{self.folder} has no round {number}.")
        self._check(row[0], self._schema.nbytes, number)
        weights = ArenaFile(self._schema, self.blobs / row[0], row[0])
        weights.patches = self.patches(number)
        return weights

    def load(self, number: int) -> Checkpoint:
        """A committed round whose weights are still kept; its digests are checked."""
        row = self._db.one("SELECT weights, state, state_schema FROM rounds WHERE round = ?", (number,))
        if row is None:
            raise StoreError(f"{self.folder} has no round {number}.")
        weights, state, state_schema = row
        schema = self._schema
        tensors = {}
        if state is not None:
            packed = msgspec.json.decode(state_schema, type=Schema)
            tensors = {n: t.clone() for n, t in self._get(packed, state, number).views().items()}
        return Checkpoint(number, self._get(schema, weights, number), tensors)

    def rounds(self) -> list[Round]:
        """Every committed round, oldest first."""
        rows = self._db.all(
            "SELECT r.round, r.weights, r.committed_at, r.record, e.metrics, e.best FROM rounds r "
            "LEFT JOIN evaluations e ON e.round = r.round ORDER BY r.round"
        )
        return [
            Round(n, w, at, msgspec.json.decode(record), metrics and msgspec.json.decode(metrics), bool(best))
            for n, w, at, record, metrics, best in rows
        ]

    @property
    def best_round(self) -> int | None:
        return cast("int | None", self._db.one("SELECT MAX(round) FROM evaluations WHERE best")[0])

    def evaluation(self, number: int | None) -> dict[str, float] | None:
        """The metrics of a round, when it was evaluated."""
        row = self._db.one("SELECT metrics FROM evaluations WHERE round = ?", (number,))
        return msgspec.json.decode(row[0]) if row else None

    def evaluations_since_best(self) -> int:
        """How many evaluations with any metrics came after the best one; all of them when none was."""
        sql = "SELECT COUNT(*) FROM evaluations WHERE round > ? AND metrics != '{}'"
        return int(self._db.one(sql, (self.best_round or 0,))[0])

    def evaluated(self, number: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Keep a round's evaluation; a `best` round keeps its weights until a better one comes."""
        with self._transaction():
            self._db.change(
                "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)",
                (number, msgspec.json.encode(dict(metrics)).decode(), best),
            )

    # --- the round under way

    def plan(self, number: int) -> RoundPlan | None:
        """Of the round that follows the last one. That of a committed round stays for a while, for should its
        weights be damaged, the same sites are to be asked for it again."""
        row = self._db.one(
            "SELECT round, attempt, sites FROM plan "
            "WHERE round = ? AND round = (SELECT MAX(round) FROM rounds)",
            (number,),
        )
        return RoundPlan(row[0], row[1], msgspec.json.decode(row[2])) if row else None

    def set_plan(self, plan: RoundPlan) -> None:
        with self._transaction():
            self._db.change(
                "INSERT OR REPLACE INTO plan VALUES (?, ?, ?)",
                (plan.round, plan.attempt, msgspec.json.encode(plan.sites).decode()),
            )

    def turns(self) -> dict[SiteId, Turn]:
        """The latest turn of each site of an asynchronous run."""
        rows = self._db.all("SELECT site, number, version, state FROM turns")
        return {site: Turn(number, version, TurnState(state)) for site, number, version, state in rows}

    def set_turn(self, site: SiteId, turn: Turn) -> None:
        with self._transaction():
            self._set_turn(site, turn)

    def keep(self, site: SiteId, delta: AnyArena) -> ArenaFile:
        """A delta as a file in its site's inbox, where one that came over a network is already; from any
        thread."""
        inbox = self.inbox(site)
        path = inbox.path(delta.digest)
        if not inbox.has(delta.digest, delta.schema.nbytes):
            inbox.put(delta.digest, delta.payload, durable=self.durable)
        return ArenaFile(delta.schema, path, delta.digest)

    def take(self, site: SiteId, turn: Turn, update: Update) -> Buffered:
        """Put the update of a turn, its delta being kept, into the buffer. With that the turn is answered."""
        taken = replace(turn, state=TurnState.TAKEN)
        with self._transaction():
            self._db.change(
                "INSERT INTO buffer VALUES (?, ?, ?, ?, ?, ?)",
                (site, turn.number, turn.version, update.delta.digest, update.num_examples,
                 msgspec.msgpack.encode(update.metrics)),
            )  # fmt: skip
            self._set_turn(site, taken)
        waiting = self._db.all("SELECT digest FROM buffer WHERE site = ?", (site,))
        self.inbox(site).keep_only(digest for (digest,) in waiting)
        return Buffered(site, taken, update)

    def discard(self, buffered: Buffered) -> None:
        """Take an update out of the buffer again."""
        with self._transaction():
            key = buffered.site, buffered.turn.number
            self._db.change("DELETE FROM buffer WHERE site = ? AND number = ?", key)

    def buffered(self) -> list[Buffered]:
        """The buffer as it was left, in the order of (site, turn). What is not whole any more (a power cut)
        is owed again, unless its site has gone on to another turn."""
        rows = self._db.all(
            "SELECT site, number, version, digest, num_examples, metrics FROM buffer ORDER BY site, number"
        )
        found = []
        for site, number, version, digest, num_examples, metrics in rows:
            inbox = self.inbox(site)
            if not inbox.has(digest, self._schema.nbytes, again=True):
                with self._transaction():
                    self._db.change("DELETE FROM buffer WHERE site = ? AND number = ?", (site, number))
                    owed = self._db.change(
                        "UPDATE turns SET state = 'owed' WHERE site = ? AND number = ?", (site, number)
                    )
                    how = "is asked for again" if owed else "is lost"
                    self._warn(f"{inbox.path(digest)} is not whole: turn {number + 1} of {site} {how}.")
                continue
            kept = msgspec.msgpack.decode(metrics, type=Metrics)
            delta = ArenaFile(self._schema, inbox.path(digest), digest)
            update = Update(delta=delta, num_examples=num_examples, metrics=kept)
            found.append(Buffered(site, Turn(number, version, TurnState.TAKEN), update))
        return found

    def _set_turn(self, site: SiteId, turn: Turn) -> None:
        self._db.change(
            "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?)", (site, turn.number, turn.version, turn.state)
        )

    def counted(self) -> dict[SiteId, int]:
        """The last round (without rounds: turn) of each site that is in the model, or in the buffer."""
        row = self._db.one("SELECT sites FROM counted ORDER BY round DESC")
        found = msgspec.msgpack.decode(row[0], type=dict[SiteId, int]) if row else {}
        return found | dict(self._db.all("SELECT site, MAX(number) FROM buffer GROUP BY site"))

    def joined(self) -> dict[SiteId, float | None]:
        """Every site that ever joined this run, with the examples it registered."""
        return dict(self._db.all("SELECT name, examples FROM sites ORDER BY name"))

    def join(self, site: SiteId, examples: float | None) -> None:
        with self._transaction():
            self._db.change("INSERT OR REPLACE INTO sites VALUES (?, ?)", (site, examples))

    # --- bytes

    @cached_property
    def _schema(self) -> Schema:
        return msgspec.convert(self.meta()["schema"], Schema)

    def _put(self, arena: AnyArena) -> str:
        if not self._models.has(arena.digest, arena.schema.nbytes):
            self._models.put(arena.digest, arena.load().payload, durable=self.durable)
        return arena.digest

    def _get(self, schema: Schema, digest: str, number: int) -> Arena:
        self._check(digest, schema.nbytes, number, again=True)
        with explained(self.blobs / digest):
            return ArenaFile(schema, self.blobs / digest, digest).load()

    def _check(self, digest: str, nbytes: int, number: int, *, again: bool = False) -> None:
        """StoreError unless a round's blob is there and whole; `again`: as in Spool."""
        path = self.blobs / digest
        if path.exists():
            if self._lock is not None:
                wrong = self._models.wrong(digest, nbytes, again=again)
            elif wrong := damage(path, digest, nbytes):
                wrong = f"{path}: {wrong}."
        elif number in self._kept():
            wrong = f"{path} is gone."
        else:
            raise StoreError(
                f"round {number} of {self.folder} is not kept (only the best and the last {KEEP} are)."
            )
        if wrong:
            raise Damaged(f"round {number} of {self.folder} is damaged: {wrong}")

    def _kept(self) -> set[int]:
        """Rounds whose weights stay."""
        rows = self._db.all(
            "SELECT round FROM rounds WHERE round IN "
            "(SELECT round FROM rounds ORDER BY round DESC LIMIT ?) OR round IN (?, ?) "
            "OR round IN (SELECT version FROM turns WHERE state = 'owed')",
            (KEEP, self.best_round, self.evaluating),
        )
        return {number for (number,) in rows}

    def _sweep(self) -> None:
        """Remove the blobs that no kept round names."""
        kept = self._kept()
        rows = self._db.all("SELECT round, weights, state FROM rounds WHERE round >= ?", (min(kept),))
        self._models.keep_only(
            {digest for number, *digests in rows if number in kept for digest in digests if digest}
            | {self.frozen.digest}
            | {digest for (digest,) in self._db.all("SELECT digest FROM patches")}
        )

    def _transaction(self) -> AbstractContextManager[None]:
        return self._db.transaction()
