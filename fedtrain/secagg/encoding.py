"""What a site's vector in the ring holds, and what the sum over sites is read back as.

  [ trained coordinates, (w/w_max)·Δ | vectors of the strategy |
    w, how many were clipped, numbers of the strategy, w·Δ of buffers | (sum, count) of metrics ]

The first two parts are fixed point with random rounding, the others are exact scalars (fixedpoint.py says
how each is laid out). Both ends make an Encoding of the same terms. The site's end reads files and loads no
torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..arena import AnyArena, Row
from ..errors import RoundError, SecAggError
from ..learning import NO_EXTRAS, Extras
from ..messages import Evaluation, Metrics, Update, name_and_size, numbers_in, sized_names
from ..schema import Schema, Section
from .fixedpoint import ONE, PER_BLOCK, SCALAR_LIMIT, FixedPoint, held, numbers, reading
from .masking import Parallel, RingVector, serial

if TYPE_CHECKING:
    import torch

    from ..arena import Arena

CHUNK = 1 << 19  # coordinates read at a time where one thread reads
STACKED = PER_BLOCK // 16  # coordinates at most of a model that is encoded with others


def rounding_seed(*parts: object) -> bytes:
    """Of the random rounding, 16 bytes: the same in a simulation and at a real site, whatever its run is
    called. "r" stands where a seed had the run's name; a run of that name goes on with the same bits."""
    return hashlib.sha256("\x1f".join(str(p) for p in ("rounding", "r", *parts)).encode()).digest()[:16]


@dataclass(frozen=True)
class Total:
    """What a sum of vectors says."""

    delta: Arena | None  # the weighted mean; None where no model was summed
    weight: float  # Σ w
    bits: float  # of a coordinate at the bound at a site of usual weight, see decode
    clipped: float  # coordinates over all sites
    metrics: Metrics  # Σ over sites
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)  # as in learning.Round
    scalars: Mapping[str, float] = field(default_factory=dict)  # likewise


@dataclass(frozen=True)
class StackedUpdate:
    """An update in a slab, checked, and with what is worked out of it alone."""

    delta: Row
    weight: float
    factor: float  # by which its coordinates count: the weight, times what shortens its delta
    seed: bytes  # of its rounding
    clipped: int  # coordinates, by the site before
    exact: list[float]  # numbers of the strategy, and what moves by the plain mean


