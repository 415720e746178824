"""DiLoCo over gossip: an outer Nesterov step on what the neighbours found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import require
from .base import Algorithm, Blend, LocalSteps, Parcel, Receive, Send

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Round, State, Vector


@dataclass(frozen=True)
class DiLoCo(Algorithm):
    """Δ = (Wθ)ᵢ − φᵢ, v ← βv + Δ, φ ← φ + η(Δ + βv), θ the model after H local steps from φ (Douillard et al.
    2023, Algorithm 1, whose outer gradient is −Δ). On the complete graph it is DiLoCo itself, and the
    aggregator's fedavgm with nesterov."""

    outer_lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(0 < self.outer_lr < math.inf, "gossip.outer_lr", f"{self.outer_lr} must be positive")
        require(0 <= self.momentum < 1, "gossip.momentum", f"{self.momentum} must be in [0, 1)")

    def init(self, x: Vector) -> State:
        return {"momentum": x.new_zeros(x.shape)}

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        trained = yield LocalSteps(x)
        blend = Blend(trained, near)
        yield Send(Parcel({"x": trained}), {"x": blend})
        yield Receive()
        delta = blend.to_self().sub_(x)
        v = (state["momentum"] * self.momentum).add_(delta)
        return x + delta.add_(v, alpha=self.momentum).mul_(self.outer_lr), {"momentum": v}
