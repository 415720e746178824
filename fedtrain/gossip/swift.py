"""SWIFT: gossip in which no peer waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..config.values import Count
from .base import LocalSteps, Mailbox, Parcel, Send
from .rules.base import Ruled

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Received, Round, State, Vector


@dataclass(frozen=True)
class Swift(Ruled):
    """Train, send the model, and average with the newest model of each neighbour (Bornstein et al. 2023,
    Algorithm 1). A model that is too old does not count, and its weight returns to self.

    Peers of different speed have different influence, so the mean is not kept: the price of never waiting.
    """

    staleness: Count = 8  # the oldest model that counts, in rounds of the receiving peer

    waits: ClassVar[bool] = False

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        trained = yield LocalSteps(x)
        yield Send(Parcel({"x": trained}))
        received: Received = yield Mailbox(self.staleness)
        mix = self.rule.over(trained, near, t)
        for peer in sorted(received.parcels.keys() & near.incoming.keys()):
            mix.begin(peer, {})
            mix.add(peer, received.parcels[peer].parts["x"])
        return (yield from self.settle(mix)), state
