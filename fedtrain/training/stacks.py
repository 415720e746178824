"""The data of many sites, batch by batch: padded where sites differ in size, with a mask of what is real.

Sites are in the order of their steps, so that those that still train are always the first rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import torch

from ..config import TrainConfig
from .batches import move
from .engine import groups
from .examples import Tensors, spans

Span = tuple[int, int]  # [start, stop) in a site's examples, those of all passes one after the other


class DropoutLayer(NamedTuple):
    """A call of F.dropout in the loss."""

    p: float
    shape: torch.Size  # of one example there
    dtype: torch.dtype


class Padded(NamedTuple):
    """One batch of each site."""

    columns: list[torch.Tensor]  # [rows, width, ...]
    noise: list[torch.Tensor]  # of each dropout layer, [rows, width, ...]
    mask: torch.Tensor | None  # bool [rows, width]: which examples are real; None: all


class Group(NamedTuple):
    """The batches of one optimizer step."""

    active: int  # the sites that take it, the first rows; a row after them has nothing real in it
    batches: list[Padded]


class _Places(NamedTuple):
    """Where the examples of one batch of each site are."""

    order: torch.Tensor  # int64 [rows, width]: places in the orders of all sites; where the examples are
    real: torch.Tensor | None  # bool [rows, width], None where all are; there too
    masked: bool  # whether an active site has one that is not real
    sizes: list[int]  # of the active ones


@dataclass(frozen=True, eq=False)
class StackedSites:
    """Sites whose tensors can stand in one, in the order of their rows."""

    members: list[int]  # which of the sites
    names: list[str]
    like: Tensors  # the first one's
    counts: list[int]  # of examples
    columns: list[torch.Tensor]  # those of all sites, one after the other
    config: TrainConfig

    @classmethod
    def of(
        cls, bucket: Sequence[tuple[int, str, Tensors]], config: TrainConfig, device: torch.device
    ) -> StackedSites:
        """Of sites in the order of their rows."""
        members, names, examples = map(list, zip(*bucket, strict=True))
        columns = [move(torch.cat(same), device) for same in zip(*(e.columns for e in examples), strict=True)]
        return cls(members, names, examples[0], [e.count for e in examples], columns, config)

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    @cached_property
    def seen(self) -> list[int]:
        """How many examples each site trains on in a round, as often as it does."""
        return [sum(stop - start for group in plan for start, stop in group) for plan in self._plans]

    @cached_property
    def steps(self) -> list[int]:
        """Of each site in a round."""
        return [len(plan) for plan in self._plans]

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(start, stop, i): rows [start, stop) are the i-th of the sites and those after it."""
        at = range(len(self.members))
        firsts = [i for i in at if i == 0 or self.members[i] != self.members[i - 1] + 1]
        return [(i, j, self.members[i]) for i, j in zip(firsts, [*firsts[1:], len(at)], strict=True)]

    def groups(self, seed: Callable[[str], int], dropouts: Sequence[DropoutLayer]) -> Iterator[Group]:
        """A round's, each site's examples in the order that the loop would take, and with its dropout.
        `seed`: of a site in this round."""
        shuffled, device = any(self._shuffled), self.columns[0].device
        seeds = [seed(name) for name in self.names] if shuffled or dropouts else []
        order = move(self._order(seeds), device) if shuffled else None
        generators = [torch.Generator().manual_seed(s) for s in seeds if dropouts]
        for active, batches in self._steps:
            found = []
            for places in batches:
                columns = self._kept(places) if order is None else self._gathered(places, order)
                noise = draw(dropouts, generators, places, device)
                mask = places.real if places.masked else None
                found.append(Padded(columns, noise, mask))
            yield Group(active, found)

    # --- Which examples

    @cached_property
    def _plans(self) -> list[list[list[Span]]]:
        known = {size: plan_of(self.config, size) for size in set(self.counts)}
        return [known[size] for size in self.counts]

    @cached_property
    def _shuffled(self) -> list[bool]:
        """Of each site: a single batch of all needs no order."""
        return [0 < self.config.batch_size < size for size in self.counts]

    @cached_property
    def _bases(self) -> list[int]:
        """Where each site's order begins among those of all, and in the end that of the next one."""
        passes = [max(stop for group in plan for _, stop in group) for plan in self._plans]
        return _offsets([-(-most // size) * size for most, size in zip(passes, self.counts, strict=True)])

    def _order(self, seeds: Sequence[int]) -> torch.Tensor:
        """int64: the examples of all sites as they are taken, pass after pass."""
        parts, bases = [], self._bases
        for row, (start, size) in enumerate(zip(_offsets(self.counts), self.counts, strict=False)):
            passes = (bases[row + 1] - bases[row]) // size
            if self._shuffled[row]:
                generator = torch.Generator().manual_seed(seeds[row])
                parts += [torch.randperm(size, generator=generator).add_(start) for _ in range(passes)]
            else:
                parts.append(torch.arange(start, start + size).repeat(passes))
        return torch.cat(parts)

    @cached_property
    def _steps(self) -> list[tuple[int, list[_Places]]]:
        """(active, places of each batch) of each step."""
        found: list[tuple[int, list[_Places]]] = []
        known: dict[tuple[Span, ...], _Places] = {}
        for step in range(self.steps[0]):
            plans = [plan[step] for plan in self._plans if len(plan) > step]
            batches = []
            for number in range(max(map(len, plans))):
                spans = tuple(plan[number] if number < len(plan) else (0, 0) for plan in plans)
                if spans not in known:
                    known[spans] = self._places(spans)
                batches.append(known[spans])
            found.append((len(plans), batches))
        return found

    def _places(self, spans: Sequence[Span]) -> _Places:
        sizes = [stop - start for start, stop in spans]
        rows, width = min(len(self.names), rounded_up(len(sizes))), max(sizes)
        if masked := min(sizes) < width:
            width = min(rounded_up(width), self.config.batch_size or sys.maxsize)
        idle = [(0, 0)] * (rows - len(sizes))
        base = torch.tensor(self._bases[:rows])[:, None]
        starts, stops = torch.tensor([*spans, *idle]).T[:, :, None]
        place, device = starts + torch.arange(width), self.columns[0].device
        if not masked and not idle:
            return _Places(move(base + place, device), None, False, sizes)
        real = place < stops
        return _Places(move(base + place * real, device), move(real, device), masked, sizes)

    # --- Their tensors

    def _gathered(self, places: _Places, order: torch.Tensor) -> list[torch.Tensor]:
        """[rows, width, ...] of each column. What is not real is the site's first example of the round, so
        that NaN in one site's data stays there."""
        index = order[places.order]
        return [_split(column.index_select(0, index.flatten()), *index.shape) for column in self.columns]

    def _kept(self, places: _Places) -> list[torch.Tensor]:
        """The same in every round."""
        key = id(places)
        if key not in self._batches:
            whole = places.real is None and len(places.sizes) == len(self.counts)
            if whole and sum(places.sizes) == sum(self.counts):
                self._batches[key] = [_split(c, len(self.counts), self.counts[0]) for c in self.columns]
            else:
                self._batches[key] = self._gathered(places, move(self._order([]), self.columns[0].device))
        return self._batches[key]

    @cached_property
    def _batches(self) -> dict[int, list[torch.Tensor]]:
        return {}


def plan_of(config: TrainConfig, size: int) -> list[list[Span]]:
    """The spans of each batch of each step that a site of `size` examples takes in a round."""
    passes = count()

    def one_pass() -> Iterator[list[Span]]:
        at = next(passes) * size
        found = list(spans(size, config.batch_size, config.drop_last))
        if len(found) == 1 and found[0] == (0, size):
            at = 0  # all of them, in any pass
        batches = iter([(at + start, at + stop) for start, stop in found])
        while group := list(islice(batches, config.accumulate)):
            yield group

    return list(groups(config, one_pass))


def draw(
    dropouts: Sequence[DropoutLayer], generators: Sequence[torch.Generator], places: _Places,
    device: torch.device,
) -> list[torch.Tensor]:  # fmt: skip
    """What each dropout layer multiplies with: at each site the draws that it would make alone."""
    shape: Any = places.order.shape
    noise = [torch.zeros(*shape, *layer.shape, dtype=layer.dtype) for layer in dropouts]
    for row, size in enumerate(places.sizes if dropouts else ()):
        for layer, padded in zip(dropouts, noise, strict=True):
            keep = 1 - layer.p
            padded[row, :size].bernoulli_(keep, generator=generators[row]).div_(keep)
    return move(noise, device)  # type: ignore[no-any-return]  # a list, as it was


def rounded_up(number: int) -> int:
    """To one of four numbers from each power of two to the next: few shapes, and so few traces."""
    step = 1 << max(0, number.bit_length() - 3)
    return -(-number // step) * step


def _split(column: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    return column.view(rows, width, *column.shape[1:])


def _offsets(sizes: Sequence[int]) -> list[int]:
    return torch.tensor([0, *sizes]).cumsum(0).tolist()
