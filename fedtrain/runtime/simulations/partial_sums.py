"""The sums of the sites that one trainer of a simulation trained, checked as their aggregator would."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ...aggregation.mean import BlockSum, blocks_of, length
from ...arena import Arena, Row
from ...config import Config
from ...errors import BadUpdate, SecAggError
from ...learning import NO_EXTRAS, Extras
from ...messages import Folded, Metrics, SiteId, Train, Update
from ...schema import Schema
from ...secagg.encoding import StackedUpdate, Total
from ...secagg.fixedpoint import ONE, SCALAR_LIMIT
from ...secagg.masking import RingVector
from ..sites.privacy import simulated_sum_key
from ..star import checks
from ..star.secure_terms import encoding_of, noise_of, round_seed, scale_of
from ..trainers.trainer_messages import Description, FoldMany


class PartialSum(Protocol):
    """What some of a round's updates are added to."""

    def add(
        self, first: int, sites: Sequence[SiteId], updates: Sequence[Update | None]
    ) -> tuple[list[float], dict[int, str]]:
        """Add the updates of these sites, the `first` of which is at this place of all; None: there is none.
        Returns their norms, where they are looked at, and why which place's can't be in the sum."""

    def finish(self) -> None:
        """Write the sums to the memory that was given for them."""


def sums_of(
    config: Config, extras: Extras, command: FoldMany, weights: Arena, memory: memoryview
) -> PartialSum:
    """Those of the command's sites, in `memory` of `bytes_of` bytes."""
    kind = FixedPointSum if command.summands else BlockSums
    return kind(config, extras, command, weights, memory)


def bytes_of(config: Config, about: Description, blocks: int, summands: int) -> int:
    """Of the sums of so many blocks; `summands`: as in exchange.Folds."""
    if not summands:
        return blocks * length(about.update) * 8
    encoding = encoding_of(config, 0, summands, about.update.model, about.extras)
    return encoding.length * encoding.point.dtype.itemsize


class BlockSums:
    """The sum of each block, as aggregation.WeightedMean adds them: float64 [blocks, numbers of a block]."""

    def __init__(
        self, config: Config, extras: Extras, command: FoldMany, weights: Arena, memory: memoryview
    ) -> None:
        import torch

        self._limits, self._extras = config.limits, extras
        self._request = Train(id="", round=command.round, weights=weights)
        self._schema = extras.update(weights.schema)
        self._ends = [end for _, _, end in blocks_of(command.places or range(len(command.sites)))]
        self._block, self._number = BlockSum(self._schema), 0
        self._sums = torch.frombuffer(memory, dtype=torch.float64).view(-1, length(self._schema))

    def add(
        self, first: int, sites: Sequence[SiteId], updates: Sequence[Update | None]
    ) -> tuple[list[float], dict[int, str]]:
        plain = self._extras == NO_EXTRAS
        if plain and (norms := checks.norms_of(updates, self._schema, self._limits)):
            self._add_all(first, [update for update in updates if update is not None])
            return norms, {}
        norms, refused = [0.0] * len(updates), dict[int, str]()
        for at, update in enumerate(updates):
            if update is None:
                continue
            try:
                checks.answers(self._request, update, self._limits, self._extras)
                norms[at] = checks.inspect(update, self._limits, self._extras)
            except BadUpdate as e:
                refused[first + at] = str(e)
            else:
                self._write(bisect_right(self._ends, first + at))
                self._block.add(update)
        self._block.settle()  # the memory of the deltas is needed again
        return norms, refused

    def _add_all(self, first: int, updates: Sequence[Update]) -> None:
        """Add all the rows of a slab."""
        assert isinstance(updates[0].delta, Row), updates[0]
        slab, counts, start = updates[0].delta.slab, [update.counts for update in updates], 0
        while start < len(counts):
            number = bisect_right(self._ends, first + start)
            stop = min(len(counts), self._ends[number] - first)
            self._write(number)
            self._block.add_rows(slab, start, counts[start:stop])
            start = stop

    def finish(self) -> None:
        self._write(len(self._sums))

    def _write(self, number: int) -> None:
        """Write the blocks before the one of this number."""
        for at in range(self._number, number):
            self._sums[at].copy_(self._block.sum)
            self._block.clear()
        self._number = number


