"""SWIFT-like: nobody waits for anybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..config import require
from .base import LocalSteps, Mailbox, Parcel, Send
from .rules.base import Ruled

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Received, Round, State, Vector


@dataclass(frozen=True)
class Swift(Ruled):
    """Train, tell the neighbours, and average with the newest that each of them has told (Bornstein et al.
    2023, Algorithm 1). A model more than `staleness` of our rounds old no longer counts; its share returns to
    self.

    Peers of different speed weigh differently, so the mean is not kept: the price of never waiting.
    """

    staleness: int = 8

    waits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.staleness >= 0, "gossip.staleness", f"{self.staleness} must be 0 or more rounds")

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        trained = yield LocalSteps(x)
        yield Send(Parcel({"x": trained}))
        heard: Received = yield Mailbox(self.staleness)
        mix = self.rule.over(trained, near, t)
        for peer in sorted(heard.parcels.keys() & near.incoming.keys()):
            mix.begin(peer, {})
            mix.add(peer, heard.parcels[peer].parts["x"])
        return (yield from self.settle(mix)), state
