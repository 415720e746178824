"""The graph seam over ZeroMQ: one background thread that owns every socket, beside the caller's event loop.

What is said is the courier's (courier.py), who is alive is SWIM's (membership.py), both without I/O; sockets
are links.py's, and who may speak is admission.py's. Here these meet a thread and a clock: greetings, what a
peer may not do, and the hand-over of results.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import zmq

from ..errors import CertificateError, ConnectError, JoinRefused, WireError
from ..events import Emit, Event, Notice, SiteJoined, SiteLost, SiteRefused, UpdateRefused, silent
from ..exchange import Exchanged, Mixer, PeerId, ReceivedShare, Share
from ..malloc import keep_freed
from ..wire.codec import decode, encode
from ..wire.frames import Refused
from ..wire.gossip import Greeting, Header, Kind, Stamp, text_of, unpack
from .admission import Curve, Roster, bundles
from .courier import Courier
from .links import Link, Links
from .membership import Membership
from .shares import Body, Limits, Parts

WAITING = 1000  # messages that wait here for one peer: credit keeps an honest one far below
TOKENS = 4000.0  # control messages that a peer may send at once,
TOKENS_S = 3000.0  # and in a second for long
PATIENCE = 20  # breaches of the protocol before a peer is cut off,
BAN_S = 60.0  # and for how long
AGAIN_S = 3.0  # before a peer is called again that refused our key
POLL_S = 0.25  # at most, between looks at what time brings
CHUNKED = (Kind.OFFER, Kind.CHUNK)
GREETINGS = (Kind.HELLO, Kind.WELCOME, Kind.REJECT)

T = TypeVar("T")


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
        emit: Emit = silent,
    ) -> None:
        """`welcome` raises JoinRefused when a peer does not fit. `listen` None: call others, take no calls.
        A peer without a connection for `idle_s` is not waited for any more."""
        self.me, self._curve, self._roster, self._listen = me, curve, roster, listen
        self._welcome, self._emit = welcome, emit
        self._limits = limits or Limits()
        self._heartbeat_s, self._idle_s, self._io_threads = float(heartbeat_s), float(idle_s), io_threads
        self._stamp = Stamp.of(run, greeting.schema_digest, me)
        self._greeting = msgspec.structs.replace(greeting, boot=secrets.token_bytes(8))
        self._courier = Courier(
            self._limits, first_transfer=secrets.randbits(31), refused=self._share_refused
        )
        self._membership = Membership(
            me, now=time.monotonic(), draw=random.Random(secrets.randbits(64)), period_s=self._heartbeat_s,
            suspicion_s=self._idle_s,
        )  # fmt: skip
        self._commands: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()  # over _posted, which both threads touch
        self._posted: dict[PeerId, ReceivedShare] = {}
        self._exchange: asyncio.Future[Exchanged] | None = None
        self._pulls: dict[PeerId, asyncio.Future[ReceivedShare | None]] = {}
        self._passed_on: frozenset[bytes] = frozenset()  # statements that all connected peers were sent
        self._round = 0
        self._view = View((me,), self._membership.epoch, False)
        self._seen = 0  # changes of the membership that the view has
        self._look_s = -math.inf  # when to look next at what time brings
        self._stopping = self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"gossip {me}", daemon=True)
        self.port = 0

    # --- the caller's side, on an event loop

    def start(self) -> None:
        """Bind and begin; ConnectError when the port is in use. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        keep_freed()  # libzmq makes a buffer for each message that it encrypts or decrypts
        self._links = Links(
            self.me, self._curve, self._roster, self._stamp, heartbeat_s=self._heartbeat_s,
            io_threads=self._io_threads, opened=self._greet, refused=self._refused,
            joined=self._look_at_roster, rung=self._obey, tell=self._tell,
        )  # fmt: skip
        if self._listen is not None:
            try:
                self.port = self._links.listen(self._listen)
            except ConnectError:
                self._links.close()
                raise
        self._thread.start()

    async def stop(self) -> None:
        """Say good-bye and close."""
        if not self._closed:
            self._do(self._leave)
        await asyncio.to_thread(self._thread.join, 10)

    @property
    def bytes_in(self) -> int:
        return self._courier.receiver.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._courier.sender.bytes_out

    def connected(self) -> list[PeerId]:
        """The peers with whom we agree and are connected, sorted."""
        return sorted(link.peer for link in self._links if link.agreed)

    def trouble(self, peer: PeerId) -> str:
        """Why there is no connection with this peer, and where it was called."""
        link = self._links.get(peer)
        if link is None or link.contact is None or link.contact.address is None:
            return f"{peer} has to call us"
        return f"{peer} ({link.contact.address}: {link.trouble or 'no answer yet'})"

    def view(self) -> View:
        """Who is there, as SWIM sees it; the same for all peers, but for the moments in which it changes."""
        return self._view

    def connect(self, peers: Iterable[PeerId]) -> None:
        """Call these peers now, rather than when there is first something to say."""
        for peer in peers:
            self._do(functools.partial(self._links.to, peer))

    def announce(self, round: int) -> None:
        self._do(lambda: self._announce(round))

    def progress(self) -> dict[PeerId, int]:
        return self._courier.progress

    def reached(self) -> dict[PeerId, int]:
        """The round that each peer announced last, those who have left too."""
        return self._courier.reached

    async def exchange(
        self,
        round: int,
        shares: Mapping[PeerId, Share],
        expected: Sequence[PeerId],
        mixer: Mixer,
        deadline_s: float,
    ) -> Exchanged:
        done: asyncio.Future[Exchanged] = self._loop.create_future()

        def begin() -> None:
            self._exchange, self._round = done, max(round, self._round)
            for peer in {*shares, *expected}:
                self._links.to(peer)
            self._courier.begin(round, shares, expected, mixer, deadline_s, time.monotonic())

        self._do(begin)
        try:
            return await done
        except asyncio.CancelledError:
            self._do(lambda: self._courier.abandon(time.monotonic()))
            raise

    def post(self, round: int, shares: Mapping[PeerId, Share]) -> None:
        def post() -> None:
            for peer in shares:
                self._links.to(peer)
            self._courier.post(round, shares, time.monotonic())

        self._do(post)

    def take(self) -> list[ReceivedShare]:
        with self._lock:
            posted, self._posted = self._posted, {}
        return [posted[peer] for peer in sorted(posted)]

    def publish(self, round: int, share: Share) -> None:
        self._do(lambda: self._courier.publish(round, share))

    async def pull(self, peer: PeerId, timeout_s: float) -> ReceivedShare | None:
        answer: asyncio.Future[ReceivedShare | None] = self._loop.create_future()

        def ask() -> None:
            self._pulls[peer] = answer
            self._links.to(peer)
            self._courier.pull(peer, time.monotonic())

        def forget() -> None:
            if self._pulls.pop(peer, None):
                self._courier.receiver.forget_pull(peer)

        self._do(ask)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._do(forget)

    def revoked(self) -> None:
        """The roster has changed: cut off at once those who are no longer on it, or have another key."""
        self._do(self._look_at_roster)

    def _tell(self, event: Event) -> None:
        """To the log, which belongs to the caller's side."""
        self._on_loop(self._emit, event)

    def _do(self, what: Callable[[], object]) -> None:
        """Have it done by the thread."""
        if self._closed:
            raise ConnectError(f"{self.me} is not connected any more: {self._error or 'it has left'}")
        self._commands.append(what)
        self._links.ring()

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
            self._links.close()

    def _turn(self) -> None:
        """Wait, hear what came, do what is due, say what follows, hand back what is over."""
        for link, message in self._links.receive(max(self._look_s - time.monotonic(), 0.0)):
            self._hear(link, message)
        if (now := time.monotonic()) >= self._look_s:
            self._courier.tick(now)
            self._membership.tick(now)
            self._look_at_links(now)
            self._look_s = min(self._courier.wake_s(), self._membership.wake_s(), now + POLL_S)
        self._look_around()
        self._write()
        self._hand_back()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._look_s = -math.inf  # they may have brought deadlines

    def _gone(self, link: Link, why: str) -> None:
        """Nobody waits for this peer, until it is back."""
        if not link.dead:
            link.dead = True
            self._courier.lost(link.peer, why, time.monotonic())
            self._tell(SiteLost(site=link.peer, reason=why))

    def _look_around(self) -> None:
        membership = self._membership
        while membership.outbox:
            peer, kind, body = membership.outbox.popleft()
            if (link := self._links.get(peer)) and link.agreed:
                self._say(link, Header(kind, self._round, epoch=self._view.epoch), body)
        if membership.changes != self._seen:
            self._seen = membership.changes
            self._view = View(tuple(membership.alive()), membership.epoch, membership.degraded())
            self._courier.state.epoch = self._view.epoch

    def _look_at_links(self, now: float) -> None:
        for link in self._links:
            unanswered = link.up and not link.greeted and not link.rejected
            if unanswered and now >= link.hello_s + self._limits.retry_s:
                self._greet(link)
            if not link.up and not link.dead and now >= link.down_s + self._idle_s:
                self._gone(link, f"no connection for {self._idle_s:g} s")
            if now >= link.again_s:
                link.again_s = math.inf
                self._links.hang_up(link)
                self._links.to(link.peer)

    def _look_at_roster(self) -> None:
        known = set(self._roster.peers())
        self._membership.add(sorted(known), time.monotonic())
        for gone in self._membership.members.keys() - known:
            self._membership.remove(gone)
        for link in self._links:
            contact = self._roster.contact(link.peer)
            if contact is None or (link.contact is not None and contact.key != link.contact.key):
                self._cut(link, "its key is no longer on the roster")
            elif contact != link.contact and link.dealer is not None:  # it has moved
                self._links.hang_up(link)
                self._links.to(link.peer)
        statements = self._roster.statements()
        news = [each for each in statements if each not in self._passed_on]
        self._passed_on = frozenset(statements)
        for link in self._links:
            if link.agreed:
                self._introduce(link, news)

    def _refused(self, link: Link) -> None:
        """Our entry may come to its roster later; by itself libzmq calls nobody again that refused a key."""
        link.again_s = time.monotonic() + AGAIN_S
        self._gone(
            link, f"it refuses our key: is our entry on its roster, and no other process {self.me} by now?"
        )

    def _cut(self, link: Link, why: str) -> None:
        self._gone(link, why)
        self._links.cut(link)

    # --- reading

    def _hear(self, link: Link, message: list[zmq.Frame]) -> None:
        """One message: is it ours, what does it say?"""
        try:
            if not message:
                raise WireError("a message of no frames")
            header, stamp = unpack(message[0].buffer)
            parts = [frame.buffer for frame in message[1:]]
            if len(parts) > 1 and header.kind not in CHUNKED:
                raise WireError(f"a {header.kind.name} of {len(message)} frames")
            if stamp.sender != link.stamp.sender:
                raise WireError("it says that it is another peer than its key's")
            if header.kind is not Kind.CHUNK:  # these are bounded by credit
                self._spend(link)
            if header.kind in GREETINGS:
                self._greeted(link, header, stamp, parts[0] if parts else b"")
            elif stamp != link.stamp:
                raise WireError("it is of another run, or of another model")
            elif link.welcomed:
                self._receive(link, header, parts)
        except WireError as e:
            self._breach(link, str(e))

    def _spend(self, link: Link) -> None:
        now = time.monotonic()
        link.tokens = min(TOKENS, link.tokens + (now - link.tokens_s) * TOKENS_S) - 1
        link.tokens_s = now
        if link.tokens < 0:
            link.tokens = 0.0
            raise WireError(f"more than {TOKENS_S:g} messages a second")

    def _breach(self, link: Link, what: str) -> None:
        link.breaches += 1
        if link.breaches & (link.breaches - 1) == 0:
            self._tell(UpdateRefused(site=link.peer, reason=f"{what} (breach {link.breaches})"))
        if link.breaches >= PATIENCE:
            link.breaches, link.banned_s = 0, time.monotonic() + BAN_S
            self._cut(link, f"cut off for {BAN_S:g} s after {PATIENCE} breaches: {what}")

    def _receive(self, link: Link, header: Header, parts: Parts) -> None:
        now, body = time.monotonic(), parts[0] if parts else b""
        match header.kind:
            case Kind.PING | Kind.PONG | Kind.SUSPECT:
                self._courier.announced(link.peer, header.round, now)
                if len(body):  # otherwise it only says where it is
                    self._membership.receive(link.peer, header.kind, text_of(header, body), now)
            case Kind.MEMBERS:
                self._introduced(link, text_of(header, body))
            case Kind.LEAVE:
                self._gone(link, "has left")
            case _:
                self._courier.receive(link.peer, header, parts, now)

    # --- greeting: both ends must train the same

    def _greet(self, link: Link) -> None:
        link.hello_s = time.monotonic()
        self._say(link, Header(Kind.HELLO, self._round), encode(self._greeting))

    def _greeted(self, link: Link, header: Header, stamp: Stamp, body: Body) -> None:
        text = text_of(header, body)
        if header.kind is Kind.WELCOME:
            if not link.greeted:
                link.greeted = True
                self._agreed(link)
            return
        if header.kind is Kind.REJECT:
            refused: Refused = decode(text, Refused)
            link.rejected = True
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
            if link.refused != str(e):
                link.refused = str(e)
                self._tell(SiteRefused(site=link.peer, reason=str(e)))
            self._say(link, Header(Kind.REJECT), encode(Refused(reason=str(e), final=True)))
            return
        again = link.welcomed and greeting.boot == link.boot
        link.welcomed, link.boot = True, greeting.boot
        self._say(link, Header(Kind.WELCOME, self._round))
        self._courier.announced(link.peer, header.round, time.monotonic())
        if not again:
            self._greet(link)  # it may not have known us before
            self._agreed(link)

    def _agreed(self, link: Link) -> None:
        if link.agreed:
            if link.dead or not link.met:
                self._tell(SiteJoined(site=link.peer))
            link.dead, link.met = False, True
            now = time.monotonic()
            self._courier.found(link.peer, now)
            self._membership.add([link.peer], now)
            self._membership.heard(link.peer, now)
            self._introduce(link, self._roster.statements())
            self._look_at_roster()  # its entry may have come by a file, and others not know it

    def _introduce(self, link: Link, statements: Iterable[bytes]) -> None:
        """Pass on what was signed: whoever knows one peer, soon knows all."""
        for body in bundles(statements):
            self._say(link, Header(Kind.MEMBERS), body)

    def _introduced(self, link: Link, text: bytes) -> None:
        known = set(self._roster.statements())
        for statement in decode(text, list[bytes]):
            if statement not in known:
                try:
                    contact = self._roster.add(statement)
                except CertificateError as e:
                    self._tell(Notice(text=f"{link.peer} passed on an entry that is refused: {e}"))
                    continue
                if contact is not None and contact.peer != self.me:
                    self._links.to(contact.peer)
        if known != set(self._roster.statements()):
            self._look_at_roster()

    # --- writing

    def _announce(self, round: int) -> None:
        self._round = max(round, self._round)
        for link in self._links:
            if link.up:
                self._say(link, Header(Kind.PING, round))

    def _say(self, link: Link, header: Header, *parts: Body) -> None:
        if len(link.queue) >= WAITING:
            self._cut(link, "it does not read what it is sent")
        else:
            self._links.say(link, header, parts)

    def _write(self) -> None:
        outbox = self._courier.outbox
        while outbox:
            peer, header, parts = outbox.popleft()
            link = self._links.get(peer) or self._links.to(peer)
            if link.up:  # otherwise the courier says it again when the peer is found
                self._say(link, header, *parts)
        self._links.send()

    # --- handing back to the caller's side

    def _hand_back(self) -> None:
        courier = self._courier
        if courier.finished is not None and self._exchange is not None:
            done, self._exchange = self._exchange, None
            for peer in {*courier.finished.kept, *courier.finished.unsure}:
                link = self._links.to(peer)
                if link.lends():  # chunks of a share that is over lie in its socket: they go with it
                    self._links.hang_up(link)
                    self._links.to(peer)
            finished, courier.finished = courier.finished, None
            self._on_loop(_settle, done, finished)
        if courier.receiver.posted:
            with self._lock:
                self._posted |= courier.receiver.take_posted()
        states = courier.receiver.states
        for peer in list(states):
            if answer := self._pulls.pop(peer, None):
                self._on_loop(_settle, answer, states.pop(peer))

    def _share_refused(self, peer: PeerId, round: int, reason: str) -> None:
        self._tell(UpdateRefused(site=peer, round=round + 1, reason=reason))

    def _leave(self) -> None:
        self._membership.leave()
        self._look_around()
        for link in self._links:
            if link.up and link.greeted:
                self._say(link, Header(Kind.LEAVE))
        self._write()
        until = time.monotonic() + 0.2  # LINGER is 0: give the last words a moment to leave
        while time.monotonic() < until and any(link.queue for link in self._links):
            self._write()
            time.sleep(0.005)
        time.sleep(0.02)
        self._stopping = True

    def _give_up(self) -> None:
        """Nobody waits for a thread that is gone."""
        error = self._error or ConnectError(f"{self.me} has left")
        waiting: list[asyncio.Future[Any]] = [*self._pulls.values()]
        if self._exchange is not None:
            waiting.append(self._exchange)
        for each in waiting:
            self._on_loop(_fail, each, error)

    def _on_loop(self, what: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(what, *args)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
