"""Who may speak to a peer: keys, the roster of those who may, the handshake's question, invitations.

A key outside of the roster is refused in the handshake, and so is everybody when nobody answers ZeroMQ's
question about it. The holder of an invitation gets through, may say one thing, and gets the roster for it;
both halves of that are here. What a roster is made of, and what an invitation says, is `pki`'s.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ..digest import digest_of
from ..errors import CertificateError, ConnectError, JoinRefused, NotPinned, WireError
from ..events import Emit, Notice, SiteRefused
from ..exchange import Contact, PeerId
from ..wire.codec import decode, encode
from ..wire.frames import Refused
from ..wire.gossip import FRAME_BYTES, TEXT_BYTES, Header, Kind, Stamp, pack, text_of, unpack

DOMAIN = b"fedtrain.gossip"
GUEST_S = 0.2  # between what the holder of an invitation says
ASK_S = 1.0  # after which it says it again
REASON_CHARS = 500  # of a refusal, which another peer words
NOBLOCK = int(zmq.NOBLOCK)


@dataclass(frozen=True)
class Curve:
    """A CURVE key pair, z85 text. The secret goes to ZeroMQ and nowhere else."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Curve:
        return cls(*zmq.curve_keypair())

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Let the socket be called by the keys that the Authenticator lets in; without one by none."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def call(self, socket: zmq.Socket[bytes], their_key: bytes) -> None:
        """Let the socket call the holder of that key, and nobody else."""
        socket.curve_serverkey = their_key
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


