"""Graphs that change from round to round, and make every model the exact mean after some rounds.

A schedule is a list of rounds, a round a list of pairs (i, j, weight). Round t of a run is round t modulo
the schedule's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import zip_longest

from .fixed import hops
from .mixing import Out

WeightedPairs = list[tuple[int, int, float]]


def one_peer_exponential(n: int, t: int) -> Out:
    """In round t, i sends to i + 2^(t mod ⌈log₂ n⌉) (Ying et al. 2021, §4). Exact if n is a power of two."""
    offsets = hops(n)
    return [[(i + offsets[t % len(offsets)]) % n] for i in range(n)] if offsets else [[]]


@cache
def base(n: int, k: int) -> list[WeightedPairs]:
    """The Base-(k+1) graph (Takezawa et al. 2023, Algorithm 3): exact for any n, with k neighbours at most.

    The n peers are p groups of q, where p is the product of n's prime factors up to k + 1. Groups average by
    the simple graph, then the peers at the same place of all groups average by hyper-hypercubes. Where the
    simple graph over all n peers has fewer rounds, the result is that graph.
    """
    peers = list(range(n))
    p = _smooth_part(n, k)
    if p == n:
        return hyper_hypercube(peers, k)
    q = n // p
    within = _beside(simple_base(peers[g * q : (g + 1) * q], k) for g in range(p))
    across = _beside(hyper_hypercube(peers[place::q], k) for place in range(q))
    whole = simple_base(peers, k)
    return whole if len(whole) < len(within) + len(across) else within + across


def simple_base(peers: Sequence[int], k: int) -> list[WeightedPairs]:
    """The simple Base-(k+1) graph (Takezawa et al. 2023, Algorithm 2).

    n is written in base k + 1; the digit a of the place (k+1)^p gives a block of a·(k+1)^p peers, in a
    parts. First every block averages within itself. Then each block, the largest first, meets all later
    blocks: each peer of a later block averages with one peer of each part, with weights that bring it to the
    common mean, and the parts then average within themselves.
    """
    if _smooth_part(len(peers), k) == len(peers):
        return hyper_hypercube(peers, k)
    blocks = _blocks(peers, k)
    own = [hyper_hypercube([i for part in parts for i in part], k) for parts in blocks]
    begin = len(own[0])  # the first block is the largest and takes the most rounds
    schedules = own
    for number, parts in enumerate(blocks[:-1]):
        later = [i for block in blocks[number + 1 :] for part in block for i in part]
        size = len(parts[0])
        weight = size / (size * len(parts) + len(later))
        meet = [(i, part[place], weight) for place, i in enumerate(later) for part in parts]
        spread = _beside([hyper_hypercube(part, k) for part in parts])
        schedules.append([[]] * (begin + number) + [meet] + spread)
    return _beside(schedules)


def hyper_hypercube(peers: Sequence[int], k: int) -> list[WeightedPairs]:
    """The k-peer hyper-hypercube (Takezawa et al. 2023, Algorithm 1): round l averages groups of nₗ ≤ k + 1
    peers, where n is the product of as few nₗ as possible."""
    rounds, stride = [], 1
    for factor in _factors(len(peers), k + 1):
        pairs = []
        for at, i in enumerate(peers):
            place = at // stride % factor
            pairs += [(i, peers[at + stride * step], 1 / factor) for step in range(1, factor - place)]
        rounds.append(pairs)
        stride *= factor
    return rounds


def _beside(schedules: Iterable[list[WeightedPairs]]) -> list[WeightedPairs]:
    """One schedule of several, which have different peers or different rounds."""
    return [[pair for pairs in rounds for pair in pairs] for rounds in zip_longest(*schedules, fillvalue=[])]


def _blocks(peers: Sequence[int], k: int) -> list[list[Sequence[int]]]:
    """For each digit a of n in base k + 1, the highest first: a parts of the size of the digit's place."""
    base, size = k + 1, 1
    while size * base <= len(peers):
        size *= base
    blocks, at = [], 0
    while at < len(peers):
        digit = (len(peers) - at) // size
        if digit:
            blocks.append([peers[at + size * a : at + size * (a + 1)] for a in range(digit)])
            at += digit * size
        size //= base
    return blocks


def _smooth_part(n: int, k: int) -> int:
    """The largest divisor of n whose prime factors are all at most k + 1."""
    part = 1
    for prime in range(2, k + 2):  # a composite number no longer divides n when its turn comes
        while n % prime == 0:
            n //= prime
            part *= prime
    return part


@cache
def _factors(n: int, largest: int) -> tuple[int, ...]:
    """n as the product of as few numbers up to `largest` as possible; n must be such a product."""
    if n == 1:
        return ()
    divisors = (d for d in range(min(n, largest), 1, -1) if n % d == 0)
    return min(((d, *_factors(n // d, largest)) for d in divisors), key=len)
