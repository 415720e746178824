"""What a rule over a neighbourhood is: the mean folds models as they come, others hold them side by side."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..base import PIECE, Algorithm, Blend, Judged

if TYPE_CHECKING:
    import torch

    from ...exchange import Neighborhood, PeerId
    from ..base import Mix, Request, Vector

    Rows = torch.Tensor  # [1 + neighbours, d]: the peer's own first, then theirs, by name
    # The one vector, and how much of each neighbour's counted, as in base.Judged; () where none is judged.
    Ruling = tuple[Vector, Sequence[float]]


class MixingRule:
    """Makes one model of a peer's own and its neighbours'. Its fields are its configuration, it has no state.

    A rule is `of` alone. Its result depends on the rows, their weights and the round, never on who came
    first, and is a new vector.
    """

    @property
    def needs(self) -> int:
        """The fewest models, one's own included, for which its promise holds. With less a peer keeps its
        own; a run refuses to start on a graph that never gives so many."""
        return 1

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        """One of many, in round t. `rows[0]` is near.peer's, `rows[1:]` are those of `peers`."""
        raise NotImplementedError("a rule says how it makes one of many")

    def over(self, own: Vector, near: Neighborhood, t: int) -> Mix:
        """Where what the neighbours send in round t goes."""
        return StackedMix(own, near, t, self)

    def mix_extras(self, own: Vector, near: Neighborhood, mass: float) -> Mix:
        """And what travels beside models: buffers, and what peers estimate."""
        return StackedMix(own, near, 0, Middle())


@dataclass(frozen=True)
class GraphMean(MixingRule):
    """By the weights of the graph, as the algorithms' papers have it. It follows one bad model anywhere."""

    def over(self, own: Vector, near: Neighborhood, t: int) -> Mix:
        return Blend(own, near)

    def mix_extras(self, own: Vector, near: Neighborhood, mass: float) -> Mix:
        return Blend(own, near, mass)


class RowRule(Protocol):
    """What a rule of aggregation/ is: all rows count alike."""

    @property
    def needs(self) -> int: ...
    def judged(self, rows: Rows) -> tuple[Vector, Sequence[float]]: ...


@dataclass(frozen=True)
class Unweighted(MixingRule):
    """A rule of aggregation/ over a neighbourhood: one's own model is a row like the others, the first."""

    rule: RowRule

    @property
    def needs(self) -> int:
        return self.rule.needs

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        one, shares = self.rule.judged(rows)
        return one, shares[1:]


@dataclass(frozen=True)
class Middle(MixingRule):
    """In each coordinate the middle value, or the mean of the middle two, of three or more."""

    @property
    def needs(self) -> int:
        return 3

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        ordered, n = rows.double().sort(dim=0).values, len(rows)
        return ordered[(n - 1) // 2].add_(ordered[n // 2]).div_(2).to(rows.dtype), ()


class StackedMix:
    """base.Mix: the neighbours' vectors side by side, until all that come are there."""

    def __init__(self, own: Vector, near: Neighborhood, t: int, rule: MixingRule) -> None:
        self._near, self._t, self._rule = near, t, rule
        self.shares: Mapping[PeerId, float] = {}
        self._rows = own.new_empty(1 + len(near.incoming), own.numel())
        self._rows[0] = own
        self._place = {peer: 1 + i for i, peer in enumerate(sorted(near.incoming))}
        self._came = dict.fromkeys(self._place, 0)

    def begin(self, peer: PeerId, fields: Mapping[str, float]) -> None:
        """A parcel is announced."""

    def add(self, peer: PeerId, chunk: Vector) -> None:
        at = self._came[peer]
        self._came[peer] = at + len(chunk)
        self._rows[self._place[peer], at : self._came[peer]] = chunk

    def to_self(self) -> Vector:
        peers = [peer for peer, came in self._came.items() if came == self._rows.shape[1]]
        if 1 + len(peers) < self._rule.needs:
            return self._rows[0].clone()
        rows = self._rows
        if len(peers) < len(self._place):
            rows = rows[[0, *(self._place[peer] for peer in peers)]]
        one, shares = self._rule.of(rows, peers, self._near, self._t)
        self.shares = dict(zip(peers, shares, strict=True)) if shares else {}
        return one


@dataclass(frozen=True)
class Ruled(Algorithm):
    """An algorithm that mixes models as a rule does. The others keep something (mass, trackers, copies) that
    is right only for the graph's own weights."""

    rule: MixingRule = GraphMean()

    def mix_extras(self, own: Vector, near: Neighborhood, mass: float) -> Mix:
        return self.rule.mix_extras(own, near, mass)

    def settle(self, mix: Mix) -> Generator[Request, Any, Vector]:
        """What the rule makes of all that came; how it judged is told."""
        mixed = mix.to_self()
        if mix.shares:
            yield Judged(mix.shares)
        return mixed


# --- for rules that look from one's own model at the others


def distances(rows: Rows) -> list[float]:
    """‖row − rows[0]‖₂ of each row but the first; inf where a float64 can't hold it."""
    import torch

    squares = torch.zeros(len(rows) - 1, dtype=torch.float64)
    for start in range(0, rows.shape[1], PIECE):
        piece = rows[:, start : start + PIECE].double()
        squares += (piece[1:] - piece[0]).square().sum(dim=1)
    found: list[float] = squares.sqrt().tolist()
    return found


def shortened(rows: Rows, peers: Sequence[PeerId], scales: Sequence[float], near: Neighborhood) -> Ruling:
    """own + Σ wⱼ·scaleⱼ·(xⱼ − own): the graph's mean when all scales are 1, to the bit."""
    own, incoming = near.own, dict(near.incoming)
    pulling = [(row, peer, scale) for row, peer, scale in zip(rows[1:], peers, scales, strict=True) if scale]
    for _, peer, scale in pulling:
        incoming[peer] *= scale
        own += near.incoming[peer] - incoming[peer]
    blend = Blend(rows[0], replace(near, own=own, incoming=incoming))
    for row, peer, _ in pulling:
        blend.begin(peer, {})
        blend.add(peer, row)
    return blend.to_self(), scales  # with the whole share of those that don't pull
