"""NoLoCo: DiLoCo without an all-reduce, over random pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.values import BelowOne, Positive, require
from .base import Algorithm, Blend, LocalSteps, Parcel, Receive, Send

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Round, State, Vector


@dataclass(frozen=True)
class NoLoCo(Algorithm):
    """v ← αv + β(WΔ)ᵢ + γ((Wφ)ᵢ − φᵢ), φ ← φ + v, where Δ = θ − φ is the result of H local steps (Kolehmainen
    et al. 2025, §3).

    W is the matrix of the round's pairs. The third term pulls the slow weights together, but momentum repeats
    a pull in later rounds with other partners: over random pairs E‖x − x̄‖² shrinks, without training, if
    0 < γ < 2(1 − α²), a sharp bound for many peers. The defaults are those of the authors' experiments, in
    whose code γ = β. Each peer sends two models a round.
    """

    outer_lr: Positive = 0.7  # β
    momentum: BelowOne = 0.5  # α
    gamma: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        most = 2 * (1 - self.momentum**2)
        advice = f"must be positive and below 2(1 − momentum²) = {most:g}, or peers drift apart"
        require(0 < self.gamma < most, "gossip.gamma", f"{self.gamma} {advice}")

    def init(self, x: Vector) -> State:
        return {"momentum": x.new_zeros(x.shape)}

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        delta = (yield LocalSteps(x)) - x
        slow, found = Blend(x, near), Blend(delta, near)
        yield Send(Parcel({"x": x, "delta": delta}), {"x": slow, "delta": found})
        yield Receive()
        v = (state["momentum"] * self.momentum).add_(found.to_self(), alpha=self.outer_lr)
        v.add_(slow.to_self().sub_(x), alpha=self.gamma)
        return x + v, {"momentum": v}
