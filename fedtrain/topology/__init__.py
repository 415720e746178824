"""Topologies: which peers exchange models, and with which weights.

A new graph of ours needs a line in KINDS; one of the user's own is a class in a file beside the task.
A round's graph is a pure function of (sorted members, view epoch, seed, round), so every peer computes the
whole graph without a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from .. import config
from ..config import kind_in, one_of
from ..digest import seed_of
from ..errors import ConfigError
from ..exchange import PeerId
from .base import Graph, drawn_by
from .drawn import epidemic, erdos_renyi, matching, nearest_degree, regular, unreached
from .finite import base, one_peer_exponential
from .fixed import complete, exponential, hops, ring, star, torus
from .listed import listed, read
from .mixing import WEIGHTS, Mixing, Out

PeerIds = Sequence[PeerId]
Draw = Callable[[PeerIds, str, int, Random], "Out | Mixing"]  # members, argument, round, seeded draws

__all__ = ["KINDS", "WEIGHTS", "Family", "Graph", "Mixing", "Topology", "names", "own_in", "parse"]


@dataclass(frozen=True)
class Family:
    """A family of graphs."""

    graph: Draw
    weights: str = "metropolis"  # the default weights
    example: str = ""  # an example of the argument, "" for a graph without one
    period: Callable[[int, str], int] = lambda n, argument: 1  # rounds until the graph repeats; 0: never
    instead: Callable[[int, str], str] = lambda n, argument: "complete"  # for n peers without such a graph


KINDS: dict[str, Family] = {
    "ring": Family(lambda m, _, t, draw: ring(len(m))),
    "torus": Family(lambda m, _, t, draw: torus(len(m))),
    "complete": Family(lambda m, _, t, draw: complete(len(m))),
    "star": Family(lambda m, _, t, draw: star(len(m))),
    "exponential": Family(lambda m, _, t, draw: exponential(len(m)), "uniform"),
    "one-peer-exponential": Family(
        lambda m, _, t, draw: one_peer_exponential(len(m), t), "uniform", period=lambda n, _: len(hops(n))
    ),
    "base": Family(
        lambda m, k, t, draw: _scheduled(m, base(len(m), _whole("base", k)), t),
        "its own",
        example="1",
        period=lambda n, k: len(base(n, _whole("base", k))),
    ),
    "regular": Family(
        lambda m, d, t, draw: regular(len(m), _whole("regular", d), draw),
        example="4",
        instead=lambda n, d: f"regular:{nearest_degree(n, int(d))}" if n > 2 else "complete",
    ),
    "erdos-renyi": Family(
        lambda m, p, t, draw: erdos_renyi(len(m), _number("erdos-renyi", p), draw), example="0.3"
    ),
    "matching": Family(lambda m, _, t, draw: matching(len(m), draw), period=lambda n, _: 0),
    "epidemic": Family(
        lambda m, s, t, draw: epidemic(len(m), _whole("epidemic", s), draw),
        "push-sum",
        example="2",
        period=lambda n, _: 0,
        instead=lambda n, _: f"epidemic:{max(n - 1, 1)}",
    ),
    "file": Family(lambda m, path, t, draw: listed(m, Path(path)), example="graph.txt"),
}


@dataclass(frozen=True)
class Topology:
    """A graph for every round, over the members of that round."""

    kind: str
    argument: str = ""
    weights: str = ""  # metropolis, uniform or push-sum; "": the kind's default
    own: Graph | None = None  # of a kind of the user's own

    @property
    def family(self) -> Family:
        """What this is one of."""
        if (own := self.own) is None:
            return KINDS[self.kind]
        return Family(
            lambda m, _, t, draw: drawn_by(own, m, t, draw), own.weights, "", lambda n, _: own.period(n)
        )

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind

    @property
    def fingerprint(self) -> str:
        """A digest of the edges of a graph from a file: the same edges have the same fingerprint."""
        edges = sorted(set(read(Path(self.argument))))
        return hashlib.sha256(repr(edges).encode()).hexdigest()[:16]

    def round(self, members: int | PeerIds, t: int, seed: int = 0, epoch: int = 0) -> Mixing:
        """The graph of round t (0 first), with weights. `members`: names, or a number of peers. `epoch` is
        the number of the membership view: a new view draws random graphs anew. ConfigError when these
        members can't have such a graph."""
        members = tuple(sorted(names(members) if isinstance(members, int) else members))
        period = self.period(len(members))
        return _round(self, members, t % period if period else t, seed, epoch)

    def period(self, n: int) -> int:
        """The number of rounds after which the graphs of n peers repeat; 0: never."""
        return max(1, found) if (found := self.family.period(n, self.argument)) or n < 2 else 0

    def check(self, members: int | PeerIds, seed: int = 0, epoch: int = 0) -> None:
        """ConfigError unless there is a path from every member to every other, over all rounds together."""
        members = tuple(sorted(names(members) if isinstance(members, int) else members))
        out: list[set[int]] = [set() for _ in members]
        for t in range(self.period(len(members)) or 16 + 4 * len(members).bit_length()):
            for j, i, _ in self.round(members, t, seed, epoch).edges:
                out[j].add(i)
        if pair := unreached([sorted(peers) for peers in out]):
            sender, receiver = (members[i] for i in pair)
            raise ConfigError(
                f"topology: {self} of {len(members)} peers is not connected: {receiver} never hears of "
                f"{sender}, so they can't agree. Add edges, or choose another kind."
            )

    def strangers(self, members: PeerIds) -> list[PeerId]:
        """The names in a graph's file that are not members, sorted."""
        if self.kind != "file":
            return []
        return sorted({name for edge in read(Path(self.argument)) for name in edge} - set(members))

    def near(self, members: PeerIds, seed: int = 0, epoch: int = 0) -> tuple[Topology, str]:
        """(self, "") where these members can have such a graph, else (the nearest possible one, the reason).
        Runs use it because peers come and go."""
        try:
            self.round(members, 0, seed, epoch)
        except ConfigError as e:
            return parse(self.family.instead(len(members), self.argument)), str(e)
        return self, ""


