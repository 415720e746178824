"""AD-PSGD: pairs average while they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .base import Algorithm, LocalSteps, Parcel, Receive, Send

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Round, State, Vector


@dataclass(frozen=True)
class ADPSGD(Algorithm):
    """Two peers replace their models by the mean of both, and each adds a step that it took from the model
    before (Lian et al. 2018, Algorithm 1: the gradient is stale by the averaging that went on beside it).

    `meet` is all that a pair does. It may happen at any time between two peers' local steps, so a driver
    without rounds calls it whenever an answer comes.
    """

    def check(self, near: Neighborhood, t: int) -> None:
        if len(near.incoming) > 1:
            raise ConfigError(
                f"gossip.algorithm: adpsgd averages pairs; {near.peer} has {len(near.incoming)} neighbours "
                f'in round {t + 1}. Use gossip.topology = "matching".'
            )

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        self.check(near, t)
        yield Send(Parcel({"x": x}))
        trained = yield LocalSteps(x)
        heard = yield Receive()
        for parcel in heard.parcels.values():
            trained = meet(trained, x, parcel.parts["x"])
        return trained, state


def meet(now: Vector, told: Vector, theirs: Vector) -> Vector:
    """The model after a meeting: `now` it is, `told` is what the partner was sent, `theirs` what it sent.

    Both ends move by opposite amounts, so the sum of the two models stays, wherever each has got to since.
    """
    return now + (theirs - told) * 0.5
