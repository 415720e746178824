"""The graph seam over ZeroMQ: always CURVE, one background thread that owns every socket.

A peer binds one ROUTER, on which others call it, and opens one DEALER for each peer that it talks to. Who
speaks is the connection's CURVE key, which the roster maps to a peer: never a routing id, never a name in a
message. A key outside of the roster is refused in the handshake (ZAP), and so is everybody when there is no
handler for it. A peer without an address calls, and is served over that call.

What is said is the courier's (transport/courier.py); here are connections, queues, threads and clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ..errors import CertificateError, ConnectError, JoinRefused, WireError
from ..exchange import Contact, Exchanged, Letter, Mixer, PeerId, Share
from ..malloc import keep_freed
from ..wire.codec import decode, encode
from ..wire.frames import CHUNK_BYTES, Refused
from ..wire.gossip import (
    FRAME_BYTES,
    TEXT_BYTES,
    Greeting,
    Header,
    Kind,
    Stamp,
    pack,
    short,
    unpack,
)
from .courier import Body, Courier, Limits
from .membership import Membership

DOMAIN = b"fedtrain.gossip"
SENDING = 64  # messages queued in libzmq on a connection; memory is at most this times a chunk
WAITING = 1000  # messages that wait here for one peer: credit keeps an honest one far below
BATCH = 64  # messages read from one socket before the others are looked at
TOKENS = 4000.0  # control messages that a peer may send at once,
TOKENS_S = 3000.0  # and in a second for long
PATIENCE = 20  # breaches of the protocol before a peer is cut off,
BAN_S = 60.0  # and for how long
GUEST_S = 0.2  # between what the holder of an invitation says
FAST = 150e6  # bytes of CURVE in a second of CPU: libsodium does twice that or more, tweetnacl a third
NOBLOCK, SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)  # an enum's | costs more than a message
POLL_S = 0.25  # at most, between looks at what time brings

Emit = Callable[..., None]


@dataclass(frozen=True)
class Curve:
    """A CURVE key pair, z85 text. The secret goes to ZeroMQ and nowhere else."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Curve:
        return cls(*zmq.curve_keypair())


class Roster(Protocol):
    """Who may speak; see pki.roster. Asked at every handshake and every message."""

    def contact(self, peer: PeerId) -> Contact | None: ...
    def peer_of(self, key: bytes) -> PeerId | None: ...
    def peers(self) -> list[PeerId]: ...
    def statements(self) -> list[bytes]:
        """All that was signed and is to be passed on: entries of peers, and who was revoked."""

    def add(self, statement: bytes) -> Contact | None:
        """One that was passed on, and whose entry it is; CertificateError when it can't be believed."""

    def is_guest(self, key: bytes) -> bool:
        """Whether it is an invitation's: its holder is not a peer yet, and may say one thing."""

    def admit(self, key: bytes, entry: bytes) -> Contact:
        """A guest's own entry; CertificateError says why it doesn't come in."""


class Peers:
    """A roster that is given, for tests and benchmarks."""

    def __init__(self, contacts: Iterable[Contact] = ()) -> None:
        self.replace(contacts)

    def replace(self, contacts: Iterable[Contact]) -> None:
        self.contacts = {each.peer: each for each in contacts}
        self._names = {each.key: each.peer for each in self.contacts.values()}

    def contact(self, peer: PeerId) -> Contact | None:
        return self.contacts.get(peer)

    def peer_of(self, key: bytes) -> PeerId | None:
        return self._names.get(key)

    def peers(self) -> list[PeerId]:
        return sorted(self.contacts)

    def statements(self) -> list[bytes]:
        return []

    def add(self, statement: bytes) -> Contact:
        raise CertificateError("this roster is fixed")

    def is_guest(self, key: bytes) -> bool:
        return False

    def admit(self, key: bytes, entry: bytes) -> Contact:
        raise CertificateError("this roster is fixed")


@dataclass(eq=False)
class Link:
    """What connects us with one peer."""

    peer: PeerId
    dealer: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    calling: bool = False  # our DEALER's handshake is done
    routes: dict[int, tuple[bytes, Any]] = field(default_factory=dict)  # its calls: fd -> routing id, address
    queue: deque[tuple[bytes, Body]] = field(default_factory=deque)  # what a full socket did not take
    trackers: deque[Any] = field(default_factory=deque)  # of chunks that libzmq may still read
    greeted: bool = False  # it took our Hello
    welcomed: bool = False  # we took its Hello
    met: bool = False  # both, at least once
    boot: bytes = b""  # which start of its process that was
    contact: Contact | None = None  # as it was on the roster when it was called
    hello_s: float = -math.inf  # when we last said Hello
    down_s: float = 0.0  # since when there is no connection
    dead: bool = False
    tokens: float = TOKENS
    tokens_s: float = 0.0
    breaches: int = 0
    banned_s: float = -math.inf  # until then

    @property
    def up(self) -> bool:
        return self.calling or bool(self.routes)

    @property
    def agreed(self) -> bool:
        return self.up and self.greeted and self.welcomed


