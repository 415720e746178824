"""A peer's shares on their way to its neighbours. One half of transport/courier.py, without I/O.

An offer brings the first chunks along, so that a round begins with data; the others flow only on the taker's
credit. Lost messages are mended by offering again. The states of a share are the table of transfers.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import WireError
from ..exchange import PeerId, Share
from ..wire.gossip import Header, Kind, chunks_of, pack_offer
from .shares import UNSCHEDULED, Body, PeerState
from .transfers import GIVING, Giving, Heard


@dataclass(slots=True, eq=False)
class Outgoing:
    """A share on its way out."""

    peer: PeerId
    kind: Kind
    round: int
    transfer: int
    share: Share
    count: int  # chunks
    touched_s: float  # when we last said or received something about it
    sent: int = 0  # chunks
    credit: int = 0  # chunks that may be sent, from the first
    offered: bool = False  # since chunks were last sent again: a NACK that crossed with them is none of them
    state: Giving = Giving.OPEN
    why: str = ""  # it is where it is


class Sender:
    """All shares on their way out: those of the exchange, and posts and states outside of it."""

    def __init__(self, state: PeerState, first_transfer: int) -> None:
        self.bytes_out = 0
        self.undecided: set[PeerId] = set()  # takers of the exchange whose share is under way
        self._state, self._limits, self._next = state, state.limits, first_transfer
        self._out: dict[PeerId, Outgoing] = {}  # of the exchange
        self._wanted: dict[PeerId, int] = {}  # the round to come of which each peer expects our share
        self._posted: dict[tuple[PeerId, Kind], Outgoing] = {}  # under way outside of an exchange
        self._queued: dict[tuple[PeerId, Kind], tuple[int, Share]] = {}  # to follow what is posted
        self._published: tuple[int, Share] | None = None

    def begin(self, shares: Mapping[PeerId, Share], now: float) -> None:
        """Offer the shares of an exchange."""
        round, dead = self._state.round, self._state.dead
        self._out = {peer: self._outgoing(peer, Kind.OFFER, round, s, now) for peer, s in shares.items()}
        self.undecided = self._out.keys() - self._state.overdue
        for out in self._out.values():
            if out.peer in dead:
                self._hear(out, Heard.GONE, now, dead[out.peer])
            elif out.peer in self.undecided:
                self._offer(out, now)

    def resume(self, peer: PeerId, now: float) -> None:
        """Offer its share to a peer that was overdue, and is in this round now."""
        if peer in self._out and not self._out[peer].state.over:
            self.undecided.add(peer)
        self.found(peer, now)

    def cancel_unmet_wants(self) -> None:
        """Tell peers that expected a share in this exchange, or in an earlier one, that there is none."""
        for peer, wanted in list(self._wanted.items()):
            if wanted <= self._state.round:
                del self._wanted[peer]
                if wanted < self._state.round or peer not in self._out:
                    self._state.say(peer, Kind.CANCEL, round=wanted)

    def stop(self, why: str, now: float) -> None:
        """Give no more in this exchange."""
        for out in self._under_way():
            self._hear(out, Heard.STOPPED, now, why)

    def ended(self, state: Giving) -> dict[PeerId, str]:
        """The takers whose share of the exchange came to this, each with the reason."""
        ends = {peer: out.why for peer, out in self._out.items() if out.state is state}
        behind = dict.fromkeys(self._out.keys() & self._state.overdue, "is behind")
        return ends | behind if state is Giving.KEPT else ends

    def post(self, peer: PeerId, kind: Kind, round: int, share: Share, now: float) -> None:
        """Outside of an exchange, one transfer at a time to a peer: what is on its way arrives, what waits
        behind it is replaced."""
        before = self._posted.get((peer, kind))
        if before is not None and before.sent:
            self._queued[peer, kind] = (round, share)
            return
        if before is not None:
            self._state.say(peer, Kind.CANCEL, round=before.round, transfer=before.transfer)
            del self._posted[peer, kind]
        if peer not in self._state.dead:
            self._posted[peer, kind] = out = self._outgoing(peer, kind, round, share, now)
            self._offer(out, now)

    def owes(self, peer: PeerId) -> bool:
        """Whether a share for it is on its way."""
        return bool(self._under_way(peer)) or any(name == peer for name, _ in self._posted)

    def publish(self, round: int, share: Share) -> None:
        self._published = (round, share)

    # --- what happens

    def lost(self, peer: PeerId, why: str, now: float) -> None:
        self._wanted.pop(peer, None)
        for out in self._under_way(peer):
            self._hear(out, Heard.GONE, now, why)
        for kind in UNSCHEDULED:
            self._posted.pop((peer, kind), None)
            self._queued.pop((peer, kind), None)

    def found(self, peer: PeerId, now: float) -> None:
        """The peer is connected again, or in a later round: to an offer it says at once how far it is."""
        posted = [out for (name, _), out in self._posted.items() if name == peer]
        for out in [*self._under_way(peer), *posted]:
            self._hear(out, Heard.FOUND, now)

    def tick(self, now: float) -> None:
        late = f"did not take it within {self._state.deadline_s:g} s"
        for out in self._under_way():
            if now >= self._ends_s(out):
                self._hear(out, Heard.LATE, now, late)
        for out in [*self._under_way(), *self._posted.values()]:
            if out.state is not Giving.ASKED and now >= out.touched_s + self._limits.retry_s:
                self._hear(out, Heard.QUIET, now)

    def wake_s(self) -> float:
        """When `tick` has something to do, by the same sums: rounded otherwise, time would stand."""
        under_way = self._under_way()
        times = [self._ends_s(out) for out in under_way]
        quiet = [out for out in (*under_way, *self._posted.values()) if out.state is not Giving.ASKED]
        return min([*times, *(out.touched_s + self._limits.retry_s for out in quiet)], default=math.inf)

    def _ends_s(self, out: Outgoing) -> float:
        """Until when its taker may take it. The rest of the deadline is for the question whether it did."""
        until_s = self._state.until(out.peer)
        sent = out.state is Giving.SENT
        return until_s - min(self._limits.retry_s, self._state.deadline_s / 20) if sent else until_s

    def credited(self, peer: PeerId, header: Header, now: float) -> None:
        """ACK: the taker has `index` chunks, and takes up to `count`. NACK: again from `index` on."""
        out = self._transfer(peer, header)
        if out is None:
            return
        if not header.index <= header.count <= out.count or header.index > out.sent:
            raise WireError(f"credit {header.index} to {header.count} of {out.count} chunks, {out.sent} sent")
        if header.kind is Kind.NACK and out.state is not Giving.ASKED and out.offered:
            # A taker that was started again has given less credit than the one before it.
            out.sent, out.credit, out.offered = header.index, header.count, False
        else:
            out.credit = max(out.credit, header.count)
        self._hear(out, Heard.CREDIT, now)

    def answered(self, peer: PeerId, header: Header, body: Body, now: float) -> None:
        """DONE or REFUSE: how a transfer ended."""
        out = self._transfer(peer, header)
        if out is None:
            return
        if header.kind is Kind.REFUSE:
            self._hear(out, Heard.REFUSED, now, _text(body))
            return
        early = out.kind is Kind.OFFER and out.sent <= self._limits.batch  # an earlier life of ours gave it
        if out.sent < out.count and not early:
            raise WireError(f"it has {out.count} chunks, of {out.sent} that were sent")
        self._hear(out, Heard.DONE, now)

    def wanted(self, peer: PeerId, header: Header) -> None:
        """WANT: the peer expects our share of a round."""
        round = self._state.round
        if header.round > round:
            self._wanted[peer] = max(header.round, self._wanted.get(peer, 0))
        elif header.round < round or not self._state.open or peer not in self._out:
            self._state.say(peer, Kind.CANCEL, round=header.round)
        elif self._out[peer].state is Giving.KEPT:
            self._state.say(peer, Kind.CANCEL, round=header.round, transfer=self._out[peer].transfer)

    def pulled(self, peer: PeerId, now: float) -> None:
        """PULL: the peer asks for our state."""
        if self._published is None:
            self._state.say(peer, Kind.REFUSE, body=b"no state to give yet")
        elif (peer, Kind.STATE) not in self._posted:
            self.post(peer, Kind.STATE, *self._published, now)

    # --- one share

    def _outgoing(self, peer: PeerId, kind: Kind, round: int, share: Share, now: float) -> Outgoing:
        self._next = (self._next % 0xFFFFFFFF) + 1
        count = chunks_of(share.payload.nbytes, self._limits.chunk_bytes)
        return Outgoing(peer, kind, round, self._next, share, count, now)

    def _offer(self, out: Outgoing, now: float) -> None:
        """Say what there is; `index`: how many chunks have left. Nothing overtakes on a connection: a taker
        that has fewer when it reads this has lost the others, and asks for them."""
        out.touched_s = now
        if not self._state.reachable(out.peer):  # it is offered when the peer is found
            return
        share, index, out.offered = out.share, out.sent, True
        parts: list[Body] = [pack_offer(share.payload.nbytes, share.note)]
        if out.kind is Kind.OFFER and not out.credit:
            out.credit = min(out.count, self._limits.batch, self._limits.window)
            parts += self._next_chunks(out)
        self._say(out, out.kind, index, parts)
        if out.sent == out.count and out.kind is Kind.OFFER:
            self._hear(out, Heard.LEFT, now)

    def _say(self, out: Outgoing, kind: Kind, index: int, parts: list[Body]) -> None:
        share = out.share
        header = Header(
            kind, out.round, out.transfer, index, out.count, share.weight, share.degree, share.codec,
            self._state.epoch,
        )  # fmt: skip
        self._state.outbox.append((out.peer, header, parts))

    def _next_chunks(self, out: Outgoing) -> list[memoryview]:
        """The chunks of the next message, as far as there is credit for them."""
        size = self._limits.chunk_bytes
        begin, out.sent = out.sent, min(out.credit, out.sent + self._limits.batch)
        payload = out.share.payload[begin * size : out.sent * size]
        self.bytes_out += payload.nbytes
        return [payload[at : at + size] for at in range(0, payload.nbytes, size)]

    def _under_way(self, peer: PeerId | None = None) -> list[Outgoing]:
        """The shares of the exchange that have not come to an end: all, or that for one peer."""
        if not self._state.open:
            return []
        found = self._out.values() if peer is None else filter(None, [self._out.get(peer)])
        return [out for out in found if not out.state.over and out.peer not in self._state.overdue]

    def _transfer(self, peer: PeerId, header: Header) -> Outgoing | None:
        """The share that an answer is about; None when it is over, as answers cross on the way."""
        posted = (self._posted.get((peer, kind)) for kind in UNSCHEDULED)
        for out in (self._out.get(peer), *posted):
            if out is not None and out.transfer == header.transfer and not out.state.over:
                return out
        return None

    def _hear(self, out: Outgoing, what: Heard, now: float, why: str = "") -> None:
        """One step of a share, by the table."""
        out.state, say = GIVING[out.state, what]
        out.why = why or out.why
        if say is Kind.OFFER:
            self._offer(out, now)
        elif say is Kind.CANCEL:
            self._state.say(out.peer, Kind.CANCEL, round=out.round, transfer=out.transfer)
            out.touched_s = now
        elif say is Kind.CHUNK:
            out.touched_s = now
            while out.sent < out.credit:
                index = out.sent
                self._say(out, Kind.CHUNK, index, [*self._next_chunks(out)])
            if out.sent == out.count:
                self._hear(out, Heard.LEFT, now)
        if out.state.over:
            self._over(out, now)

    def _over(self, out: Outgoing, now: float) -> None:
        if out.kind is Kind.OFFER:
            self.undecided.discard(out.peer)
        else:
            del self._posted[out.peer, out.kind]
            if queued := self._queued.pop((out.peer, out.kind), None):
                self.post(out.peer, out.kind, *queued, now)


def _text(body: Body) -> str:
    """A reason off the wire, for a person: one short line."""
    return "".join(c if c.isprintable() else "?" for c in bytes(body[:200]).decode("utf-8", "replace"))
