"""Random graphs: all peers draw the same graph, because all know the seed, the round and the members."""

from __future__ import annotations

import math
from random import Random

from ..errors import ConfigError
from .mixing import Out

TRIES = 200  # draws of a graph before a ConfigError


def regular(n: int, degree: int, draw: Random) -> Out:
    """A connected graph in which every peer has `degree` neighbours (Steger and Wormald 1999: ends of edges
    are matched at random, and a draw that gets stuck, or falls apart, is drawn again)."""
    if not 1 < degree < n or n * degree % 2:
        raise ConfigError(
            f"topology: regular:{degree} needs more than {degree} peers and an even number of ends of edges, "
            f"but {n} peers have {n * degree}. Choose another degree, from 2 to {n - 1}."
        )
    for _ in range(TRIES):
        out = _matched_ends(n, degree, draw)
        if out is not None and connected(out):
            return out
    raise ConfigError(f"topology: no connected regular:{degree} graph of {n} peers in {TRIES} draws.")


def nearest_degree(n: int, degree: int) -> int:
    """The nearest possible degree of a regular graph of n peers, n >= 3."""
    degree = max(2, min(degree, n - 1))
    return degree + n * degree % 2  # n·degree must be even; for an odd n, an odd degree is at most n - 2


def _matched_ends(n: int, degree: int, draw: Random) -> Out | None:
    out: list[set[int]] = [set() for _ in range(n)]
    ends = [i for i in range(n) for _ in range(degree)]
    while ends:
        draw.shuffle(ends)
        left = []
        for i, j in zip(ends[::2], ends[1::2], strict=True):
            if i == j or j in out[i]:
                left += [i, j]
            else:
                out[i].add(j)
                out[j].add(i)
        if len(left) == len(ends) and not any(j not in out[i] for i in left for j in left if i != j):
            return None
        ends = left
    return [sorted(peers) for peers in out]


def erdos_renyi(n: int, probability: float, draw: Random) -> Out:
    """Each pair is an edge with this probability; the graph is drawn again until it is connected."""
    if not 0 < probability <= 1:
        raise ConfigError(f"topology: erdos-renyi:{probability:g} is no probability: choose one in (0, 1].")
    for _ in range(TRIES):
        out: list[list[int]] = [[] for _ in range(n)]
        for i in range(n):
            for j in range(i + 1, n):
                if draw.random() < probability:
                    out[i].append(j)
                    out[j].append(i)
        if connected(out):
            return out
    raise ConfigError(
        f"topology: erdos-renyi:{probability:g} of {n} peers fell apart in {TRIES} draws. "
        f"It is likely to hold together from about {min(1.0, 2 * math.log(n) / n):.2g} on."
    )


def matching(n: int, draw: Random) -> Out:
    """Random pairs; one peer of an odd number has no neighbour."""
    order = draw.sample(range(n), n)
    out: list[list[int]] = [[] for _ in range(n)]
    for i, j in zip(order[::2], order[1::2], strict=False):
        out[i], out[j] = [j], [i]
    return out


def epidemic(n: int, fanout: int, draw: Random) -> Out:
    """Each peer sends to `fanout` random others, drawn for each peer by itself."""
    if not 1 <= fanout < max(n, 2):
        raise ConfigError(f"topology: epidemic:{fanout} of {n} peers: choose a number from 1 to {n - 1}.")
    others = [draw.sample(range(n - 1), min(fanout, n - 1)) for _ in range(n)]
    return [sorted(j + (j >= i) for j in peers) for i, peers in enumerate(others)]


def connected(out: Out) -> bool:
    """Whether there is a path from every peer to every other (strongly connected)."""
    return unreached(out) is None


def unreached(out: Out) -> tuple[int, int] | None:
    """A pair (a, b) of peers without a path from a to b; None for a strongly connected graph."""
    back: list[list[int]] = [[] for _ in out]
    for j, peers in enumerate(out):
        for i in peers:
            back[i].append(j)
    if apart := set(range(len(out))) - _reached(out):
        return 0, min(apart)
    if apart := set(range(len(out))) - _reached(back):
        return min(apart), 0
    return None


def _reached(out: Out) -> set[int]:
    """The peers to which there is a path from the first one."""
    seen, todo = {0}, [0]
    while todo:
        fresh = set(out[todo.pop()]) - seen
        seen |= fresh
        todo += fresh
    return seen
