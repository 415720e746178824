"""NoLoCo: DiLoCo without an all-reduce, over random pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.values import BelowOne, Positive, require
from .base import Algorithm, Blend, CompressorLike, LocalSteps, Parcel, Receive, Send
from .coded import Coded

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

    compressor: CompressorLike | None = None
    outer_lr: Positive = 0.7  # β
    momentum: BelowOne = 0.5  # α
    gamma: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        most = 2 * (1 - self.momentum**2)
        advice = f"must be positive and below 2(1 − momentum²) = {most:g}, or peers drift apart"
        require(0 < self.gamma < most, "gossip.gamma", f"{self.gamma} {advice}")

    def init(self, x: Vector) -> State:
        coded = Coded.init("x", x, self.compressor) | Coded.init("delta", x, self.compressor)
        return {"momentum": x.new_zeros(x.shape)} | coded

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        delta = (yield LocalSteps(x)) - x
        xs, deltas = (
            Coded(name, own, near, t, self.compressor, state) for name, own in (("x", x), ("delta", delta))
        )
        slow, found = Blend(xs.told, near), Blend(deltas.told, near)
        yield Send(Parcel({"x": xs.part, "delta": deltas.part}), xs.blends(slow) | deltas.blends(found), x)
        received = yield Receive()
        xs.read(slow, received)
        deltas.read(found, received)
        v = (state["momentum"] * self.momentum).add_(deltas.whole(found.to_self()), alpha=self.outer_lr)
        v.add_(xs.whole(slow.to_self()).sub_(x), alpha=self.gamma)
        return x + v, {"momentum": v} | xs.kept | deltas.kept
