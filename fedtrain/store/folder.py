"""The folder of a run: its lock, its database, what the run is, and bytes under their digests."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ..arena import AnyArena, Arena, ArenaFile, Frozen
from ..errors import Damaged, StoreError
from ..messages import SiteId
from ..schema import Schema
from .database import Database
from .disk import Warn, explained, lock, private_folder, refuse_network_disk, silent, sync_folder, unshare
from .spool import Spool, damage


class RunFolder:
    """What every part of a run's store stands on. The writer holds the folder's lock."""

    def __init__(
        self, folder: Path, tables: str, *, read_only: bool = False, durable: bool = True,
        warn: Warn = silent, copies: bool = False, back: Warn | None = None,
    ) -> None:  # fmt: skip
        """`tables`: as of a Database. `durable` waits for the disk at each commit, so that a power cut loses
        nothing either. `warn` hears of what is damaged and how the run goes on; a reader, who can't repair
        it, gets a StoreError. `copies`: models and updates are in two files, as nobody could make them again.
        `back` hears that the run goes back by a round, and may raise instead; None: `warn` does."""
        if read_only and not (folder / "run.db").exists():
            what = "not a run directory: `fedtrain runs` lists those that are."
            if "@" in folder.name:
                what = "a site's own, without a model: name the aggregator's run, or add --site."
            raise StoreError(f"{folder} is {what}")
        if not read_only:
            refuse_network_disk(folder)
        self.folder, self.durable, self.warn, self.back = folder, durable, warn, back or warn
        self._copies = copies and not read_only
        self.blobs, self._models = folder / "blobs", self._spool("blobs")
        self._inboxes: dict[SiteId, Spool] = {}
        self._remedy = f"Restore it from a copy, or move {folder} away to start the run anew."
        again = "The run's own command makes it again."
        self._lock = None if read_only else lock(folder)
        try:
            for each in () if read_only else (folder / "memory").rglob("*"):  # no trainer has them open yet
                unshare(each)
            self.db = Database(
                folder / "run.db", tables, read_only=read_only, durable=durable,
                remedy=again if read_only else self._remedy, warn=warn,
            )  # fmt: skip
        except BaseException:
            if self._lock is not None:
                self._lock.close()
            raise

    def close(self) -> None:
        """Let another process have the folder."""
        self.db.close()
        if self._lock is not None:
            self._lock.close()

    def meta(self) -> dict[str, Any]:
        """What the run was begun with; {} before that."""
        return {k: msgspec.json.decode(v) for k, v in self.db.all("SELECT key, value FROM meta")}

    @cached_property
    def schema(self) -> Schema:
        """Of the run's model."""
        return msgspec.convert(self.meta()["schema"], Schema)

    @property
    def checkpoints(self) -> str:
        """Where a datacenter's run has left checkpoints; "" before the first one."""
        return str(self.meta().get("checkpoints", ""))

    @checkpoints.setter
    def checkpoints(self, where: str) -> None:
        self.db.put("meta", "checkpoints", msgspec.json.encode(where).decode())

    def inbox(self, site: SiteId) -> Spool:
        """Where what this site sends is kept, apart from what others send."""
        if site not in self._inboxes:
            self._inboxes[site] = self._spool(f"inbox/{site}")
        return self._inboxes[site]

    def _spool(self, name: str) -> Spool:
        copies = self.folder / "copies" / name if self._copies else None
        if copies is not None:
            private_folder(copies.parent)
        return Spool(self.folder / name, self.warn, copies)

    def clear_inbox(self) -> None:
        """The round is committed: what was sent for it is not needed any more."""
        for folder in (self.folder / "inbox").glob("*"):
            self.inbox(folder.name).keep_only(())

    def put_blob(self, arena: AnyArena) -> str:
        """The digest of an arena that lies among the blobs when this returns."""
        if not self._models.has(arena.digest, arena.schema.nbytes):
            whole = arena.load() if isinstance(arena, ArenaFile) else arena
            self._models.put(arena.digest, whole.payload, durable=self.durable)
        elif self.durable:  # a kill may have come between its rename and this
            with explained(self.blobs):
                sync_folder(self.blobs)
        return arena.digest

    # --- the run's frozen parameters

    def keep_frozen(self, arena: Arena) -> None:
        """Keep the run's frozen parameters, before its first round; later StoreError for others. An arena
        without any is not kept."""
        found = Frozen.of(arena)
        if found != self.frozen and self.db.one("SELECT 1 FROM rounds"):
            raise StoreError(
                f"{self.blobs / self.frozen.digest}, the run's frozen parameters, is gone, and the task's "
                f"model() gives others. {self._remedy}"
            )
        if found.digest:
            self.put_blob(arena)
            self.db.put("meta", "frozen", found)
            self.__dict__.pop("frozen", None)

    @cached_property
    def frozen(self) -> Frozen:
        """What names the run's frozen parameters."""
        row = self.db.one("SELECT value FROM meta WHERE key = 'frozen'")
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
