"""What connects a peer with one other: calls of both, what waits to be sent, and what went wrong."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

from ..errors import WireError
from ..events import Event
from ..exchange import Contact, PeerId
from ..wire.gossip import Stamp
from .shares import Limits, Parts

OUR_CALL = 0  # a way to a peer; the others are its calls, by their fds
TOKENS = 4000.0  # control messages that a peer may send at once
TOKENS_S = 3000.0  # control messages that a peer may send in a second, for long

# What is heard of our calls. Never HANDSHAKE_FAILED_PROTOCOL: where bytes were damaged, libzmq 4.3.5 tells
# that event before it looks at errno, in which telling leaves EAGAIN. So libzmq reads nothing more, keeps the
# connection, and a heartbeat ends this process once the other end is gone ("Assertion failed: !_io_error").
WATCHED = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
)  # fmt: skip

Source = zmq.Socket[bytes]


@dataclass(frozen=True)
class LinkSettings:
    """How a peer keeps its connections."""

    heartbeat_s: float = 1.0  # a connection that is silent for three of these is lost
    idle_s: float = 5.0  # a peer without a connection for so long is not waited for any more
    limits: Limits = Limits()


@dataclass(eq=False)
class Link:
    """What connects us with one peer."""

    peer: PeerId
    stamp: Stamp  # that its messages bear
    dealer: Source | None = None
    monitor: Source | None = None
    calling: bool = False  # our DEALER's handshake is done
    routes: dict[int, tuple[bytes, Any]] = field(default_factory=dict)  # its calls: fd -> routing id, address
    queue: deque[tuple[bytes, Parts]] = field(default_factory=deque)  # shares that no socket has taken yet
    urgent: deque[tuple[bytes, Parts]] = field(default_factory=deque)  # all else
    way: int | None = None  # by which shares went last
    lent: deque[weakref.ref[memoryview]] = field(default_factory=deque)  # chunks that libzmq may still read
    contact: Contact | None = None  # as it was on the roster when it was called
    greeted: bool = False  # the peer accepted our Hello
    welcomed: bool = False  # we accepted the peer's Hello
    rejected: str = ""  # why the peer refused our Hello
    refused: str = ""  # why we refused the peer's Hello
    met: bool = False  # both Hellos were accepted at least once
    trouble: str = ""  # what became of our last call, where nobody answered it
    boot: bytes = b""  # the start of the peer's process that said the Hello we accepted
    number: int = 0  # of that start, which grows with each
    heard: int = OUR_CALL  # the way over which its last message came
    known: bytes = b""  # a digest of the peer's roster, as its Hello said
    hello_s: float = -math.inf  # when we last said Hello
    down_s: float = 0.0  # since when there is no connection, or it is missed
    used_s: float = 0.0  # when it was asked for last
    dead: bool = False
    denials: int = 0  # of our key by the peer, one after the other
    failures: int = 0  # of our calls, one after the other
    recall_s: float = math.inf  # when to call it again
    tokens: float = 0.0  # control messages that the peer could send at once at tokens_s
    tokens_s: float = -math.inf
    breaches: int = 0  # of the protocol, by the peer
    banned_s: float = -math.inf  # until when the peer is cut off

    @property
    def up(self) -> bool:
        return self.calling or bool(self.routes)

    @property
    def agreed(self) -> bool:
        return self.up and self.greeted and self.welcomed

    @property
    def ways(self) -> list[int]:
        """How the peer is reached: by our call, and by its own, the latest first."""
        return [OUR_CALL] * self.calling + [*reversed(self.routes)]

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.urgent)

    def lend(self, chunk: memoryview) -> None:
        self.lends()
        self.lent.append(weakref.ref(chunk))

    def lends(self) -> bool:
        """Whether libzmq may still read memory that is not its own."""
        while self.lent and self.lent[0]() is None:
            self.lent.popleft()
        return bool(self.lent)

    def went_down(self) -> None:
        self.down_s, self.greeted, self.welcomed = time.monotonic(), False, False
        self.rejected = self.refused = ""

    def spend(self, now: float) -> None:
        """Pay for a control message; WireError where the peer sends too many."""
        self.tokens = min(TOKENS, self.tokens + (now - self.tokens_s) * TOKENS_S) - 1
        self.tokens_s = now
        if self.tokens < 0:
            self.tokens = 0.0
            raise WireError(f"more than {TOKENS_S:g} messages a second")

    def is_banned(self) -> bool:
        return time.monotonic() < self.banned_s


class Observer(Protocol):
    """What links tell the thread that drives them."""

    @property
    def near(self) -> frozenset[PeerId]: ...  # whom it is to be connected with
    def greet(self, link: Link) -> None: ...  # a connection was made
    def owes(self, peer: PeerId) -> bool: ...  # whether a share is on its way to it
    def key_refused(self, link: Link) -> None: ...  # by a peer, and the key is ours
    def refresh_roster(self) -> None: ...  # a guest may have joined
    def woken(self) -> None: ...  # by `wake`
    def emit(self, event: Event) -> None: ...


def address_of(fd: int) -> Any:
    """Who is at the other end of a connection of libzmq's; None when it has ended."""
    try:
        with socket.socket(fileno=os.dup(fd)) as s:
            return s.getpeername()
    except OSError:
        return None


def shut(fd: int, address: Any) -> None:
    """Cut a connection of libzmq's, if it is still the one that was meant: its number may be taken anew."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as s:
        if s.getpeername() == address:
            s.shutdown(socket.SHUT_RDWR)
