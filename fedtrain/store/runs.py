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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from ..arena import PATCHES, AnyArena, Arena, ArenaFile, Patch
from ..config.values import changes
from ..errors import Damaged, StoreError, Unreadable
from ..messages import SiteId
from ..schema import Schema
from . import counted, forgotten, turns
from .disk import Warn, explained, silent, sync_folder
from .folder import RunFolder
from .rounds import Checkpoint, Round, RoundPlan
from .spool import damage, is_digest

VERSION = 3
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (
  round INTEGER PRIMARY KEY, weights TEXT NOT NULL, state TEXT, state_schema TEXT,
  record TEXT NOT NULL, committed_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (
  round INTEGER PRIMARY KEY, metrics TEXT NOT NULL, best INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS plan (
  round INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, sites TEXT NOT NULL, registered INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS sites (name TEXT PRIMARY KEY, examples REAL);
CREATE TABLE IF NOT EXISTS patches (round INTEGER PRIMARY KEY, digest TEXT NOT NULL, schema TEXT NOT NULL);
"""
T = TypeVar("T")
ANEW = "give the new run its own run.name, or (a simulation) start it with --fresh."  # of one that differs
KEEP = 2  # newest rounds whose weights and plans stay, beside the best one's weights
IN_A_COMMIT = 3  # blobs: the weights, the strategy's state and a patch
OPENED = ("opened", "evaluated")  # rows of `meta`: whose sums of updates, and of evaluations, may be opened


class RunStore(RunFolder):
    """The rounds in a run's folder. Readers open it read-only, also while a run writes."""

    def __init__(
        self, folder: Path, *, read_only: bool = False, durable: bool = True, warn: Warn = silent,
        copies: bool = False, back: Warn | None = None,
    ) -> None:  # fmt: skip
        """See RunFolder; StoreError where the database was lost, too."""
        tables = TABLES + counted.TABLE + turns.TABLES
        super().__init__(
            folder, tables, read_only=read_only, durable=durable, warn=warn, copies=copies, back=back
        )
        self.turns = turns.Turns(self)
        self._counted = counted.CountedSites(self.db, read_only=read_only)
        self.evaluating: int | None = None  # a round whose weights are needed until its evaluation is done
        if not read_only:
            try:
                self._check_that_nothing_is_lost()
            except BaseException:
                self.close()
                raise

    def _check_that_nothing_is_lost(self) -> None:
        """StoreError where there are models and the database never heard of a round."""
        begun, strangers = self.db.one("SELECT 1 FROM rounds"), self._strangers()
        if strangers > (IN_A_COMMIT if self.meta() else 0) and not begun:
            raise StoreError(
                f"{self.folder / 'run.db'} knows of no round, though {self.blobs} has {strangers} files of "
                f"some: the database was lost. {self._remedy}"
            )

    def _strangers(self) -> int:
        """Blobs that no round names: those of a commit that a process died in. More: run.db is an old one."""
        named = {digest for row in self.db.all("SELECT weights, state FROM rounds") for digest in row}
        named |= {self.frozen.digest, *(digest for (digest,) in self.db.all("SELECT digest FROM patches"))}
        return sum(is_digest(path.name) and path.name not in named for path in self.blobs.iterdir())

    # --- what the run is

    def begun(self) -> tuple[Schema, str] | None:
        """The model and the task's digest of the run that is here; None without one that we can read."""
        have = self.meta()
        if have.get("version") != VERSION:
            return None
        return self.schema, have.get("task_digest", "")

    def forget_if_unused(self) -> None:
        """Where no round was done, forget what the run was begun with: nothing depends on it yet."""
        if self.db.one("SELECT MAX(round) FROM rounds")[0] or not self.meta():
            return
        self._models.keep_only(())
        if self.durable:  # models without a word of what they are would be those of a lost database
            sync_folder(self.blobs)
        with self.db.transaction():
            self.db.delete("meta")
        self.forget_after(-1)
        for cached in ("schema", "frozen"):
            self.__dict__.pop(cached, None)

    def begin(
        self, schema: Schema, agreed: Mapping[str, str], *, frozen: Schema = Schema(()), **meta: Any
    ) -> None:
        """Say what this run is, or check that it is the one begun here. `frozen`: schema of what
        `keep_frozen` keeps."""
        have = self.meta()
        if not have:
            have = {"version": VERSION, "schema": schema, "agreed": dict(agreed), **meta}
            with self.db.transaction():
                for key, value in have.items():
                    self.db.put("meta", key, msgspec.json.encode(value).decode())
            return
        if have["version"] != VERSION:
            raise StoreError(f"{self.folder} has store version {have['version']}; fedtrain has {VERSION}.")
        holds, back = f"{self.folder} holds a run of another", f"Change it back, {ANEW}"
        if changed := changes(have["agreed"], agreed):
            raise StoreError(f"{holds} configuration: {changed}. {back}")
        kept = self.frozen.schema if "frozen" in have else frozen
        if difference := self.schema.difference(schema) or kept.difference(frozen):
            raise StoreError(f"{holds} model: {difference}. {back}")
        if have.get("task_digest") != meta.get("task_digest"):
            raise StoreError(
                f"{self.folder} was begun with other task code (comments and layout don't count). {back}"
            )

    # --- committed rounds

    def prepare(self, checkpoint: Checkpoint) -> tuple[str, Arena | None]:
        """Bring a round's bytes onto the disk; from any thread. `commit` is quick with what this returns."""
        packed = Arena.pack(checkpoint.state) if checkpoint.state else None
        if packed is not None:
            self.put_blob(packed)
        if checkpoint.patch is not None:
            self.put_blob(checkpoint.patch)
        return self.put_blob(checkpoint.weights), packed

    def commit(
        self,
        checkpoint: Checkpoint,
        record: Mapping[str, Any],
        prepared: tuple[str, Arena | None] | None = None,
        sites: Iterable[SiteId] = (),
        following: RoundPlan | None = None,
        suspects: Any = None,
    ) -> None:
        """Make a round the last one. Before this returns the round before it is; after it, this one.

        `prepared` is what `prepare` returned for it, where that was called before; `sites`: whose updates are
        in it, unless they were in the buffer; `following`: the plan of the next round, where it is known;
        `suspects`: what `suspects` gives from then on, where that is something new.
        """
        weights, packed = prepared or self.prepare(checkpoint)
        state = (packed.digest, packed.schema) if packed is not None else (None, None)
        number = checkpoint.round
        try:
            with self.db.transaction():
                self.db.put("rounds", number, weights, *state, dict(record), time.time())
                self.db.delete("plan", "round <= ?", (number - KEEP,))
                self._counted.add(number, self._buffered() | dict.fromkeys(sites, number - 1), KEEP - 1)
                if (patch := checkpoint.patch) is not None:
                    self.db.put("patches", number, patch.digest, patch.schema)
                    most = min(PATCHES, checkpoint.weights.schema.nbytes // max(patch.schema.nbytes, 1)) or 1
                    self.db.delete("patches", "round <= ?", (number - most,))
                self.db.delete("buffer")  # all of it is in this version
                if following is not None:
                    self.set_plan(following)
                if suspects is not None:
                    self.db.put("meta", "suspects", msgspec.json.encode(suspects).decode())
        except BaseException:
            self._counted.forget()
            raise
        self._sweep()

    def on_disk(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same committed round with its weights left in their file: sent from there, read by the next
        step, so that between rounds no model is held in memory."""
        weights = self._in_file(checkpoint.weights.digest, checkpoint.round)
        return Checkpoint(checkpoint.round, weights, checkpoint.state)

    def _in_file(self, digest: str, number: int) -> ArenaFile:
        weights = ArenaFile(self.schema, self._models.file(digest), digest)
        weights.patches = self.patches(number)
        return weights

    def patches(self, number: int) -> tuple[Patch, ...]:
        """Those that lead to the weights of a round, one after the other, as far as they are kept."""
        rows = self.db.all(
            "SELECT r.round, r.weights, p.digest, p.schema FROM patches p JOIN rounds r "
            "ON r.round = p.round - 1 WHERE p.round <= ? ORDER BY p.round DESC",
            (number,),
        )
        found: list[Patch] = []
        for i, (before, base, digest, text) in enumerate(rows):
            schema = msgspec.json.decode(text, type=Schema)
            if before != number - 1 - i or not self._models.has(digest, schema.nbytes):
                break
            found.append(Patch(base, ArenaFile(schema, self._models.file(digest), digest)))
        return tuple(reversed(found))

    def latest(self) -> Checkpoint | None:
        """The newest round whose bytes are whole; those after it are forgotten, and `warn` is told. None
        before the first one, also where the initial model's own bytes are damaged."""
        rounds = [number for (number,) in self.db.all("SELECT round FROM rounds ORDER BY round DESC")]
        damaged: list[StoreError] = []
        for number in rounds:
            try:
                checkpoint = self.load(number)
            except StoreError as e:
                if self._lock is None or isinstance(e, Unreadable):
                    raise
                damaged.append(e)
                continue
            if damaged:
                self.back(f"{damaged[0]} The run goes on after round {number}.")
                forgotten.keep(self.db, number)
                self.forget_after(number)
            elif self._lock and (strangers := self._strangers()) > IN_A_COMMIT:
                self.warn(
                    f"{self.folder / 'run.db'} may be an old copy: {strangers} files in {self.blobs} are of "
                    f"none of its rounds. The run goes on after round {number}."
                )
            if self._lock is not None:
                self.turns.refuse_unreadable(self.weights)
                self._look_at_the_others(number)
            return checkpoint
        if damaged and rounds != [0]:
            old = f"{self.folder / 'run.db'} may be an old copy. " if self._strangers() > IN_A_COMMIT else ""
            raise StoreError(f"{damaged[0]} {old}{self._remedy}")
        if damaged:
            self.back(f"{damaged[0]} The run begins anew.")
            self.forget_after(-1)
        return None

    def _look_at_the_others(self, number: int) -> None:
        """Tell of the kept rounds, but for this one, whose weights are damaged: the best one, say."""
        for other in sorted(self._kept() - {number}):
            try:
                self.weights(other)
            except Damaged as e:
                self.warn(f"{e} The run goes on without it.")

    def forget_after(self, number: int) -> None:
        """A round is the last one again: the run goes on from there."""
        with self.db.transaction():
            for table in forgotten.TABLES:
                self.db.delete(table, "round > ?", (number,))
            self.turns.refuse_after(number)
        self._counted.forget()

    def recover(self, number: int, weights: AnyArena) -> Checkpoint | None:
        """A round that was forgotten for damaged bytes, with its model from elsewhere, and all that was known
        of it. None where it was not, or had another model; Damaged where its state is."""
        self.put_blob(weights)
        self._counted.forget()
        with self.db.transaction():
            back = forgotten.put_back(self.db, number, weights.digest)
            return self.load(number) if back else None

    def weights(self, number: int) -> ArenaFile:
        """The weights of a committed round that are still kept, left in their file."""
        row = self.db.one("SELECT weights FROM rounds WHERE round = ?", (number,))
        if row is None:
            raise StoreError(f"{self.folder} has no round {number}.")
        self._check(row[0], self.schema.nbytes, number)
        return self._in_file(row[0], number)

    def load(self, number: int) -> Checkpoint:
        """A committed round whose weights are still kept; its digests are checked."""
        row = self.db.one("SELECT weights, state, state_schema FROM rounds WHERE round = ?", (number,))
        if row is None:
            raise StoreError(f"{self.folder} has no round {number}.")
        weights, state, state_schema = row
        schema = self.schema
        tensors = {}
        if state is not None:
            packed = msgspec.json.decode(state_schema, type=Schema)
            tensors = {n: t.clone() for n, t in self._get(packed, state, number).views().items()}
        return Checkpoint(number, self._get(schema, weights, number), tensors)

    def rounds(self) -> list[Round]:
        """Every committed round, oldest first."""
        rows = self.db.all(
            "SELECT r.round, r.weights, r.committed_at, r.record, e.metrics, e.best FROM rounds r "
            "LEFT JOIN evaluations e ON e.round = r.round ORDER BY r.round"
        )
        return [
            Round(n, w, at, msgspec.json.decode(record), metrics and msgspec.json.decode(metrics), bool(best))
            for n, w, at, record, metrics, best in rows
        ]

    def norms(self, most: int) -> list[float]:
        """How long the updates of the newest rounds were, the newest first; without rounds that don't say."""
        rows = self.db.all("SELECT record FROM rounds ORDER BY round DESC LIMIT ?", (most,))
        found = [msgspec.json.decode(record).get("norm") for (record,) in rows]
        return [norm for norm in found if norm]

    @property
    def best_round(self) -> int | None:
        return cast("int | None", self.db.one("SELECT MAX(round) FROM evaluations WHERE best")[0])

    def evaluation(self, number: int | None) -> dict[str, float] | None:
        """The metrics of a round, when it was evaluated."""
        row = self.db.one("SELECT metrics FROM evaluations WHERE round = ?", (number,))
        return msgspec.json.decode(row[0]) if row else None

    def evaluations_since_best(self) -> int:
        """How many evaluations with any metrics came after the best one; all of them when none was."""
        sql = "SELECT COUNT(*) FROM evaluations WHERE round > ? AND metrics != '{}'"
        return int(self.db.one(sql, (self.best_round or 0,))[0])

    def evaluated(self, number: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Keep a round's evaluation; a `best` round keeps its weights until a better one comes."""
        self.db.put("evaluations", number, dict(metrics), best)

    # --- the round under way

    def plan(self, number: int) -> RoundPlan | None:
        """Of the round that follows the last one. That of a committed round stays for a while, for should its
        weights be damaged, the same sites are to be asked for it again."""
        row = self.db.one(
            "SELECT round, attempt, sites, registered FROM plan "
            "WHERE round = ? AND round = (SELECT MAX(round) FROM rounds)",
            (number,),
        )
        return RoundPlan(row[0], row[1], msgspec.json.decode(row[2]), registered=row[3]) if row else None

    def set_plan(self, plan: RoundPlan) -> None:
        """Keep who is asked; before the first request goes out."""
        self.db.put("plan", plan.round, plan.attempt, plan.sites, plan.registered)

    def opened(self, number: int, *, evaluation: bool = False) -> list[tuple[SiteId, ...]]:
        """The sites of each sum under masks of this round, or of the `evaluation` of its model, that was, or
        may have been, opened."""
        return self._opened(evaluation).get(number, [])

    def opens(self, number: int, sums: list[tuple[SiteId, ...]], *, evaluation: bool = False) -> None:
        """Keep whose sums of this round, or evaluation, may be opened; before they are."""
        newest = dict(sorted((self._opened(evaluation) | {number: sums}).items())[-KEEP:])
        self.db.put("meta", OPENED[evaluation], msgspec.json.encode(newest).decode())

    def _opened(self, evaluation: bool) -> dict[int, list[tuple[SiteId, ...]]]:
        row = self.db.one("SELECT value FROM meta WHERE key = ?", (OPENED[evaluation],))
        return msgspec.json.decode(row[0], type=dict[int, list[tuple[SiteId, ...]]]) if row else {}

    def counted(self, sites: Iterable[SiteId] | None = None) -> dict[SiteId, int]:
        """The last round (without rounds: turn) in which each of these sites (None: of all) is in the model,
        or in the buffer; without those that never were."""
        return self._counted.of(sites) | self._buffered()

    def _buffered(self) -> dict[SiteId, int]:
        return dict(self.db.all("SELECT site, MAX(number) FROM buffer GROUP BY site"))

    def clock(self, number: int) -> float:
        """Where the clock of a simulation stands, in seconds, when it goes on after `number` rounds, with the
        attempt that is planned."""
        plan = self.plan(number)
        if plan is not None and 0 < plan.attempt <= len(begins := self._begins(number)):
            return begins[plan.attempt - 1]
        row = self.db.one("SELECT record FROM rounds WHERE round = ?", (number,))
        return float(msgspec.json.decode(row[0]).get("clock_s", 0.0)) if row else 0.0

    def set_clock(self, number: int, attempt: int, now_s: float) -> None:
        """Keep when an attempt at the round after `number` begins; the first is attempt 0."""
        self.db.put("meta", "clock", (number, [*self._begins(number)[: attempt - 1], now_s]))

    def _begins(self, number: int) -> list[float]:
        """When each attempt at the round after `number` began, but for the first."""
        row = self.db.one("SELECT value FROM meta WHERE key = 'clock'")
        of_round, begins = msgspec.json.decode(row[0], type=tuple[int, list[float]]) if row else (-1, [])
        return begins if of_round == number else []

    def suspects(self, type: type[T]) -> T:
        """Which sites are under suspicion, as it was last committed."""
        row = self.db.one("SELECT value FROM meta WHERE key = 'suspects'")
        return msgspec.json.decode(row[0], type=type) if row else type()

    def joined(self) -> dict[SiteId, float | None]:
        """Every site that ever joined this run, with the examples it registered."""
        return dict(self.db.all("SELECT name, examples FROM sites ORDER BY name"))

    def examples_of(self, site: SiteId) -> float | None:
        """What `joined` says of a site, if it says anything."""
        return next(iter(self.db.one("SELECT examples FROM sites WHERE name = ?", (site,)) or ()), None)

    def registered(self, members: Sequence[SiteId]) -> int:
        """How many sites ever joined, the present members included."""
        joined = self.joined()
        return len({*joined, *members}) if joined else len(members)

    def join(self, site: SiteId, examples: float | None) -> None:
        """A site joined this run, with so many examples."""
        self.db.put("sites", site, examples)

    # --- bytes

    def _get(self, schema: Schema, digest: str, number: int) -> Arena:
        self._check(digest, schema.nbytes, number, again=True)
        with explained(self.blobs / digest):
            return ArenaFile(schema, self.blobs / digest, digest).load()

    def _check(self, digest: str, nbytes: int, number: int, *, again: bool = False) -> None:
        """StoreError unless a round's blob is there and whole; `again`: as in Spool."""
        path, wrong = self.blobs / digest, ""
        if self._lock is not None:
            wrong = self._models.wrong(digest, nbytes, again=again)
        elif path.exists() and (found := damage(path, digest, nbytes)):
            wrong = f"{path}: {found}."
        if not wrong and not path.exists() and number in self._kept():
            wrong = f"{path} is gone."
        elif not wrong and not path.exists():
            raise StoreError(
                f"round {number} of {self.folder} is not kept (only the best and the last {KEEP} are)."
            )
        if wrong:
            raise Damaged(f"round {number} of {self.folder} is damaged: {wrong}")

    def _kept(self) -> set[int]:
        """Rounds whose weights stay."""
        rows = self.db.all(
            "SELECT round FROM rounds WHERE round IN "
            "(SELECT round FROM rounds ORDER BY round DESC LIMIT ?) OR round IN (?, ?) "
            "OR round IN (SELECT version FROM turns WHERE state = 'owed')",
            (KEEP, self.best_round, self.evaluating),
        )
        return {number for (number,) in rows}

    def _sweep(self) -> None:
        """Remove the blobs that no kept round names."""
        kept = self._kept()
        rows = self.db.all("SELECT round, weights, state FROM rounds WHERE round >= ?", (min(kept),))
        self._models.keep_only(
            {digest for number, *digests in rows if number in kept for digest in digests if digest}
            | {self.frozen.digest}
            | {digest for (digest,) in self.db.all("SELECT digest FROM patches")}
        )
