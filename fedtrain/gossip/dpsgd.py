"""D-PSGD: train, then average with the neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import LocalSteps, Parcel, Receive, Send
from .rules.base import Ruled

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Round, State, Vector


@dataclass(frozen=True)
class DPSGD(Ruled):
    """X ← W(X + Δ(X)), or X ← WX + Δ(X) with `overlap` (Lian et al. 2017, Algorithm 1, where Δ = −ηG).

    On the complete graph the first form is FedAvg. The second form trains while the models are sent.
    """

    sums: ClassVar[bool] = True

    overlap: bool = False

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        sent = x if self.overlap else (yield LocalSteps(x))
        mix = self.rule.over(sent, near, t)
        yield Send(Parcel({"x": sent}), {"x": mix})
        trained = (yield LocalSteps(x)) if self.overlap else sent
        yield Receive()
        mixed = yield from self.settle(mix)
        return (mixed.add_(trained - x) if self.overlap else mixed), state
