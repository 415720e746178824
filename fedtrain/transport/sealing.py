"""Frames between two peers that only a third connects: sealed so that the third reads and alters nothing.

Both have each other's CURVE key from the roster, which proves who they are. Each draws another key for a
session, and says it in an OPEN that is sealed under what the roster's keys agree on. An OPEN that names the
reader's own session key is fresh; only then does the session stand, under what all four keys agree on. So
an OPEN of before opens nothing, and who gets at a roster key later reads nothing of earlier sessions.
Without I/O.

A frame's nonce is its number; numbers of a lane grow, so that none is read twice. What is urgent has a lane
of its own, since it may overtake the rest.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from ..errors import WireError
from ..exchange import PeerId

KEY_BYTES, NONCE_BYTES = 32, 12
DATA, URGENT = 0, 1  # lanes
_NUMBER = struct.Struct("<BQ")


def _keys(secret: bytes, count: int, *about: bytes) -> list[ChaCha20Poly1305]:
    info = b"fedtrain relay 1" + b"".join(len(each).to_bytes(4, "little") + each for each in about)
    made = HKDF(SHA256(), count * KEY_BYTES, None, info).derive(secret)
    return [ChaCha20Poly1305(made[at : at + KEY_BYTES]) for at in range(0, len(made), KEY_BYTES)]


def _nonce(lane: int, number: int) -> bytes:
    return _NUMBER.pack(lane, number) + bytes(NONCE_BYTES - _NUMBER.size)


@dataclass
class Session:
    """The keys of both directions, and how far their numbers are."""

    ours: bytes
    theirs: bytes
    out: ChaCha20Poly1305
    into: ChaCha20Poly1305
    sent: list[int] = field(default_factory=lambda: [0, 0])  # frames, by lane
    read: list[int] = field(default_factory=lambda: [0, 0])


class Sealer:
    """One peer's end of what it says to one other."""

    def __init__(self, run: bytes, me: PeerId, secret: bytes, peer: PeerId, public: bytes) -> None:
        """`secret`, `public`: the CURVE keys of this peer and of the other, in z85."""
        self.public = public
        names = sorted([me.encode(), peer.encode()])
        self._about, self._first = [run, *names], me.encode() == names[0]
        self._me, self._peer = me.encode(), peer.encode()
        own = X25519PrivateKey.from_private_bytes(z85.decode(secret))
        self._static = own.exchange(X25519PublicKey.from_public_bytes(z85.decode(public)))
        (self._opening,) = _keys(self._static, 1, b"open", *self._about)
        self._key = X25519PrivateKey.generate()  # of the session to come
        self._used = b""  # of the last session
        self._theirs = bytes(KEY_BYTES)  # the last that the other one said
        self.session: Session | None = None

    @property
    def _public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def open(self) -> bytes:
        """An OPEN: our session key, that of the other which we have read, and whether we want an answer."""
        wants = self.session is None or self._public != self.session.ours
        said = self._public + self._theirs + bytes([wants])
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._opening.encrypt(nonce, said, self._me + b"\0" + self._peer)

    def opened(self, data: bytes | bytearray | memoryview) -> bool:
        """Take the other's OPEN; whether it wants an answer. WireError where the other has not sealed it."""
        try:
            said = self._opening.decrypt(
                bytes(data[:NONCE_BYTES]), bytes(data[NONCE_BYTES:]), self._peer + b"\0" + self._me
            )
        except (InvalidTag, ValueError):
            raise WireError("an opening that its sender has not sealed") from None
        if len(said) != 2 * KEY_BYTES + 1:
            raise WireError(f"an opening of {len(said)} bytes")
        theirs, ours, wants = said[:KEY_BYTES], said[KEY_BYTES:-1], bool(said[-1])
        if self.session is not None and (theirs, ours) == (self.session.theirs, self.session.ours):
            return wants
        if self._used == self._public:  # a key serves one session: numbers begin anew with each
            self._key = X25519PrivateKey.generate()
        self._theirs = theirs
        if ours == self._public:
            self._begin(theirs)
        return wants

    def _begin(self, theirs: bytes) -> None:
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            raise WireError("an opening with a key that keeps no secret") from None
        ours = self._used = self._public
        both = [ours, theirs] if self._first else [theirs, ours]
        keys = _keys(self._static + shared, 2, b"session", *self._about, *both)
        self.session = Session(ours, theirs, *(keys if self._first else reversed(keys)))

    def seal(self, frames: Sequence[bytes | bytearray | memoryview], lane: int) -> list[bytes]:
        """The frames of one message as they travel; the first says the lane and the number."""
        session = self.session
        assert session is not None
        first, count = session.sent[lane], len(frames)
        session.sent[lane] += count
        sealed = [
            session.out.encrypt(_nonce(lane, first + at), bytes(each), bytes([at, count]))
            for at, each in enumerate(frames)
        ]
        return [_NUMBER.pack(lane, first), *sealed]

    def unseal(self, frames: Sequence[bytes | bytearray | memoryview]) -> list[bytearray]:
        """The frames of a message, which may be written to; WireError where they are not as the other sealed
        them, or were read before."""
        session = self.session
        if session is None or len(frames) < 2 or len(frames) > 255 or len(frames[0]) != _NUMBER.size:
            raise WireError("sealed frames without a session")
        lane, first = _NUMBER.unpack(frames[0])
        count = len(frames) - 1
        if lane not in (DATA, URGENT) or not session.read[lane] <= first < 1 << 63:
            raise WireError("sealed frames that were read before")
        try:
            found = [
                bytearray(session.into.decrypt(_nonce(lane, first + at), bytes(each), bytes([at, count])))
                for at, each in enumerate(frames[1:])
            ]
        except InvalidTag:
            raise WireError("sealed frames that their sender has not sealed") from None
        session.read[lane] = first + count
        return found
