"""The cohort guard: into which sums a site gave, in all its runs, and which further ones would tell too much.

  runs/@cleveland/cohorts.jsonl   a line for each sum that this site let be opened
  runs/heart@cleveland/opened     how many lines there were after the last one of this run

A file that is gone, or shorter than a run's folder says, stops the site, as with the ledger of ε (spent.py).

Two sums from one model over different sites differ by single sites' updates. So a model that this site
answered for is answered for again over the same sites only; and where two models are near, their cohorts are
equal or differ by policy.cohort_change sites at least. Models are near when they, or this site's own updates
of them, differ by less than policy.cohort_near times the norm of such an update: then the others' updates
hardly differ either. A step of training is far longer than that, whoever left or joined before it. Models of
different schemas are never near. Where the site adds noise to its update, the norm is that without the noise,
which is at most the clip.

Distances are those of sketches: 64 sums of a vector's coordinates under signs that only this site knows. The
squared norm of a sketch is right on average, and off by a fifth.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from ...arena import AnyArena
from ...config import SitePolicy
from ...errors import SecAggError
from ...messages import SiteId
from ...schema import Section
from ...secagg.fixedpoint import numbers
from ...secagg.masking import KEY_BYTES, TAG_BYTES, keystream
from ...store.chain import Chain
from ...store.disk import Warn, sealed, silent, write_whole
from .records import check_length

FILE = "cohorts.jsonl"
MARK = "opened"  # in the folder of a run that has sums in the guard's file
RULES = SitePolicy()  # by default what two sums differ by is a sum over three, as any sum must be
SKETCH = 64  # numbers in a sketch
AT_ONCE = 1 << 16  # coordinates, of which all copies stay in a core's cache
REMEDY = (
    "Restore it from a copy: without it this site could give the same into two sums that differ by a site."
)


class Opened(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the guard's file: a sum that was opened."""

    kind: str  # of the request that began it; "": none, the line only brings the key
    run: str
    round: int
    model: bytes  # hash of what was asked about
    sites: tuple[SiteId, ...] = ()  # over whom, sorted
    weights: bytes = b""  # sketch of the model; b"": there is none
    update: bytes = b""  # likewise, of this site's update
    key: bytes = b""  # of all sketches
    schema: bytes = b""  # how its digest begins; b"": no model, or a line of an earlier version
    clip: float = 0.0  # the update has the site's noise, without which its norm is at most this; 0: no noise


Group = tuple[str, tuple[SiteId, ...], bytes]  # kind, sites and schema of sums


class Seen(msgspec.Struct, frozen=True, gc=False):
    """What of such a line stays in memory: of a year of rounds the sketches would be tens of megabytes."""

    cohort: Group
    model: bytes
    has_update: bool


