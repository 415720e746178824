"""The base class of graphs of the user's own, and what is checked of what they give."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from random import Random
from typing import ClassVar

from ..config.values import Settings, one_of, require
from ..errors import ConfigError
from ..exchange import PeerId
from .mixing import WEIGHTS, Mixing, Out

AGAIN = (
    "gave another graph for the same round, so peers would disagree. Draw from `draw` alone, and depend on "
    "nothing but the arguments"
)


class Graph(Settings):
    """Who sends to whom in each round. The fields of a graph are its configuration; it has no state.

    Every peer computes the whole graph by itself, so it may depend on the arguments alone: on the members'
    names, which come sorted, the round, and what is drawn from `draw`, which has the same seed at all peers.
    A custom graph is a frozen dataclass; gossip.topology = "module:Class:3" names it, with its options:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Skips(Graph):
    ...     hop: int = 2
    ...     def out(self, members, t, draw):
    ...         n = len(members)
    ...         return [{(i + step) % n for step in (-self.hop, -1, 1, self.hop)} - {i} for i in range(n)]
    >>> from fedtrain.topology import Topology
    >>> near = Topology("mine:Skips", own=Skips(3)).round(["a", "b", "c", "d", "e", "f"], 0).graph["a"]
    >>> sorted(near.incoming), round(near.own, 3)
    (['b', 'd', 'f'], 0.25)
    """

    section: ClassVar[str] = "topology"
    weights: ClassVar[str] = "metropolis"  # or uniform, or push-sum for edges that go one way

    def out(self, members: Sequence[PeerId], t: int, draw: Random) -> Out | Mixing:
        """For each member by its index, the indices of those to which it sends in round t; or a Mixing, where
        the graph has weights of its own. ConfigError when so few or so many can't have such a graph: peers
        then exchange with all others until they can."""
        raise NotImplementedError("a graph says who sends to whom")

    def period(self, n: int) -> int:
        """Rounds after which the graphs of n peers repeat; 0: never."""
        return 1


def drawn_by(graph: Graph, members: Sequence[PeerId], t: int, draw: Random) -> Out | Mixing:
    """What a graph of the user's own gives, in a fixed order; ConfigError where it is no graph over these
    members, or another one when it is asked again, as peers would then disagree."""
    name, n, again = type(graph).__name__, len(members), copy(draw)
    one_of(f"topology: {name}.weights", graph.weights, WEIGHTS)
    first, second = graph.out(members, t, draw), graph.out(members, t, again)
    if isinstance(first, Mixing) or isinstance(second, Mixing):
        _require(first == second, name, AGAIN)
        assert isinstance(first, Mixing)
        _require(first.members == tuple(members), name, "gave a Mixing over other members")
        return first
    wrong = (
        f"gave {str(first)[:80]}. For each of the {n} members it must give the indices, 0 to {n - 1}, of "
        f"others to which it sends"
    )
    try:
        found, other = ([sorted({int(j) for j in peers}) for peers in each] for each in (first, second))
    except (TypeError, ValueError):
        raise ConfigError(f"topology: {name}.out() {wrong}.") from None
    _require(found == other, name, AGAIN)
    whose = len(found) == n and all(0 <= j < n and j != i for i, peers in enumerate(found) for j in peers)
    _require(whose, name, wrong)
    return found


def _require(condition: bool, name: str, what: str) -> None:
    require(condition, "topology", f"{name}.out() {what}.")
