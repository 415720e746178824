"""DiLoCo over gossip: many local steps, an outer Nesterov step, then an average with the neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..config.values import BelowOne, Positive
from .base import CompressorLike, LocalSteps, Parcel, Receive, Send
from .coded import Coded
from .rules.base import Ruled

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Round, State, Vector


@dataclass(frozen=True)
class DiLoCo(Ruled):
    """Δ = θ − φ after H local steps, v ← βv + Δ, φ ← W(φ + η(Δ + βv)) (after Douillard et al. 2023,
    Algorithm 1, whose outer gradient is −mean Δ).

    Every step is linear, so on the complete graph φ is DiLoCo's, and the aggregator's fedavgm with nesterov.
    The outer step comes before the average: momentum of the differences between peers resonates with graphs
    that change (on the Base graph peers never agreed); momentum of each peer's own training does not.
    """

    sums: ClassVar[bool] = True

    compressor: CompressorLike | None = None
    outer_lr: Positive = 0.7
    momentum: BelowOne = 0.9

    def init(self, x: Vector) -> State:
        return {"momentum": x.new_zeros(x.shape)} | Coded.init("x", x, self.compressor)

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        delta = (yield LocalSteps(x)) - x
        v = (state["momentum"] * self.momentum).add_(delta)
        stepped = x + delta.add_(v, alpha=self.momentum).mul_(self.outer_lr)
        sent = Coded("x", stepped, near, t, self.compressor, state)
        mix = self.rule.over(sent.told, near, t)
        yield Send(Parcel({"x": sent.part}), sent.blends(mix), stepped)
        sent.read(mix, (yield Receive()))
        return sent.whole((yield from self.settle(mix))), {"momentum": v} | sent.kept