class Cohorts:
    """What one site let be opened."""

    def __init__(
        self, folder: Path, rules: SitePolicy = RULES, warn: Warn = silent, run: Path | None = None
    ) -> None:
        """`folder`: of the site, whatever the run; `run`: of its run, which notes how long the file is.
        Damaged for a file that can't be read, or is shorter than a run of this site noted."""
        self.change, self.near, self._run, self._warn = rules.cohort_change, rules.cohort_near, run, warn
        self._known: dict[Group, Group] = {}  # each once
        self._by_cohort: dict[Group, array[int]] = {}  # the places of its lines
        self._indexed = 0
        self._chain = Chain(folder / FILE, Opened, REMEDY, warn, self._seen)
        if run is not None:
            check_length(folder / FILE, len(self._opened), run, MARK, REMEDY, warn)
        self._notified = False
        self._key, self._sketched = b"", (b"", b"")  # of sketches; a model's hash, and its sketch

    @property
    def _opened(self) -> list[Seen]:
        return self._chain.values

    def _seen(self, opened: Opened) -> Seen:
        cohort = opened.kind, opened.sites, opened.schema
        return Seen(self._known.setdefault(cohort, cohort), opened.model, bool(opened.update))

    def check(self, asked: Opened) -> None:
        """SecAggError for a sum whose difference from an earlier one would tell of fewer than `change`
        sites."""
        for (kind, sites, schema), earlier in self._cohorts().items() if self.change else ():
            changed = len({*sites} ^ {*asked.sites})
            if kind != asked.kind or not changed:
                continue
            same = [place for place in earlier if self._opened[place].model == asked.model]
            near = changed < self.change and one_schema(schema, asked.schema)
            for before in self._chain.stored(same or (earlier if near else ())):
                if same or self._near(before, asked):
                    what = f"{'this' if same else 'a near'} {'model' if asked.weights else 'statistic'}"
                    raise SecAggError(
                        f"round {asked.round + 1} over {len(asked.sites)} sites: {what} was answered for in "
                        f"round {before.round + 1} of {before.run} over {len(sites)} sites, and both sums "
                        f"together would tell of {changed} sites alone. Ask those {len(sites)} again, or ask "
                        f"with a model that is trained further"
                    )

    def _cohorts(self) -> dict[Group, array[int]]:
        """The places of what was opened, by its kind and its sites: of years of rounds, most are over the
        same sites."""
        if self._indexed > len(self._opened):  # the file was read anew
            self._by_cohort, self._indexed = {}, 0
        for place in range(self._indexed, len(self._opened)):
            self._by_cohort.setdefault(self._opened[place].cohort, array("L")).append(place)
        self._indexed = len(self._opened)
        return self._by_cohort

    def session(self, asked: Opened, model: AnyArena | None, update: AnyArena | None) -> Watched:
        """The guard of a session about a model, with this site's update of it. `asked` lacks sites, sketches
        and schema."""
        with self._chain.alone():  # with what the site's other runs have added
            if not self._opened:
                self._chain.append(Opened("", asked.run, 0, b"", key=os.urandom(KEY_BYTES)))
        if not self._key:
            self._key = next(self._chain.stored([0])).key
        key = self._key
        # With what a strategy sends beside the model: of IFCA that is all that changes.
        weights = schema = b""
        if model is not None:  # the one that a round trains from was evaluated before
            if self._sketched[0] != asked.model:
                self._sketched = asked.model, sketch(key, model, model.schema.sections)
            weights, schema = self._sketched[1], bytes.fromhex(model.schema.model.digest)[:8]
        moved = b"" if update is None else sketch(key, update, update.schema.model.sections)
        asked = msgspec.structs.replace(asked, weights=weights, update=moved, schema=schema)
        return Watched(self, asked)

    def answered(self, model: bytes) -> bool:
        """Whether this site gave an update or an evaluation of this model (hash_of) into an opened sum."""
        return any(seen.model == model and seen.cohort[0] != "AdvertiseTally" for seen in self._opened)

    def opens(self, asked: Opened) -> None:
        """Keep what is opened, on the disk when this returns; SecAggError as `check`."""
        with self._chain.alone():
            self.check(asked)
            places = self._cohorts().get((asked.kind, asked.sites, asked.schema), ())
            alike = (place for place in places if self._opened[place].model == asked.model)
            if asked not in self._chain.stored(alike):
                self._notify(asked)
                self._chain.append(asked)
            if self._run is not None:
                write_whole(self._run / MARK, sealed(len(self._opened)), durable=False)

    def _notify(self, asked: Opened) -> None:
        """Warn, once in a process, of two sums in a row over cohorts that differ by fewer than `change`
        sites."""
        group = asked.kind, asked.schema
        before = next((s.cohort[1] for s in reversed(self._opened) if s.cohort[::2] == group), asked.sites)
        changed = len({*before} ^ {*asked.sites})
        if self._notified or not 0 < changed < self.change:
            return
        self._notified = True
        self._warn(
            f"round {asked.round + 1} is summed over {len(asked.sites)} sites, and the sum before it was "
            f"over {len(before)}. The difference of both tells the aggregator about {changed} alone, as far "
            f"as the other sites trained alike. For sums over all sites from the first round on, run "
            f"fedtrain policy set min_cohort=N, or set strategy.min_sites to their number at the aggregator"
        )

    def _near(self, a: Opened, b: Opened) -> bool:
        if not (a.weights and b.weights):
            return not (a.weights or b.weights)  # of data without a model, all sums are
        updates = [each for each in (a, b) if each.update]
        if not updates:  # evaluations: as near as the last update of such a model says
            latest = (
                place
                for place in reversed(range(len(self._opened)))
                if self._opened[place].has_update and one_schema(self._opened[place].cohort[2], b.schema)
            )
            updates = [*self._chain.stored(islice(latest, 1))]
        near = self.near * max((min(norm(x.update), x.clip or math.inf) for x in updates), default=0.0)
        pairs = [(a.weights, b.weights), *([(a.update, b.update)] if a.update and b.update else [])]
        return any(norm(x, y) < near for x, y in pairs)


@dataclass(frozen=True)
class Watched:
    """A session as its client asks the guard about it."""

    cohorts: Cohorts
    asked: Opened  # without its sites

    def check(self, sites: tuple[SiteId, ...]) -> None:
        self.cohorts.check(msgspec.structs.replace(self.asked, sites=sites))

    def opens(self, sites: tuple[SiteId, ...]) -> None:
        self.cohorts.opens(msgspec.structs.replace(self.asked, sites=sites))


def one_schema(some: bytes, other: bytes) -> bool:
    """Whether two models may be near: of lines of an earlier version the schema is unknown."""
    return some == other or b"" in (some, other)


def norm(sketch: bytes, other: bytes = b"") -> float:
    """Of a sketch, or of the difference of two: about that of the vectors."""
    x = np.frombuffer(sketch)
    return float(np.linalg.norm(x - np.frombuffer(other) if other else x))


def sketch(key: bytes, arena: AnyArena, sections: Sequence[Section]) -> bytes:
    """Of all floats in these sections."""
    found, drawn, block = np.zeros(SKETCH), np.empty(AT_ONCE // 8 + TAG_BYTES, np.uint8), 0
    for section in sections:
        for start in range(0, section.numel if section.floating else 0, AT_ONCE):
            values = numbers(arena, section, start, min(start + AT_ONCE, section.numel)).astype(np.float64)
            keystream(key, block, drawn, AT_ONCE // 8)
            signs = 1.0 - 2.0 * np.unpackbits(drawn, count=-(-len(values) // SKETCH) * SKETCH)
            values.resize(len(signs), refcheck=False)
            found += np.einsum("ij,ij->j", values.reshape(-1, SKETCH), signs.reshape(-1, SKETCH))
            block += 1
    return found.tobytes()
