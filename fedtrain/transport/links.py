"""Connections with other peers: every socket, and who is at the other end of it.

A peer binds one ROUTER, on which others call it, and opens one DEALER for each peer that it talks to, always
with CURVE. Who speaks is the connection's key, which the roster maps to a peer: never a routing id, never a
name in a message. A peer without an address calls, and is served over that call.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from ..errors import ConnectError
from ..exchange import PeerId
from ..wire.gossip import FRAME_BYTES, Header, Kind, pack, short
from .admission import Authenticator, Guests, LocalPeer
from .link import OUR_CALL, WATCHED, Link, LinkSettings, Observer, Source, address_of, shut
from .shares import Parts

SENDING = 16  # messages queued in libzmq on a connection, each of a batch of chunks at most
# Credit keeps an honest peer far below it. Where a queue is full when its connection ends, libzmq's heartbeat
# ends this process: "Assertion failed: !_io_error", libzmq issue 4364.
RECEIVING = 1000
BATCH = 64  # messages read from one socket before the others are looked at
COPIED = 64 << 10  # bytes up to which libzmq gets a copy, rather than the memory itself for a while
SPARE = 4  # calls that are kept for a while though nobody needs them now
STRANGE = 8  # of others, whom we don't need now, whose calls are taken
AGAIN_S, AGAIN_MAX_S = 0.1, 2.0  # until a call that ended is made again; doubled while nobody takes it
FULL_S = 0.002  # until a full socket is tried again: a ROUTER can't be polled for one of its peers
# HELLO makes a call known as ours; what a ROUTER got last is read when its connection has ended, too; and a
# list of the revoked (MEMBERS) is read before the good-bye of whoever was revoked.
SHARES = (Kind.OFFER, Kind.CHUNK, Kind.POST, Kind.ANSWER, Kind.STATE)
OVER_OUR_CALL = (*SHARES, Kind.HELLO, Kind.MEMBERS, Kind.LEAVE, Kind.LEFT)
LAST_WORDS_S = 0.5  # that a peer has to read why its connections end
NOBLOCK, SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)  # an enum's | costs more than a message
POLLIN, EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)


class Links:
    """All links of a peer. They belong to one thread, but for `wake`."""

    def __init__(self, local: LocalPeer, settings: LinkSettings, observer: Observer) -> None:
        self._local, self._heartbeat_s, self._observer = local, settings.heartbeat_s, observer
        self._guests = Guests(local, observer.emit)
        self._links: dict[PeerId, Link] = {}
        self._by_dealer: dict[Source, Link] = {}
        self._talking: dict[Link, None] = {}  # with something in their queues
        self._let_in: dict[PeerId, float] = {}  # to call us, lately: when
        self._parting: dict[int, tuple[float, Any]] = {}  # calls that are to end: fd -> when, address
        self._ended: list[Link] = []  # whose last connection has ended, and was not seen to yet
        self._context: zmq.Context[Source] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._waker, self._wakee = socket.socketpair()
        for end in (self._waker, self._wakee):
            end.setblocking(False)
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}  # of what can be polled, but for peers' messages
        # before the ROUTER, which takes no call without one
        self.authenticator = Authenticator(
            self._context, local, self._is_banned, self._has_room, observer.emit
        )
        self._on(self.authenticator.socket, self.authenticator.answer)
        self._on(self._wakee.fileno(), self._wake_up)
        self._router = self._socket(zmq.ROUTER)
        self._local.curve.serve(self._router)
        self._router.router_mandatory = True
        self._poller.register(self._router, POLLIN)
        self._calls = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._on(self._calls, self._see_calls)
        self.wire_out = 0  # bytes of all messages sent, headers too, before encryption

    def listen(self, address: str) -> int:
        """Take calls there; the port. ConnectError when it is in use."""
        self._router.ipv6 = address.startswith("[")
        try:
            self._router.bind(f"tcp://{address}")
        except zmq.ZMQError as e:
            why = os.strerror(e.errno or 0)
            if e.errno == errno.ENODEV:
                why = "it is no address of this machine. A name that others call is network.address"
            raise ConnectError(f"cannot listen on {address}: {why}. Change network.listen.") from None
        return int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def get(self, peer: PeerId) -> Link | None:
        return self._links.get(peer)

    def link(self, peer: PeerId) -> Link:
        """The link with a peer, which need not be called."""
        if peer not in self._links:
            stamp = msgspec.structs.replace(self._local.stamp, sender=short(peer))
            self._links[peer] = Link(peer, stamp, down_s=time.monotonic())
        return self._links[peer]

    def wake(self) -> None:
        """Have `woken` called, from any thread."""
        with contextlib.suppress(OSError):  # closed at this moment, or as many wait as there is room for
            self._waker.send(b"!")

    def close(self) -> None:
        for link in self:
            self.hang_up(link)
        self._router.disable_monitor()
        for each in (self._router, self._calls, self.authenticator.socket):
            each.close(0)
        self._waker.close()
        self._wakee.close()
        self._context.term()

    # --- calls

    def to(self, peer: PeerId) -> Link:
        """The link with a peer; calls it when it has an address and is not being called."""
        link = self.link(peer)
        link.used_s = time.monotonic()
        if link.dealer is None and link.recall_s == math.inf:
            self.call(link)
        return link

    def call(self, link: Link) -> None:
        """Call a peer anew, where it has an address."""
        self._end_our_call(link)
        link.recall_s, link.contact = math.inf, self._local.roster.contact(link.peer)
        if link.contact is None or link.contact.address is None:
            return
        link.dealer = dealer = self._socket(zmq.DEALER)
        dealer.immediate = True
        dealer.routing_id = b"\x01" + secrets.token_bytes(16)
        self._local.curve.call(dealer, link.contact.key)
        link.monitor = dealer.get_monitor_socket(WATCHED)
        self._by_dealer[dealer] = link
        self._poller.register(dealer, POLLIN)
        self._on(link.monitor, lambda: self._see_call(link))
        dealer.ipv6 = link.contact.address.startswith("[")
        dealer.connect(f"tcp://{link.contact.address}")

    def hang_up(self, link: Link) -> None:
        """Drop our call, and with it what its queue holds."""
        self._end_our_call(link)
        link.recall_s = math.inf
        link.queue.clear()
        link.urgent.clear()

    def _end_our_call(self, link: Link, linger_s: float = 0.0) -> None:
        """Close its socket. All memory that was lent is free then."""
        if link.dealer is None or link.monitor is None:
            return
        for each in (link.dealer, link.monitor):
            self._poller.unregister(each)
        del self._by_dealer[link.dealer], self._handlers[link.monitor]
        link.dealer.disable_monitor()
        link.monitor.close(0)
        link.dealer.close(0 if link.lends() else int(linger_s * 1000))  # nor does it read memory for longer
        link.dealer = link.monitor = None
        link.calling = False
        until_s = time.monotonic() + 1.0  # libzmq lets go within milliseconds
        while link.lends() and time.monotonic() < until_s:
            time.sleep(0.001)
        link.lent.clear()

    def close_spare(self, spare: Sequence[Link], since_s: float) -> None:
        """Drop our calls with these, but for a few that were used last and after `since_s`, and for those
        who have yet to answer; and the calls of more than a few of them, who have been silent for longest."""
        called = [link for link in spare if link.dealer is not None or link.recall_s < math.inf]
        young_s = time.monotonic() - 2 * self._heartbeat_s
        for at, link in enumerate(sorted(called, key=lambda link: -link.used_s)):
            if link.used_s < since_s or (at >= SPARE and (link.agreed or link.used_s < young_s)):
                self.hang_up(link)
                if not link.up:
                    link.went_down()
        calling = [link for link in spare if link.routes]
        for link in sorted(calling, key=lambda link: -link.tokens_s)[STRANGE:]:
            self._let_in.pop(link.peer, None)
            self._end_calls(link)

    def cut(self, link: Link, last_words: Sequence[bytes] = ()) -> None:
        """End our call and its calls. It may still read the last words, which are bodies of MEMBERS."""
        if last_words:
            self._dismiss(link, link.ways, ((Kind.MEMBERS, body) for body in last_words))
        self.hang_up(link)
        self._end_calls(link)
        link.routes.clear()
        link.went_down()

    def keep_last(self, link: Link) -> None:
        """Of a peer's connections only that over which it spoke last: the others are its former process's."""
        self._part(link, [fd for fd in link.routes if fd != link.heard])
        if link.heard != OUR_CALL:
            self.call(link)

    def refuse(self, link: Link, said: Iterable[tuple[Kind, bytes]]) -> None:
        """Say this over the connection over which a peer spoke last, and end that."""
        self._dismiss(link, [way for way in link.ways if way == link.heard], said)

    def _part(self, link: Link, calls: Iterable[int]) -> None:
        """Have these calls of a peer end in a moment: it may still read why, and nothing that it says is
        read."""
        until_s = time.monotonic() + LAST_WORDS_S
        for fd in list(calls):
            self._parting[fd] = until_s, link.routes.pop(fd)[1]

    def end_parting(self, now: float) -> None:
        """End the calls whose time to read why is over."""
        for fd in [fd for fd, (until_s, _) in self._parting.items() if until_s <= now]:
            shut(fd, self._parting.pop(fd)[1])

    def _dismiss(self, link: Link, ways: Sequence[int], said: Iterable[tuple[Kind, bytes]]) -> None:
        """Say this at once, over each of these ways as far as it takes it, and end them in a moment."""
        messages = [(pack(Header(kind), self._local.stamp), [body]) for kind, body in said]
        for way in ways:
            with contextlib.suppress(zmq.ZMQError):
                for message in messages:
                    self._over(way, link, *message)
        if OUR_CALL in ways:
            self._end_our_call(link, LAST_WORDS_S)
        self._part(link, link.routes.keys() & {*ways})

    def _end_calls(self, link: Link) -> None:
        for fd, (_, address) in link.routes.items():
            shut(fd, address)

    def _is_banned(self, peer: PeerId) -> bool:
        return (link := self._links.get(peer)) is not None and link.is_banned()

    def _has_room(self, peer: PeerId) -> bool:
        """Whether a peer may call: it is near, or few that are not are connected, or about to be."""
        near, now = self._observer.near, time.monotonic()
        self._let_in = {p: at for p, at in self._let_in.items() if now < at + self._heartbeat_s}
        away = {link.peer for link in self._links.values() if link.routes}.union(self._let_in) - near
        if room := peer in near or peer in away or len(away) < STRANGE:
            self._let_in[peer] = now
        return room

    def _socket(self, kind: int) -> Source:
        made: Source = self._context.socket(kind)
        made.linger, made.sndtimeo, made.maxmsgsize = 0, 1000, FRAME_BYTES
        made.sndhwm, made.rcvhwm = SENDING, RECEIVING
        made.heartbeat_ivl = int(self._heartbeat_s * 1000)
        made.heartbeat_timeout = made.heartbeat_ttl = made.handshake_ivl = int(self._heartbeat_s * 3000)
        made.reconnect_ivl, made.reconnect_ivl_max = int(AGAIN_S * 1000), int(AGAIN_MAX_S * 1000)
        made.tcp_keepalive = 1
        return made

    # --- what happens

    def receive(self, timeout_s: float) -> Iterator[tuple[Link, list[zmq.Frame]]]:
        """Wait until something happens, at most so long; messages of peers, and whose they are."""
        if self._talking:
            timeout_s = min(timeout_s, FULL_S)
        speaking = []
        for source, _ in self._poller.poll(math.ceil(timeout_s * 1000)):
            if handle := self._handlers.get(source):
                handle()
            else:
                speaking.append(source)
        ended, self._ended = self._ended, []
        for link in ended:  # what a peer said last is read before its connection counts as gone
            speaking += [self._router, link.dealer or self._router]
        for source in speaking:
            if not source.closed:
                yield from self._read(source)
        for link in ended:
            if link.recall_s < math.inf:
                self._end_our_call(link)
            if not link.up:
                link.went_down()

    def _read(self, source: Source) -> Iterator[tuple[Link, list[zmq.Frame]]]:
        for _ in range(BATCH):
            try:
                frames = [source.recv(NOBLOCK, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(source.recv(NOBLOCK, copy=False))
            if source is not self._router:
                self._by_dealer[source].heard = OUR_CALL
                yield self._by_dealer[source], frames
            elif link := self._caller(frames):
                yield link, frames[1:]
            if source.closed or not int(source.get(EVENTS)) & POLLIN:
                return

    def _caller(self, frames: list[zmq.Frame]) -> Link | None:
        """Whose call a message of the ROUTER came over, by the key that the Authenticator let in."""
        try:
            key = str(frames[-1].get("User-Id")).encode()
            fd = int(frames[-1].get(zmq.SRCFD))
        except zmq.ZMQError:
            return None
        peer = self._local.roster.peer_of(key)
        if fd in self._parting and self._parting[fd][1] == address_of(fd):
            return None
        if peer is None:
            if self._guests.may_speak(key):
                for header, body in self._guests.answer(key, frames[1:]):
                    with contextlib.suppress(zmq.ZMQError):  # gone, or it doesn't read: it may ask again
                        self._router.send_multipart(
                            [frames[0].bytes, pack(header, self._local.stamp), body], NOBLOCK
                        )
                self._observer.refresh_roster()
            else:  # revoked since its handshake, or a guest who says too much
                shut(fd, address_of(fd))
            return None
        link = self._links.get(peer) or self.to(peer)
        if link.is_banned():
            return None
        if fd not in link.routes and (address := address_of(fd)):
            link.routes[fd] = (frames[0].bytes, address)
            self._observer.greet(link)
        link.heard = fd
        return link

    def _see_calls(self) -> None:
        """Calls of others that ended."""
        with contextlib.suppress(zmq.Again):
            while True:
                fd = parse_monitor_message(self._calls.recv_multipart(NOBLOCK))["value"]
                for link in self._links.values():
                    if link.routes.pop(fd, None) and not link.up:
                        self._ended.append(link)

    def _see_call(self, link: Link) -> None:
        """What became of our call."""
        with contextlib.suppress(zmq.Again):
            while link.monitor is not None:
                match parse_monitor_message(link.monitor.recv_multipart(NOBLOCK))["event"]:
                    case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        link.calling, link.trouble, link.denials, link.failures = True, "", 0, 0
                        self._observer.greet(link)
                    case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                        self._observer.key_refused(link)
                    case zmq.EVENT_CLOSED:
                        link.trouble = "nothing listens there yet"
                    case zmq.EVENT_DISCONNECTED:
                        if not link.calling and not link.denials:
                            link.trouble = "what answers there is no fedtrain peer, or stands still"
                        self._is_called_again(link)
                        return

    def _is_called_again(self, link: Link) -> None:
        """By a new socket: libzmq would call with the same routing id, and a ROUTER that has not read all of
        the call before takes nothing more from it, without a word (libzmq issue 2019)."""
        again_s = time.monotonic() + min(AGAIN_S * 2 ** min(link.failures, 9), AGAIN_MAX_S)
        link.recall_s = again_s if link.recall_s == math.inf else link.recall_s
        link.failures += 1
        if link.calling:  # it is ended once what the peer said last is read
            link.calling = False
            self._ended.append(link)
        else:
            self._end_our_call(link)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakee.recv(4096)
        self._observer.woken()

    def _on(self, source: Any, handle: Callable[[], None]) -> None:
        self._handlers[source] = handle
        self._poller.register(source, POLLIN)

    # --- what is said

    def say(self, link: Link, header: Header, parts: Parts = ()) -> None:
        """To be sent by the next `send`."""
        queue = link.queue if header.kind in OVER_OUR_CALL else link.urgent
        queue.append((pack(header, self._local.stamp), parts))
        self._talking[link] = None

    def send(self) -> None:
        """All that sockets take; the rest stays for the next time."""
        for link in list(self._talking):
            self._drain(link)
            if not link.waiting:
                del self._talking[link]

    def _drain(self, link: Link) -> None:
        """Shares go by our call, and what is urgent by the peer's, where shares come in and none go out: so
        nothing urgent waits behind a share."""
        for queue in (link.urgent, link.queue):
            while queue and (ways := link.ways):
                way = self._way_of_shares(link, ways) if queue is link.queue else ways[len(ways) > 1]
                try:
                    self._over(way, link, *queue[0])
                except zmq.Again:
                    break
                except zmq.ZMQError as e:
                    if e.errno != zmq.EHOSTUNREACH:
                        raise
                    del link.routes[way]
                    continue
                header, parts = queue.popleft()
                self.wire_out += len(header) + sum(map(len, parts))
        if link.waiting and not link.ways:
            link.queue.clear()
            link.urgent.clear()
            link.went_down()

    def _way_of_shares(self, link: Link, ways: list[int]) -> int:
        """The same while a share is on its way: over another connection the next would overtake it."""
        if link.way is None or link.way not in ways or not self._observer.owes(link.peer):
            link.way = ways[0]
        return link.way

    def _over(self, way: int, link: Link, header: bytes, parts: Parts) -> None:
        if way == OUR_CALL and link.dealer is not None:
            self._over_our_call(link, link.dealer, header, parts)
        else:
            self._router.send_multipart([link.routes[way][0], header, *parts], NOBLOCK)

    def _over_our_call(self, link: Link, dealer: Source, header: bytes, parts: Parts) -> None:
        dealer.send(header, NOBLOCK | SNDMORE if parts else NOBLOCK)
        for left, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
            flags = NOBLOCK | SNDMORE if left else NOBLOCK
            if isinstance(part, memoryview) and len(part) > COPIED:
                dealer.send(part, flags, copy=False)
                link.lend(part)
            else:
                dealer.send(part, flags)
