"""What both directions of a peer's transfers have in common: limits, the exchange under way, the outbox."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..exchange import Account, PeerId
from ..wire.frames import CHUNK_BYTES
from ..wire.gossip import Header, Kind

Body = bytes | bytearray | memoryview
Parts = Sequence[Body]  # of a message, after its header
UNSCHEDULED = (Kind.POST, Kind.ANSWER, Kind.STATE)  # shares outside of an exchange


@dataclass(frozen=True)
class Limits:
    """What one peer takes from another."""

    payload_bytes: int = 4 << 30  # of one share; a run sets it from its schema
    chunk_bytes: int = CHUNK_BYTES  # the same at all peers
    window: int = 16  # chunks that a giver may be ahead of what was mixed
    batch: int = 4  # chunks in one message, and with an offer: each message costs the taker a wakeup
    retry_s: float = 1.0  # silence after which an offer is repeated


@dataclass(slots=True, eq=False)
class PeerState:
    """What a peer knows of its exchange and of the other peers."""

    limits: Limits
    outbox: deque[tuple[PeerId, Header, Parts]] = field(default_factory=deque)
    epoch: int = 0  # of the view; it stands in every header
    epochs: dict[PeerId, int] = field(default_factory=dict)  # of each other peer's view, as it said last
    round: int = -1  # of the exchange under way, or of the last one
    open: bool = False  # an exchange is under way
    begun_s: float = 0.0  # when it began
    deadline_s: float = 0.0  # seconds that a peer has for it
    announced: dict[PeerId, tuple[int, float]] = field(default_factory=dict)  # a peer's last round, and when
    waiting: dict[PeerId, float] = field(default_factory=dict)  # since when it waits for others in that round
    own_s: float = math.inf  # this peer's last training
    # Peers that needed half a deadline or more for their last training, and twice as long as this one.
    slow: set[PeerId] = field(default_factory=set)
    patient: bool = False  # the exchange under way needs all of its shares
    overdue: set[PeerId] = field(default_factory=set)  # peers that the exchange under way does not wait for
    reachable: Callable[[PeerId], bool] = lambda peer: True  # whether there is a connection
    dead: dict[PeerId, str] = field(default_factory=dict)  # why each dead peer is so
    counted: Mapping[PeerId, Account] = field(default_factory=dict)  # of each giver, by our last commit
    told: dict[PeerId, tuple[int, Account]] = field(default_factory=dict)  # by each taker, as in Neighbors

    def until(self, peer: PeerId) -> float:
        """A peer's deadline. It counts from our start, or from when the peer announced this round. A peer
        in an earlier round has it from its announcement of that round on, for its training; and twice as
        much from when it said that it waits for others there, so that one slow peer parts no two others."""
        round, at_s = self.announced.get(peer, (self.round, self.begun_s))
        if round >= self.round or self.patient:
            return max(self.begun_s, at_s) + self.deadline_s
        return self.waiting[peer] + 2 * self.deadline_s if peer in self.waiting else at_s + self.deadline_s

    def waits_for(self, peer: PeerId, now: float) -> bool:
        """Whether the exchange that begins now waits for the peer: not while a slow one trains."""
        at = self.announced.get(peer, (self.round, 0.0))[0]
        training = at <= self.round and peer not in self.waiting
        return self.patient or (now < self.until(peer) and not (training and peer in self.slow))

    def trained(self, peer: PeerId, now: float) -> None:
        """The training is over that the peer began with its last announcement."""
        if peer in self.announced and peer not in self.waiting and self.deadline_s:
            slow = now - self.announced[peer][1] > max(self.deadline_s / 2, 2 * self.own_s)
            (self.slow.add if slow else self.slow.discard)(peer)

    def say(
        self, peer: PeerId, kind: Kind, round: int = 0, transfer: int = 0, index: int = 0, count: int = 0,
        body: bytes = b"",
    ) -> None:  # fmt: skip
        header = Header(kind, round, transfer, index, count, epoch=self.epoch)
        self.outbox.append((peer, header, (body,) if body else ()))