class PeerDirectory(Protocol):
    """The peers that may speak; see pki.roster. It is asked at every handshake and every message."""

    def contact(self, peer: PeerId) -> Contact | None: ...
    def peer_of(self, key: bytes) -> PeerId | None: ...
    def peers(self) -> list[PeerId]: ...
    def statements(self) -> list[bytes]:
        """All that was signed and is to be passed on: entries of peers, and who was revoked."""

    def proves(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether a peer of the roster, this one too, has signed a message."""

    def add(self, statement: bytes) -> Contact | None:
        """One that was passed on, and whose entry it is; CertificateError when it can't be believed."""

    def is_guest(self, key: bytes) -> bool:
        """Whether it is an invitation's: its holder is not a peer yet, and may say one thing."""

    def admit(self, key: bytes, entry: bytes) -> Contact:
        """A guest's own entry; CertificateError says why it doesn't come in."""


@dataclass(frozen=True)
class LocalPeer:
    """This peer, and the peers that it may talk to."""

    name: PeerId
    curve: Curve
    sign: Callable[[bytes], bytes]  # as `roster.proves` finds it right at the others
    roster: PeerDirectory
    stamp: Stamp  # that its messages bear

    def check(self, peer: PeerId, stamp: Stamp, theirs: str = "", ours: str = "") -> None:
        """JoinRefused where a peer's messages are of another model or another run; the runs' names, where
        they are known."""
        if stamp.run != self.stamp.run:
            names = f": {theirs[:64]!r} at {peer}, {ours!r} at {self.name}" if theirs else ""
            raise JoinRefused(f"{peer} and {self.name} are in different runs{names}")
        if stamp.schema != self.stamp.schema:
            raise JoinRefused(f"{peer} and {self.name} train different models")


class Authenticator:
    """Says for each connection of a ZeroMQ context whether its key may come in (ZAP, RFC 27)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        local: LocalPeer,
        banned: Callable[[PeerId], bool],
        has_room: Callable[[PeerId], bool],
        emit: Emit,
    ) -> None:
        """`has_room`: whether there is a place for a peer; otherwise it is to call again."""
        self._local, self._banned, self._has_room, self._emit = local, banned, has_room, emit
        self._strangers = 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer all questions that wait."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(NOBLOCK)
                version, number, domain, address, _, mechanism, *credentials = frames
                key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
                if why := self._why_not(key if domain == DOMAIN else b""):
                    self._log(address.decode("ascii", "replace"), why)
                    self.socket.send_multipart([version, number, b"400", b"unknown key", b"", b""])
                elif (peer := self._local.roster.peer_of(key)) is not None and not self._has_room(peer):
                    self.socket.send_multipart([version, number, b"300", b"call again", b"", b""])
                else:
                    self.socket.send_multipart([version, number, b"200", b"OK", key, b""])

    def _why_not(self, key: bytes) -> str:
        peer = self._local.roster.peer_of(key) if key else None
        if peer is None and key and self._local.roster.is_guest(key):
            return ""
        if peer is None or peer == self._local.name:
            return "its key is not on the roster"
        return "cut off for its breaches" if self._banned(peer) else ""

    def _log(self, address: str, why: str) -> None:
        self._strangers += 1
        if self._strangers & (self._strangers - 1) == 0:  # 1st, 2nd, 4th, 8th ...: a flood fills no log
            reason = f"call from {address}: {why} ({self._strangers} so far)"
            self._emit(SiteRefused(site="?", reason=reason))


class Guests:
    """The host's half of an invitation: what its holder may say, and what it is answered."""

    def __init__(self, local: LocalPeer, emit: Emit) -> None:
        self._local, self._emit = local, emit
        self._spoke_s: dict[bytes, float] = {}

    def may_speak(self, key: bytes) -> bool:
        """Whether the key is a guest's, who has not spoken just now."""
        now = time.monotonic()
        if not self._local.roster.is_guest(key) or now < self._spoke_s.get(key, -math.inf) + GUEST_S:
            return False
        self._spoke_s[key] = now
        return True

    def answer(self, key: bytes, message: Sequence[zmq.Frame]) -> list[tuple[Header, bytes]]:
        """For its entry all of ours, or a line that says why not."""
        try:
            if len(message) != 2:
                raise WireError(f"a message of {len(message)} frames")
            header, stamp = unpack(message[0].buffer)
            if header.kind is not Kind.JOIN:
                raise WireError(f"{header.kind.name} from one who has not joined")
            if (stamp.run, stamp.schema) != (self._local.stamp.run, self._local.stamp.schema):
                raise JoinRefused(f"{self._local.name} is in another run, or trains another model")
            contact = self._local.roster.admit(key, text_of(header, message[1].buffer))
        except (WireError, JoinRefused, CertificateError) as e:
            self._emit(SiteRefused(site="?", reason=f"by invitation: {e}"))
            reason = unpinned(self._local.name, e) if isinstance(e, NotPinned) else str(e)
            return [(Header(Kind.REJECT), encode(Refused(reason=reason, final=True)))]
        self._emit(Notice(text=f"{contact.peer} is on the roster now, by invitation"))
        entries = [(Header(Kind.MEMBERS), body) for body in bundles(self._local.roster.statements())]
        return [*entries, (Header(Kind.WELCOME), b"")]


def unpinned(at: PeerId, lacks: NotPinned) -> str:
    """For a peer that reads it elsewhere: what the people of `at` have to do, so that another may come in."""
    return (
        f"{at} has not pinned {lacks.site} with its key. The people of {at} compare it with what `fedtrain "
        f"policy show` says at {lacks.site}, and run at {at}: fedtrain policy pin {lacks.pin}. Then give "
        f"this command again."
    )


def join(
    host: Contact,
    guest: Curve,
    stamp: Stamp,
    entry: bytes,
    add: Callable[[bytes], object],
    timeout_s: float,
    over: Callable[[], bool] = lambda: False,
) -> None:
    """The guest's half: tell the host our signed entry, hand what it answers to `add`. Blocks, until over()
    is true at most.

    JoinRefused says why we may not come in, ConnectError that nobody is there.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.maxmsgsize, dealer.immediate = 0, FRAME_BYTES, True
        guest.call(dealer, host.key)
        dealer.ipv6 = str(host.address).startswith("[")
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        poller = zmq.Poller()
        for each in (dealer, monitor):
            poller.register(each, zmq.POLLIN)
        dealer.connect(f"tcp://{host.address}")
        question, until, asked_s = pack(Header(Kind.JOIN), stamp), time.monotonic() + timeout_s, -math.inf
        while (now := time.monotonic()) < until and not over():
            if now >= asked_s + ASK_S:
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
        raise JoinRefused(f"{host.peer} at {host.address} refuses: {refused.reason[:REASON_CHARS]}")
    if header.kind is Kind.MEMBERS:
        for statement in decode(body, list[bytes]):
            add(statement)
    return header.kind is Kind.WELCOME


def bundles(statements: Iterable[bytes]) -> Iterator[bytes]:
    """Bodies of MEMBERS, each short enough to be read."""
    bundle: list[bytes] = []
    for statement in statements:
        if bundle and sum(map(len, bundle)) + len(statement) > TEXT_BYTES - 1024:
            yield msgspec.msgpack.encode(bundle)
            bundle = []
        bundle.append(statement)
    if bundle:
        yield msgspec.msgpack.encode(bundle)


class Introductions:
    """What a peer passes on of its roster (entries, lists of the revoked, mask keys): all statements to a
    peer that it meets, the new ones to those that it has met."""

    def __init__(self, roster: PeerDirectory) -> None:
        self._roster = roster
        self._told: frozenset[bytes] = frozenset()  # what all connected peers were sent
        self.digest = b""  # of all: who has the same one needs none

    def all(self) -> Iterator[bytes]:
        """Bodies of MEMBERS with all statements."""
        return bundles(self._roster.statements())

    def news(self) -> Iterator[bytes]:
        """Bodies of MEMBERS with what is new since the last call."""
        statements = self._roster.statements()
        new = [each for each in statements if each not in self._told]
        if new or len(statements) != len(self._told):
            self._told = frozenset(statements)
            self.digest = digest_of(b"".join(sorted(statements))).encode()
        return bundles(new)

    def take(self, text: bytes) -> tuple[list[PeerId], list[str]]:
        """Statements that a peer passed on: whose entries came, and why others are refused."""
        known, peers, refused = set(self._roster.statements()), list[PeerId](), list[str]()
        for statement in decode(text, list[bytes]):
            if statement not in known:
                try:
                    contact = self._roster.add(statement)
                except CertificateError as e:
                    refused.append(str(e))
                    continue
                if contact is not None:
                    peers.append(contact.peer)
        return peers, refused

    def changed(self) -> bool:
        """Whether there is something that not all were told."""
        return self._told != frozenset(self._roster.statements())
