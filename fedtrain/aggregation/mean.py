"""The weighted mean of the sites' deltas: Σ wᵢΔᵢ / Σ wᵢ, the same bits from memory and from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ..arena import Arena, Row, narrow_into
from ..errors import RoundError
from ..messages import Update
from ..schema import Schema, Section, chunks
from .base import NOTHING, Known, Rule, Stack, weighted_sum

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
PRODUCTS = 1 << 17  # float64 products (weight times coordinate) held at a time when rows of a slab are folded


@dataclass(frozen=True)
class Mean(Rule):
    """Updates weighted by their examples; plain vectors weighted alike. One bad row can move it anywhere."""

    linear: ClassVar[bool] = True

    def of(self, stack: Stack[T]) -> T:
        total = 0.0
        for weight in stack.weights:
            total += weight
        check_total(total, stack.count)
        return stack.reduce(lambda rows: weighted_sum(rows, stack.weights).div_(total))

    def combine(self, schema: Schema, updates: Sequence[Update], known: Known = NOTHING) -> Arena:
        return WeightedMean.combine(schema, updates)


class WeightedMean:
    """A fold over updates that holds one float64 sum, however many sites there are.

    Per coordinate: each product and each sum is rounded to float64 once, in the order in which the updates
    are given, and the result to its own dtype once (to 16 bits by way of float32). So the bits depend on
    that order (give site order, see exchange.in_order) and on nothing else: not on arrival, chunks, threads
    or vector width.
    """

    def __init__(self, schema: Schema) -> None:
        import torch

        self._schema, self._total, self._folded = schema.model, 0.0, 0
        self._rows: list[Update] = []  # consecutive rows of a slab that are not folded yet
        scratch = torch.empty(max(_longest(schema), PRODUCTS), dtype=torch.float64)
        self._parts = []  # (section, start, stop, the sum of that chunk, scratch memory of its size)
        self._sums = {s: torch.zeros(s.numel, dtype=torch.float64) for s in summed(schema)}
        for section, total in self._sums.items():
            for start, stop in chunks(section):
                self._parts.append((section, start, stop, total[start:stop], scratch[: stop - start]))
        self._scratch = scratch

    def add(self, update: Update) -> None:
        """Add the next update: at once, or together with the following rows when it is a row of a slab."""
        delta, weight = update.delta, update.counts
        self._total += weight
        self._folded += 1
        if self._rows and not (isinstance(delta, Row) and delta.follows(self._rows[-1].delta)):
            self._fold_rows()
        if isinstance(delta, Row):
            self._rows.append(update)
            if delta.last:
                self._fold_rows()
            return
        for section, start, stop, total, scratch in self._parts:
            _fold(total, delta.chunk(section, start, stop), 1.0 if section.extra else weight, scratch)

    def add_all(self, updates: Sequence[Update]) -> None:
        """Add these, in their order."""
        for update in updates:
            self.add(update)

    def _fold_rows(self) -> None:
        """Add the pending rows: the bits of one by one, with the products of many rows computed at once."""
        import torch

        rows, self._rows = self._rows, []
        first = rows[0].delta
        assert isinstance(first, Row), first
        counts = torch.tensor([u.counts for u in rows], dtype=torch.float64)[:, None]
        for section, start, stop, total, _ in self._parts:
            weights = torch.ones_like(counts) if section.extra else counts
            deltas = first.slab.flat(section)[first.index : first.index + len(rows), start:stop]
            at_once = max(1, PRODUCTS // (stop - start))
            products = self._scratch[: at_once * (stop - start)].view(at_once, -1)
            for at in range(0, len(rows), at_once):
                some = deltas[at : at + at_once]
                for product in products[: len(some)].copy_(some).mul_(weights[at : at + at_once]).unbind():
                    total.add_(product)

    def result(self) -> Arena:
        """The mean so far; RoundError when the updates have no examples."""
        if self._rows:
            self._fold_rows()
        check_total(self._total, self._folded)
        mean = Arena.zeros(self._schema)
        for section, start, stop, total, scratch in self._parts:
            if not section.extra:
                narrow_into(mean.chunk(section, start, stop), scratch.copy_(total).div_(self._total))
        return mean

    def nothing(self) -> Arena:
        """The mean of updates that all weigh nothing: no move."""
        return Arena.zeros(self._schema)

    @property
    def weight(self) -> float:
        """Σ wᵢ."""
        return self._total

    def sums(self) -> dict[Section, torch.Tensor]:
        """Σ wᵢΔᵢ of each section that a round changes, and Σ of each section of extras; float64."""
        if self._rows:
            self._fold_rows()
        return self._sums

    @staticmethod
    def combine(schema: Schema, updates: Sequence[Update]) -> Arena:
        """The mean of updates in files, chunk by chunk: memory is the result and a few chunks."""
        import torch

        total = 0.0
        for update in updates:
            total += update.counts  # not sum(), which rounds in another way from Python 3.12 on
        check_total(total, len(updates))
        mean, size = Arena.zeros(schema.model), _longest(schema)
        sums, scratch = torch.empty(size, dtype=torch.float64), torch.empty(size, dtype=torch.float64)
        for section in schema.moving:
            for start, stop in chunks(section):
                part, product = sums[: stop - start].zero_(), scratch[: stop - start]
                for update in updates:
                    _fold(part, update.delta.chunk(section, start, stop), update.counts, product)
                narrow_into(mean.chunk(section, start, stop), part.div_(total))
        return mean


def summed(schema: Schema) -> list[Section]:
    """The sections of an update that are summed."""
    return [section for section in schema.sections if section.moves or section.extra]


def check_total(total: float, count: int) -> None:
    """RoundError when `count` updates have `total` examples and that is not positive."""
    if not total > 0:
        raise RoundError(
            f"{count} updates weigh {total:g} examples together, so they have no mean. "
            f"Do the sites' data() give any examples?"
        )


def _fold(total: torch.Tensor, delta: torch.Tensor, weight: float, scratch: torch.Tensor) -> None:
    """total += weight · delta. Two operations, because a fused one rounds once in vector code and twice in
    the tail, and the bits would depend on where a chunk ends."""
    total.add_(scratch.copy_(delta).mul_(weight))


def _longest(schema: Schema) -> int:
    return max((stop - start for s in schema.sections for start, stop in chunks(s)), default=0)
