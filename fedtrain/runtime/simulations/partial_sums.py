"""The sums of the sites that one trainer of a simulation trained, checked as their aggregator would."""

from __future__ import annotations

from typing import Protocol

from ...aggregation.mean import BLOCK, BlockSum, length
from ...arena import Arena
from ...config import Config
from ...learning import Extras
from ...messages import SiteId, Train, Update
from ...schema import Schema
from ..star import checks


class PartialSum(Protocol):
    """What some of a round's updates are added to."""

    def add(self, place: int, site: SiteId, update: Update) -> float:
        """Add the update of the site at this place of all, after those before; its norm, where it is looked
        at. BadUpdate or SecAggError for one that can't be in the sum; then it is not."""

    def settle(self) -> None:
        """Sum all that was added: the memory of the deltas is needed again."""

    def finish(self) -> None:
        """Write the sums to the memory that was given for them."""


def sums_of(
    config: Config, extras: Extras, round: int, weights: Arena, sites: int, summands: int, memory: memoryview
) -> PartialSum:
    """Of so many sites, in `memory` of bytes_of; `summands`: as in exchange.Folds."""
    assert not summands
    return BlockSums(config, extras, round, weights, memory)


def bytes_of(update: Schema, sites: int, summands: int) -> int:
    """Of the sums of so many sites with updates of this schema."""
    assert not summands
    return -(-sites // BLOCK) * length(update) * 8


class BlockSums:
    """The sum of each block, as aggregation.WeightedMean adds them: float64 [blocks, numbers of a block]."""

    def __init__(
        self, config: Config, extras: Extras, round: int, weights: Arena, memory: memoryview
    ) -> None:
        import torch

        self._limits, self._extras = config.limits, extras
        self._request = Train(id="", round=round, weights=weights)
        schema = extras.update(weights.schema)
        self._block, self._number = BlockSum(schema), 0
        self._sums = torch.frombuffer(memory, dtype=torch.float64).view(-1, length(schema))

    def add(self, place: int, site: SiteId, update: Update) -> float:
        checks.answers(self._request, update, self._limits, self._extras)
        norm = checks.inspect(update, self._limits, self._extras)
        self._write(place // BLOCK)
        self._block.add(update)
        return norm

    def settle(self) -> None:
        self._block.settle()

    def finish(self) -> None:
        self._write(len(self._sums))

    def _write(self, number: int) -> None:
        """Write the blocks before the one of this number."""
        for at in range(self._number, number):
            self._sums[at].copy_(self._block.sum)
            self._block.clear()
        self._number = number
