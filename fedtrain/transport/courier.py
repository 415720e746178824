"""How shares travel between one peer and its neighbours: the protocol of wire/gossip.py, without I/O.

Both transports drive a `Courier`: transport/zmq.py with sockets and the machine's clock,
transport/memory.py with a queue and a virtual clock. A message that comes goes into `receive`, what is to be
sent lies in `outbox`, time passes by `tick`. So what is tested under thousands of seeded faults is what
runs over the network.

An offer brings the first chunks along, so that a round begins with data; the others flow only on the taker's
credit, so memory is bounded by `window` chunks a neighbour, and a slow taker slows its giver down. Lost and
repeated messages are mended by offering again; a share counts once, by its round and transfer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import BadUpdate, WireError
from ..exchange import Exchanged, Letter, Mixer, Offer, PeerId, Share
from ..wire.frames import CHUNK_BYTES
from ..wire.gossip import Header, Kind, chunks_of, pack_offer, unpack_offer

Body = bytes | bytearray | memoryview
Parts = Sequence[Body]  # of a message, behind its header
Refuse = Callable[[PeerId, int, str], None]
EARLY_BYTES = 64 << 20  # of the chunks of rounds to come that are kept; others are asked for again
PATIENCE_S = 0.05  # before a giver that has offered nothing yet is asked
AGAIN = 1  # an offer's index after its connection was lost
UNASKED = (Kind.LETTER, Kind.STATE)  # shares outside of an exchange


@dataclass(frozen=True)
class Limits:
    """What one peer takes from another."""

    payload_bytes: int = 4 << 30  # of one share; a run sets it from its schema
    chunk_bytes: int = CHUNK_BYTES  # the same at all peers
    window: int = 16  # chunks that a giver may be ahead of what was mixed
    batch: int = 4  # chunks in one message, and with an offer: each message costs the taker a wakeup
    retry_s: float = 1.0  # silence after which an offer is repeated


@dataclass(slots=True, eq=False)
class Outgoing:
    """A share on its way out."""

    peer: PeerId
    kind: Kind
    round: int
    transfer: int
    share: Share
    count: int  # chunks
    touched_s: float  # when we last said, or heard, something about it
    sent: int = 0  # chunks
    credit: int = 0  # chunks that may be sent, from the first
    outcome: str = ""  # "given", "kept" or "unsure"; "" while under way
    why: str = ""


@dataclass(slots=True, eq=False)
class Incoming:
    """A share that is expected, or coming."""

    peer: PeerId
    offer: Offer | None = None
    transfer: int = 0
    count: int = 0
    had: int = 0  # chunks received
    mixed: int = 0  # chunks handed to the mixer
    credit: int = 0
    held: deque[Body] = field(default_factory=deque)  # received, and waiting for their turn
    asked_again: bool = False  # for a chunk that was left out
    asked_at: int = -1  # chunks received when the share was last offered again
    outcome: str = ""  # "whole", or why it is not; "" while under way
    into: memoryview | None = None  # of a letter

    @property
    def whole(self) -> bool:
        return self.offer is not None and self.had == self.count


class Courier:
    """One peer's end of all transfers. Not for several threads."""

    def __init__(self, limits: Limits = Limits(), *, first_transfer: int = 1, refuse: Refuse | None = None):
        """`first_transfer` should differ from start to start of a process, so that its transfers don't
        take on the numbers of those before; `refuse(peer, round, reason)` hears of every refused share."""
        self.outbox: deque[tuple[PeerId, Header, Parts]] = deque()
        self.finished: Exchanged | None = None  # of the last `begin`
        self.letters: dict[PeerId, Letter] = {}
        self.states: dict[PeerId, Letter | None] = {}  # answers to `pull`; None: it has none
        self.bytes_in = self.bytes_out = 0
        self.epoch = 0  # of the view, in every header
        self._size = limits.chunk_bytes
        self._limits, self._next, self._refuse = limits, first_transfer, refuse or (lambda *_: None)
        self._round = -1  # of the exchange under way, or the last
        self._open = False
        self._slots: dict[PeerId, Incoming] = {}  # in mixing order
        self._head = 0  # slots before this one have ended
        self._out: dict[PeerId, Outgoing] = {}
        self._undecided: set[PeerId] = set()  # of _out
        self._begun_s = self._deadline_s = self._asked_s = 0.0
        self._early: dict[PeerId, tuple[Header, Parts]] = {}  # offers of rounds to come
        self._wanted: dict[PeerId, int] = {}  # who expects our share of which round to come
        self._counted: dict[PeerId, int] = {}  # the last round in which a peer's share was had whole
        self._heard: dict[PeerId, tuple[int, float]] = {}  # which round a peer announced last, and when
        self._dead: dict[PeerId, str] = {}
        self._posted: dict[tuple[PeerId, Kind], Outgoing] = {}
        self._behind: dict[tuple[PeerId, Kind], tuple[int, Share]] = {}  # to follow what is posted
        self._coming: dict[tuple[PeerId, Kind], Incoming] = {}  # letters and states
        self._had: dict[PeerId, deque[int]] = {}  # transfers of letters that were had whole
        self._pulling: dict[PeerId, float] = {}  # when we last asked
        self._state: tuple[int, Share] | None = None

    # --- what the peer itself asks for

    def begin(
        self, round: int, shares: Mapping[PeerId, Share], expected: Sequence[PeerId], mixer: Mixer,
        deadline_s: float, now: float,
    ) -> None:  # fmt: skip
        """Start an exchange; `finished` says when it is over."""
        assert not self._open, "one exchange at a time"
        assert round > self._round, (round, self._round)
        self._round, self._open, self._mixer, self.finished = round, True, mixer, None
        self._begun_s, self._asked_s = now, now - self._limits.retry_s + PATIENCE_S
        self._deadline_s, self._head = deadline_s, 0
        self._slots = {peer: Incoming(peer) for peer in expected}
        self._order = list(self._slots.values())
        self._out = {peer: self._outgoing(peer, Kind.OFFER, round, s, now) for peer, s in shares.items()}
        self._undecided = set(self._out)
        for out in self._out.values():
            if out.peer in self._dead:
                self._settle(out, self._dead[out.peer], now)
            else:
                self._offer(out, now)
        early, self._early = self._early, {}
        for peer, slot in self._slots.items():
            if peer in early:
                continue
            if peer in self._dead:
                self._lose(slot, self._dead[peer])
            elif self._heard.get(peer, (0, 0.0))[0] > round:
                self._lose(slot, f"went on to round {self._heard[peer][0]}")
        for peer, (header, parts) in early.items():
            self._offered(peer, header, parts)
        for peer, wanted in list(self._wanted.items()):
            if wanted <= round:
                del self._wanted[peer]
                if wanted < round or peer not in self._out:
                    self._say(peer, Kind.CANCEL, round=wanted)
        self._check_end(now)

    def abandon(self, now: float) -> None:
        """End the exchange under way at once: what is not whole counts as missing."""
        for slot in self._slots.values():
            self._lose(slot, "the exchange was stopped here")
        for out in self._out.values():
            self._settle(out, "the exchange was stopped here", now)
        self._check_end(now)

    def post(self, round: int, shares: Mapping[PeerId, Share], now: float) -> None:
        for peer, share in shares.items():
            self._send_unasked(peer, Kind.LETTER, round, share, now)

    def publish(self, round: int, share: Share) -> None:
        self._state = (round, share)

    def pull(self, peer: PeerId, now: float) -> None:
        """Ask for a peer's state; it will lie in `states`."""
        self.states.pop(peer, None)
        self._pulling[peer] = now
        self._say(peer, Kind.PULL)

    def forget_pull(self, peer: PeerId) -> None:
        self._pulling.pop(peer, None)
        self._coming.pop((peer, Kind.STATE), None)

    # --- what happens

    def lost(self, peer: PeerId, why: str, now: float) -> None:
        """The peer is dead, or has left: nobody waits for it any more."""
        self._dead[peer] = why
        self._early.pop(peer, None)
        self._wanted.pop(peer, None)
        if slot := self._slots.get(peer):
            self._lose(slot, why)
        if out := self._out.get(peer):
            self._settle(out, why, now)
        for kind in UNASKED:
            self._posted.pop((peer, kind), None)
            self._behind.pop((peer, kind), None)
            self._coming.pop((peer, kind), None)
        self._check_end(now)

    def found(self, peer: PeerId, now: float) -> None:
        """The peer is connected, or connected again: what it may have missed is said again."""
        self._dead.pop(peer, None)
        if self._open:
            if (out := self._out.get(peer)) and not out.outcome:
                self._offer(out, now, AGAIN)
            if (slot := self._slots.get(peer)) and not slot.outcome and slot.offer is None:
                self._say(peer, Kind.WANT, round=self._round)
        for (name, _), posted in self._posted.items():
            if name == peer:
                self._offer(posted, now, AGAIN)
        if peer in self._pulling:
            self._say(peer, Kind.PULL)

    def heard(self, peer: PeerId, round: int, now: float) -> None:
        """The peer says that it is at `round`."""
        if round <= self._heard.get(peer, (-1, 0.0))[0]:
            return
        self._heard[peer] = (round, now)
        if self._open and round > self._round:
            slot, out = self._slots.get(peer), self._out.get(peer)
            if slot and not slot.outcome and slot.offer is None:
                self._lose(slot, f"went on to round {round}")
            if out and not out.outcome:  # did it take our share? It answers at once
                self._offer(out, now)
            self._check_end(now)

    @property
    def progress(self) -> dict[PeerId, int]:
        """The round that each peer announced last, of those that are not dead."""
        return {peer: round for peer, (round, _) in list(self._heard.items()) if peer not in self._dead}

    @property
    def reached(self) -> dict[PeerId, int]:
        """The same of those too who are dead, or have left."""
        return {peer: round for peer, (round, _) in list(self._heard.items())}

    def receive(self, peer: PeerId, header: Header, parts: Parts, now: float) -> None:
        """A message of an authenticated peer. WireError: it breaks the protocol, and changed nothing that
        others rely on."""
        body = parts[0] if parts else b""
        match header.kind:
            case Kind.CHUNK:
                self._chunks(peer, header, parts)
            case Kind.ACK | Kind.NACK:
                self._credited(peer, header, now)
            case Kind.OFFER:
                self.heard(peer, header.round, now)
                self._offered(peer, header, parts)
            case Kind.DONE | Kind.REFUSE:
                self._answered(peer, header, body, now)
            case Kind.CANCEL:
                self._cancelled(peer, header)
            case Kind.WANT:
                self._want(peer, header)
            case Kind.LETTER | Kind.STATE:
                self._unasked(peer, header, body)
            case Kind.PULL:
                self._pulled(peer, now)
            case _:
                raise WireError(f"{header.kind.name} is not about a share")
        self._check_end(now)

    def tick(self, now: float) -> None:
        """Deadlines and repeats that are due."""
        retry_s = (
            self._limits.retry_s
        )  # below, the same sums as in wake_s: rounded otherwise, time would stand
        if self._open:
            for slot in self._order[self._head :]:
                if not slot.outcome and not slot.whole:  # a whole one waits for its turn alone
                    if now >= self._until(slot.peer):
                        self._lose(slot, f"did not finish within {self._deadline_s:g} s")
                    elif slot.offer is None and now >= self._asked_s + retry_s:
                        self._say(slot.peer, Kind.WANT, round=self._round)
            if now >= self._asked_s + retry_s:
                self._asked_s = now
            for out in self._out.values():
                if not out.outcome:
                    if now >= self._until(out.peer):
                        self._settle(out, f"did not take it within {self._deadline_s:g} s", now)
                    elif now >= out.touched_s + retry_s:
                        self._offer(out, now)
            self._check_end(now)
        for posted in list(self._posted.values()):
            if now >= posted.touched_s + retry_s:
                self._offer(posted, now)
        for peer, asked_s in list(self._pulling.items()):
            if now >= asked_s + retry_s:
                self._pulling[peer] = now
                if (peer, Kind.STATE) not in self._coming:
                    self._say(peer, Kind.PULL)

    def wake_s(self) -> float:
        """When `tick` has something to do next, unless something happens before; inf: not at all."""
        times = [math.inf]
        if self._open:
            waiting = [s for s in self._order[self._head :] if not s.outcome and not s.whole]
            under_way = [o for o in self._out.values() if not o.outcome]
            times += [
                self._until(peer) for peer in {*(s.peer for s in waiting), *(o.peer for o in under_way)}
            ]
            times += [out.touched_s + self._limits.retry_s for out in under_way]
            if any(slot.offer is None for slot in waiting):
                times.append(self._asked_s + self._limits.retry_s)
        times += [posted.touched_s + self._limits.retry_s for posted in self._posted.values()]
        times += [asked_s + self._limits.retry_s for asked_s in self._pulling.values()]
        return min(times)

    # --- giving

    def _outgoing(self, peer: PeerId, kind: Kind, round: int, share: Share, now: float) -> Outgoing:
        self._next = (self._next % 0xFFFFFFFF) + 1
        return Outgoing(
            peer, kind, round, self._next, share, chunks_of(share.payload.nbytes, self._size), now
        )

    def _offer(self, out: Outgoing, now: float, index: int = 0) -> None:
        out.touched_s = now
        share = out.share
        header = Header(
            out.kind, out.round, out.transfer, index, out.count, share.weight, share.degree, share.codec,
            self.epoch,
        )  # fmt: skip
        parts: list[Body] = [pack_offer(share.payload.nbytes, share.note)]
        if out.kind is Kind.OFFER and not out.credit:
            out.credit = min(out.count, self._limits.batch, self._limits.window)
            parts += self._next_chunks(out)
        self.outbox.append((out.peer, header, parts))

    def _credited(self, peer: PeerId, header: Header, now: float) -> None:
        """ACK: so far so good, and this much more; NACK: again from there."""
        out = self._transfer(peer, header)
        if out is None:
            return
        if not header.index <= header.count <= out.count or header.index > out.sent:
            raise WireError(f"credit {header.index} to {header.count} of {out.count} chunks, {out.sent} sent")
        out.touched_s = now
        out.credit = max(out.credit, header.count)
        if header.kind is Kind.NACK:
            out.sent = header.index
        self._send_chunks(out)

    def _send_chunks(self, out: Outgoing) -> None:
        """As far as there is credit."""
        while out.sent < out.credit:
            head = Header(
                Kind.CHUNK, out.round, out.transfer, out.sent, out.count, out.share.weight, out.share.degree,
                out.share.codec, self.epoch,
            )  # fmt: skip
            self.outbox.append((out.peer, head, self._next_chunks(out)))

    def _next_chunks(self, out: Outgoing) -> list[memoryview]:
        """What the next message takes of those for which there is credit."""
        begin, out.sent = out.sent, min(out.credit, out.sent + self._limits.batch)
        payload = out.share.payload[begin * self._size : out.sent * self._size]
        self.bytes_out += payload.nbytes
        return [payload[at : at + self._size] for at in range(0, payload.nbytes, self._size)]

    def _answered(self, peer: PeerId, header: Header, body: Body, now: float) -> None:
        """DONE or REFUSE: how it ended."""
        if header.kind is Kind.REFUSE and header.transfer == 0:  # of a PULL
            if self._pulling.pop(peer, None) is not None:
                self.states[peer] = None
            return
        out = self._transfer(peer, header)
        if out is None:
            return
        if header.kind is Kind.DONE and out.sent < out.count:
            if out.kind is Kind.OFFER and out.sent <= self._limits.batch:  # an earlier life of ours gave it
                self._decide(out, now, "given")
                return
            raise WireError(f"it has {out.count} chunks, of {out.sent} that were sent")
        self._decide(out, now, "given" if header.kind is Kind.DONE else "kept", _text(body))

    def _transfer(self, peer: PeerId, header: Header) -> Outgoing | None:
        """What this answer is about; None when it is over, as answers cross on the way."""
        unasked = (self._posted.get((peer, kind)) for kind in UNASKED)
        for out in (self._out.get(peer), *unasked):
            if out is not None and out.transfer == header.transfer and not out.outcome:
                return out
        return None

    def _settle(self, out: Outgoing, why: str, now: float) -> None:
        """Without an answer. A taker that can't have the last chunk can't have counted it."""
        if not out.outcome:
            self._decide(out, now, "unsure" if out.count and out.sent == out.count else "kept", why)
            if out.peer not in self._dead:
                self._say(out.peer, Kind.CANCEL, round=out.round, transfer=out.transfer)

    def _decide(self, out: Outgoing, now: float, outcome: str, why: str = "") -> None:
        out.outcome, out.why = outcome, why
        if out.kind is Kind.OFFER:
            self._undecided.discard(out.peer)
        else:
            del self._posted[out.peer, out.kind]
            if waiting := self._behind.pop((out.peer, out.kind), None):
                self._send_unasked(out.peer, out.kind, *waiting, now)

    def _want(self, peer: PeerId, header: Header) -> None:
        if header.round > self._round:
            self._wanted[peer] = max(header.round, self._wanted.get(peer, 0))
        elif header.round < self._round or not self._open or peer not in self._out:
            self._say(peer, Kind.CANCEL, round=header.round)
        elif self._out[peer].outcome == "kept":
            self._say(peer, Kind.CANCEL, round=header.round, transfer=self._out[peer].transfer)

    def _send_unasked(self, peer: PeerId, kind: Kind, round: int, share: Share, now: float) -> None:
        """One transfer at a time: what is on its way arrives, what waits behind it is replaced."""
        before = self._posted.get((peer, kind))
        if before is not None and before.sent:
            self._behind[peer, kind] = (round, share)
            return
        if before is not None:
            self._say(peer, Kind.CANCEL, round=before.round, transfer=before.transfer)
            del self._posted[peer, kind]
        if peer not in self._dead:
            self._posted[peer, kind] = out = self._outgoing(peer, kind, round, share, now)
            self._offer(out, now)

    def _pulled(self, peer: PeerId, now: float) -> None:
        if self._state is None:
            self._say(peer, Kind.REFUSE, body=b"no state to give yet")
        elif (peer, Kind.STATE) not in self._posted:
            self._send_unasked(peer, Kind.STATE, *self._state, now)

    # --- taking

    def _offered(self, peer: PeerId, header: Header, parts: Parts) -> None:
        """A share of a round, and its first chunks: of one that is over, of this one, or of one to come."""
        body, chunks = (parts[0], parts[1:]) if parts else (b"", ())
        nbytes, note = unpack_offer(header, body, self._limits.payload_bytes, self._size)
        if len(chunks) > self._limits.batch:
            raise WireError(f"an offer with {len(chunks)} chunks, {self._limits.batch} at most are taken")
        self._check(nbytes, 0, chunks)
        slot = self._slots.get(peer) if header.round == self._round else None
        if header.round > self._round:
            self._early_offer(peer, header, parts)
        elif self._counted.get(peer) == header.round:
            self._say(peer, Kind.DONE, round=header.round, transfer=header.transfer)
        elif slot is None or not self._open or slot.outcome:
            reason = (slot and slot.outcome) or (
                f"round {header.round} is over" if not self._open or header.round < self._round
                else f"not an in-neighbour in round {header.round}"
            )  # fmt: skip
            self._say(peer, Kind.REFUSE, round=header.round, transfer=header.transfer, body=reason.encode())
        elif slot.offer is None:
            self._accept(slot, header, nbytes, note, chunks)
        elif slot.transfer == header.transfer:
            self._where(slot, header)
        else:  # the giver was started again in the middle of a transfer
            self._lose(slot, "its first share was broken off")
            self._say(peer, Kind.REFUSE, round=header.round, transfer=header.transfer, body=b"broken off")

    def _early_offer(self, peer: PeerId, header: Header, parts: Parts) -> None:
        """Of a round to come: its chunks wait here too, as far as there is room."""
        before = self._early.get(peer)
        if before and (header.transfer == before[0].transfer or header.round < before[0].round):
            return
        others = (kept for other, (_, kept) in self._early.items() if other != peer)
        room = EARLY_BYTES - sum(len(part) for kept in others for part in kept)
        self._early[peer] = (header, parts if sum(map(len, parts)) <= room else parts[:1])

    def _accept(self, slot: Incoming, header: Header, nbytes: int, note: bytes, chunks: Parts) -> None:
        offer = Offer(slot.peer, header.round, nbytes, header.weight, header.degree, header.codec, note)
        slot.transfer, slot.count = header.transfer, header.count
        try:
            self._mixer.begin(offer)
        except BadUpdate as e:
            self._bad(slot, str(e))
            return
        slot.offer = offer
        slot.credit = len(chunks)
        if slot.count == 0 or chunks:
            self._take(slot, chunks)
        else:
            self._grant(slot)

    def _where(self, slot: Incoming, header: Header) -> None:
        """Offered again: chunks were lost if the connection was, or if none came since the last time."""
        again = header.index == AGAIN or slot.had == slot.asked_at
        slot.asked_at = slot.had
        kind = Kind.NACK if again else Kind.ACK
        self._say(slot.peer, kind, header.round, slot.transfer, slot.had, slot.credit)

    def _grant(self, slot: Incoming) -> None:
        """More credit, a few times a window. Without a chunk so far, none is on its way either."""
        credit = min(slot.count, slot.mixed + self._limits.window)
        if credit - slot.credit >= min(slot.count - slot.credit, max(1, self._limits.window // 4)) > 0:
            slot.credit = credit
            assert slot.offer is not None
            kind = Kind.ACK if slot.had else Kind.NACK
            self._say(slot.peer, kind, slot.offer.round, slot.transfer, slot.had, credit)

    def _chunks(self, peer: PeerId, header: Header, chunks: Parts) -> None:
        """Some that follow one another, from the header's index on."""
        slot = self._receiving(peer, header)
        if slot is None or header.index < slot.had:  # of a share that is over, or again
            return
        assert slot.offer is not None
        if header.index + len(chunks) > slot.credit:
            raise WireError(f"{len(chunks)} chunks from {header.index} on, but credit is {slot.credit}")
        if header.index > slot.had:
            if not slot.asked_again:
                slot.asked_again = True
                self._say(peer, Kind.NACK, slot.offer.round, slot.transfer, slot.had, slot.credit)
            return
        self._check(slot.offer.nbytes, header.index, chunks)
        self._take(slot, chunks)

    def _check(self, nbytes: int, index: int, chunks: Parts) -> None:
        for at, chunk in enumerate(chunks, index):
            due = min(self._size, nbytes - at * self._size)
            if len(chunk) != due or due <= 0:
                raise WireError(f"chunk {at} has {len(chunk)} bytes, {due} are due")

    def _take(self, slot: Incoming, chunks: Parts) -> None:
        """Those that come next, checked."""
        begin, slot.asked_again = slot.had, False
        slot.had += len(chunks)
        self.bytes_in += sum(map(len, chunks))
        if slot.into is not None:
            for at, chunk in enumerate(chunks, begin):
                slot.into[at * self._size :][: len(chunk)] = chunk
            slot.mixed = slot.had
            if slot.whole:
                self._have_letter(slot)
            else:
                self._grant(slot)
            return
        slot.held.extend(chunks)
        if slot.whole:
            self._have_whole(slot)
        self._mix_on()

    def _receiving(self, peer: PeerId, header: Header) -> Incoming | None:
        unasked = (self._coming.get((peer, kind)) for kind in UNASKED)
        for slot in (self._slots.get(peer), *unasked):
            if (
                slot is not None
                and slot.offer is not None
                and not slot.outcome
                and slot.transfer == header.transfer
                and slot.offer.round == header.round
            ):
                return slot
        return None

    def _have_whole(self, slot: Incoming) -> None:
        """All bytes are here: it counts, even if its chunks still wait for their turn."""
        assert slot.offer is not None
        self._counted[slot.peer] = slot.offer.round
        self._say(slot.peer, Kind.DONE, round=slot.offer.round, transfer=slot.transfer)

    def _mix_on(self) -> None:
        """Hand on all chunks whose turn it is: at each offset the peers in their order."""
        if not self._open:
            return
        while self._head < len(self._order) and self._order[self._head].outcome:
            self._head += 1
        turn = 1 << 62  # chunks that all peers before have had mixed
        for slot in self._order[self._head :]:
            if turn == 0:
                break
            if slot.outcome:
                continue
            before = slot.mixed
            while slot.held and slot.mixed < turn and not slot.outcome:
                self._mix(slot, slot.held.popleft())
            if slot.offer is not None and slot.mixed == slot.count and not slot.outcome:
                self._end(slot, "whole")
            if not slot.outcome:
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
        """Our mixer refused it: its giver is told, and it is named in the log."""
        self._refuse(slot.peer, self._round, reason)
        if not slot.whole:
            body = reason.encode()[:200]
            self._say(slot.peer, Kind.REFUSE, round=self._round, transfer=slot.transfer, body=body)
        self._end(slot, f"refused: {reason}")

    def _lose(self, slot: Incoming, why: str) -> None:
        """Nothing more comes. What is whole stays, and is mixed in its turn."""
        if not slot.outcome and not slot.whole:
            self._end(slot, why)
            self._mix_on()

    def _end(self, slot: Incoming, outcome: str) -> None:
        slot.outcome = outcome
        slot.held.clear()
        if slot.offer is not None:
            self._mixer.end(slot.peer, min(slot.mixed * self._size, slot.offer.nbytes))

    def _cancelled(self, peer: PeerId, header: Header) -> None:
        for kind in UNASKED:
            if (coming := self._coming.get((peer, kind))) and coming.transfer == header.transfer:
                del self._coming[peer, kind]
                return
        if (early := self._early.get(peer)) and early[0].transfer == header.transfer:
            del self._early[peer]
        slot = self._slots.get(peer)
        if slot is None or header.round != self._round or not self._open:
            return
        if header.transfer == 0 and slot.offer is None:
            self._lose(slot, f"has no share for us in round {header.round}")
        elif header.transfer and slot.transfer in (0, header.transfer):
            self._lose(slot, "gave up on us")

    def _unasked(self, peer: PeerId, header: Header, body: Body) -> None:
        """A letter, or the state that we pulled: into a buffer of its own, once its size is known to fit."""
        if header.kind is Kind.STATE and peer not in self._pulling:
            self._say(peer, Kind.REFUSE, round=header.round, transfer=header.transfer, body=b"not asked for")
            return
        nbytes, note = unpack_offer(header, body, self._limits.payload_bytes, self._size)
        if header.transfer in self._had.get(peer, ()):
            self._say(peer, Kind.DONE, round=header.round, transfer=header.transfer)
            return
        coming = self._coming.get((peer, header.kind))
        if coming is not None and coming.transfer == header.transfer:
            self._where(coming, header)
            return
        offer = Offer(peer, header.round, nbytes, header.weight, header.degree, header.codec, note)
        coming = Incoming(peer, offer, header.transfer, header.count, into=memoryview(bytearray(nbytes)))
        self._coming[peer, header.kind] = coming
        if coming.whole:
            self._have_letter(coming)
        else:
            self._grant(coming)

    def _have_letter(self, coming: Incoming) -> None:
        offer = coming.offer
        assert offer is not None
        assert coming.into is not None
        share = Share(coming.into, offer.weight, offer.degree, offer.codec, offer.note)
        letter = Letter(offer.peer, offer.round, share)
        if self._coming.get((offer.peer, Kind.STATE)) is coming:
            del self._coming[offer.peer, Kind.STATE], self._pulling[offer.peer]
            self.states[offer.peer] = letter
        else:
            del self._coming[offer.peer, Kind.LETTER]
            self.letters[offer.peer] = letter
        self._had.setdefault(offer.peer, deque(maxlen=16)).append(coming.transfer)
        self._say(offer.peer, Kind.DONE, round=offer.round, transfer=coming.transfer)

    # --- both

    def _until(self, peer: PeerId) -> float:
        """Its deadline: from when it announced this round, or the one before, if that is after our start."""
        round, at_s = self._heard.get(peer, (-1, 0.0))
        late = round in (self._round - 1, self._round)
        return (max(self._begun_s, at_s) if late else self._begun_s) + self._deadline_s

    def _check_end(self, now: float) -> None:
        if not self._open or self._undecided:
            return
        self._mix_on()
        if self._head < len(self._order):
            return
        self._open = False
        slots, outs = self._slots, self._out
        self.finished = Exchanged(
            arrived=frozenset(p for p, s in slots.items() if s.outcome == "whole"),
            missing={p: s.outcome for p, s in slots.items() if s.outcome != "whole"},
            given=frozenset(p for p, o in outs.items() if o.outcome == "given"),
            kept={p: o.why for p, o in outs.items() if o.outcome == "kept"},
            unsure={p: o.why for p, o in outs.items() if o.outcome == "unsure"},
            waited_s=now - self._begun_s,
        )

    def _say(
        self, peer: PeerId, kind: Kind, round: int = 0, transfer: int = 0, index: int = 0, count: int = 0,
        body: bytes = b"",
    ) -> None:  # fmt: skip
        header = Header(kind, round, transfer, index, count, epoch=self.epoch)
        self.outbox.append((peer, header, (body,) if body else ()))


def _text(body: Body) -> str:
    """A reason off the wire, for a person: one short line."""
    return "".join(c if c.isprintable() else "?" for c in bytes(body[:200]).decode("utf-8", "replace"))
