"""The weighted mean of the sites' deltas: Σ wᵢΔᵢ / Σ wᵢ, the same bits from memory and from files."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ..arena import Arena, Row, Slab, narrow_into
from ..errors import RoundError
from ..messages import Update
from ..schema import Schema, Section, chunks
from .base import NOTHING, Known, Rule, Stack, weighted_sum

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
BLOCK = 16  # sites of a round's plan that are summed together, as the mean is defined
PRODUCTS = 1 << 17  # float64 products (weight times coordinate) held at a time when rows of a slab are folded


@dataclass(frozen=True)
class Mean(Rule):
    """Updates weighted by their examples; plain vectors weighted alike. One bad row can move it anywhere."""

    linear: ClassVar[bool] = True

    def of(self, stack: Stack[T]) -> T:
        total = in_turn(stack.weights)
        check_total(total, stack.count)
        return stack.reduce(lambda rows: weighted_sum(rows, stack.weights).div_(total))

    def combine(self, schema: Schema, updates: Sequence[Update], known: Known = NOTHING) -> Arena:
        return WeightedMean.combine(schema, updates, known.places)


class BlockSum:
    """Σ wᵢΔᵢ over the updates of one block, one after the other, in float64; of extras Σ.

    Per coordinate each product and each sum is rounded once. So the bits depend on the order of the updates
    and on nothing else: not on chunks, threads or vector width.
    """

    def __init__(self, schema: Schema) -> None:
        """`schema`: of an update."""
        import torch

        self._sum = torch.zeros(length(schema), dtype=torch.float64)
        self._rows: list[Update] = []  # consecutive rows of a slab that are not folded yet
        self._scratch = torch.empty(max(_longest(schema), PRODUCTS), dtype=torch.float64)
        self._parts = [(section, i, j, self._sum[at:to]) for section, i, j, at, to in places(schema)]

    def add(self, update: Update) -> None:
        """Add the next update: at once, or together with the following rows when it is a row of a slab."""
        delta, weight = update.delta, update.counts
        if self._rows and not (isinstance(delta, Row) and delta.follows(self._rows[-1].delta)):
            self.settle()
        if isinstance(delta, Row):
            self._rows.append(update)
            if delta.last:
                self.settle()
            return
        for section, start, stop, total in self._parts:
            scratch = self._scratch[: stop - start]
            _fold(total, delta.chunk(section, start, stop), 1.0 if section.extra else weight, scratch)

    def add_rows(self, slab: Slab, first: int, counts: Sequence[float]) -> None:
        """Add consecutive rows of a slab, from the `first` on, with these weights: the bits of one by one,
        with the products of many rows computed at once."""
        import torch

        own = torch.tensor(counts, dtype=torch.float64)[:, None]
        for section, start, stop, total in self._parts:
            weights = torch.ones_like(own) if section.extra else own
            deltas = slab.flat(section)[first : first + len(counts), start:stop]
            at_once = max(1, PRODUCTS // (stop - start))
            products = self._scratch[: at_once * (stop - start)].view(at_once, -1)
            for at in range(0, len(counts), at_once):
                some = deltas[at : at + at_once]
                for product in products[: len(some)].copy_(some).mul_(weights[at : at + at_once]).unbind():
                    total.add_(product)

    def settle(self) -> None:
        """Add the rows that wait for others of their slab."""
        rows, self._rows = self._rows, []
        if rows:
            first = rows[0].delta
            assert isinstance(first, Row), first
            self.add_rows(first.slab, first.index, [update.counts for update in rows])

    @property
    def sum(self) -> torch.Tensor:
        """The sum so far, [length(schema)]: the sections that are summed, one after the other. A view."""
        self.settle()
        return self._sum

    def clear(self) -> None:
        """Begin the next block."""
        self._rows = []
        self._sum.zero_()


class WeightedMean:
    """The mean of a round's updates, which holds two float64 sums, however many sites there are.

    The mean is defined over blocks: BLOCK sites that follow one another in the round's plan are a block. The
    sum of a block is a BlockSum in the order of its sites, the sums of blocks are added in their order, and
    the result is rounded to its own dtype once (to 16 bits by way of float32). A site whose update is not
    used leaves its place empty. So the bits depend on the plan and on whose updates are used, and on nothing
    else: neither on the order of arrival (see exchange.in_order), nor on who sums a block.
    """

    def __init__(self, schema: Schema) -> None:
        """`schema`: of an update."""
        self._schema, self._block = schema, BlockSum(schema)
        self._total: torch.Tensor | None = None  # of the blocks that are over
        self._weights = [0.0, 0.0]  # of those blocks, of the present one
        self._number = self._next = 0  # of the present block; the place after the last
        self._folded = 0

    def add(self, update: Update, place: int | None = None) -> None:
        """Add an update. `place`: of its site in the plan, after those before; None: the next place."""
        place = self._next if place is None else place
        assert place >= self._next, "updates are added in the order of the plan"
        self._go_to(place // BLOCK)
        self._block.add(update)
        self._weights[1] += update.counts
        self._folded += 1
        self._next = place + 1

    def add_block(self, number: int, block: torch.Tensor, counts: Sequence[float]) -> None:
        """Add the block of this number, whole, as BlockSum.sum has it; `counts`: its updates' weights."""
        self._go_to(number)
        self._close(block, in_turn(counts))
        self._folded += len(counts)
        self._number, self._next = number + 1, (number + 1) * BLOCK

    def _go_to(self, number: int) -> None:
        """Have the present block be the one of this number."""
        if self._number == number:
            return
        self._close(self._block.sum, self._weights[1])
        self._block.clear()
        self._number, self._weights[1] = number, 0.0

    def _close(self, block: torch.Tensor, weight: float) -> None:
        self._total = block.clone() if self._total is None else self._total.add_(block)
        self._weights[0] += weight

    def _sum(self) -> torch.Tensor:
        """Of all blocks; maybe a view."""
        block = self._block.sum
        return block if self._total is None else self._total + block

    def result(self) -> Arena:
        """The mean so far; RoundError when the updates have no examples."""
        weight, sums = self.weight, self._sum()
        check_total(weight, self._folded)
        mean = Arena.zeros(self._schema.model)
        for section, start, stop, at, to in places(self._schema):
            if not section.extra:
                narrow_into(mean.chunk(section, start, stop), sums[at:to] / weight)
        return mean

    def nothing(self) -> Arena:
        """The mean of updates that all weigh nothing: no move."""
        return Arena.zeros(self._schema.model)

    @property
    def weight(self) -> float:
        """Σ wᵢ, by blocks as well."""
        return self._weights[0] + self._weights[1]

    def sums(self) -> dict[Section, torch.Tensor]:
        """Σ wᵢΔᵢ of each section that a round changes, and Σ of each section of extras; float64."""
        import torch

        sections = summed(self._schema)
        parts = torch.split(self._sum(), [section.numel for section in sections])
        return dict(zip(sections, parts, strict=True))

    @staticmethod
    def combine(schema: Schema, updates: Sequence[Update], at: Sequence[int] = ()) -> Arena:
        """The mean of updates in files, chunk by chunk: memory is the result and a few chunks. `at`: the
        places of their sites in the plan; (): they follow one another."""
        import torch

        blocks, total = in_blocks(updates, at), weight_of(updates, at)
        check_total(total, len(updates))
        mean, size = Arena.zeros(schema.model), _longest(schema)
        sums, block_sums, scratch = torch.empty(3, size, dtype=torch.float64)
        for section in schema.moving:
            for start, stop in chunks(section):
                part, block_part, product = (t[: stop - start] for t in (sums, block_sums, scratch))
                part.zero_()
                for block in blocks:
                    block_part.zero_()
                    for update in block:
                        _fold(block_part, update.delta.chunk(section, start, stop), update.counts, product)
                    part.add_(block_part)
                narrow_into(mean.chunk(section, start, stop), part.div_(total))
        return mean