def parse(spec: str, weights: str = "", root: Path | None = None) -> Topology:
    """The topology of a text like "ring", "base:1", "regular:4" or "file:graph.txt", or a ConfigError.
    "module:Class" and "module:Class:3" are a Graph of the user's, in module.py in the folder `root`."""
    kind, argument = kind_in(spec, KINDS)
    if weights:
        one_of("weights", weights, WEIGHTS)
    if config.is_own(kind):
        cls = config.own_class("topology", kind, Graph, root, "a graph", KINDS)
        options = config.options_in("topology", kind, argument, config.options_of(cls))
        config.check_options("topology", kind, options, {kind: cls})
        return Topology(kind, argument or "", weights, config.build(cls, options, "topology"))
    one_of("topology", kind, KINDS)
    found = KINDS[kind]
    if bool(found.example) != bool(argument) or argument == "":
        form = f"{kind}:{found.example}" if found.example else kind
        raise ConfigError(f'topology: {spec!r}: write "{form}".')
    if weights and kind == "base":
        raise ConfigError("weights: base has its own, by which it is exact. Leave them out.")
    return Topology(kind, argument or "", weights)


def own_in(spec: str) -> str:
    """The class of the user's own that a text names, "module:Class"; "" for one of ours."""
    kind, _ = kind_in(spec, KINDS)
    return kind if config.is_own(kind) else ""


def names(n: int) -> list[PeerId]:
    """n names "0", "1", ... padded with zeros, so that they sort like numbers."""
    return [f"{i:0{len(str(max(n - 1, 0)))}d}" for i in range(n)]


@lru_cache(maxsize=64)  # all peers of a simulation ask for the same graph
def _round(topology: Topology, members: tuple[PeerId, ...], t: int, seed: int, epoch: int) -> Mixing:
    kind = topology.family
    when = () if topology.period(len(members)) else (t,)
    graph = kind.graph(members, topology.argument, t, Random(seed_of(seed, "topology", epoch, *when)))
    if isinstance(graph, Mixing):
        return graph
    return WEIGHTS[topology.weights or kind.weights](members, graph)


def _scheduled(members: PeerIds, schedule: list[list[tuple[int, int, float]]], t: int) -> Mixing:
    return Mixing.symmetric(members, schedule[t] if schedule else [])


def _whole(kind: str, text: str) -> int:
    value = _number(kind, text)
    if value < 1 or value != int(value):
        raise ConfigError(
            f'topology: {kind}:{text}: write a whole number, as in "{kind}:{KINDS[kind].example}".'
        )
    return int(value)


def _number(kind: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f'topology: {kind}:{text}: write a number, as in "{kind}:{KINDS[kind].example}".'
        ) from None
