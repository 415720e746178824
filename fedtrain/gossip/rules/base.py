"""The base class of mixing rules: the mean adds models as they arrive, other rules hold them side by side."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...config.values import Settings
from ..base import PIECE, Algorithm, Blend, Judged

if TYPE_CHECKING:
    import torch

    from ...exchange import Neighborhood, PeerId
    from ..base import Mix, Request, Vector

    Rows = torch.Tensor  # [1 + neighbours, d]: the peer's own model, then its neighbours' by name
    # (the mixed vector; the used part of each neighbour's, as in base.Judged, or () where none is judged)
    Ruling = tuple[Vector, Sequence[float]]


class MixingRule(Settings):
    """Makes one model of a peer's own and its neighbours'. Its fields are its configuration, it has no state.

    A custom rule is a frozen dataclass that defines `of`, and `needs` where its promise wants several models.
    The result is a new vector; it depends on the rows, their weights and the round, never on the order of
    arrival. gossip.rule = "module:Class:NAME=VALUE" names it.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Part(MixingRule):
    ...     part: float = 0.5
    ...     def of(self, rows, peers, near, t):
    ...         return rows[0] + self.part * (rows.mean(0) - rows[0]), ()
    >>> import torch
    >>> from fedtrain.topology import Topology
    >>> near = Topology("complete").round(["a", "b"], 0).graph["a"]
    >>> Part().of(torch.tensor([[0.0], [4.0]]), ["b"], near, t=0)[0]
    tensor([1.])
    """

    section: ClassVar[str] = "gossip.rule"

    @property
    def needs(self) -> int:
        """The fewest models, the peer's own included, for which the rule's promise holds. With fewer a peer
        keeps its own; a run refuses to start on a graph that never gives enough."""
        return 1

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        """The mix of round t. `rows[0]` is the model of `near.peer`, `rows[1:]` are those of `peers`."""
        raise NotImplementedError("a rule says how it makes one of many")

    def over(self, own: Vector, near: Neighborhood, t: int) -> Mix:
        """The Mix that takes the neighbours' models in round t."""
        return StackedMix(own, near, t, self)

    def mix_extras(self, own: Vector, near: Neighborhood, mass: float) -> Mix:
        """The Mix for buffers and estimates, which are sent together with the models."""
        return StackedMix(own, near, 0, Middle())


@dataclass(frozen=True)
class GraphMean(MixingRule):
    """The mean by the graph's weights, as in the algorithms' papers. One bad model can move it anywhere."""

    def over(self, own: Vector, near: Neighborhood, t: int) -> Mix:
        return Blend(own, near)

    def mix_extras(self, own: Vector, near: Neighborhood, mass: float) -> Mix:
        return Blend(own, near, mass)


class RowRule(Protocol):
    """The methods of an aggregation rule that are used here; all rows count alike."""

    @property
    def needs(self) -> int: ...
    def judged(self, rows: Rows) -> tuple[Vector, Sequence[float]]: ...


@dataclass(frozen=True)
class Unweighted(MixingRule):
    """An aggregation rule over a neighbourhood. The peer's own model is the first row, and counts alike."""

    rule: RowRule

    @property
    def needs(self) -> int:
        return self.rule.needs

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        one, shares = self.rule.judged(rows)
        return one, shares[1:]


@dataclass(frozen=True)
class Middle(MixingRule):
    """Each coordinate's median of three or more models."""

    @property
    def needs(self) -> int:
        return 3

    def of(self, rows: Rows, peers: Sequence[PeerId], near: Neighborhood, t: int) -> Ruling:
        ordered, n = rows.double().sort(dim=0).values, len(rows)
        return ordered[(n - 1) // 2].add_(ordered[n // 2]).div_(2).to(rows.dtype), ()


class StackedMix:
    """A Mix that holds the neighbours' vectors side by side until the rule is applied."""

    def __init__(self, own: Vector, near: Neighborhood, t: int, rule: MixingRule) -> None:
        self._near, self._t, self._rule = near, t, rule
        self.shares: Mapping[PeerId, float] = {}
        self._rows = own.new_empty(1 + len(near.incoming), own.numel())
        self._rows[0] = own
        self._place = {peer: 1 + i for i, peer in enumerate(sorted(near.incoming))}
        self._came = dict.fromkeys(self._place, 0)

    def begin(self, peer: PeerId, fields: Mapping[str, float]) -> None:
        """No preparation is needed."""

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
    """Base of algorithms that mix models by any rule. Other algorithms keep a mass, trackers or copies, which
    are right only for the graph's own weights."""

    rule: MixingRule = GraphMean()

    def mix_extras(self, own: Vector, near: Neighborhood, mass: float) -> Mix:
        return self.rule.mix_extras(own, near, mass)

    def settle(self, mix: Mix) -> Generator[Request, Any, Vector]:
        """The mixed model; yields the rule's judgement for the log."""
        mixed = mix.to_self()
        if mix.shares:
            yield Judged(mix.shares)
        return mixed


# --- for rules that compare the neighbours' models with the peer's own


def distances(rows: Rows) -> list[float]:
    """‖row − rows[0]‖₂ of each row but the first; inf where the value exceeds float64."""
    import torch

    squares = torch.zeros(len(rows) - 1, dtype=torch.float64)
    for start in range(0, rows.shape[1], PIECE):
        piece = rows[:, start : start + PIECE].double()
        squares += (piece[1:] - piece[0]).square().sum(dim=1)
    found: list[float] = squares.sqrt().tolist()
    return found


def shortened(rows: Rows, peers: Sequence[PeerId], scales: Sequence[float], near: Neighborhood) -> Ruling:
    """own + Σ wⱼ·scaleⱼ·(xⱼ − own); with all scales 1 it is the graph's mean, to the bit."""
    own, incoming = near.own, dict(near.incoming)
    pulling = [(row, peer, scale) for row, peer, scale in zip(rows[1:], peers, scales, strict=True) if scale]
    for _, peer, scale in pulling:
        incoming[peer] *= scale
        own += near.incoming[peer] - incoming[peer]
    blend = Blend(rows[0], replace(near, own=own, incoming=incoming))
    for row, peer, _ in pulling:
        blend.begin(peer, {})
        blend.add(peer, row)
    return blend.to_self(), scales  # to_self also returns the weight of the rows with scale 0
