"""A round's graph with its weights: the mixing matrix W, where W[i, j] is the weight of j's model at i."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..exchange import Neighborhood, PeerId

Matrix = npt.NDArray[np.float64]
Out = Sequence[Sequence[int]]  # out[j]: the indices to which j sends, without j itself
WeightedEdges = Sequence[tuple[int, int, float]]  # (j, i, W[i, j]), j other than i


@dataclass(frozen=True)
class Mixing:
    """The weighted edges of one round. The members are sorted by name; an edge names them by index."""

    members: tuple[PeerId, ...]
    edges: WeightedEdges
    own: tuple[float, ...]  # W[i, i], the weight of a peer's own model

    @classmethod
    def symmetric(cls, members: Sequence[PeerId], pairs: WeightedEdges) -> Mixing:
        """Each pair (i, j, weight) as an edge both ways; a peer's own weight is what is left of 1."""
        own = np.ones(len(members))
        for i, j, weight in pairs:
            own[i] -= weight
            own[j] -= weight
        return cls(tuple(members), [*pairs, *((j, i, w) for i, j, w in pairs)], tuple(own.tolist()))

    @cached_property
    def matrix(self) -> Matrix:
        """W, float64 [n, n]."""
        w = np.diag(np.array(self.own))
        for j, i, weight in self.edges:
            w[i, j] = weight
        return w

    @cached_property
    def graph(self) -> dict[PeerId, Neighborhood]:
        """Every peer's neighborhood, by name."""
        incoming: list[dict[PeerId, float]] = [{} for _ in self.members]
        outgoing: list[dict[PeerId, float]] = [{} for _ in self.members]
        for j, i, weight in sorted(self.edges):
            incoming[i][self.members[j]] = weight
        for j, i, weight in sorted(self.edges, key=lambda e: e[1]):
            outgoing[j][self.members[i]] = weight
        senders = {name: tuple(into) for name, into in zip(self.members, incoming, strict=True)}
        parts = zip(self.members, self.own, incoming, outgoing, strict=True)
        return {
            name: Neighborhood(name, own, into, out, {other: senders[other] for other in out})
            for name, own, into, out in parts
        }

    @property
    def degree(self) -> int:
        """The most peers to which one peer sends."""
        return max((len(part.outgoing) for part in self.graph.values()), default=0)


# --- weights


def metropolis(members: Sequence[PeerId], out: Out) -> Mixing:
    """W[i, j] = 1/(1 + max(dᵢ, dⱼ)) (Metropolis–Hastings): symmetric. ConfigError for one-way edges."""
    near = [set(peers) for peers in out]
    if any(j not in near[i] for j, peers in enumerate(near) for i in peers):
        raise ConfigError('weights: "metropolis" wants edges that go both ways. Use "push-sum".')
    pairs = [
        (i, j, 1 / (1 + max(len(near[i]), len(near[j]))))
        for j, peers in enumerate(near)
        for i in sorted(peers)
        if i < j
    ]
    return Mixing.symmetric(members, pairs)


def uniform(members: Sequence[PeerId], out: Out) -> Mixing:
    """The plain mean of a peer's own and d received models: weights 1/(1 + d). ConfigError unless every peer
    sends to d peers and receives from d."""
    incoming = np.bincount([i for peers in out for i in peers], minlength=len(out))
    degrees = {*(len(peers) for peers in out), *incoming.tolist()}
    if len(degrees) > 1:
        raise ConfigError(
            f'weights: "uniform" keeps the mean only where all peers have as many neighbours; here they have '
            f'{min(degrees)} to {max(degrees)}. Use "metropolis", or "push-sum" where edges have a direction.'
        )
    weight = 1 / (1 + degrees.pop())
    edges = [(j, i, weight) for j, peers in enumerate(out) for i in peers]
    return Mixing(tuple(members), edges, (weight,) * len(out))


def push_sum(members: Sequence[PeerId], out: Out) -> Mixing:
    """Each peer splits its mass equally among itself and the peers it sends to: columns of W sum to 1."""
    edges = [(j, i, 1 / (1 + len(peers))) for j, peers in enumerate(out) for i in peers]
    return Mixing(tuple(members), edges, tuple(1 / (1 + len(peers)) for peers in out))


WEIGHTS: dict[str, Callable[[Sequence[PeerId], Out], Mixing]] = {
    "metropolis": metropolis,
    "uniform": uniform,
    "push-sum": push_sum,
}