def length(schema: Schema) -> int:
    """The numbers of a BlockSum of updates of this schema."""
    return sum(section.numel for section in summed(schema))


def places(schema: Schema) -> Iterator[tuple[Section, int, int, int, int]]:
    """(section, start, stop, from where, up to where in a BlockSum) of all that is summed, chunk by chunk."""
    at = 0
    for section in summed(schema):
        for start, stop in chunks(section):
            yield section, start, stop, at + start, at + stop
        at += section.numel


def in_blocks(updates: Sequence[Update], at: Sequence[int] = ()) -> list[list[Update]]:
    """The updates by block; `at`: as in WeightedMean.combine."""
    numbers = (place // BLOCK for place in at or range(len(updates)))
    found = groupby(zip(numbers, updates, strict=True), itemgetter(0))
    return [[update for _, update in block] for _, block in found]


def blocks_of(places: Sequence[int]) -> list[tuple[int, int, int]]:
    """(number of the block, start, stop) of each run of these ascending places that is in one block."""
    found, start = list[tuple[int, int, int]](), 0
    while start < len(places):
        number = places[start] // BLOCK
        stop = bisect_left(places, (number + 1) * BLOCK, start)
        found.append((number, start, stop))
        start = stop
    return found


def weight_of(updates: Sequence[Update], at: Sequence[int] = ()) -> float:
    """Σ wᵢ, by blocks; `at`: as in WeightedMean.combine."""
    return in_turn(in_turn(update.counts for update in block) for block in in_blocks(updates, at))


def in_turn(numbers: Iterable[float]) -> float:
    """The sum of the numbers, added one after the other. Not sum(), which rounds in another way from Python
    3.12 on."""
    return reduce(operator.add, numbers, 0.0)


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
