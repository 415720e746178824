"""The thread that owns every socket of a peer, and what is said over them.

courier.py decides how shares travel, membership.py who is alive, admission.py who may speak; sockets are in
links.py. Here they meet a clock: greetings, the limits of what a peer may send, and what ZmqNeighbors awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from ..errors import ConnectError, JoinRefused, WireError
from ..events import Emit, Event, Notice, SiteJoined, SiteLost, SiteRefused, UpdateRefused
from ..exchange import Exchanged, Mixer, PeerId, ReceivedShare, Share
from ..wire.codec import decode, encode
from ..wire.frames import AuditHead, Refused
from ..wire.gossip import Greeting, Header, Kind, Stamp, text_of, unpack
from .admission import Introductions, LocalPeer
from .courier import Courier
from .link import Link, LinkSettings
from .links import Links
from .membership import Liveness, Membership, Voice
from .promises import Promises
from .shares import Body, Parts

WAITING = 1000  # messages that wait here for one peer: credit keeps an honest one far below
PATIENCE = 20  # breaches of the protocol after which a peer is cut off
BAN_S = 60.0  # how long a peer stays cut off for its breaches
RECALL_S = 3.0  # before a peer is called again that refused our key
LEAVE_S = 1.0  # the longest time that other peers have to read a LEAVE
POLL_S = 0.25  # the longest time between two ticks of the clock
CHUNKED = (Kind.OFFER, Kind.CHUNK)
GREETINGS = (Kind.HELLO, Kind.WELCOME, Kind.REJECT)

Welcome = Callable[[PeerId, Greeting], None]


class PeerThread:
    """One peer's end of all connections. `submit` may be called from any thread, and the attributes read."""

    def __init__(
        self, local: LocalPeer, settings: LinkSettings, greeting: Greeting, welcome: Welcome, emit: Emit
    ):
        """Call it on the loop that calls `emit`. `welcome` raises JoinRefused when a peer does not fit."""
        self._local, self._settings, self._welcome, self._emit = local, settings, welcome, emit
        self.promises = Promises()
        self._greeting = msgspec.structs.replace(greeting, boot=secrets.token_bytes(8))
        self.courier = Courier(
            settings.limits, first_transfer=secrets.randbits(31),
            refused=lambda peer, round, why: self.emit(UpdateRefused(site=peer, round=round + 1, reason=why)),
        )  # fmt: skip
        voice = Voice(local.sign, local.roster.proves, local.stamp.run, time.time_ns() // 1_000_000)
        self.owes = self.courier.sender.owes
        self.courier.state.reachable = lambda peer: bool((link := self.links.get(peer)) and link.agreed)
        self.membership = Membership(
            local.name, voice, now=time.monotonic(), draw=random.Random(secrets.randbits(64)),
            period_s=settings.heartbeat_s, suspicion_s=settings.idle_s,
        )  # fmt: skip
        self._commands: deque[Callable[[], object]] = deque()
        self.heard: Callable[[Mapping[tuple[PeerId, Kind], ReceivedShare]], None] = lambda posted: None
        self.lost: Callable[[PeerId], None] = lambda peer: None  # both are called on the loop
        self._exchange: asyncio.Future[Exchanged] | None = None  # who waits for the end of the exchange
        self._pulls: dict[PeerId, asyncio.Future[ReceivedShare | None]] = {}  # who waits for a peer's state
        self._introductions = Introductions(local.roster)
        self.view = self.membership.view()
        self.ends: dict[PeerId, int] = {}  # as in ZmqNeighbors
        self._round = self._seen = 0  # the latter: changes of the membership that the view has
        self.witness: Callable[[PeerId, AuditHead], object] = lambda peer, head: None  # on the loop
        self._tick_s = -math.inf  # when the clock is to tick next
        self._stopping = self._closed = False
        self._left_s = math.inf  # when this peer is gone at the latest, once it has said LEAVE
        self._unanswered: set[Link] = set()  # with those who have yet to answer it
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"gossip {local.name}", daemon=True)
        self.links = Links(local, settings, self)

    def start(self, listen: str | None) -> int:
        """Bind host:port, where this peer is called, if it is; the port. ConnectError when it is in use."""
        try:
            port = self.links.listen(listen) if listen is not None else 0
        except ConnectError:
            self.links.close()
            raise
        self.membership.add(self._local.roster.peers(), time.monotonic())
        self._thread.start()
        return port

    def stop(self) -> None:
        """Say good-bye and close. Blocks."""
        with contextlib.suppress(ConnectError):  # it is closed
            self.submit(self._leave)
        self._thread.join(10)

    def submit(self, command: Callable[[], object]) -> None:
        """Have the thread do something."""
        if self._closed:
            why = self._error or "it has left"
            raise ConnectError(f"{self._local.name} is not connected any more: {why}")
        self._commands.append(command)
        self.links.wake()

    # --- what the caller's side submits

    def begin(
        self, done: asyncio.Future[Exchanged], round: int, shares: Mapping[PeerId, Share],
        expected: Sequence[PeerId], mixer: Mixer, deadline_s: float,
    ) -> None:  # fmt: skip
        self._exchange, self._round = done, max(round, self._round)
        if not {*shares, *expected} <= self.near:
            self.keep({*shares, *expected})
        self.courier.begin(round, shares, expected, mixer, deadline_s, time.monotonic())

    def keep(self, peers: Iterable[PeerId] | None = None) -> None:
        """Be connected with the circle and with these; None: with those that were so before."""
        before = self.near
        self.membership.keep(peers)
        for link in map(self.links.to, self.near):
            if link.peer not in before and not link.up:
                link.down_s = time.monotonic()

    @property
    def near(self) -> frozenset[PeerId]:  # whom this peer is to be connected with
        return self.membership.near

    def post(self, round: int, shares: Mapping[PeerId, Share], answers: bool) -> None:
        for gone in self.courier.post(round, shares, answers, time.monotonic()):
            self.promises.call(self.lost, gone)

    def pull(self, peer: PeerId, answer: asyncio.Future[ReceivedShare | None]) -> None:
        self._pulls[peer] = answer
        self.courier.pull(peer, time.monotonic())

    def forget_pull(self, peer: PeerId) -> None:
        if self._pulls.pop(peer, None):
            self.courier.receiver.forget_pull(peer)

    def announce(self, round: int) -> None:
        self._round = max(round, self._round)
        self.courier.announces(time.monotonic())
        for link in [each for each in self.links if each.up]:
            self._say(link, self.courier.heading(Kind.PING, link.peer, round))

    # --- the thread

    def _work(self) -> None:
        try:
            while not self._has_left():
                self._turn()
        except Exception as e:  # whatever it is, those who wait must get it
            self._error = e
        finally:
            self._closed = True
            self.promises.fail(self._error or ConnectError(f"{self._local.name} has left"))
            self.links.close()

    def _has_left(self) -> bool:
        """Once this peer is to stop, it says LEAVE of this start of its process to all that are connected. It
        has left when each has answered: a DEALER drops what is unread when its connection ends."""
        if not self._stopping:
            return False
        if self._left_s == math.inf:
            self._left_s = time.monotonic() + LEAVE_S
            self._unanswered = {link for link in self.links if link.up and link.greeted}
            for link in self._unanswered:
                self.links.say(link, Header(Kind.LEAVE), (self._greeting.boot,))
            self.links.send()
        self._unanswered = {link for link in self._unanswered if link.up}
        return not self._unanswered or time.monotonic() >= self._left_s

    def _turn(self) -> None:
        """Wait, receive what came, do what is due, send what follows, deliver what is over."""
        for link, message in self.links.receive(max(self._tick_s - time.monotonic(), 0.0)):
            self._dispatch(link, [frame.buffer for frame in message])
        if (now := time.monotonic()) >= self._tick_s:
            self.courier.tick(now)
            self.membership.tick(now)
            self._check_links(now)
            self._tick_s = min(self.courier.wake_s(), self.membership.wake_s(), now + POLL_S)
        self._refresh_view()
        self._write()
        self._deliver_results()

    def woken(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._tick_s = -math.inf  # they may have brought deadlines

    def _gone(self, link: Link, why: str) -> None:
        """Nobody waits for this peer, until it is back."""
        if not link.dead and not self._stopping:
            link.dead = True
            self.courier.lost(link.peer, why, time.monotonic())
            self.promises.call(self.lost, link.peer)
            self.emit(SiteLost(site=link.peer, reason=why))

    def _refresh_view(self) -> None:
        membership = self.membership
        while membership.outbox:
            peer, kind, body = membership.outbox.popleft()
            if (link := self.links.get(peer)) and link.agreed:
                self._say(link, self.courier.heading(kind, peer, self._round), body)
            elif not self._stopping:  # one that is doubted, or is to help: `met` says it then
                self.links.to(peer)
        while membership.reports:
            peer, what = membership.reports.popleft()
            self.emit(UpdateRefused(site=peer, reason=what))
        if membership.changes != self._seen:
            self._seen, before = membership.changes, self.view.alive
            self.view, self.ends = membership.view(), membership.ends()
            self.courier.state.epoch = self.view.epoch
            for peer in sorted({*before} ^ {*self.view.alive}):
                self._came_or_went(peer)

    def _came_or_went(self, peer: PeerId) -> None:
        """The view has changed its mind on this peer. The last share of one that has left may still come."""
        if (member := self.membership.members.get(peer)) is None:
            return
        link = self.links.link(peer)
        if member.status <= Liveness.SUSPECT:
            if link.agreed:
                self._found(link)
            elif link.dead:  # it is waited for again, as for any that is called
                link.dead, link.down_s = False, time.monotonic()
                self.courier.found(peer, link.down_s)
        elif not (link.up and member.status is Liveness.LEFT):
            self._gone(link, "has left" if member.status is Liveness.LEFT else "answers nobody's pings")

    def _check_links(self, now: float) -> None:
        known = self.membership.members.keys()
        away, others = known - self.near, known - self.membership.circle
        spare = [link for link in self.links if link.peer in away]
        self.links.close_spare(spare, now - self._settings.idle_s)
        self.links.end_parting(now)
        for link in self.links:
            unanswered = link.up and not link.agreed and not link.rejected and not link.refused
            if unanswered and now >= link.hello_s + self._settings.limits.retry_s:
                self.greet(link)
            # whether others are here is SWIM's to say: they may be behind, and take no call of ours yet
            missed = not link.up and not link.dead and link.peer not in others
            if missed and now >= link.down_s + self._settings.idle_s:
                self._gone(link, f"no connection for {self._settings.idle_s:g} s")
            if now >= link.recall_s:
                self.links.call(link)

    def refresh_roster(self) -> None:
        known = set(self._local.roster.peers())
        self.membership.add(sorted(known), time.monotonic())
        for gone in self.membership.members.keys() - known:
            self.membership.remove(gone)
        news = list(self._introductions.news())
        for link in self.links:
            contact = self._local.roster.contact(link.peer)
            if contact is None or (link.contact is not None and contact.key != link.contact.key):
                self._cut(link, "its key is no longer on the roster", news)  # a revocation, say
            elif contact != link.contact and (link.dealer is not None or link.peer in self.near):  # it moved
                self.links.call(link)
        for link in [each for each in self.links if each.agreed]:
            for body in news:
                self._say(link, Header(Kind.MEMBERS), body)

    def key_refused(self, link: Link) -> None:
        """Our entry may come to its roster later; by itself libzmq calls no peer again that refused a key."""
        link.denials += 1
        link.recall_s = time.monotonic() + RECALL_S * (link.denials > 1)
        if link.denials > 1:  # once may be a handshake that was damaged on its way
            why = f"it refuses our key: is our entry on its roster, and no other process {self._local.name}"
            self._gone(link, f"{why} by now?")

    def _cut(self, link: Link, why: str, last_words: Sequence[bytes] = ()) -> None:
        self._gone(link, why)
        self.links.cut(link, last_words)

    # --- reading

    def _dispatch(self, link: Link, message: Parts) -> None:
        """One message: is it ours, what does it say?"""
        try:
            if not message:
                raise WireError("a message of no frames")
            header, stamp = unpack(bytes(message[0]))
            parts = message[1:]
            if self._left_s < math.inf and header.kind not in (Kind.LEAVE, Kind.LEFT):
                return
            if len(parts) > 1 and header.kind not in CHUNKED:
                raise WireError(f"a {header.kind.name} of {len(message)} frames")
            if stamp.sender != link.stamp.sender:
                raise WireError("it says that it is another peer than its key's")
            if header.kind is not Kind.CHUNK:  # these are bounded by credit
                link.spend(time.monotonic())
            if header.kind in GREETINGS:
                self._greeted(link, header, stamp, parts[0] if parts else b"")
            elif stamp != link.stamp:
                raise WireError("it is of another run, or of another model")
            elif link.welcomed or header.kind is Kind.MEMBERS:  # these are signed
                self._receive(link, header, parts)
        except WireError as e:
            self._breach(link, str(e))

    def _breach(self, link: Link, what: str) -> None:
        link.breaches += 1
        if link.breaches & (link.breaches - 1) == 0:
            self.emit(UpdateRefused(site=link.peer, reason=f"{what} (breach {link.breaches})"))
        if link.breaches >= PATIENCE:
            link.breaches, link.banned_s = 0, time.monotonic() + BAN_S
            self._cut(link, f"cut off for {BAN_S:g} s after {PATIENCE} breaches: {what}")

    def _receive(self, link: Link, header: Header, parts: Parts) -> None:
        now, body = time.monotonic(), parts[0] if parts else b""
        self.membership.heard(link.peer, now)
        match header.kind:
            case Kind.PING | Kind.PONG | Kind.SUSPECT:
                self.courier.heard(link.peer, header, now)
                if len(body):  # otherwise it only says where it is
                    self.membership.receive(link.peer, header.kind, text_of(header, body), now)
            case Kind.MEMBERS:
                self._introduced(link, text_of(header, body))
            case Kind.HEAD:
                self.promises.call(self.witness, link.peer, decode(text_of(header, body), AuditHead))
            case Kind.LEAVE | Kind.LEFT:
                self._unanswered.discard(link)
                if header.kind is Kind.LEAVE and bytes(body) == link.boot:  # else of another of that name
                    self._say(link, Header(Kind.LEFT))
                    self._gone(link, "has left")
            case _:
                self.courier.receive(link.peer, header, parts, now)

    # --- greeting: both ends must train the same

    def greet(self, link: Link) -> None:
        link.hello_s = time.monotonic()
        if not self._stopping:
            known, lacks = self._introductions.digest, not link.welcomed
            greeting = msgspec.structs.replace(self._greeting, known=known, lacks=lacks)
            self._say(link, self.courier.heading(Kind.HELLO, link.peer, self._round), encode(greeting))

    def _greeted(self, link: Link, header: Header, stamp: Stamp, body: Body) -> None:
        text = text_of(header, body)
        if header.kind is Kind.WELCOME:
            if not link.greeted:
                link.greeted = True
                self._agreed(link)
            return
        if header.kind is Kind.REJECT:
            refused: Refused = decode(text, Refused)
            link.rejected = refused.reason[:200] or "it refuses us"
            self._gone(link, link.rejected)
            return
        greeting: Greeting = decode(text, Greeting)
        try:
            self._local.check(link.peer, stamp, greeting.run, self._greeting.run)
            self._welcome(link.peer, greeting)
        except JoinRefused as e:
            if link.refused != str(e):
                link.refused = str(e)
                self.emit(SiteRefused(site=link.peer, reason=str(e)))
            self._say(link, Header(Kind.REJECT), encode(Refused(reason=str(e), final=True)))
            return
        again = link.welcomed and greeting.boot == link.boot
        if link.welcomed and not again:  # two processes of that name, or one's successor
            if greeting.mask_number < link.number:
                why = f"another process is {link.peer} now, and the one that was started last counts"
                said = (Kind.REJECT, encode(Refused(reason=why, final=True)))
                self.links.refuse(link, [said, *((Kind.MEMBERS, each) for each in self._introductions.all())])
                return
            self.links.keep_last(link)
        link.welcomed, link.boot, link.known = True, greeting.boot, greeting.known
        link.number = greeting.mask_number
        self._say(link, Header(Kind.WELCOME, self._round))
        self.courier.heard(link.peer, header, time.monotonic())
        if greeting.lacks or not again:
            self.greet(link)  # it may not have known us before, or count an earlier connection as gone
        if not again or self.membership.unheard(link.peer):  # what was said then may be lost with the call
            self._agreed(link)

    def _agreed(self, link: Link) -> None:
        if link.agreed:
            self._found(link)
            self.membership.add([link.peer], time.monotonic())
            if link.known != self._introductions.digest:
                for body in self._introductions.all():
                    self._say(link, Header(Kind.MEMBERS), body)
            self.refresh_roster()  # its entry may have come by a file, and others not know it
            self.membership.met(link.peer)

    def _found(self, link: Link) -> None:
        if link.dead or not link.met:
            self.emit(SiteJoined(site=link.peer))
        link.dead, link.met = False, True
        self.courier.found(link.peer, time.monotonic())

    def _introduced(self, link: Link, text: bytes) -> None:
        peers, bad = self._introductions.take(text)
        for why in bad:
            self.emit(Notice(text=f"{link.peer} passed on an entry that is refused: {why}"))
        if self._introductions.changed():
            self.refresh_roster()
        for peer in self.near.intersection(peers):
            self.links.to(peer)

    # --- writing

    def _say(self, link: Link, header: Header, *parts: Body) -> None:
        if link.waiting >= WAITING:
            self._cut(link, "it does not read what it is sent")
        else:
            self.links.say(link, header, parts)

    def _write(self) -> None:
        outbox = self.courier.outbox
        while outbox:
            peer, header, parts = outbox.popleft()
            link = self.links.to(peer)
            if link.agreed:  # otherwise the courier says it again when the peer is found
                self._say(link, header, *parts)
        self.links.send()

    def _deliver_results(self) -> None:
        courier = self.courier
        if courier.finished is not None and self._exchange is not None:
            done, self._exchange = self._exchange, None
            for peer in {*courier.finished.kept, *courier.finished.unsure}:
                link = self.links.to(peer)
                if link.lends():  # chunks of a share that is over lie in its socket: they go with it
                    self.links.hang_up(link)
                    self.links.to(peer)
            finished, courier.finished = courier.finished, None
            self.promises.settle(done, finished)
        if courier.receiver.posted:
            self.promises.call(self.heard, courier.receiver.take_posted())
        states = courier.receiver.states
        for peer in list(states):
            if answer := self._pulls.pop(peer, None):
                self.promises.settle(answer, states.pop(peer))

    def emit(self, event: Event) -> None:  # to the log, which belongs to the caller's side
        self.promises.call(self._emit, event)

    def _leave(self) -> None:
        self.refresh_roster()  # a revocation, be it of this peer, is passed on before the good-bye
        self.membership.leave(time.monotonic())
        self._stopping = True
