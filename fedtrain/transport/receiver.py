"""The shares of a peer's neighbours on their way to its mixer. One half of transport/courier.py, without I/O.

Memory is bounded by `Limits.window` chunks a neighbour: chunks flow on credit, which is given as they are
mixed, so a slow taker slows its giver down. A share counts once, by its round and transfer; its states are
the table of transfers.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import BadUpdate, WireError
from ..exchange import Mixer, PeerId, ReceivedShare, Share, ShareHeader
from ..wire.gossip import Header, Kind, unpack_offer
from .shares import UNSCHEDULED, Body, Parts, PeerState
from .transfers import TAKING, Met, Taking

Refused = Callable[[PeerId, int, str], None]  # giver, round, reason
EARLY_BYTES = 64 << 20  # of the chunks of rounds to come that are kept; others are asked for again
PATIENCE_S = 0.05  # before a giver that has offered nothing yet is asked


@dataclass(slots=True, eq=False)
class Incoming:
    """A share that is expected, or coming."""

    peer: PeerId
    round: int
    kind: Kind = Kind.OFFER
    transfer: int = 0
    nbytes: int = 0
    count: int = -1  # chunks; -1: it was not accepted
    received: int = 0  # chunks
    mixed: int = 0  # chunks handed to the mixer
    credit: int = 0
    held: deque[Body] = field(default_factory=deque)  # chunks received that wait for their turn
    asked_again: bool = False  # for a chunk that was left out
    state: Taking = Taking.AWAITED
    why: str = ""  # it is missed
    into: Share | None = None  # where a share outside of an exchange goes

    @property
    def whole(self) -> bool:
        return self.received == self.count


class Receiver:
    """All shares on their way in: those of the exchange, and posts and states outside of it."""

    def __init__(self, state: PeerState, refused: Refused) -> None:
        self.bytes_in = 0
        self.posted: dict[tuple[PeerId, Kind], ReceivedShare] = {}  # the latest of each peer
        self.states: dict[PeerId, ReceivedShare | None] = {}  # answers to `pull`; None: it has none
        self._state, self._limits, self._size = state, state.limits, state.limits.chunk_bytes
        self._refused = refused
        self._slots: dict[PeerId, Incoming] = {}  # of the exchange, in mixing order
        self._order: list[Incoming] = []
        self._head = 0  # slots before this one have ended
        self._asked_s = 0.0  # when shares were last asked for that were not offered
        self._early: dict[PeerId, tuple[Header, Parts]] = {}  # offers of rounds to come
        self._counted: dict[PeerId, int] = {}  # the last round in which a peer's share was received whole
        self._closed: dict[PeerId, int] = {}  # the last round whose share its giver has taken back
        self._coming: dict[tuple[PeerId, Kind], Incoming] = {}  # outside of an exchange
        self._finished: dict[PeerId, deque[int]] = {}  # transfers outside of an exchange that were received
        self._pulling: dict[PeerId, float] = {}  # when each peer was last asked for its state

    def begin(self, expected: Sequence[PeerId], mixer: Mixer) -> None:
        """Take the shares of an exchange."""
        state, self._mixer, self._head = self._state, mixer, 0
        self._asked_s = state.begun_s - self._limits.retry_s + PATIENCE_S
        self._slots = {peer: Incoming(peer, state.round) for peer in expected}
        self._order = list(self._slots.values())
        early, self._early = self._early, {}
        for peer, slot in self._slots.items():
            if peer in early:
                continue
            if peer in state.dead:
                self._meet(slot, Met.LOST, state.dead[peer])
            elif (round := state.announced.get(peer, (0, 0.0))[0]) > state.round:
                self._meet(slot, Met.NONE, f"went on to round {round + 1}")
        for peer, (header, parts) in early.items():
            self.offered(peer, header, parts)

    def offered_early(self, round: int) -> set[PeerId]:
        """The peers that have offered their share of a round to come."""
        return {peer for peer, (header, _) in self._early.items() if header.round == round}

    def stop(self, why: str) -> None:
        """Take no more in this exchange."""
        for slot in self._slots.values():
            self._meet(slot, Met.LOST, why)

    def ended(self) -> bool:
        """Whether all shares of the exchange have come, or will not."""
        self._mix_on()
        rest = [slot for slot in self._order[self._head :] if not slot.state.over]
        overdue = [s for s in rest if s.state is Taking.AWAITED and s.peer in self._state.overdue]
        if all(slot in overdue or slot.state is Taking.WHOLE for slot in rest):
            for slot in overdue:
                self._meet(slot, Met.LOST, f"did not finish within {self._state.deadline_s:g} s")
        return self._head == len(self._order)

    def ended_as(self, state: Taking) -> dict[PeerId, str]:
        """The givers whose share of the exchange came to this, each with the reason."""
        return {peer: slot.why for peer, slot in self._slots.items() if slot.state is state}

    def pull(self, peer: PeerId, now: float) -> None:
        self.states.pop(peer, None)
        self._pulling[peer] = now
        self._state.say(peer, Kind.PULL)

    def forget_pull(self, peer: PeerId) -> None:
        self._pulling.pop(peer, None)
        self._coming.pop((peer, Kind.STATE), None)

    def take_posted(self) -> dict[tuple[PeerId, Kind], ReceivedShare]:
        """What was posted since the last call."""
        posted, self.posted = self.posted, {}
        return posted

    # --- what happens

    def pull_refused(self, peer: PeerId) -> None:
        """REFUSE without a transfer: the peer has no state to give."""
        if self._pulling.pop(peer, None) is not None:
            self.states[peer] = None

    def lost(self, peer: PeerId, why: str) -> None:
        self._early.pop(peer, None)
        if slot := self._slots.get(peer):
            self._meet(slot, Met.LOST, why)
        for kind in UNSCHEDULED:
            self._coming.pop((peer, kind), None)

    def found(self, peer: PeerId) -> None:
        slot = self._slots.get(peer)
        if self._state.open and slot and slot.state is Taking.AWAITED:
            self._state.say(peer, Kind.WANT, round=self._state.round)
        if peer in self._pulling:
            self._state.say(peer, Kind.PULL)

    def went_on(self, peer: PeerId, round: int) -> None:
        """The giver is in a later round: what it has not offered does not come."""
        if slot := self._slots.get(peer):
            self._meet(slot, Met.NONE, f"went on to round {round + 1}")

    def tick(self, now: float) -> None:
        state, retry_s = self._state, self._limits.retry_s
        if state.open:
            for slot in self._order[self._head :]:
                if slot.state is Taking.AWAITED and slot.peer in state.overdue:
                    continue
                if slot.state in (Taking.AWAITED, Taking.COMING):  # a whole one waits for its turn alone
                    if now >= state.until(slot.peer):
                        self._meet(slot, Met.LOST, f"did not finish within {state.deadline_s:g} s")
                    elif slot.state is Taking.AWAITED and now >= self._asked_s + retry_s:
                        state.say(slot.peer, Kind.WANT, round=state.round)
            if now >= self._asked_s + retry_s:
                self._asked_s = now
        for peer, asked_s in list(self._pulling.items()):
            if now >= asked_s + retry_s:
                self._pulling[peer] = now
                if (peer, Kind.STATE) not in self._coming:
                    state.say(peer, Kind.PULL)

    def wake_s(self) -> float:
        """When `tick` has something to do, by the same sums: rounded otherwise, time would stand."""
        rest = self._order[self._head :] if self._state.open else []
        waiting = [
            slot for slot in rest
            if slot.state is Taking.COMING
            or (slot.state is Taking.AWAITED and slot.peer not in self._state.overdue)
        ]  # fmt: skip
        times = [self._state.until(slot.peer) for slot in waiting]
        if any(slot.state is Taking.AWAITED for slot in waiting):
            times.append(self._asked_s + self._limits.retry_s)
        times += [asked_s + self._limits.retry_s for asked_s in self._pulling.values()]
        return min(times, default=math.inf)

    def offered(self, peer: PeerId, header: Header, parts: Parts) -> None:
        """OFFER: a share of the round under way, of an earlier or of a later one, with its first chunks."""
        body, chunks = (parts[0], parts[1:]) if parts else (b"", ())
        nbytes, note = unpack_offer(header, body, self._limits.payload_bytes, self._size)
        if len(chunks) > self._limits.batch:
            raise WireError(f"an offer with {len(chunks)} chunks, {self._limits.batch} at most are taken")
        self._check(nbytes, 0, chunks)
        slot = self._slots.get(peer) if header.round == self._state.round else None
        if header.round > max(self._state.round, self._closed.get(peer, -1)):
            self._early_offer(peer, header, parts)
        elif slot is not None and slot.state is Taking.AWAITED:
            self._accept(slot, header, nbytes, note, chunks)
        elif slot is not None:
            again = slot.transfer == header.transfer
            self._meet(slot, Met.OFFERED if again else Met.REPLACED, "its first share was broken off", header)
        elif self._has(peer, header.round):
            self._state.say(peer, Kind.DONE, round=header.round, transfer=header.transfer)
        elif header.round <= self._closed.get(peer, -1):
            self._decline(peer, header, "taken back")
        else:
            over = not self._state.open or header.round < self._state.round
            reason = "round {} is over" if over else "not an in-neighbour in round {}"
            self._decline(peer, header, reason.format(header.round + 1))

    def _has(self, peer: PeerId, round: int) -> bool:
        """Whether the share counts, here or by the last commit of an earlier life."""
        account = self._state.counted.get(peer)
        return self._counted.get(peer) == round or (account is not None and round in account)

    def _decline(self, peer: PeerId, header: Header, reason: str) -> None:
        self._state.say(peer, Kind.REFUSE, round=header.round, transfer=header.transfer, body=reason.encode())

    def _early_offer(self, peer: PeerId, header: Header, parts: Parts) -> None:
        """An offer of a round to come waits, and its chunks too, as far as there is room."""
        before = self._early.get(peer)
        if before and (header.transfer == before[0].transfer or header.round < before[0].round):
            return
        others = (kept for other, (_, kept) in self._early.items() if other != peer)
        room = EARLY_BYTES - sum(len(part) for kept in others for part in kept)
        self._early[peer] = (header, parts if sum(map(len, parts)) <= room else parts[:1])

    def _accept(self, slot: Incoming, header: Header, nbytes: int, note: bytes, chunks: Parts) -> None:
        offer = ShareHeader(slot.peer, header.round, nbytes, header.weight, header.degree, header.codec, note)
        slot.transfer = header.transfer
        try:
            self._mixer.begin(offer)
        except BadUpdate as e:
            self._bad(slot, str(e))
            return
        self._meet(slot, Met.OFFERED)
        slot.nbytes, slot.count, slot.credit = nbytes, header.count, len(chunks)
        if slot.count == 0 or chunks:
            self._take(slot, chunks)
        else:
            self._grant(slot)

    def _where(self, slot: Incoming, header: Header) -> None:
        """Answer an offer that is repeated, by how far its share has come, and what of it was lost."""
        kind = Kind.NACK if slot.received < header.index else Kind.ACK
        self._state.say(slot.peer, kind, header.round, slot.transfer, slot.received, slot.credit)

    def _grant(self, slot: Incoming) -> None:
        """Give more credit, a few times a window. While no chunk has come, none is on its way either."""
        credit = min(slot.count, slot.mixed + self._limits.window)
        if credit - slot.credit >= min(slot.count - slot.credit, max(1, self._limits.window // 4)) > 0:
            slot.credit = credit
            kind = Kind.ACK if slot.received else Kind.NACK
            self._state.say(slot.peer, kind, slot.round, slot.transfer, slot.received, credit)

    def chunks(self, peer: PeerId, header: Header, chunks: Parts) -> None:
        """CHUNK: chunks that follow one another, from the header's index on."""
        slot = self._receiving(peer, header)
        if slot is None or header.index < slot.received:  # their share is over, or they come twice
            return
        if header.index + len(chunks) > slot.credit:
            raise WireError(f"{len(chunks)} chunks from {header.index} on, but credit is {slot.credit}")
        if header.index > slot.received:
            if not slot.asked_again:
                slot.asked_again = True
                self._state.say(peer, Kind.NACK, slot.round, slot.transfer, slot.received, slot.credit)
            return
        self._check(slot.nbytes, header.index, chunks)
        self._take(slot, chunks)

    def _check(self, nbytes: int, index: int, chunks: Parts) -> None:
        for at, chunk in enumerate(chunks, index):
            due = min(self._size, nbytes - at * self._size)
            if len(chunk) != due or due <= 0:
                raise WireError(f"chunk {at} has {len(chunk)} bytes, {due} are due")

    def _take(self, slot: Incoming, chunks: Parts) -> None:
        """The next chunks of a share, whose sizes have been checked."""
        begin, slot.asked_again = slot.received, False
        slot.received += len(chunks)
        self.bytes_in += sum(map(len, chunks))
        if slot.into is not None:
            for at, chunk in enumerate(chunks, begin):
                slot.into.payload[at * self._size :][: len(chunk)] = chunk
            slot.mixed = slot.received
            return self._take_on(slot)
        slot.held.extend(chunks)
        if slot.whole:  # it counts, even if its chunks still wait for their turn
            self._counted[slot.peer] = self._state.round
            self._meet(slot, Met.ARRIVED)
        self._mix_on()

    def _receiving(self, peer: PeerId, header: Header) -> Incoming | None:
        unscheduled = (self._coming.get((peer, kind)) for kind in UNSCHEDULED)
        for slot in filter(None, (self._slots.get(peer), *unscheduled)):
            about = slot.transfer, slot.round
            if slot.state is Taking.COMING and about == (header.transfer, header.round):
                return slot
        return None

    def _mix_on(self) -> None:
        """Hand on all chunks whose turn it is: at each offset the peers in their order."""
        if not self._state.open:
            return
        while self._head < len(self._order) and self._order[self._head].state.over:
            self._head += 1
        turn = 1 << 62  # chunks that all peers before have had mixed
        for slot in self._order[self._head :]:
            if turn == 0:
                break
            if slot.state.over:
                continue
            before = slot.mixed
            while slot.held and slot.mixed < turn and not slot.state.over:
                self._mix(slot, slot.held.popleft())
            if slot.state is Taking.WHOLE and slot.mixed == slot.count:
                self._meet(slot, Met.TURN)
            if not slot.state.over:
                turn = min(turn, slot.mixed)
                if slot.mixed > before:
                    self._grant(slot)

    def _mix(self, slot: Incoming, body: Body) -> None:
        try:
            self._mixer.mix(slot.peer, slot.mixed * self._size, memoryview(body))
            slot.mixed += 1
        except BadUpdate as e:
            self._bad(slot, str(e))

    def _bad(self, slot: Incoming, reason: str) -> None:
        """Our mixer refuses a share: its giver is told, and named in the log."""
        self._refused(slot.peer, self._state.round, reason)
        self._counted.pop(slot.peer, None)
        self._meet(slot, Met.BAD, f"refused: {reason}")

    def _meet(self, slot: Incoming, what: Met, why: str = "", header: Header | None = None) -> None:
        """One step of a share of the exchange, by the table. `header`: of the message that is answered."""
        before = slot.state
        slot.state, answer = TAKING[before, what]
        about = header or Header(Kind.OFFER, self._state.round, slot.transfer)
        if answer is Kind.DONE:
            self._state.say(slot.peer, Kind.DONE, round=about.round, transfer=about.transfer)
        elif answer is Kind.REFUSE:
            self._decline(slot.peer, about, (slot.why or why).removeprefix("refused: ")[:200])
        elif answer is Kind.ACK:
            self._where(slot, about)
        if slot.state.over and not before.over:
            slot.why = why
            slot.held.clear()
            if slot.count >= 0:
                self._mixer.end(slot.peer, min(slot.mixed * self._size, slot.nbytes))
            if what in (Met.LOST, Met.NONE, Met.CANCELLED, Met.REPLACED):
                self._mix_on()  # others waited behind it

    def cancelled(self, peer: PeerId, header: Header) -> None:
        """CANCEL: no more comes of this share; of transfer 0: there is none. Its giver has to know whether it
        counts; if it does not, then never."""
        for kind in UNSCHEDULED:
            if (coming := self._coming.get((peer, kind))) and coming.transfer == header.transfer:
                del self._coming[peer, kind]
                return
        slot = self._slots.get(peer) if header.round == self._state.round else None
        if header.transfer == 0:
            if slot is not None:
                self._meet(slot, Met.NONE, f"has no share for us in round {header.round + 1}")
            return
        has = self._has(peer, header.round)
        if not has:
            self._closed[peer] = max(header.round, self._closed.get(peer, -1))
            if (early := self._early.get(peer)) and early[0].round <= header.round:
                del self._early[peer]
        if slot is not None:
            self._meet(slot, Met.CANCELLED, "gave up on us", header)
        elif has:
            self._state.say(peer, Kind.DONE, round=header.round, transfer=header.transfer)
        elif self._state.round >= 0:  # else this peer has just started, and does not know what it has
            self._decline(peer, header, "taken back")

    def unscheduled(self, peer: PeerId, header: Header, body: Body) -> None:
        """POST, ANSWER or STATE: a share outside of an exchange comes, into a buffer of its own."""
        if header.kind is Kind.STATE and peer not in self._pulling:
            self._decline(peer, header, "not asked for")
            return
        nbytes, note = unpack_offer(header, body, self._limits.payload_bytes, self._size)
        if header.transfer in self._finished.get(peer, ()):
            self._state.say(peer, Kind.DONE, round=header.round, transfer=header.transfer)
            return
        coming = self._coming.get((peer, header.kind))
        if coming is not None and coming.transfer == header.transfer:
            self._where(coming, header)
            return
        coming = Incoming(peer, header.round, header.kind, header.transfer, nbytes, header.count)
        payload = memoryview(bytearray(nbytes))
        coming.into = Share(payload, header.weight, header.degree, header.codec, note)
        coming.state = Taking.COMING
        self._coming[peer, header.kind] = coming
        self._take_on(coming)

    def _take_on(self, coming: Incoming) -> None:
        """Give credit for more of a share outside of an exchange, or hand it on where it is whole."""
        if not coming.whole:
            return self._grant(coming)
        assert coming.into is not None
        peer, kind = coming.peer, coming.kind
        received = ReceivedShare(peer, coming.round, coming.into, kind is Kind.ANSWER)
        del self._coming[peer, kind]
        if kind is Kind.STATE:
            del self._pulling[peer]
            self.states[peer] = received
        else:
            self.posted[peer, kind] = received
        self._finished.setdefault(peer, deque(maxlen=16)).append(coming.transfer)
        self._state.say(peer, Kind.DONE, round=coming.round, transfer=coming.transfer)
