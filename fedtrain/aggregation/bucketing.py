"""Bucketing: means of a few random updates each, which are more alike than the updates."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

from ..config.values import AtLeastOne
from ..digest import seed_of
from .base import Stack
from .before import Mixed, PreAggregation

T = TypeVar("T")


@dataclass(frozen=True)
class Bucketing(PreAggregation):
    """Plain means of s random updates each, dealt anew in each round (Karimireddy et al. 2022, Algorithm 1).

    The last bucket may have fewer; its mean is that of those in it, where the paper divides by s. A hostile
    update spoils one bucket, so a rule that withstands f bad ones of n withstands as many of n/s. All updates
    count alike.
    """

    s: AtLeastOne = 2  # updates in a bucket

    def fewest(self, needs: int) -> int:
        return (needs - 1) * self.s + 1

    def over(self, stack: Stack[T]) -> Stack[T]:
        order = list(range(stack.count))
        random.Random(seed_of(stack.known.seed, "bucketing")).shuffle(order)
        buckets = [order[i : i + self.s] for i in range(0, len(order), self.s)]
        return Mixed(stack, [
            [(i in bucket) / len(bucket) for i in range(stack.count)] for bucket in buckets
        ])  # fmt: skip