class FixedPointSum:
    """The sum under masks' arithmetic, one vector in the ring."""

    def __init__(
        self, config: Config, extras: Extras, command: FoldMany, weights: Arena, memory: memoryview
    ) -> None:
        self._limits, self._extras, self._memory = config.limits, extras, memory
        self._request = Train(id="", round=command.round, weights=weights)
        self._schema = extras.update(weights.schema)
        self._sum = PlainSum(config, command.round, weights.schema.model, command.summands, extras)

    def add(
        self, first: int, sites: Sequence[SiteId], updates: Sequence[Update | None]
    ) -> tuple[list[float], dict[int, str]]:
        refused, plain = dict[int, str](), self._extras == NO_EXTRAS
        sure = plain and checks.norms_of(updates, self._schema, self._limits)
        for place, (site, update) in enumerate(zip(sites, updates, strict=True), first):
            if update is not None:
                try:
                    if not sure:
                        checks.answers(self._request, update, self._limits, self._extras)
                    self._sum.add(site, update)
                except (BadUpdate, SecAggError) as e:
                    refused[place] = f"{site} refuses: {e}"
        self._sum.settle()  # the memory of the deltas is needed again
        return [0.0] * len(sites), refused

    def finish(self) -> None:
        np.frombuffer(self._memory, self._sum.ring.dtype)[:] = self._sum.ring


class PlainSum:
    """Σ of encoded updates, in the open."""

    def __init__(
        self, config: Config, number: int, schema: Schema, sites: int, extras: Extras = NO_EXTRAS
    ) -> None:
        """Of a round's updates of a model of this schema, of at most so many sites."""
        self._config, self._number = config, number
        self._encoding = encoding_of(config, number, sites, schema, extras)
        self._noise = noise_of(config, schema, sites)
        self._sum = np.zeros(self._encoding.length, self._encoding.point.dtype)
        self._room = np.empty_like(self._sum)
        self._rows: list[StackedUpdate] = []  # of one slab, not summed yet
        self._metrics: Exact = {}
        self.nbytes, self.sites = self._sum.nbytes, 0

    def add(self, site: SiteId, update: Update) -> None:
        """With the site's noise, where sums have noise. SecAggError or BadUpdate for one that can't be in a
        sum; then it is not."""
        config, number = self._config, self._number
        scale, seed = scale_of(config, update), round_seed(config, number, site)
        if not self._encoding.stacks(update.delta):
            self._encoding.encode(update, (), seed, self._room, scale=scale)
            add_exactly(self._metrics, update.metrics)  # raises for what no scalar holds
            self._sum += self._room
        else:
            row = self._encoding.row(update, seed, scale)
            add_exactly(self._metrics, update.metrics)
            if self._rows and self._rows[0].delta.slab is not row.delta.slab:
                self.settle()
            self._rows.append(row)
            if row.delta.last:
                self.settle()
        self.sites += 1
        if self._noise is not None:
            self._noise.add_to(self._sum, simulated_sum_key(config, site, number))

    def add_folded(self, folded: Folded) -> None:
        """Add what several sites found."""
        self._sum += np.frombuffer(folded.sums, self._sum.dtype)
        for name, columns in folded.metrics.items():
            have, _ = self._metrics.get(name, ([0, 0], False))
            more = [sum(round(value * ONE) for value in column) for column in columns]
            self._metrics[name] = [a + b for a, b in zip(have, more, strict=True)], False
        self.sites += len(folded.num_examples) - len(folded.refused)

    def settle(self) -> None:
        """Add the rows that wait for others of their slab."""
        rows, self._rows = self._rows, []
        if rows:
            self._encoding.add_rows(rows, self._sum)

    @property
    def ring(self) -> RingVector:
        """The sum so far, without metrics."""
        self.settle()
        return self._sum

    def total(self) -> Total:
        return replace(self._encoding.decode(self.ring, self.sites, ()), metrics=scaled_down(self._metrics))


Exact = dict[str, tuple[list[int], bool]]  # name -> (sums and count, in whole 2^-20; whether of several sums)


def add_exactly(sums: Exact, metrics: Metrics) -> None:
    """Each metric's sums and count. SecAggError for one too large; adds nothing."""
    given = {n: [*(v if isinstance(v, list) else [v]), count] for n, (v, count) in metrics.items()}
    for name, values in given.items():
        if not all(abs(value) <= SCALAR_LIMIT for value in values):
            raise SecAggError(f"the sum or count of {name} is not finite, or beyond ±{SCALAR_LIMIT:.3g}")
    for name, values in given.items():
        have, several = sums.get(name, ([0] * len(values), isinstance(metrics[name][0], list)))
        sums[name] = [h + round(v * ONE) for h, v in zip(have, values, strict=True)], several


def scaled_down(sums: Exact) -> Metrics:
    found: Metrics = {}
    for name, (values, several) in sums.items():
        *totals, count = (value / ONE for value in values)
        found[name] = totals if several else totals[0], count
    return found
