"""Streaming DiLoCo over gossip: a fragment of the model travels while the peer trains the whole of it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from ..config.values import AtLeastOne, BelowOne, Positive
from ..digest import seed_of
from .base import LocalSteps, Parcel, Receive, Send
from .coded import Coded
from .diloco import DiLoCo

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Round, State, Vector


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    """In each round, of one of P fragments: Δ = θ − φ, v ← βv + Δ, φ ← W(φ + η(Δ + βv)), and, when the
    round's H local steps are done, θ ← αθ + (1 − α)φ (after Douillard et al. 2025, Algorithm 2, whose τ is H
    here). So each coordinate travels once in P rounds, and while it does the peer trains.

    Fragments are pieces of the model. They take turns in an order that is drawn anew for each P rounds: in a
    fixed one a fragment would meet the same rounds of a graph that changes again and again, and never all.
    """

    sums: ClassVar[bool] = False

    outer_lr: Positive = 0.4
    fragments: AtLeastOne = 4  # P
    alpha: BelowOne = 0.5

    def init(self, x: Vector) -> State:
        state = {"slow": x.clone(), "momentum": x.new_zeros(x.shape)}
        for p, piece in enumerate(self._pieces(x)):
            state |= Coded.init(f"x{p}", piece, self.compressor)
        return state

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        slow, momentum = state["slow"].clone(), state["momentum"].clone()
        count = len(self._pieces(x))
        p = Random(seed_of(count, t // count)).sample(range(count), count)[t % count]
        phi, v = self._pieces(slow)[p], self._pieces(momentum)[p]
        delta = self._pieces(x)[p] - phi
        v.mul_(self.momentum).add_(delta)
        stepped = phi + delta.add_(v, alpha=self.momentum).mul_(self.outer_lr)
        sent = Coded(f"x{p}", stepped, near, t, self.compressor, state)
        mix = self.rule.over(sent.told, near, t)
        yield Send(Parcel({f"x{p}": sent.part}), sent.blends(mix), x)
        trained = yield LocalSteps(x)
        sent.read(mix, (yield Receive()))
        phi.copy_(sent.whole((yield from self.settle(mix))))
        self._pieces(trained)[p].mul_(self.alpha).add_(phi, alpha=1 - self.alpha)
        return trained, state | {"slow": slow, "momentum": momentum} | sent.kept

    def _pieces(self, x: Vector) -> tuple[Vector, ...]:
        return x.tensor_split(min(self.fragments, max(len(x), 1)))
