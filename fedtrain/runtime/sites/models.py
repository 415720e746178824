"""Models that a site makes itself, of what it has and of what the aggregator shows it, and need not fetch.

Of a patch, with compression.down. Of a checked sum, with secagg.verify: the site holds the sum against the
checksums that the sites put into it, and moves the model of the round before by it, as the strategy says.
So the aggregator has no say in the model of a site that was in the sum. A site that was not goes by those
that were: it says of each model whether it checked it, and takes part where enough others say so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np

from ...arena import ArenaFile, Patch
from ...config import Config
from ...errors import ConfigError, Damaged, ForgedSum, TaskError
from ...events import Emit, Notice, SumForged
from ...schema import Schema
from ...secagg.checksum import Checksums
from ...secagg.client import Owed
from ...secagg.masking import Parallel, serial
from ...secagg.messages import CHECKSUM_BITS, VERSION, sum_schema
from ...store import Ledger
from ...store.disk import read_sealed, sealed, set_aside, write_whole
from ..star.secure_terms import encoding_of, hash_of
from ..threads import all_cores, in_thread
from ..trainers.trainer import Trains
from ..trainers.trainer_messages import Summed

FILE = "checked.json"
Hashed = Callable[[ArenaFile], Awaitable[bytes]]
KEEP = 3  # newest models of which a site knows that it checked them
UNMOVED = 3  # rounds of a run that leave the model but for a bit: a search for a spoiler begins with one


class SeenSums(msgspec.Struct):
    """What a site remembers of the sums that it was in, over restarts."""

    owed: Owed | None = None  # of the last session
    checked: dict[str, int] = {}  # hash_of a model that it checked, as hex digits -> rounds in it
    unmoved: int = 0  # rounds that left the model but for a bit


class CheckedSums:
    """Which models a site has checked, and what it needs to check the next one."""

    def __init__(self, folder: Path, emit: Emit) -> None:
        self._path, self._emit = folder / FILE, emit
        self.known = SeenSums()  # with which the next model is one that this site can't check
        try:
            if self._path.exists():
                self.known = read_sealed(self._path, SeenSums)
        except Damaged as e:
            emit(Notice(text=f"{e} {set_aside(self._path)}"))

    def owe(self, owed: Owed) -> None:
        """As Client calls it."""
        self.known.owed = owed
        self._keep()

    def made(self, model: bytes, rounds: int) -> None:
        """This site made the model with this hash_of from a checked sum."""
        self.known.checked[model.hex()] = rounds
        self._keep()

    def has_checked(self, rounds: int, model: bytes, before_nudge: Callable[[], bytes] = bytes) -> bool:
        """Whether this site checked the model of so many rounds, with this hash_of.

        `before_nudge`: the hash_of of the model that blame.nudged would have made this one of. A round whose
        sums are all spoiled makes no model of them, and a site can't check that they are: its model goes on
        but for a bit, at most UNMOVED times in a run.
        """
        known, name = self.known, model.hex()
        if known.owed is not None and not known.owed.seed and known.owed.round + 1 == rounds:
            return True  # no site could
        if known.checked.get(name) == rounds:
            return True
        stays = rounds == 0 or known.checked.get(name) == rounds - 1  # the round moved the model by nothing
        nudged = not stays and known.unmoved < UNMOVED
        nudged = nudged and known.checked.get(before_nudge().hex()) == rounds - 1
        if stays or nudged:
            known.unmoved += nudged
            known.checked[name] = rounds
            self._keep()
            return True
        self._emit(
            Notice(
                text=f"round {rounds}: this site was shown no sum that it was in, so it could not check what "
                f"the model was made of, and goes by the other sites"
            )
        )
        return False

    def _keep(self) -> None:
        rounds = self.known.checked
        for old in sorted(rounds, key=rounds.__getitem__)[:-KEEP]:
            del rounds[old]
        write_whole(self._path, sealed(self.known), durable=False)


class Models:
    """Makes models in a site's inbox."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        trainer: Trains,
        emit: Emit,
        checked: CheckedSums | None,
        aggregator: str = "the aggregator",
        parallel: Parallel = serial,
    ) -> None:
        """`aggregator`: its name, for people."""
        self._config, self._ledger, self._trainer, self._emit = config, ledger, trainer, emit
        self._checked, self._aggregator, self._parallel = checked, aggregator, parallel
        self._schema, self._extras = trainer.description.schema, trainer.description.extras

    async def made(self, patch: Patch, digest: str, hashed: Hashed) -> bool:
        """Make the model of this digest of a patch, or sum, and its base, which are here; whether it could be
        made. `hashed` gives the hash_of a model in the inbox. ForgedSum for a sum, or a model, that is not
        what this site and others sent."""
        summed = None
        assert isinstance(patch.arena, ArenaFile), patch
        if self._checked is not None:
            owed = self._checked.known.owed
            if (
                owed is None
                or not owed.seed
                or owed.version != VERSION
                or named(patch.arena.schema) != owed.sid.hex()
            ):
                return False
            await in_thread(patch.arena.schema.nbytes, self._check, owed, patch.arena)
            summed = Summed(owed.round, owed.cohort, len(owed.sites), owed.names)
        inbox, out = self._ledger.inbox, self._ledger.scratch / "patched"
        try:
            base = ArenaFile(self._schema, inbox.file(patch.base), patch.base)
            found = await self._trainer.apply(base, patch.arena, out, summed)
        except (TaskError, ConfigError) as e:
            self._tell(f"a patch could not be used: {e}; the whole model is fetched")
            return False
        if found != digest and summed is not None:
            raise self._forged(summed.round, "the model that it names is not what the sum makes")
        if found != digest:
            self._tell(f"a patch gave {found[:12]}… here, not {digest[:12]}…; the whole model is fetched")
            return False
        os.replace(out, inbox.file(digest))
        inbox.arrived(digest)
        if self._checked is not None and summed is not None:
            made = ArenaFile(self._schema, inbox.file(digest), digest)
            self._checked.made(await hashed(made), summed.round + 1)
        return True

    async def keep_initial(self) -> None:
        """Have the model before round 0, which the first patch may be for, unless there is a later one."""
        out, inbox = self._ledger.scratch / "patched", self._ledger.inbox
        if not any(inbox.folder.iterdir()):
            initial = await self._trainer.initial(out)
            os.replace(out, inbox.file(initial.digest))

    def _check(self, owed: Owed, shown: ArenaFile) -> None:
        """ForgedSum unless what is shown is the sum of that session."""
        encoding = encoding_of(self._config, owed.round, owed.cohort, self._schema.model, self._extras)
        numel, point = encoding.numel(owed.names), encoding.point
        checksum = point.digits(CHECKSUM_BITS)
        if shown.schema != sum_schema(owed.sid, numel + checksum, point.ring_bits):
            raise self._forged(owed.round, f"it is {shown.schema.tensors[0]}")
        vector = np.fromfile(shown.file, point.dtype, numel + checksum)
        if not Checksums(owed.seed, point, self._parallel).fits(vector[:numel], vector[numel:], owed.sites):
            raise self._forged(owed.round, "it does not fit the sites' checksums")

    def _forged(self, round: int, why: str) -> ForgedSum:
        self._emit(SumForged(round=round + 1, aggregator=self._aggregator, reason=why))
        return ForgedSum(self._aggregator, round + 1, why)

    def _tell(self, line: str) -> None:
        self._emit(Notice(text=line))


def named(schema: Schema) -> str:
    """The session of a sum that is shown."""
    return schema.tensors[0].name if schema.tensors else ""


async def own_model(trainer: Trains, scratch: Path) -> str:
    """The hash_of of the model that the site's own trainer begins with, as hex digits."""
    out = scratch / "own"
    try:
        initial = await trainer.initial(out)
        frozen = trainer.description.frozen.sha256
        return (await asyncio.to_thread(hash_of, initial, all_cores(), frozen)).hex()
    finally:
        out.unlink(missing_ok=True)