@dataclass(frozen=True)
class View:
    """Who is there."""

    alive: tuple[PeerId, ...]  # sorted, this peer too; a round's graph is over these
    epoch: int  # equal views have equal ones; it stands in every header
    degraded: bool  # half of the roster, or fewer


class ZmqNeighbors:
    """One peer on the network. Implements exchange.Neighbors."""

    def __init__(
        self,
        *,
        me: PeerId,
        curve: Curve,
        roster: Roster,
        run: str,
        greeting: Greeting,
        welcome: Callable[[PeerId, Greeting], None] = lambda peer, greeting: None,
        listen: str | None = "127.0.0.1:0",
        limits: Limits | None = None,
        heartbeat_s: float = 1.0,
        idle_s: float = 5.0,
        io_threads: int = 1,
        emit: Emit = lambda kind, **fields: None,
    ) -> None:
        """`welcome` raises JoinRefused when a peer does not fit. `listen` None: call others, take no calls.
        A peer without a connection for `idle_s` is not waited for any more."""
        self.me, self._curve, self._roster, self._listen = me, curve, roster, listen
        self._welcome, self._emit = welcome, emit
        self._limits = limits or Limits()
        self._heartbeat_s, self._idle_s = float(heartbeat_s), float(idle_s)
        self._stamp = Stamp.of(run, greeting.schema_digest, me)
        self._greeting = msgspec.structs.replace(greeting, boot=secrets.token_bytes(8))
        self._courier = Courier(self._limits, first_transfer=secrets.randbits(31), refuse=self._share_refused)
        self._membership = Membership(
            me, now=time.monotonic(), draw=random.Random(secrets.randbits(64)), period_s=self._heartbeat_s,
            suspicion_s=self._idle_s,
        )  # fmt: skip
        self._links: dict[PeerId, Link] = {}
        self._by_monitor: dict[zmq.Socket[bytes], Link] = {}
        self._by_dealer: dict[zmq.Socket[bytes], Link] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=io_threads)
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._commands: deque[Callable[[], object]] = deque()
        self._bell, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        self._lock = threading.Lock()  # over what both threads touch: letters and those who wait for them
        self._letters: dict[PeerId, Letter] = {}
        self._waits: list[Future[None]] = []
        self._exchange: Future[Exchanged] | None = None
        self._pulls: dict[PeerId, Future[Letter | None]] = {}
        self._strangers = 0
        self._guests: dict[bytes, float] = {}  # when the holder of an invitation last said something
        self._passed_on: frozenset[bytes] = frozenset()  # statements that all connected peers were sent
        self._round = 0
        self._view = View((me,), self._membership.epoch, False)
        self._seen = 0  # changes of the membership that the view has
        self._stopping = self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"gossip {me}", daemon=True)
        self.port = 0
        self.wire_out = 0  # bytes of all messages sent, headers too, before encryption

    # --- the caller's side, on an event loop

    def start(self) -> None:
        """Bind and begin; ConnectError when the port is in use. Call it on the event loop."""
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        keep_freed()  # libzmq makes a buffer for each message that it encrypts or decrypts
        poller = self._poller = zmq.Poller()
        self._zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")  # before the ROUTER: there is no moment without a handler
        self._router = self._socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.curve_secretkey, self._router.curve_publickey = self._curve.secret, self._curve.public
        self._router.zap_domain = DOMAIN
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody comes in
        self._router.router_mandatory = True
        self._calls = self._router.get_monitor_socket()
        if self._listen is not None:
            try:
                self._router.bind(f"tcp://{self._listen}")
            except zmq.ZMQError as e:
                self._close()
                raise ConnectError(
                    f"cannot listen on {self._listen}: {e.strerror}. Change network.listen."
                ) from None
            self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        for each in (self._zap, self._router, self._calls, self._ear):
            poller.register(each, zmq.POLLIN)
        self._thread.start()

    async def stop(self) -> None:
        """Say good-bye and close."""
        if not self._closed:
            self._do(self._leave)
        await asyncio.to_thread(self._thread.join, 10)

    @property
    def bytes_in(self) -> int:
        return self._courier.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._courier.bytes_out

    def connected(self) -> list[PeerId]:
        """The peers with whom we agree and are connected, sorted."""
        return sorted(
            link.peer for link in list(self._links.values()) if link.up and link.greeted and link.welcomed
        )

    def view(self) -> View:
        """Who is there, as SWIM sees it; the same for all peers, but for the moments in which it changes."""
        return self._view

    def connect(self, peers: Iterable[PeerId]) -> None:
        """Call these peers now, rather than when there is first something to say."""
        for peer in peers:
            self._do(functools.partial(self._link, peer))

    async def meet(self, peers: Iterable[PeerId], timeout_s: float) -> list[PeerId]:
        """Call these and wait until all are connected, or the time is over; those who are."""
        wanted = set(peers)
        self.connect(wanted)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not wanted <= set(self.connected()):
                    self._news.clear()
                    await self._news.wait()
        return sorted(wanted & set(self.connected()))

    def announce(self, round: int) -> None:
        self._do(lambda: self._announce(round))

    def progress(self) -> dict[PeerId, int]:
        return self._courier.progress

    async def exchange(
        self,
        round: int,
        shares: Mapping[PeerId, Share],
        expected: Sequence[PeerId],
        mixer: Mixer,
        deadline_s: float,
    ) -> Exchanged:
        done: Future[Exchanged] = Future()

        def begin() -> None:
            self._exchange, self._round = done, max(round, self._round)
            for peer in {*shares, *expected}:
                self._link(peer)
            self._courier.begin(round, shares, expected, mixer, deadline_s, time.monotonic())

        self._do(begin)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._do(lambda: self._courier.abandon(time.monotonic()))
            raise

    def post(self, round: int, shares: Mapping[PeerId, Share]) -> None:
        def post() -> None:
            for peer in shares:
                self._link(peer)
            self._courier.post(round, shares, time.monotonic())

        self._do(post)

    def take(self) -> list[Letter]:
        with self._lock:
            letters, self._letters = self._letters, {}
        return [letters[peer] for peer in sorted(letters)]

    async def arrival(self, timeout_s: float) -> bool:
        wait: Future[None] = Future()
        with self._lock:
            if self._letters:
                return True
            self._waits.append(wait)
        try:
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                await asyncio.wrap_future(wait)
        except TimeoutError:
            return False
        return True

    def publish(self, round: int, share: Share) -> None:
        self._do(lambda: self._courier.publish(round, share))

    async def pull(self, peer: PeerId, timeout_s: float) -> Letter | None:
        answer: Future[Letter | None] = Future()

        def ask() -> None:
            self._pulls[peer] = answer
            self._link(peer)
            self._courier.pull(peer, time.monotonic())

        def forget() -> None:
            if self._pulls.pop(peer, None):
                self._courier.forget_pull(peer)

        self._do(ask)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            return None
        finally:
            self._do(forget)

    def revoked(self) -> None:
        """The roster has changed: cut off at once those who are no longer on it, or have another key."""
        self._do(self._look_at_roster)

    def _tell(self, kind: str, **fields: Any) -> None:
        """To the log, which belongs to the caller's side."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(functools.partial(self._emit, kind, **fields))

    def _do(self, what: Callable[[], object]) -> None:
        """Have it done by the thread."""
        if self._closed:
            raise ConnectError(f"{self.me} is not connected any more: {self._error or 'it has left'}")
        self._commands.append(what)
        with contextlib.suppress(OSError):  # closed at this moment
            self._bell.send(b"!")

    # --- the thread's side

    def _work(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as e:  # whatever it is, those who wait must hear of it
            self._error = e
        finally:
            self._closed = True
            self._give_up()
            self._close()

    def _turn(self) -> None:
        now = time.monotonic()
        wake_s = min(self._courier.wake_s(), self._membership.wake_s())
        wait_s = min(max(wake_s - now, 0.0), POLL_S)
        if any(link.queue for link in self._links.values()):
            wait_s = min(wait_s, 0.002)  # a full ROUTER can't be polled for one of its peers
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self._zap in ready:
            self._answer_zap()
        if self._calls in ready:
            self._see_calls()
        for each in ready:
            if link := self._by_monitor.get(each):
                self._see_call_out(link)
        if self._ear.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._ear.recv(4096)
        while self._commands:
            self._commands.popleft()()
        if self._router in ready:
            self._read(self._router)
        for each in ready:
            if each in self._by_dealer:
                self._read(each)
        self._courier.tick(time.monotonic())
        self._look_at_links()
        self._look_around()
        self._write()
        self._hand_back()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = made.rcvhwm = SENDING
        made.maxmsgsize = FRAME_BYTES
        made.sndtimeo = 1000
        made.heartbeat_ivl = int(self._heartbeat_s * 1000)
        made.heartbeat_timeout = int(self._heartbeat_s * 3000)
        made.heartbeat_ttl = int(self._heartbeat_s * 3000)
        made.handshake_ivl = int(self._heartbeat_s * 3000)
        made.reconnect_ivl, made.reconnect_ivl_max = 100, 2000
        made.tcp_keepalive = 1
        return made

    def _link(self, peer: PeerId) -> Link:
        """The link with a peer; calls it when it has an address and is not being called."""
        link = self._links.get(peer)
        contact = self._roster.contact(peer)
        if link is None:
            link = self._links[peer] = Link(peer, down_s=time.monotonic())
        if link.dealer is None:
            link.contact = contact
        if link.dealer is None and contact is not None and contact.address is not None:
            link.dealer = dealer = self._socket(zmq.DEALER)
            dealer.immediate = True
            dealer.curve_serverkey = contact.key
            dealer.curve_publickey, dealer.curve_secretkey = self._curve.public, self._curve.secret
            dealer.routing_id = b"\x01" + secrets.token_bytes(16)
            link.monitor = dealer.get_monitor_socket()
            self._by_dealer[dealer], self._by_monitor[link.monitor] = link, link
            self._poller.register(dealer, zmq.POLLIN)
            self._poller.register(link.monitor, zmq.POLLIN)
            dealer.connect(f"tcp://{contact.address}")
        return link

    def _hang_up(self, link: Link) -> None:
        """Drop our call, and with it what its queue holds."""
        if link.dealer is None or link.monitor is None:
            return
        for each in (link.dealer, link.monitor):
            self._poller.unregister(each)
        del self._by_dealer[link.dealer], self._by_monitor[link.monitor]
        link.dealer.disable_monitor()
        link.monitor.close(0)
        link.dealer.close(0)
        link.dealer = link.monitor = None
        link.calling = False
        link.queue.clear()
        for tracker in link.trackers:  # libzmq lets go of the buffers within milliseconds
            with contextlib.suppress(zmq.NotDone):
                tracker.wait(1.0)
        link.trackers.clear()

    # --- who may come in

    def _answer_zap(self) -> None:
        """ZeroMQ asks for each connection: may this key come in? (RFC 27)"""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._zap.recv_multipart(NOBLOCK)
                version, number, domain, address, _, mechanism, *credentials = frames
                key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
                peer = self._roster.peer_of(key) if domain == DOMAIN and key else None
                banned = peer is not None and self._is_banned(peer)
                if peer is None and domain == DOMAIN and key and self._roster.is_guest(key):
                    self._zap.send_multipart([version, number, b"200", b"OK", key, b""])
                elif peer is None or peer == self.me or banned:
                    why = "cut off for its breaches" if banned else "its key is not on the roster"
                    self._refused_call(address.decode("ascii", "replace"), why)
                    self._zap.send_multipart([version, number, b"400", b"unknown key", b"", b""])
                else:
                    self._zap.send_multipart([version, number, b"200", b"OK", key, b""])

    def _is_banned(self, peer: PeerId) -> bool:
        link = self._links.get(peer)
        return link is not None and time.monotonic() < link.banned_s

    def _refused_call(self, address: str, why: str) -> None:
        self._strangers += 1
        if self._strangers & (self._strangers - 1) == 0:  # 1st, 2nd, 4th, 8th ...: a flood fills no log
            self._tell(
                "join_refused", site="?", reason=f"call from {address}: {why} ({self._strangers} so far)"
            )

    def _see_calls(self) -> None:
        """Calls that ended."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._calls.recv_multipart(NOBLOCK))
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    for link in self._links.values():
                        if link.routes.pop(event["value"], None) and not link.up:
                            self._went_down(link)

    def _see_call_out(self, link: Link) -> None:
        assert link.monitor is not None
        with contextlib.suppress(zmq.Again):
            while link.monitor is not None:
                event = parse_monitor_message(link.monitor.recv_multipart(NOBLOCK))
                match event["event"]:
                    case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        link.calling = True
                        self._greet(link)
                    case zmq.EVENT_DISCONNECTED if link.calling:
                        link.calling = False
                        link.queue.clear()
                        if not link.up:
                            self._went_down(link)
                    case zmq.EVENT_HANDSHAKE_FAILED_AUTH if not link.dead:
                        self._gone(link, "it refuses our key: is our entry on its roster?")

    def _went_down(self, link: Link) -> None:
        link.down_s, link.greeted, link.welcomed = time.monotonic(), False, False

    def _gone(self, link: Link, why: str) -> None:
        """Nobody waits for this peer, until it is back."""
        if not link.dead:
            link.dead = True
            self._courier.lost(link.peer, why, time.monotonic())
            self._tell("site_lost", site=link.peer, reason=why)

    def _look_around(self) -> None:
        membership = self._membership
        membership.tick(time.monotonic())
        while membership.outbox:
            peer, kind, body = membership.outbox.popleft()
            if (link := self._links.get(peer)) and link.agreed:
                self._say(link, Header(kind, self._round, epoch=self._view.epoch), body)
        if membership.changes != self._seen:
            self._seen = membership.changes
            self._view = View(tuple(membership.alive()), membership.epoch, membership.degraded())
            self._courier.epoch = self._view.epoch
            self._loop.call_soon_threadsafe(self._news.set)

    def _look_at_links(self) -> None:
        now = time.monotonic()
        for link in self._links.values():
            if link.up and not link.greeted and now >= link.hello_s + self._limits.retry_s:
                self._greet(link)
            if not link.up and not link.dead and now >= link.down_s + self._idle_s:
                self._gone(link, f"no connection for {self._idle_s:g} s")
            while link.trackers and link.trackers[0].done:
                link.trackers.popleft()

    def _look_at_roster(self) -> None:
        known = set(self._roster.peers())
        self._membership.add(sorted(known), time.monotonic())
        for gone in self._membership.members.keys() - known:
            self._membership.remove(gone)
        for link in list(self._links.values()):
            contact = self._roster.contact(link.peer)
            if contact is None or (link.contact is not None and contact.key != link.contact.key):
                self._cut(link, "its key is no longer on the roster")
            elif contact != link.contact and link.dealer is not None:  # it has moved
                self._hang_up(link)
                self._link(link.peer)
        statements = self._roster.statements()
        news = [each for each in statements if each not in self._passed_on]
        self._passed_on = frozenset(statements)
        for link in self._links.values():
            if link.agreed:
                self._introduce(link, news)

    def _cut(self, link: Link, why: str) -> None:
        self._gone(link, why)
        self._hang_up(link)
        for fd, (_, address) in list(link.routes.items()):
            _shut(fd, address)
        link.routes.clear()
        self._went_down(link)

    # --- reading

    def _read(self, source: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCH):
                if source.closed:
                    return
                frames = source.recv_multipart(NOBLOCK, copy=False)
                self._hear(source, frames)

    def _hear(self, source: zmq.Socket[bytes], frames: list[zmq.Frame]) -> None:
        """One message: whose is it, is it ours, what does it say?"""
        link = self._by_dealer.get(source) or self._caller(frames)
        if link is None:
            return
        parts = frames if source is not self._router else frames[1:]
        try:
            if not 1 <= len(parts) <= 2:
                raise WireError(f"a message of {len(parts)} frames")
            header, stamp = unpack(parts[0].buffer)
            body: Body = parts[1].buffer if len(parts) == 2 else b""
            if stamp.sender != short(link.peer):
                raise WireError("it says that it is another peer than its key's")
            self._spend(link, header)
            if header.kind in GREETINGS:
                self._greeted(link, header, stamp, body)
            elif stamp.run != self._stamp.run or stamp.schema != self._stamp.schema:
                raise WireError("it is of another run, or of another model")
            elif link.welcomed:
                self._receive(link, header, body)
        except WireError as e:
            self._breach(link, str(e))

    def _caller(self, frames: list[zmq.Frame]) -> Link | None:
        """Whose call a message of the ROUTER came over, by the key that ZAP let in."""
        try:
            key = str(frames[-1].get("User-Id")).encode()
            fd = int(frames[-1].get(zmq.SRCFD))
        except zmq.ZMQError:
            return None
        peer = self._roster.peer_of(key)
        if peer is None:
            now = time.monotonic()
            if self._roster.is_guest(key) and now >= self._guests.get(key, -math.inf) + GUEST_S:
                self._guests[key] = now
                self._invited(key, frames)
            else:  # revoked since its handshake, or a guest who says too much
                _shut(fd, _address(fd))
            return None
        link = self._link(peer)
        if self._is_banned(peer):
            return None
        if fd not in link.routes:
            link.routes[fd] = (frames[0].bytes, _address(fd))
            self._greet(link)
        return link

    def _spend(self, link: Link, header: Header) -> None:
        """Chunks are bounded by credit; everything else by a budget in time."""
        if header.kind is Kind.CHUNK:
            return
        now = time.monotonic()
        link.tokens = min(TOKENS, link.tokens + (now - link.tokens_s) * TOKENS_S) - 1
        link.tokens_s = now
        if link.tokens < 0:
            link.tokens = 0.0
            raise WireError(f"more than {TOKENS_S:g} messages a second")

    def _breach(self, link: Link, what: str) -> None:
        link.breaches += 1
        if link.breaches & (link.breaches - 1) == 0:
            self._tell("update_refused", site=link.peer, reason=f"{what} (breach {link.breaches})")
        if link.breaches >= PATIENCE:
            link.breaches, link.banned_s = 0, time.monotonic() + BAN_S
            self._cut(link, f"cut off for {BAN_S:g} s after {PATIENCE} breaches: {what}")

    def _receive(self, link: Link, header: Header, body: Body) -> None:
        now = time.monotonic()
        match header.kind:
            case Kind.PING | Kind.PONG | Kind.SUSPECT:
                self._courier.heard(link.peer, header.round, now)
                if len(body):  # otherwise it only says where it is
                    self._membership.receive(link.peer, header.kind, _text(header, body), now)
            case Kind.MEMBERS:
                self._introduced(link, _text(header, body))
            case Kind.LEAVE:
                self._gone(link, "has left")
            case _:
                self._courier.receive(link.peer, header, body, now)

    # --- greeting: both ends must train the same

    def _greet(self, link: Link) -> None:
        link.hello_s = time.monotonic()
        self._say(link, Header(Kind.HELLO, self._round), encode(self._greeting))

    def _greeted(self, link: Link, header: Header, stamp: Stamp, body: Body) -> None:
        text = _text(header, body)
        if header.kind is Kind.WELCOME:
            if not link.greeted:
                link.greeted = True
                self._agreed(link)
            return
        if header.kind is Kind.REJECT:
            refused: Refused = decode(text, Refused)
            self._gone(link, refused.reason[:200])
            return
        greeting: Greeting = decode(text, Greeting)
        try:
            if stamp.schema != self._stamp.schema:
                raise JoinRefused(f"{link.peer} and {self.me} train different models")
            if stamp.run != self._stamp.run:
                raise JoinRefused(f"{link.peer} and {self.me} are in different runs")
            self._welcome(link.peer, greeting)
        except JoinRefused as e:
            self._tell("join_refused", site=link.peer, reason=str(e))
            self._say(link, Header(Kind.REJECT), encode(Refused(reason=str(e), final=True)))
            return
        again = link.welcomed and greeting.boot == link.boot
        link.welcomed, link.boot = True, greeting.boot
        self._say(link, Header(Kind.WELCOME, self._round))
        self._courier.heard(link.peer, header.round, time.monotonic())
        if not again:
            self._greet(link)  # it may not have known us before
            self._agreed(link)

    def _agreed(self, link: Link) -> None:
        if link.agreed:
            if link.dead or not link.met:
                self._tell("site_joined", site=link.peer)
            link.dead, link.met = False, True
            self._loop.call_soon_threadsafe(self._news.set)
            now = time.monotonic()
            self._courier.found(link.peer, now)
            self._membership.add([link.peer], now)
            self._membership.heard(link.peer, now)
            self._introduce(link, self._roster.statements())
            self._look_at_roster()  # its entry may have come by a file, and others not know it

    def _introduce(self, link: Link, statements: Iterable[bytes]) -> None:
        """Pass on what was signed: whoever knows one peer, soon knows all."""
        for body in _bundles(statements):
            self._say(link, Header(Kind.MEMBERS), body)

    def _introduced(self, link: Link, text: bytes) -> None:
        known = set(self._roster.statements())
        for statement in decode(text, list[bytes]):
            if statement not in known:
                try:
                    contact = self._roster.add(statement)
                except CertificateError as e:
                    self._tell("notice", text=f"{link.peer} passed on an entry that is refused: {e}")
                    continue
                if contact is not None and contact.peer != self.me:
                    self._link(contact.peer)
        if known != set(self._roster.statements()):
            self._look_at_roster()

    def _invited(self, key: bytes, frames: list[zmq.Frame]) -> None:
        """A newcomer, who shows an invitation: its entry for all of ours, or a line that says why not."""
        answers: list[tuple[Kind, bytes]]
        try:
            if len(frames) != 3:
                raise WireError(f"a message of {len(frames) - 1} frames")
            header, stamp = unpack(frames[1].buffer)
            if header.kind is not Kind.JOIN:
                raise WireError(f"{header.kind.name} from one who has not joined")
            if (stamp.run, stamp.schema) != (self._stamp.run, self._stamp.schema):
                raise JoinRefused(f"{self.me} is in another run, or trains another model")
            contact = self._roster.admit(key, _text(header, frames[2].buffer))
        except (WireError, JoinRefused, CertificateError) as e:
            self._tell("join_refused", site="?", reason=f"by invitation: {e}")
            answers = [(Kind.REJECT, encode(Refused(reason=str(e), final=True)))]
        else:
            self._tell("notice", text=f"{contact.peer} is on the roster now, by invitation")
            self._look_at_roster()
            answers = [(Kind.MEMBERS, body) for body in _bundles(self._roster.statements())]
            answers.append((Kind.WELCOME, b""))
        for kind, body in answers:
            with contextlib.suppress(zmq.ZMQError):  # it has gone, or doesn't read: it may ask again
                self._router.send_multipart([frames[0].bytes, pack(Header(kind), self._stamp), body], NOBLOCK)

    # --- writing

    def _announce(self, round: int) -> None:
        self._round = max(round, self._round)
        for link in self._links.values():
            if link.up:
                self._say(link, Header(Kind.PING, round))

    def _say(self, link: Link, header: Header, body: Body = b"") -> None:
        if len(link.queue) >= WAITING:
            self._cut(link, "it does not read what it is sent")
        else:
            link.queue.append((pack(header, self._stamp), body))

    def _write(self) -> None:
        outbox = self._courier.outbox
        while outbox:
            peer, header, body = outbox.popleft()
            link = self._links.get(peer) or self._link(peer)
            if link.up:  # otherwise the courier says it again when the peer is found
                self._say(link, header, body)
        for link in self._links.values():
            self._drain(link)

    def _drain(self, link: Link) -> None:
        """Send what the sockets take; the rest stays, and the courier's credit bounds it."""
        while link.queue:
            header, body = link.queue[0]
            try:
                if link.calling and link.dealer is not None:
                    link.dealer.send(header, NOBLOCK | (SNDMORE if len(body) else 0))
                    if len(body) > COPIED:
                        link.trackers.append(link.dealer.send(body, NOBLOCK, copy=False, track=True))
                    elif len(body):
                        link.dealer.send(body, NOBLOCK)
                elif link.routes:
                    route = next(reversed(link.routes.values()))[0]  # its latest call
                    self._router.send_multipart(
                        [route, header, body] if len(body) else [route, header], NOBLOCK
                    )
                else:
                    link.queue.clear()
                    return
            except zmq.Again:
                return
            except zmq.ZMQError as e:
                if e.errno != zmq.EHOSTUNREACH:
                    raise
                link.routes.popitem()
                if not link.up:
                    self._went_down(link)
                continue
            link.queue.popleft()
            self.wire_out += len(header) + len(body)

    # --- handing back to the caller's side

    def _hand_back(self) -> None:
        courier = self._courier
        if courier.finished is not None and self._exchange is not None:
            done, self._exchange = self._exchange, None
            for peer in {*courier.finished.kept, *courier.finished.unsure}:
                link = self._links[peer]
                if link.trackers:  # chunks of a share that is over may lie in its socket: they go with it
                    self._hang_up(link)
                    self._link(peer)
            finished, courier.finished = courier.finished, None
            _settle(done, finished)
        if courier.letters:
            with self._lock:
                self._letters |= courier.letters
                waits, self._waits = self._waits, []
            courier.letters.clear()
            for wait in waits:
                _settle(wait, None)
        for peer in list(courier.states):
            if answer := self._pulls.pop(peer, None):
                _settle(answer, courier.states.pop(peer))

    def _share_refused(self, peer: PeerId, round: int, reason: str) -> None:
        self._tell("update_refused", site=peer, round=round + 1, reason=reason)

    def _leave(self) -> None:
        self._membership.leave()
        self._look_around()
        for link in self._links.values():
            if link.up and link.greeted:
                self._say(link, Header(Kind.LEAVE))
        self._write()
        until = time.monotonic() + 0.2  # LINGER is 0: give the last words a moment to leave
        while time.monotonic() < until and any(link.queue for link in self._links.values()):
            self._write()
            time.sleep(0.005)
        time.sleep(0.02)
        self._stopping = True

    def _give_up(self) -> None:
        """Nobody waits for a thread that is gone."""
        error = self._error or ConnectError(f"{self.me} has left")
        waiting: list[Future[Any]] = [*self._waits, *self._pulls.values()]
        if self._exchange is not None:
            waiting.append(self._exchange)
        for each in waiting:
            if each.set_running_or_notify_cancel():
                each.set_exception(error)

    def _close(self) -> None:
        for link in self._links.values():
            self._hang_up(link)
        self._router.disable_monitor()
        for each in (self._router, self._calls, self._zap):
            each.close(0)
        self._bell.close()
        self._ear.close()
        self._context.term()


