"""Who masks with whom, and how many of them can unmask: with everybody, or with k others on a ring.

With k neighbours instead of n − 1 (Bell et al., Secure single-server aggregation with (poly)logarithmic
overhead, CCS 2020) the masks that a site adds and the shares that it makes grow with k, far slower than n.
The graph is Harary's: sites on a ring in an order that nobody chose, each joined to those up to k/2 away.

`degree` finds the least k for which, with a threshold t, each of these is improbable over the order drawn:

secrecy      some site has X corrupt neighbours, enough to open its secret. Semi-honest: X >= t. Semi-
             malicious, where the aggregator may tell some neighbours that a site dropped out and others that
             it didn't: X >= 2t − k, for then the k − X honest ones are two times t − X
secrecy      the sites that are neither corrupt nor lost fall apart, so that two partial sums can be told: two
             runs of k/2 places on the ring hold none of them. An aggregator says who is lost when it knows
             the ring (`chosen_loss`), and fills up two runs in which many are corrupt: k − lost of their k
             places at least. And 2t − k at least: the site beside a run has all of it for neighbours, and
             goes on with k − t of its neighbours lost at most
correctness  some site that stayed has fewer than t neighbours that stayed

Each of the secrecy events may have half of 2^-security. X and the neighbours that stayed are hypergeometric;
the union bound is over sites, and over pairs of runs. With a loss at random this gives the degrees that were
published.

A probability is that of one order on the ring. A corrupt site that signs other keys has the order drawn anew;
with SECURITY, 2^40 such tries leave 2^-40.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

SECURITY = 80.0  # of one order of the ring


@dataclass(frozen=True)
class Degree:
    """How many neighbours each site has, and how many of their shares open its secret."""

    neighbours: int  # k
    threshold: int  # t


@lru_cache
def degree(
    sites: int,
    corrupt: float,
    dropout: float,
    semi_malicious: bool = True,
    security: float = 40.0,
    correctness: float = 20.0,
    chosen_loss: bool = False,
) -> Degree:
    """The least even k, and the least t for it; n − 1 where only the full graph will do.

    Of n `sites` a fraction `corrupt` is with the aggregator, and another, `dropout`, is lost on the way.
    Secrets are kept except with probability 2^-security, and the sum is made except with 2^-correctness.
    `chosen_loss`: the aggregator knows the ring when it chooses who is lost.
    ConfigError when even the full graph has no threshold for that.
    """
    n, bad, lost = sites, math.ceil(sites * corrupt - 1e-9), math.ceil(sites * dropout - 1e-9)
    if not (n >= 2 and corrupt >= 0 and dropout >= 0 and bad + lost < n):
        raise ConfigError(
            f"secagg: of {n} sites {bad} corrupt and {lost} lost leave {n - bad - lost} to protect. "
            f"Lower the fractions."
        )
    for k in (*range(2, n - 1, 2), n - 1):
        secret = np.flatnonzero(math.log2(n) + _at_least(n - 1, bad, k) <= -security - 1)
        least = int(secret[0]) if len(secret) else k + 1  # improbably many corrupt neighbours
        threshold = max(1, -(-(k + least) // 2) if semi_malicious else least)
        if chosen_loss and k < n - 1:
            split = _split(n, bad, k)
            while threshold <= k and split[max(k - lost, 2 * threshold - k)] > -security - 1:
                threshold += 1
        if threshold > k or (k < n - 1 and _apart(n, bad + lost, k // 2) > -security - 1):
            continue
        if math.log2(n) + _fewer_than(n - 1, n - lost - 1, k)[threshold] <= -correctness:
            return Degree(k, threshold)
    raise ConfigError(
        f"secagg: with {n} sites, {bad} of them corrupt and {lost} lost, no threshold both keeps secrets and "
        f"lets the others finish. Lower the fractions, or ask for more sites."
    )


def neighbours(sites: int, k: int, seed: bytes) -> list[list[int]]:
    """The indices of each site's k neighbours, sorted; all others where k >= n − 1.

    The order on the ring is drawn from `seed`, alike for all who know it: nobody should be able to choose it.
    """
    n = sites
    if k >= n - 1:
        return [[j for j in range(n) if j != i] for i in range(n)]
    if k < 2 or (k % 2 and n % 2):
        raise ConfigError(f"secagg: no ring of {n} sites gives each {k} neighbours; {k + 1} are possible")
    ring = permutation(n, seed)
    steps = [*range(-(k // 2), 0), *range(1, k // 2 + 1), *([n // 2] if k % 2 else [])]
    found: list[list[int]] = [[] for _ in range(n)]
    for place, site in enumerate(ring):
        found[site] = sorted(ring[(place + step) % n] for step in steps)
    return found


def permutation(n: int, seed: bytes) -> list[int]:
    """0..n-1 in a uniformly random order that is a function of `seed` (Fisher and Yates)."""
    order, draws = list(range(n)), _uniform64(seed)
    for i in range(n - 1, 0, -1):
        span = i + 1
        fair = 2**64 - 2**64 % span  # draws above would make the low ones likelier
        j = next(draw for draw in draws if draw < fair) % span
        order[i], order[j] = order[j], order[i]
    return order


def _uniform64(seed: bytes) -> Iterator[int]:
    """SHA-256 over ("fedtrain ring", seed, 0), (.., 1), .., four numbers of 64 bits from each."""
    start = hashlib.sha256(b"fedtrain ring" + hashlib.sha256(seed).digest())
    counter = 0
    while True:
        block = start.copy()
        block.update(counter.to_bytes(8, "little"))
        digest = block.digest()
        yield from (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))
        counter += 1


# --- Probabilities, as base-2 logarithms


def _at_least(population: int, marked: int, draws: int) -> NDArray[np.float64]:
    """log2 P[X >= x] for x = 0..draws, X the number of marked ones among `draws` without replacement."""
    above = np.cumsum(_hypergeometric(population, marked, draws)[::-1])[::-1]
    with np.errstate(divide="ignore"):
        logs: NDArray[np.float64] = np.log2(above)
    return logs


def _fewer_than(population: int, marked: int, draws: int) -> NDArray[np.float64]:
    """log2 P[X < x] for x = 0..draws."""
    below = np.concatenate([[0.0], np.cumsum(_hypergeometric(population, marked, draws)[:-1])])
    with np.errstate(divide="ignore"):
        logs: NDArray[np.float64] = np.log2(below)
    return logs


def _hypergeometric(population: int, marked: int, draws: int) -> NDArray[np.float64]:
    """P[X = x] for x = 0..draws."""
    x = np.arange(max(0, draws - (population - marked)), min(draws, marked) + 1)
    logs = (
        _choose(marked, x) + _choose(population - marked, draws - x) - _choose(population, np.array([draws]))
    )
    found = np.zeros(draws + 1)
    found[x] = np.exp2(logs)
    return found


def _split(n: int, bad: int, k: int) -> NDArray[np.float64]:
    """log2 of a bound on the probability that some two separate runs, of k places together, hold x corrupt
    sites or more, for x = 0..k."""
    return math.log2(n * max(1, n - k - 1) / 2) + _at_least(n, bad, k)


def _apart(n: int, gone: int, run: int) -> float:
    """log2 of a bound on the probability that two separate runs of `run` places on the ring are gone."""
    if 2 * run > gone:
        return -math.inf
    pairs = n * (n - 2 * run - 1) / 2  # with at least one place between them on both sides
    taken = np.array([gone - 2 * run])
    both = _choose(n - 2 * run, taken) - _choose(n, np.array([gone]))
    return math.log2(pairs) + float(both[0])


def _choose(n: int, k: NDArray[np.int64]) -> NDArray[np.float64]:
    """log2 of the binomial coefficient."""
    logs = _log2_factorials(n)
    found: NDArray[np.float64] = logs[n] - logs[k] - logs[n - k]
    return found


@lru_cache
def _log2_factorials(n: int) -> NDArray[np.float64]:
    logs: NDArray[np.float64] = np.cumsum(np.log2(np.maximum(np.arange(n + 1), 1)))
    return logs
