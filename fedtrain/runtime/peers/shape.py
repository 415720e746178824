"""The graph of a round over those who are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import ConfigError
from ...events import Emit, Notice
from ...exchange import Neighborhood, PeerId
from ...gossip import Algorithm
from ...topology import Topology
from .gossip_setup import check_hearing


class Shape:
    """The graph over those who are there: the run's own, or the nearest that so many can have."""

    def __init__(self, graph: Topology, seed: int, emit: Emit) -> None:
        self._graph, self._seed, self._emit = graph, seed, emit
        self._of: tuple[Sequence[PeerId], int] | None = None  # members and epoch that _now is for
        self._now = graph

    def check(self, algorithm: Algorithm, members: Sequence[PeerId], masks: bool) -> None:
        """ConfigError where these could never agree, or hear too few."""
        graph, _ = self._graph.near(members, self._seed)
        graph.check(members, self._seed)
        check_hearing(algorithm, graph, members, self._seed, masks)

    def round(
        self, members: Sequence[PeerId], epoch: int, t: int, other: Topology | None
    ) -> Mapping[PeerId, Neighborhood]:
        """Each one's part of round t; `other` is a round's own graph."""
        if self._of != (members, epoch):
            self._of = members, epoch
            self._now, why = self._graph.near(members, self._seed, epoch)
            if why:
                self._emit(Notice(text=f"{why} With those who are here now it is {self._now}."))
            try:
                self._now.check(members, self._seed, epoch)
            except ConfigError as e:
                self._emit(Notice(text=f"{e} Until then each part goes on by itself."))
        return (other or self._now).round(members, t, self._seed, epoch).graph
