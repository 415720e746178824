"""Peers that can't be called, and those that forward frames between two of them.

A relay offers itself in its roster entry (`gossip.relay`). Two peers without an address try all relays with
which they are connected, and go on over one that both reach; what they say is sealed between them
(sealing.py). A relay forwards for peers of the roster alone, of whom neither can be called: what is urgent at
once, the rest as fast as its owner allows. It says in its log how much that was, and for whom.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from ..errors import WireError
from ..events import Emit, Notice
from ..exchange import PeerId
from ..wire.gossip import Header, Kind, short
from .admission import LocalPeer
from .link import Link
from .links import Links
from .sealing import Sealer
from .shares import Body, Parts

HELD_BYTES = 64 << 20  # that wait at a relay for its limit; what comes beyond is dropped, and said again
TOLD_BYTES = 64 << 20  # after which a relay says what it has forwarded; then at each doubling
SILENT = 3  # heartbeats
OPEN, SEALED = b"\0", b"\1"  # what a RELAY brings
ROUTE = 17  # bytes: to whom, of whom, and what


class Relays:
    """One peer's part: its own sessions, and what it forwards for others."""

    def __init__(
        self, local: LocalPeer, links: Links, greet: Callable[[Link], None], emit: Emit, heartbeat_s: float
    ) -> None:
        self._local, self._links, self._greet, self._emit = local, links, greet, emit
        self._heartbeat_s, self._me = heartbeat_s, short(local.name)
        self._sealers: dict[PeerId, Sealer] = {}
        self._names: dict[bytes, PeerId] = {}
        self._heard_s: dict[PeerId, float] = {}  # by way of a relay
        self._open_s: dict[PeerId, float] = {}  # when to say OPEN next
        self._held: deque[tuple[Link, Parts]] = deque()
        self._held_bytes = 0
        self._room, self._room_s = 0.0, time.monotonic()  # bytes that may be forwarded now
        self._forwarded: Counter[tuple[PeerId, ...]] = Counter()
        self._told = TOLD_BYTES

    def all(self) -> set[PeerId]:
        """The peers that relay, where this one needs some."""
        if not self._is_hidden(self._local.name):
            return set()
        contacts = map(self._local.roster.contact, self._local.roster.peers())
        return {each.peer for each in contacts if each is not None and each.relays}

    def needed(self, peer: PeerId) -> bool:
        """Whether only a relay connects this peer with another."""
        return self._is_hidden(peer) and self._is_hidden(self._local.name) and peer != self._local.name

    def _is_hidden(self, peer: PeerId) -> bool:
        contact = self._local.roster.contact(peer)
        return contact is not None and contact.address is None

    # --- our own sessions

    def say(self, link: Link, header: bytes, parts: Parts, lane: int) -> None:
        """To a peer behind a relay, of whom there is a session."""
        assert link.via is not None
        self._send(link.peer, link.via, SEALED, self._sealer(link.peer).seal([header, *parts], lane), lane)

    def _send(self, peer: PeerId, via: PeerId, what: bytes, frames: Parts, lane: int = 1) -> None:
        relay, route = self._links.get(via), short(peer) + self._me + what
        if relay is not None and relay.agreed:
            self._links.say(relay, Header(Kind.RELAY, index=lane), [route, *frames])

    def _sealer(self, peer: PeerId) -> Sealer:
        contact = self._local.roster.contact(peer)
        assert contact is not None
        if (sealer := self._sealers.get(peer)) is None or sealer.public != contact.key:
            secret = self._local.curve.secret
            sealer = Sealer(self._local.stamp.run, self._local.name, secret, peer, contact.key)
            self._sealers[peer] = sealer
        return sealer

    def receive(self, link: Link, header: Header, parts: Parts) -> tuple[Link, list[bytearray]] | None:
        """A RELAY: the frames that another peer has sealed for this one, and its link. WireError where the
        sender breaks the rules; what a relay alone may have spoilt is dropped."""
        route = bytes(parts[0]) if parts else b""
        if len(route) != ROUTE or len(parts) < 2:
            raise WireError("a RELAY without a route or without frames")
        to, of, what = route[:8], route[8:16], route[16:]
        if to != self._me:
            if of != link.stamp.sender:
                raise WireError("a RELAY for frames of another peer")
            self._forward(link, to, header.index, parts)
            return None
        peer = self._name(of)
        if peer is None or not self.needed(peer) or self._links.link(peer).is_banned():
            return None
        try:
            return self._take(link, peer, what, parts[1:])
        except WireError:
            return None

    def _take(
        self, relay: Link, peer: PeerId, what: bytes, frames: Parts
    ) -> tuple[Link, list[bytearray]] | None:
        sealer, link = self._sealer(peer), self._links.link(peer)
        before = sealer.session
        if what == OPEN:
            if sealer.opened(frames[0]):
                self._send(peer, relay.peer, OPEN, [sealer.open()])
            found = None
        else:
            found = link, sealer.unseal(frames)
        self._heard_s[peer] = time.monotonic()
        if sealer.session is not None and (link.via is None or sealer.session is not before):
            link.via = relay.peer
            self._greet(link)
        return found

    def _name(self, short_name: bytes) -> PeerId | None:
        if short_name not in self._names:
            self._names = {short(peer): peer for peer in self._local.roster.peers()}
        return self._names.get(short_name)

    def tick(self, now: float, near: frozenset[PeerId]) -> None:
        """Open sessions with those near whom only a relay connects, keep them, and forward what waits."""
        for peer in sorted(near) if self._is_hidden(self._local.name) else ():
            link = self._links.link(peer)
            if link.via is not None and (
                not self._links.agrees(link.via) or now > self._heard_s[peer] + SILENT * self._heartbeat_s
            ):
                link.via, self._sealer(peer).session = None, None
                self._open_s[peer] = now
                if not link.up:
                    link.went_down()
            if self.needed(peer) and now >= self._open_s.get(peer, now):
                self._open_s[peer] = now + self._heartbeat_s
                for relay in [link.via] if link.via is not None else sorted(self.all()):
                    self._send(peer, relay, OPEN, [self._sealer(peer).open()])
        self._release(now)

    # --- what is forwarded for others

    def _forward(self, link: Link, to: bytes, lane: int, parts: Parts) -> None:
        peer, limit = self._name(to), self._local.relay_bytes_s
        taker = self._links.get(peer) if peer is not None else None
        hidden = peer is not None and self._is_hidden(peer) and self._is_hidden(link.peer)
        if limit <= 0 or taker is None or not taker.agreed or not hidden:
            return
        nbytes = sum(map(len, parts))
        if lane == 1 and nbytes <= 1 << 16:
            self._pass_on(taker, 1, parts)
        elif self._held_bytes + nbytes <= HELD_BYTES:
            self._held.append((taker, parts))
            self._held_bytes += nbytes
            self._release(time.monotonic())
        self._forwarded[tuple(sorted((link.peer, taker.peer)))] += nbytes
        if (total := self._forwarded.total()) >= self._told:
            self._told = 2 * total
            pairs = (
                f"{n / 1e6:.0f} MB for {' and '.join(pair)}" for pair, n in self._forwarded.most_common(3)
            )
            self._emit(Notice(text=f"forwarded so far, sealed: {', '.join(pairs)} (gossip.relay)"))

    def _release(self, now: float) -> None:
        limit = self._local.relay_bytes_s
        self._room = min(self._room + (now - self._room_s) * limit, limit)
        self._room_s = now
        while self._held and self._room > 0:
            taker, parts = self._held.popleft()
            self._held_bytes -= sum(map(len, parts))
            self._pass_on(taker, 0, parts)

    def _pass_on(self, taker: Link, lane: int, parts: list[Body] | Parts) -> None:
        self._room -= sum(map(len, parts))
        if taker.agreed:
            self._links.say(taker, Header(Kind.RELAY, index=lane), parts)

    def wake_s(self, now: float) -> float:
        """When `tick` has something to do next, at the latest."""
        limit = self._local.relay_bytes_s
        return now + max(0.0, -self._room) / limit + 0.001 if self._held else now + self._heartbeat_s / 4
