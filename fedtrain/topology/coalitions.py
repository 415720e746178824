"""Under gossip.masks: which peers' models others can work out when they put their sums of a round together.

Each receiver knows its weights and the sum of its senders' models, Σ wⱼxⱼ. A coalition of receivers knows its
own models too, so it has one linear equation a receiver in the models of the others. A model is opened when
these equations leave it no freedom: it is 0 in each vector of their null space.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from math import comb

import numpy as np

from . import Topology
from .mixing import Mixing

ZERO = 1e-9
FEWEST = 3  # senders whose models are summed under masks
MOST_PEERS = 12  # whose coalitions are all tried


def opened(mixing: Mixing, coalition: Collection[int]) -> list[int]:
    """The peers, by index, whose models of this round a coalition works out."""
    others = [i for i in range(len(mixing.members)) if i not in coalition]
    sums = np.asarray(mixing.matrix)[np.ix_(sorted(coalition), others)]
    _, sizes, rows = np.linalg.svd(sums)
    free = rows[int((sizes > ZERO).sum()) :]
    return [
        peer
        for peer, moves in zip(others, np.abs(free).max(axis=0, initial=0.0), strict=True)
        if moves < ZERO
    ]


def opening(graph: Topology, peers: int, size: int, seed: int = 0) -> int:
    """How many of the comb(peers, size) coalitions open a model in some round."""
    rounds = [graph.round(peers, t, seed) for t in range(graph.period(peers) or 1)]
    return sum(any(opened(each, some) for each in rounds) for some in combinations(range(peers), size))


def smallest(graph: Topology, peers: int, seed: int = 0) -> str:
    """A line on the smallest coalitions that open a model. "" for more than MOST_PEERS peers, and for a graph
    on which there are no masks."""
    rounds = [graph.round(peers, t, seed).graph for t in range(graph.period(peers))]
    if peers > MOST_PEERS or any(len(near.incoming) < FEWEST for each in rounds for near in each.values()):
        return ""
    for size in range(1, peers - 1 if rounds else 0):
        if found := opening(graph, peers, size, seed):
            cases = f"{found} of {comb(peers, size)} cases, fewer never"
            return f"{size} peers together open another's model in {cases}"
    return "nobody opens another's model, but all others together" if rounds else ""
