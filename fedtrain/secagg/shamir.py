"""Shamir's secret sharing over the integers modulo 2^255 − 19, in Python's integers.

A secret is the value at 0 of a random polynomial of degree threshold − 1; a share is its value at the
holder's x. Any `threshold` shares give the secret, fewer say nothing about it (Shamir, How to share a secret,
CACM 1979). The modulus is X25519's, so an X25519 private key is one secret.

Sums and products of small numbers are reduced at the end, not at each step. What depends on the holders alone
(Lagrange's weights) is computed once for a set of them; then a reconstruction is one sum of products.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

from ..errors import SecAggError

PRIME = 2**255 - 19
RUN = 32  # steps of Horner's rule between reductions; each makes a number longer by the bits of x


def share(
    secret: int, xs: Sequence[int], threshold: int, random: Callable[[int], bytes] = os.urandom
) -> list[int]:
    """The shares of `secret` for the holders at `xs`, in their order.

    `random(n)` gives n bytes that nobody can foresee; a coefficient of the polynomial is made of 32 of them,
    and so is off by 2^-250 from uniform.
    SecAggError where the secret or an x is out of range, xs are not distinct or fewer than the threshold.
    """
    if not 0 <= secret < PRIME:
        raise SecAggError("a secret to share must be in [0, 2^255 - 19)")  # and is not printed
    _check(xs, threshold)
    drawn = (int.from_bytes(random(32), "little") % PRIME for _ in range(threshold - 1))
    highest_first = [*drawn, secret]
    runs = [highest_first[i : i + RUN] for i in range(0, threshold, RUN)]
    ys = []
    for x in xs:
        y = 0
        for run in runs:
            for coefficient in run:
                y = y * x + coefficient
            y %= PRIME
        ys.append(y)
    return ys


@dataclass(frozen=True)
class Weights:
    """What the shares of one set of holders are multiplied by; their sum is the polynomial's value at 0."""

    xs: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def at_zero(cls, xs: Sequence[int]) -> Weights:
        """Lagrange's weights of the holders at `xs`; kept for the next secret of the same holders."""
        return _at_zero(tuple(xs))

    def combine(self, ys: Sequence[int]) -> int:
        """The secret of which `ys` are the shares, in the order of xs; some other number if one is wrong."""
        if len(ys) != len(self.xs):
            raise SecAggError(f"{len(ys)} shares came for the {len(self.xs)} holders of these weights")
        total: int = sum(map(mul, self.values, ys))
        return total % PRIME


@lru_cache(maxsize=1024)
def _at_zero(xs: tuple[int, ...]) -> Weights:
    """w_i = Π_{j≠i} x_j / (x_j − x_i) = Π_j x_j / (x_i · Π_{j≠i} (x_j − x_i))."""
    _check(xs, len(xs))
    inverses = _inverses([x * math.prod([other - x for other in xs if other != x]) % PRIME for x in xs])
    product = math.prod(xs) % PRIME
    return Weights(xs, tuple(product * inverse % PRIME for inverse in inverses))


def _check(xs: Sequence[int], threshold: int) -> None:
    if not 1 <= threshold <= len(xs):
        raise SecAggError(f"a threshold of {threshold} with {len(xs)} holders: it must be in 1..{len(xs)}")
    if len(set(xs)) != len(xs):
        raise SecAggError("two holders have the same x")
    if not all(0 < x < PRIME for x in xs):
        raise SecAggError("a holder's x must be in 1..2^255 - 20; at 0 lies the secret itself")


def _inverses(numbers: Sequence[int]) -> list[int]:
    """1/a for each a modulo PRIME, with one inversion for all (Montgomery 1987)."""
    before = list(accumulate(numbers, lambda a, b: a * b % PRIME, initial=1))
    inverse, found = pow(before[-1], -1, PRIME), []
    for number, product in zip(reversed(numbers), reversed(before[:-1]), strict=True):
        found.append(inverse * product % PRIME)
        inverse = inverse * number % PRIME
    return found[::-1]
