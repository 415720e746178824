"""Epidemic learning: each round, tell s peers at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Algorithm, LocalSteps, Parcel, Receive, Send
from .sgp import SGP, push

if TYPE_CHECKING:
    from ..exchange import Neighborhood
    from .base import Received, Round, State, Vector


@dataclass(frozen=True)
class Epidemic(Algorithm):
    """EL-Oracle and EL-Local (De Vos et al. 2023, Algorithm 1): the plain mean of own and what came.

    Some are told more often than others, so that mean drifts. With `push_sum` each model travels with its
    mass, for 8 bytes, and the mean by mass stays. A local step counts by its peer's mass, as its model does,
    and is not divided by it as in SGP: who is not told for k rounds has a mass of 2^-k, and would leap.
    """

    push_sum: bool = True

    directed: ClassVar[bool] = True

    def init(self, x: Vector) -> State:
        return SGP().init(x) if self.push_sum else {}

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        mixed = yield LocalSteps(x)
        if self.push_sum:
            return (yield from push(mixed, state, near))
        yield Send(Parcel({"x": mixed}))
        heard: Received = yield Receive()
        mixed = mixed.clone()
        for peer in sorted(heard.parcels):
            mixed.add_(heard.parcels[peer].parts["x"])
        return mixed.div_(1 + len(heard.parcels)), state