GREETINGS = (Kind.HELLO, Kind.WELCOME, Kind.REJECT)
COPIED = 64 << 10  # bytes up to which copying is faster than tracking


def join(
    host: Contact, guest: Curve, stamp: Stamp, entry: bytes, add: Callable[[bytes], object], timeout_s: float
) -> None:
    """Show an invitation: tell the host our signed entry, hand what it answers to `add`. Blocks.

    JoinRefused says why we may not come in, ConnectError that nobody is there.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.maxmsgsize, dealer.immediate = 0, FRAME_BYTES, True
        dealer.curve_serverkey = host.key
        dealer.curve_publickey, dealer.curve_secretkey = guest.public, guest.secret
        monitor = dealer.get_monitor_socket()
        poller = zmq.Poller()
        for each in (dealer, monitor):
            poller.register(each, zmq.POLLIN)
        dealer.connect(f"tcp://{host.address}")
        question, until, asked_s = pack(Header(Kind.JOIN), stamp), time.monotonic() + timeout_s, -math.inf
        while (now := time.monotonic()) < until:
            if now >= asked_s + Limits().retry_s:
                with contextlib.suppress(zmq.Again):  # not connected yet
                    dealer.send_multipart([question, entry], NOBLOCK)
                    asked_s = now
            ready = dict(poller.poll(100))
            if monitor in ready:
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise JoinRefused(
                        f"{host.peer} at {host.address} made no such invitation. Ask for one: "
                        f"fedtrain invite NAME --by {host.peer}"
                    )
            if dealer in ready and _answered(dealer.recv_multipart(), host, add):
                return
        raise ConnectError(
            f"{host.peer} does not answer at {host.address} within {timeout_s:g} s: is its "
            f"`fedtrain peer {host.peer}` running, and its port open?"
        )
    finally:
        context.destroy(0)


def _answered(frames: list[bytes], host: Contact, add: Callable[[bytes], object]) -> bool:
    """What the host says to a guest; whether that was all."""
    header, _ = unpack(frames[0])
    body = frames[1] if len(frames) == 2 else b""
    if header.kind is Kind.REJECT:
        refused: Refused = decode(body, Refused)
        raise JoinRefused(f"{host.peer} at {host.address} refuses: {refused.reason[:200]}")
    if header.kind is Kind.MEMBERS:
        for statement in decode(body, list[bytes]):
            add(statement)
    return header.kind is Kind.WELCOME


def _bundles(statements: Iterable[bytes]) -> Iterator[bytes]:
    """Bodies of MEMBERS, each short enough to be read."""
    bundle: list[bytes] = []
    for statement in statements:
        if bundle and sum(map(len, bundle)) + len(statement) > TEXT_BYTES - 1024:
            yield msgspec.msgpack.encode(bundle)
            bundle = []
        bundle.append(statement)
    if bundle:
        yield msgspec.msgpack.encode(bundle)


def curve_speed(total: int = 16 << 20) -> float:
    """Bytes for a second of CPU that CURVE takes from one socket to another, in this process; 0.0 when
    nothing arrives. CPU, so that a machine which is busy is not taken for one that is slow."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    giver, taker = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        giver.linger, taker.rcvtimeo = 0, 5000
        mine, theirs = Curve.new(), Curve.new()
        taker.curve_server, taker.curve_publickey, taker.curve_secretkey = True, theirs.public, theirs.secret
        giver.curve_serverkey = theirs.public
        giver.curve_publickey, giver.curve_secretkey = mine.public, mine.secret
        giver.connect(f"tcp://127.0.0.1:{taker.bind_to_random_port('tcp://127.0.0.1')}")
        chunk = bytes(CHUNK_BYTES)
        giver.send(b"")
        taker.recv()  # the handshake is done
        began = time.process_time()
        for _ in range(total // CHUNK_BYTES):
            giver.send(chunk)
        for _ in range(total // CHUNK_BYTES):
            taker.recv(copy=False)
        return total / max(time.process_time() - began, 1e-9)
    except zmq.Again:
        return 0.0
    finally:
        context.destroy(0)


def _text(header: Header, body: Body) -> bytes:
    if len(body) > TEXT_BYTES:
        raise WireError(f"a {header.kind.name} of {len(body)} bytes, at most {TEXT_BYTES} are read")
    return bytes(body)


def _address(fd: int) -> Any:
    """Who is at the other end of a connection of libzmq's; None when it has ended."""
    try:
        with socket.socket(fileno=os.dup(fd)) as s:
            return s.getpeername()
    except OSError:
        return None


def _shut(fd: int, address: Any) -> None:
    """Cut a connection of libzmq's, if it is still the one that was meant: its number may be taken anew."""
    try:
        with socket.socket(fileno=os.dup(fd)) as s:
            if s.getpeername() == address:
                s.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _settle(future: Future[Any], result: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)
