"""What peers say to each other: a header of 64 bytes, then its body. Little-endian, no pickle.

    bytes  0-3    magic "FTGP"            32-39  sender, SHA-256 of its name, first 8 bytes
           4      version                 40-43  index     44-47  count      both in chunks
           5      kind                    48-55  weight, float64
           6-7    codec                   56-59  degree
           8-15   run, first 8 bytes      60-63  transfer
          16-23   schema, first 8 bytes          of the sender's own numbering
          24-27   view epoch
          28-31   round

How a share travels (transport/courier.py):

    giver  OFFER(round, transfer, bytes)  ->              taker
                                          the body, then up to 4 chunks, the first, each a frame of its own
           <- ACK(index, count)           has `index` chunks, takes up to `count`: the giver's credit
           CHUNK(index) ...               ->                 up to 4 chunks from `index` on, each a frame
           <- DONE                        has it whole, and counts it; it is given
    or     <- REFUSE(reason)              does not count it, and never will
    or     CANCEL                         -> comes no more of it; with transfer 0: has none for you
    again  <- NACK(index, count)          go back to chunk `index`; an OFFER that came bare is answered so
    and    WANT(round)                    -> expects your share of this round

A letter is a share without a round (LETTER, else the same), a state is what PULL is answered with (STATE).
"""

from __future__ import annotations

import hashlib
import math
import struct
from enum import IntEnum

import msgspec

from ..errors import WireError
from .frames import CHUNK_BYTES

MAGIC = b"FTGP"
VERSION = 2
HEADER_BYTES = 64
NOTE_BYTES = 4096  # of an offer's note
TEXT_BYTES = 64 << 10  # of the body of a HELLO, MEMBERS, PING ...: everything that isn't an offer or a chunk
FRAME_BYTES = CHUNK_BYTES * 11 // 10  # no larger frame is read

_LAYOUT = struct.Struct("<4sBBH8s8sII8sIIdII")
_NBYTES = struct.Struct("<Q")
assert _LAYOUT.size == HEADER_BYTES


class Kind(IntEnum):
    HELLO = 1  # who I am (a signed entry), what I train
    WELCOME = 2
    REJECT = 3  # a HELLO, with the reason
    MEMBERS = 4  # signed entries of the roster, and the list of the revoked
    OFFER = 5
    LETTER = 6
    STATE = 7
    CHUNK = 8
    DONE = 9
    ACK = 10
    NACK = 11
    CANCEL = 12
    WANT = 13
    PULL = 14
    PING = 15
    PONG = 16
    SUSPECT = 17  # please ping this one for me
    LEAVE = 18
    REFUSE = 19  # a share
    JOIN = 20  # the entry of one who shows an invitation; answered by MEMBERS and WELCOME, or REJECT


_KINDS = {int(kind): kind for kind in Kind}


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a HELLO: what both ends must have alike, and which start of its process a peer is in."""

    version: str  # of fedtrain, for the message when protocols differ
    task_digest: str
    schema_digest: str
    agreed: dict[str, str]  # Config.agreed()
    frozen_digest: str = ""  # of the parameters that are not trained
    boot: bytes = b""
    mask_key: bytes = b""  # X25519, of this start too; empty without gossip.masks
    mask_number: int = 0  # of the key: grows from start to start


class Header(msgspec.Struct, frozen=True, gc=False):
    """What a message is about. Fields that its kind doesn't use are 0."""

    kind: Kind
    round: int = 0
    transfer: int = 0
    index: int = 0
    count: int = 0
    weight: float = 0.0
    degree: int = 0
    codec: int = 0
    epoch: int = 0


class Stamp(msgspec.Struct, frozen=True):
    """What all messages of one peer in one run have alike."""

    run: bytes  # [8]
    schema: bytes  # [8]
    sender: bytes  # [8]

    @classmethod
    def of(cls, run: str, schema_digest: str, sender: str) -> Stamp:
        return cls(short(run), short(schema_digest), short(sender))


def short(text: str) -> bytes:
    """8 bytes that stand for a text in headers."""
    return hashlib.sha256(text.encode()).digest()[:8]


def pack(header: Header, stamp: Stamp) -> bytes:
    h = header
    return _LAYOUT.pack(
        MAGIC, VERSION, h.kind, h.codec, stamp.run, stamp.schema, h.epoch, h.round, stamp.sender,
        h.index, h.count, h.weight, h.degree, h.transfer,
    )  # fmt: skip


def unpack(data: bytes | memoryview) -> tuple[Header, Stamp]:
    """A header off the wire, checked in itself; WireError says what is wrong with it."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header of {len(data)} bytes, {HEADER_BYTES} are due")
    (
        magic, version, number, codec, run, schema, epoch, round, sender,
        index, count, weight, degree, transfer,
    ) = _LAYOUT.unpack(data)  # fmt: skip
    if magic != MAGIC:
        raise WireError(f"not ours: it begins with {magic!r}")
    if version != VERSION:
        raise WireError(f"protocol {version} there, {VERSION} here: run the same fedtrain at both ends")
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(f"unknown kind of message {number}")
    if not math.isfinite(weight):
        raise WireError(f"a weight of {weight}")
    header = Header(kind, round, transfer, index, count, weight, degree, codec, epoch)
    return header, Stamp(run, schema, sender)


def text_of(header: Header, body: bytes | bytearray | memoryview) -> bytes:
    """The body of a message that is neither an offer nor a chunk."""
    if len(body) > TEXT_BYTES:
        raise WireError(f"a {header.kind.name} of {len(body)} bytes, at most {TEXT_BYTES} are read")
    return bytes(body)


def chunks_of(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """How many chunks a payload makes."""
    return -(-nbytes // chunk_bytes)


def pack_offer(nbytes: int, note: bytes) -> bytes:
    """The body of an OFFER, LETTER or STATE."""
    if len(note) > NOTE_BYTES:
        raise WireError(f"a note of {len(note)} bytes is over the limit of {NOTE_BYTES}")
    return _NBYTES.pack(nbytes) + note


def unpack_offer(
    header: Header, body: bytes | bytearray | memoryview, limit: int, chunk_bytes: int = CHUNK_BYTES
) -> tuple[int, bytes]:
    """(bytes of the payload, note). Nothing is allocated for an offer that says more than `limit` bytes."""
    if not _NBYTES.size <= len(body) <= _NBYTES.size + NOTE_BYTES:
        raise WireError(f"an offer's body of {len(body)} bytes")
    (nbytes,) = _NBYTES.unpack_from(body)
    if nbytes > limit:
        raise WireError(f"an offer of {nbytes} bytes, at most {limit} are taken")
    if header.count != chunks_of(nbytes, chunk_bytes):
        raise WireError(f"an offer of {nbytes} bytes in {header.count} chunks")
    return nbytes, bytes(body[_NBYTES.size :])
