"""AD-PSGD: pairs of peers average their models while they train."""

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
    """Two peers replace their models by the mean of both; each adds the local steps that it took before the
    mean (Lian et al. 2018, Algorithm 1, where the gradient is stale by one averaging).

    `meet` is the whole exchange of a pair. It may happen at any time between local steps, so a driver
    without rounds calls it when a partner's model arrives.
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
        received = yield Receive()
        for parcel in received.parcels.values():
            trained = meet(trained, x, parcel.parts["x"])
        return trained, state


def meet(now: Vector, sent: Vector, received: Vector) -> Vector:
    """The model after an exchange: `now` is the present model; the pair exchanged `sent` and `received`.

    Both ends move by opposite amounts, so the sum of the two models stays, however far each has trained.
    """
    return now + (received - sent) * 0.5