class LinearMap(Protocol):
    """A compressor whose compressed sum is the sum of the compressed, see compression.Linear."""

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Self: ...
    def length(self, n: int) -> int: ...
    def project(self, vector: NDArray[Any], seed: int) -> NDArray[Any]: ...
    def lift(self, vector: NDArray[Any], seed: int, n: int) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Encoding:
    """Updates of one schema (None: evaluations, which are metrics alone) as vectors of one FixedPoint."""

    point: FixedPoint
    schema: Schema | None  # of an update
    compressor: LinearMap | None = None  # makes fewer coordinates of the trained ones, alike at all sites
    seed: int = 0  # of what the compressor draws: one for a round
    extras: Extras = NO_EXTRAS
    points: tuple[FixedPoint, ...] = ()  # of each vector of the strategy

    @cached_property
    def length(self) -> int:
        """Ring elements before those of metrics."""
        return self._coordinates + self.point.limbs * (2 + len(self.extras.scalars) + self._exact)

    def numel(self, names: Sequence[str]) -> int:
        """Ring elements of a vector with the metrics of these names, which are sized."""
        return self.length + self.point.limbs * numbers_in(names)

    @cached_property
    def _trained(self) -> list[Section]:
        return [s for s in self.schema.sections if s.trained] if self.schema else []

    @cached_property
    def _coordinates(self) -> int:
        return sum(map(self._length, self._trained)) + sum(stop - start for _, start, stop, _ in self._extras)

    @cached_property
    def _extras(self) -> list[tuple[Section, int, int, FixedPoint]]:
        """Where each vector of the strategy lies in an update, and how its values become integers."""
        if self.schema is None:
            return []
        places, up = self.schema.places, self.extras.up
        return [(*places[each.name], point) for each, point in zip(up, self.points, strict=True)]

    def _length(self, section: Section) -> int:
        squeeze = self._compressor(section)
        return squeeze.length(section.trained) if squeeze else section.trained

    def _compressor(self, section: Section) -> LinearMap | None:
        if self.compressor is None or self.schema is None:
            return None
        tensors = [t for t in self.schema.tensors if t.trained and t.dtype == section.dtype]
        return self.compressor.shaped([t.shape for t in tensors])

    @cached_property
    def _rest(self) -> list[tuple[Section, int]]:
        """(section, first coordinate) of what moves by the plain mean: buffers and integers."""
        return [(s, s.trained) for s in self.schema.moving] if self.schema else []

    @cached_property
    def _exact(self) -> int:
        return sum(section.numel - first for section, first in self._rest)

    # --- The site's end

    def encode(
        self,
        update: Update,
        names: Sequence[str],
        seed: bytes,
        vector: RingVector,
        *,
        scale: float = 1.0,
        parallel: Parallel = serial,
    ) -> None:
        """Into `vector` [numel(names)]; `scale` shortens the delta. SecAggError for what can't travel."""
        assert self.schema is not None
        weight, delta = self._weight(update), update.delta
        at = clipped = 0
        for section in self._trained:
            if squeeze := self._compressor(section):
                whole = squeeze.project(np.array(numbers(delta, section, 0, section.trained)), self.seed)
                length, read = len(whole), held(whole)
            else:
                length, read = section.trained, reading(delta, section)
            out = vector[at : at + length]
            if weight:
                clipped += self.point.encode_into(read, weight * scale, seed, out, at, parallel)
            else:
                out[:] = self.point.zero
            at += length
        for section, start, stop, point in self._extras:
            out, read = vector[at : at + stop - start], reading(delta, section, start)
            clipped += point.encode_into(read, 1.0, seed, out, at, parallel)
            at += stop - start
        exact = [*self._numbers(update), *self._exact_values(delta, weight, scale)]
        self._put(vector, at, [weight * self._finer, clipped + update.clipped, *exact], self._name)
        self._put_metrics(vector, update.metrics, names)

    @property
    def _finer(self) -> float:
        """By how much a weight's unit is finer than that of other scalars."""
        return 1 / ONE / self.point.weight_unit

    def stacks(self, delta: AnyArena) -> bool:
        """Whether an update is summed faster together with its neighbours in a slab: that of a small model of
        floats that numpy has, and one which needs no closer look."""
        if not (self._small and isinstance(delta, Row)):
            return False
        slab, at = delta.slab, delta.index
        return math.isfinite(slab.norms[at]) and math.isfinite(slab.extra_norms[at])

    @cached_property
    def _small(self) -> bool:
        assert self.schema is not None
        known = all(section.dtype != "bfloat16" for section in self.schema.sections)
        return known and self.compressor is None and 0 < self._coordinates <= STACKED

    def row(self, update: Update, seed: bytes, scale: float = 1.0) -> StackedUpdate:
        """What add_rows needs of an update that `stacks`. SecAggError for what can't travel."""
        assert isinstance(update.delta, Row)
        weight = self._weight(update)
        exact = [*self._numbers(update), *self._exact_values(update.delta, weight, scale)]
        if exact:  # what no scalar holds is refused now, when it is known whose it is
            self.point.encode_scalars(np.array(exact), lambda i: self._name(i + 2))
        return StackedUpdate(update.delta, weight, weight * scale, seed, update.clipped, exact)

    def add_rows(self, rows: Sequence[StackedUpdate], total: RingVector) -> None:
        """total [length] += Σ of what `encode` makes of each of these, which lie in one slab."""
        slab, indices = rows[0].delta.slab, [each.delta.index for each in rows]
        factors, seeds = np.array([each.factor for each in rows]), [each.seed for each in rows]
        at, clipped = 0, np.array([each.clipped for each in rows], np.int64)
        for section in self._trained:
            values = slab.flat(section).numpy()[indices, : section.trained]
            out = total[at : at + section.trained]
            clipped += self.point.add_rows(values, factors, seeds, out, at)
            at += section.trained
        for section, start, stop, point in self._extras:
            values, out = slab.flat(section).numpy()[indices, start:stop], total[at : at + stop - start]
            clipped += point.add_rows(values, np.ones(len(rows)), seeds, out, at)
            at += stop - start
        each_row = zip(rows, clipped, strict=True)
        scalars = [[each.weight * self._finer, count, *each.exact] for each, count in each_row]
        exact = self.point.encode_scalars(np.array(scalars, np.float64))
        total[at : self.length] += exact.sum(axis=0, dtype=total.dtype)

    def _weight(self, update: Update) -> float:
        """As its scalar will say. SecAggError for one that no sum takes."""
        if update.weight is not None:
            return self.point.weight(update.weight) if update.weight else 0.0
        if not 0 < update.num_examples <= self.point.max_weight:
            raise SecAggError(
                f"it trained on none, or on more examples than secagg.max_examples = "
                f"{self.point.max_weight:g}. Raise it at both ends, to what the largest site has."
            )
        return self.point.weight(update.num_examples)

    def encode_metrics(self, metrics: Metrics, names: Sequence[str], vector: RingVector) -> None:
        """An evaluation, into `vector` [numel(names)]."""
        assert self.schema is None
        self._put(vector, 0, [0.0, 0.0], self._name)
        self._put_metrics(vector, metrics, names)

    def _numbers(self, update: Update) -> list[float]:
        """Those of the strategy."""
        return [update.scalars[each.name] for each in self.extras.scalars]

    def _exact_values(self, delta: AnyArena, weight: float, scale: float) -> list[float]:
        found: list[float] = []
        for section, first in self._rest:
            for start in range(first, section.numel, CHUNK):
                values = numbers(delta, section, start, min(start + CHUNK, section.numel))
                factor = (weight * scale if section.floating else weight) * self._finer
                found += (values.astype(np.float64) * factor).tolist()
        return found

    def _put_metrics(self, vector: RingVector, metrics: Metrics, names: Sequence[str]) -> None:
        values: list[float] = []
        whose: list[str] = []
        for sized in names:
            name, size = name_and_size(sized)
            total, count = metrics.get(name, ([0.0] * size if size else 0.0, 0.0))
            numbers = [*(total if isinstance(total, list) else [total]), count]
            values += numbers
            whose += [f"the sum of {name}"] * (len(numbers) - 1) + [f"the count of {name}"]
        self._put(vector, self.length, values, whose.__getitem__)

    def _put(self, vector: RingVector, at: int, values: list[float], name: Callable[[int], str]) -> None:
        if values:
            items = self.point.encode_scalars(np.array(values, np.float64), name)
            vector[at : at + len(items)] = items

    def _name(self, i: int) -> str:
        scalars = [f"its {each.name}" for each in self.extras.scalars]
        first = ["the weight", "the count of clipped values", *scalars]
        return first[i] if i < len(first) else f"value {i - len(first)} of its buffers"

    # --- The aggregator's end

    def decode(
        self, total: RingVector, sites: int, names: Sequence[str], parallel: Parallel = serial
    ) -> Total:
        """What the sum of the vectors of so many sites says. SecAggError for what is no such sum, RoundError
        when they weigh nothing."""
        exact = self.point.decode_scalars(total[self._coordinates : self.length], sites)
        sums = iter(self.point.decode_scalars(total[self.length :], sites).tolist())
        metrics: Metrics = {}
        for sized in names:
            name, size = name_and_size(sized)
            metrics[name] = list(islice(sums, size)) if size else next(sums), next(sums)
        weight, clipped = float(exact[0]) / self._finer, float(exact[1])
        most = sites * self.point.max_weight * (self.schema is not None)
        if not (0 <= weight <= most + sites / ONE and 0 <= clipped <= sites * SCALAR_LIMIT * (most > 0)):
            raise SecAggError(
                f"a sum of {sites} sites weighs {weight:.3g}, with {clipped:.3g} clipped values: one of them "
                f"sent what no update gives, or masked for another model"
            )
        if self.schema is None:
            return Total(None, weight, 0.0, clipped, metrics)
        numbers = {each.name: float(n) for each, n in zip(self.extras.scalars, exact[2:], strict=False)}
        sums = self._sums(total, sites)
        if not weight > 0 and self.extras.max_weight is None:
            raise RoundError(f"{sites} updates weigh {weight:g} examples together, so they have no mean.")
        rest = exact[2 + len(numbers) :] / self._finer / (weight or 1.0)
        mean = self._mean(total, rest, sites, weight or 1.0, parallel)
        # Roundings are at random: of more than three sites, the fewest in a sum, they even out.
        bits = self.point.bits(weight / sites) + math.log2(max(sites, 3) / 3) / 2
        return Total(mean, weight, bits, clipped, metrics, sums, numbers)

    def _sums(self, total: RingVector, sites: int) -> dict[str, torch.Tensor]:
        """Each vector of the strategy, and of an exact one the sum of deltas; float64."""
        import torch

        at, found, deltas = 0, dict[str, torch.Tensor](), []
        for section in self._trained:
            length = self._length(section)
            if self.extras.exact:
                deltas.append(self.point.decode(total[at : at + length], sites, 1.0))
            at += length
        for each, (_, start, stop, point) in zip(self.extras.up, self._extras, strict=True):
            found[each.name] = torch.from_numpy(point.decode(total[at : at + stop - start], sites, 1.0))
            at += stop - start
        if deltas:
            found["delta"] = torch.from_numpy(np.concatenate(deltas))
        return found

    def _mean(
        self, total: RingVector, rest: NDArray[np.float64], sites: int, weight: float, parallel: Parallel
    ) -> Arena:
        import torch

        from ..arena import Arena, narrow_into

        assert self.schema is not None
        mean, at = Arena.empty(self.schema.model), 0
        for section in self._trained:
            part, out = total[at : at + self._length(section)], mean.flat(section)[: section.trained]
            at += len(part)
            if squeeze := self._compressor(section):
                lifted = squeeze.lift(self.point.decode(part, sites, weight), self.seed, section.trained)
                out.copy_(torch.from_numpy(lifted))
            elif section.dtype == "bfloat16":  # which numpy doesn't have
                out.copy_(torch.from_numpy(self.point.decode(part, sites, weight)))
            else:
                self.point.decode_into(part, sites, weight, out.numpy(), parallel)
        at = 0
        for section, first in self._rest:
            values = rest[at : at + section.numel - first]
            narrow_into(mean.flat(section)[first:], torch.from_numpy(values))
            at += section.numel - first
        for section in mean.schema.sections:
            if not section.moves:
                mean.flat(section).zero_()
        return mean


@dataclass(frozen=True)
class Encoded:
    """One site's result as a client.Summand: it is encoded when it is written."""

    encoding: Encoding
    result: Update | Evaluation
    seed: bytes = b""  # of the rounding of an update
    scale: float = 1.0  # shortens the delta of an update
    parallel: Parallel = serial

    @property
    def names(self) -> tuple[str, ...]:
        return sized_names(self.result.metrics)

    def write(self, names: tuple[str, ...], out: RingVector) -> None:
        if isinstance(self.result, Update):
            self.encoding.encode(self.result, names, self.seed, out, scale=self.scale, parallel=self.parallel)
        else:
            self.encoding.encode_metrics(self.result.metrics, names, out)


def norm_of(arena: AnyArena) -> float:
    """L2 norm over all floats, summed in float64; NaN or infinite where a value is."""
    squares = 0.0
    for section in arena.schema.model.sections:
        if section.floating:
            for start in range(0, section.numel, CHUNK):
                values = numbers(arena, section, start, min(start + CHUNK, section.numel)).astype(np.float64)
                squares += float(np.dot(values, values))
    return math.sqrt(squares)
