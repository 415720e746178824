"""AD-PSGD between peers: averages of two models, at any time, each whole or not at all.

A peer asks one neighbour at a time with its model x. The neighbour answers at once, also while it trains,
with half of what its own model y is ahead of x, and takes that off y; who asked adds it to x. So both become
the mean of both, and their sum stays, whatever training adds to either in the meantime.

An average must be atomic: who has asked may average with no third before it has its answer. Two peers that
ask each other could so wait for ever. By the rule of wait-die they do not: a question of a peer whose name
is before ours is held until ours is answered, that of one behind us is refused. Who waits, waits for a
greater name, so there is no circle of peers that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import BadUpdate
from ...exchange import Neighborhood, PeerId, ReceivedShare
from ...gossip import LocalSteps, Meet, Parcel, partner
from .mailbox import opened
from .parcels import check_finite, other_parts, share_of, trained_part, write

if TYPE_CHECKING:
    import torch

    from .gossip import Peer

    Vector = torch.Tensor

NOT_MET = "no average with it in this round"


class Pairs:
    """One peer's."""

    def __init__(self, peer: Peer, staleness: int) -> None:
        self._peer, self._staleness = peer, staleness
        self.near: Neighborhood | None = None  # who may ask; None: nobody, before the first round
        # ... and who else may by now, while a round of this peer's lasts: they came after it had begun
        self.nearby: Callable[[], Neighborhood] | None = None
        self.began: Vector | None = None  # in a simulation, the model when the round to come began
        self._asked: tuple[PeerId, int] | None = None  # whom this peer has asked, and in which round
        self._held: dict[PeerId, ReceivedShare] = {}  # questions that wait for our answer
        self._met: dict[PeerId, str] = {}  # since the last round: "", or what was wrong with what came
        peer.neighbors.listen(self._heard, self._lost)

    async def round(self, near: Neighborhood, deadline_s: float) -> dict[PeerId, str]:
        """Train, add what was found to the model as it is by then, and ask a neighbour. Returns those with
        whom there was no average since the last round, and why."""
        peer, t, self.near = self._peer, self._peer.round, near
        peer.neighbors.announce(t, near.incoming.keys() | near.outgoing.keys())
        start, others = trained_part(peer.model), other_parts(peer.model)
        party = peer.algorithm.round(start if self.began is None else self.began, peer.state, near, t)
        answer, moved = None, others
        while True:
            try:
                request: Any = party.send(answer)
            except StopIteration as end:
                x, state = end.value
                break
            if isinstance(request, LocalSteps):
                answer, moved = await peer.local_steps(request.x, others)
            else:
                assert isinstance(request, Meet), request
                await self._answered_since(t - request.staleness, deadline_s)
                answer = trained_part(peer.model) + request.moved
        now = other_parts(peer.model)
        check_finite(x, peer.name, t)
        sides = {name: now[name] + (moved[name] - others[name]) for name in now}
        peer._gauge, peer._own = peer._gauge + (peer._now - peer._own), peer._now.clone()
        peer.model, peer.state, peer.round = write(peer.model.load(), x, sides), state, t + 1
        met, self._met = self._met, {}
        if self._asked is None and (other := partner(near, t)) is not None:
            self._asked = other, t
            peer.neighbors.post(t, {other: share_of(Parcel(self._parts()), 0.5, 1)})
        return {other: why for other in near.incoming if (why := met.get(other, NOT_MET))}

    async def end(self, deadline_s: float) -> None:
        """Average with nobody any more, once the question under way has its answer."""
        await self._answered_since(self._peer.round, deadline_s)
        self.near = None
        self._close()

    async def _answered_since(self, oldest: int, deadline_s: float) -> None:
        """Wait while a question of that round, or of one before, is open."""

        def over() -> bool:
            return self._asked is None or self._asked[1] > oldest

        if not await self._peer.neighbors.until(over, deadline_s):
            self._close()  # an answer would be too old

    def _close(self) -> None:
        """No question of ours is open: those that were held have their turn."""
        self._asked, held, self._held = None, self._held, {}
        for _, posted in sorted(held.items()):
            self._questioned(posted)

    def _lost(self, other: PeerId) -> None:
        self._held.pop(other, None)
        if self._asked is not None and self._asked[0] == other:
            self._close()

    # --- what comes

    def _heard(self, posted: ReceivedShare) -> None:
        if not posted.answers:
            self._questioned(posted)
        elif self._asked == (posted.peer, posted.round):
            if posted.share.payload and (step := self._opened(posted)) is not None:
                self._shift(step.parts, 1.0)
            self._close()

    def _questioned(self, posted: ReceivedShare) -> None:
        other, peer = posted.peer, self._peer
        old = peer.neighbors.progress().get(other, 0) > posted.round + self._staleness
        welcome = not old and self._may_ask(other)
        if welcome and self._asked is not None and other < peer.name:
            self._held[other] = posted
            return
        step: Mapping[str, Vector] = {}  # which refuses
        if welcome and self._asked is None and (theirs := self._opened(posted)) is not None:
            step = {name: (part - theirs.parts[name]) / 2 for name, part in self._parts().items()}
            self._shift(step, -1.0)
        share = share_of(Parcel(step), 0.5, 1)
        peer.neighbors.post(posted.round, {other: share}, answers=True)

    def _may_ask(self, other: PeerId) -> bool:
        if self.near is None:
            return False
        return other in self.near.incoming or (self.nearby is not None and other in self.nearby().incoming)

    def _opened(self, posted: ReceivedShare) -> Parcel | None:
        """None where it is not as our own parts are; the log will name its sender."""
        try:
            parcel, self._met[posted.peer] = opened(posted, self._parts()), ""
        except BadUpdate as e:
            parcel, self._met[posted.peer] = None, str(e)
        return parcel

    # --- the peer's model

    def _parts(self) -> dict[str, Vector]:
        """All that is averaged."""
        model = self._peer.model
        return {"x": trained_part(model), "gauge": self._peer._gauge} | other_parts(model)

    def _shift(self, step: Mapping[str, Vector], sign: float) -> None:
        """Add to all of it. Who has the model as it was keeps that."""
        peer = self._peer
        new = {name: part.add(step[name], alpha=sign) for name, part in self._parts().items()}
        x, peer._gauge = new.pop("x"), new.pop("gauge")
        peer.model = write(peer.model.load(), x, new)
        peer._now[1] = float(step["x"].norm() / x.norm().clamp(min=1e-30)) ** 2
