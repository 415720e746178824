"""AD-PSGD: gossip in pairs, at any time, in which no peer waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..config.values import AtLeastOne
from ..digest import seed_of
from .base import Algorithm, LocalSteps, Meet

if TYPE_CHECKING:
    from ..exchange import Neighborhood, PeerId
    from .base import Round, State, Vector


@dataclass(frozen=True)
class ADPSGD(Algorithm):
    """A peer trains from x; what it finds, Δ, is added to the model as it is by then, and a neighbour drawn
    at random is asked for an average: both models become their mean (Lian et al. 2018, Algorithm 1).

    A peer answers at once, also while it trains, so a slow one holds nobody up, and its data count as often
    as it trains. An average is atomic: no other one changes either model between its question and its
    answer. The sum of both models stays, so the mean of all moves by the mean of the Δ alone.
    """

    staleness: AtLeastOne = 4  # the oldest question that is answered, in rounds of the peer that asks

    waits: ClassVar[bool] = False
    static: ClassVar[bool] = True

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        trained = yield LocalSteps(x)
        return (yield Meet(trained - x, self.staleness)), state


def partner(near: Neighborhood, t: int) -> PeerId | None:
    """The neighbour that a peer asks after its round t: each is as likely."""
    names = sorted(near.outgoing)
    return names[seed_of("pair", near.peer, t) % len(names)] if names else None
