"""How shares travel between one peer and its neighbours: the protocol of wire/gossip.py, without I/O.

Both transports drive a `Courier`: transport/zmq.py with sockets and the machine's clock,
transport/memory.py with a queue and a virtual clock. A message that comes goes into `receive`, what is to be
sent lies in `outbox`, time passes by `tick`. So what is tested under thousands of seeded faults is what
runs over the network. Shares leave through a `Sender` and come in through a `Receiver`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from ..errors import WireError
from ..exchange import Account, Exchanged, Mixer, PeerId, Share
from ..wire.gossip import Header, Kind
from .receiver import Receiver, Refused
from .sender import Sender
from .shares import Limits, Parts, PeerState
from .transfers import Giving, Taking


class Courier:
    """One peer's end of all transfers. Not for several threads."""

    def __init__(self, limits: Limits = Limits(), *, first_transfer: int = 1, refused: Refused | None = None):
        """`first_transfer` should differ from start to start of a process, so that its transfers don't
        take on the numbers of those before; `refused(peer, round, reason)` is told of every refused share."""
        self.state = PeerState(limits)
        self.sender = Sender(self.state, first_transfer)
        self.receiver = Receiver(self.state, refused or (lambda *_: None))
        self.outbox = self.state.outbox
        self.finished: Exchanged | None = None  # of the last `begin`
        self._waits_s = math.inf  # when the others are to hear that this peer waits
        self._said_s = -math.inf  # when it announced a round
        self._ready_s = -math.inf  # when they heard that it waits

    # --- what the peer itself asks for

    def begin(
        self, round: int, shares: Mapping[PeerId, Share], expected: Sequence[PeerId], mixer: Mixer,
        deadline_s: float, now: float,
    ) -> None:  # fmt: skip
        """Start an exchange; `finished` says when it is over."""
        state = self.state
        assert not state.open, "one exchange at a time"
        assert round > state.round, (round, state.round)
        state.round, state.open, self.finished = round, True, None
        state.begun_s, state.deadline_s = now, deadline_s
        state.patient = getattr(mixer, "patient", False)
        others = {*shares, *expected} - self.receiver.offered_early(round)
        state.overdue = {peer for peer in others if not state.waits_for(peer, now)}
        self._mixer, self._waits_s = mixer, now + min(state.limits.retry_s, deadline_s / 10)
        self.sender.begin(shares, now)
        self.receiver.begin(expected, mixer)
        self.sender.cancel_unmet_wants()
        self._check_end(now)

    def abandon(self, now: float) -> None:
        """End the exchange under way at once: what is not whole counts as missing."""
        self.receiver.stop("the exchange was stopped here")
        self.sender.stop("the exchange was stopped here", now)
        self._check_end(now)

    def announces(self, now: float) -> None:
        """This peer begins with a round."""
        self.state.own_s = max(self._ready_s - self._said_s, 0.0) or now - self._said_s
        self._said_s, self._ready_s = now, -math.inf

    def post(self, round: int, shares: Mapping[PeerId, Share], answers: bool, now: float) -> list[PeerId]:
        """Returns the peers that are dead, to whom nothing goes."""
        for peer, share in shares.items():
            self.sender.post(peer, Kind.ANSWER if answers else Kind.POST, round, share, now)
        return [peer for peer in shares if peer in self.state.dead]

    def publish(self, round: int, share: Share) -> None:
        self.sender.publish(round, share)

    def pull(self, peer: PeerId, now: float) -> None:
        """Ask for a peer's state; it will lie in `receiver.states`."""
        self.receiver.pull(peer, now)

    # --- what happens

    def lost(self, peer: PeerId, why: str, now: float) -> None:
        """The peer is dead, or has left: nobody waits for it any more."""
        self.state.dead[peer] = why
        self.receiver.lost(peer, why)
        self.sender.lost(peer, why, now)
        self._check_end(now)

    def found(self, peer: PeerId, now: float) -> None:
        """The peer is connected, or connected again: what it may have missed is said again."""
        self.state.dead.pop(peer, None)
        self.sender.found(peer, now)
        self.receiver.found(peer)

    def heading(self, kind: Kind, peer: PeerId, round: int) -> Header:
        """Of a message that says where this peer is, and what it has counted of the other's shares."""
        account = self.state.counted.get(peer, Account())
        return Header(kind, round, account.mask, account.last + 1, epoch=self.state.epoch)

    def heard(self, peer: PeerId, header: Header, now: float) -> None:
        """A message with such a heading."""
        if header.round > self.state.told.get(peer, (0, None))[0]:
            self.state.told[peer] = header.round, Account(header.index - 1, header.transfer)
        self.state.epochs[peer] = header.epoch
        self.announced(peer, header.round, now)
        if header.count and header.round == self.state.announced[peer][0]:
            self.state.trained(peer, now)
            self.state.waiting.setdefault(peer, now)
            self._wait_again(peer, now)

    def announced(self, peer: PeerId, round: int, now: float) -> None:
        """The peer says that it is at `round`."""
        if round <= self.state.announced.get(peer, (-1, 0.0))[0]:
            return
        self.state.trained(peer, now)
        self.state.announced[peer] = (round, now)
        self.state.waiting.pop(peer, None)
        if peer not in self.state.slow:
            self._wait_again(peer, now)
        if self.state.open and round > self.state.round:
            self.receiver.went_on(peer, round)
            self.sender.found(peer, now)
            self._check_end(now)

    def _here(self, peer: PeerId, round: int, now: float) -> None:
        """The peer exchanges shares in `round`. What it never announced it has trained for."""
        new = round > self.state.announced.get(peer, (-1, 0.0))[0]
        self.announced(peer, round, now)
        if new:
            self.state.waiting[peer] = now
        self._wait_again(peer, now)

    def _wait_again(self, peer: PeerId, now: float) -> None:
        """The exchange under way waits for a peer that was overdue, and is in this round now."""
        if (
            self.state.open
            and peer in self.state.overdue
            and self.state.announced[peer][0] == self.state.round
        ):
            self.state.overdue.discard(peer)
            self.sender.resume(peer, now)

    @property
    def progress(self) -> dict[PeerId, int]:
        """The round that each peer announced last, of those that are not dead."""
        return {peer: round for peer, round in self.reached.items() if peer not in self.state.dead}

    @property
    def reached(self) -> dict[PeerId, int]:
        """The round that each peer announced last, those too that are dead or have left."""
        return {peer: round for peer, (round, _) in list(self.state.announced.items())}

    def receive(self, peer: PeerId, header: Header, parts: Parts, now: float) -> None:
        """A message of an authenticated peer. WireError: it breaks the protocol, and changed nothing that
        others rely on."""
        body = parts[0] if parts else b""
        match header.kind:
            case Kind.CHUNK:
                self.receiver.chunks(peer, header, parts)
            case Kind.ACK | Kind.NACK:
                self.sender.credited(peer, header, now)
            case Kind.OFFER:
                self._here(peer, header.round, now)
                self.receiver.offered(peer, header, parts)
            case Kind.REFUSE if header.transfer == 0:
                self.receiver.pull_refused(peer)
            case Kind.DONE | Kind.REFUSE:
                self.sender.answered(peer, header, body, now)
            case Kind.CANCEL:
                self.receiver.cancelled(peer, header)
            case Kind.WANT:
                self._here(peer, header.round, now)
                self.sender.wanted(peer, header)
            case Kind.POST | Kind.ANSWER | Kind.STATE:
                self.receiver.unscheduled(peer, header, body)
            case Kind.PULL:
                self.sender.pulled(peer, now)
            case _:
                raise WireError(f"{header.kind.name} is not about a share")
        self._check_end(now)

    def tick(self, now: float) -> None:
        """Deadlines and repeats that are due."""
        self.receiver.tick(now)
        self.sender.tick(now)
        self._check_end(now)
        if self.state.open and now >= self._waits_s:
            waits = getattr(self._mixer, "waits", True)
            self._waits_s = math.inf if waits else now + self.state.limits.retry_s
            self._ready_s = now if waits else self._ready_s
            for peer in [*self.state.announced] if waits else ():
                heading = self.heading(Kind.PING, peer, self.state.round)
                self.outbox.append((peer, msgspec.structs.replace(heading, count=1), ()))

    def wake_s(self) -> float:
        """When `tick` has something to do next, unless something happens before; inf: not at all."""
        waits_s = self._waits_s if self.state.open else math.inf
        return min(self.receiver.wake_s(), self.sender.wake_s(), waits_s)

    def _check_end(self, now: float) -> None:
        if not self.state.open or self.sender.undecided or not self.receiver.ended():
            return
        self.state.open = False
        self.finished = Exchanged(
            arrived=frozenset(self.receiver.ended_as(Taking.MIXED)),
            missing=self.receiver.ended_as(Taking.MISSED),
            given=frozenset(self.sender.ended(Giving.GIVEN)),
            kept=self.sender.ended(Giving.KEPT),
            unsure=self.sender.ended(Giving.UNSURE),
            waited_s=now - self.state.begun_s,
        )
