"""The messages between peers: a header of 64 bytes, then its body. Little-endian, no pickle.

    bytes  0-3    magic "FTGP"            32-39  sender, SHA-256 of its name, first 8 bytes
           4      version                 40-43  index     44-47  count      both in chunks
           5      kind                    48-55  weight, float64
           6-7    codec                   56-59  degree
           8-15   run, first 8 bytes      60-63  transfer
          16-23   schema, first 8 bytes          of the sender's own numbering
          24-27   view epoch
          28-31   round

How a share travels from its giver to its taker (transport/courier.py). -> giver to taker, <- taker to giver:

    OFFER(round, transfer, bytes)  ->   the size and note of the share, then its first chunks, up to 4; said
                                        again, `index` is how many chunks have left: who has fewer lost some
    <- ACK(index, count)                the taker has `index` chunks and accepts up to `count`: flow control
    CHUNK(index) ...               ->   up to 4 chunks from `index` on, one a frame
    <- DONE                             the taker has the whole share and uses it; the transfer is over
    <- REFUSE(reason)                   instead of DONE: the taker does not use this share, and never will
    CANCEL                         ->   the giver ends this transfer: the taker, which may have all of it,
                                        answers DONE or REFUSE; with transfer 0: it has no share to give
    <- NACK(index, count)               send again from chunk `index`; also answers an OFFER without chunks
    <- WANT(round)                      the taker expects the share of this round

PING, PONG and HELLO say at which round the sender is, and what it has counted of the taker's shares in the
rounds before, as committed: the last round is `index` - 1, bit i of `transfer` stands for i rounds before it.

A POST is the OFFER of an asynchronous share, which belongs to no round; an ANSWER is one that answers a
POST, and a STATE is the answer to a PULL.
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
VERSION = 5
HEADER_BYTES = 64
NOTE_BYTES = 4096  # the longest note of an offer
TEXT_BYTES = 64 << 10  # the longest body of a HELLO, MEMBERS, PING ...: of all but offers and chunks
FRAME_BYTES = CHUNK_BYTES * 11 // 10  # no larger frame is read

_LAYOUT = struct.Struct("<4sBBH8s8sII8sIIdII")
_NBYTES = struct.Struct("<Q")
assert _LAYOUT.size == HEADER_BYTES


class Kind(IntEnum):
    """The kinds of messages."""

    HELLO = 1  # the sender's signed roster entry, and a Greeting
    WELCOME = 2
    REJECT = 3  # refuses a HELLO or a JOIN, with the reason
    MEMBERS = 4  # signed entries of the roster, and the list of the revoked
    OFFER = 5
    POST = 6
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
    SUSPECT = 17  # asks the receiver to ping the peer that the body names
    LEAVE = 18  # of the process whose Greeting has the body as its boot; answered by LEFT
    REFUSE = 19  # refuses a share, with the reason
    JOIN = 20  # a newcomer's entry, with an invitation; the answer is MEMBERS and WELCOME, or REJECT
    LEFT = 21  # the LEAVE was read
    ANSWER = 22  # a share that answers a POST
    HEAD = 24  # how the sender's audit log stands: a frames.AuditHead


_KINDS = {int(kind): kind for kind in Kind}


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a HELLO. Task, schema and settings must be the same at both ends."""

    version: str  # of fedtrain, shown when the protocols differ
    task_digest: str
    schema_digest: str
    agreed: dict[str, str]  # Config.agreed()
    frozen_digest: str = ""  # of the parameters that are not trained
    boot: bytes = b""  # random, of this start of the peer's process
    known: bytes = b""  # a digest of the sender's roster, which need not be sent to who has the same
    mask_key: bytes = b""  # X25519 public key, made anew at each start; empty without gossip.masks
    mask_number: int = 0  # the number of mask_key, which grows with each start
    run: str = ""  # its name, of which stamps have a digest
    lacks: bool = False  # the sender has no greeting of the receiver's, or not any more: it wants one


class Header(msgspec.Struct, frozen=True, gc=False):
    """The fields of a message's header. Fields that its kind doesn't use are 0."""

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
    """The header fields that are the same in all messages of one peer in one run."""

    run: bytes  # [8]
    schema: bytes  # [8]
    sender: bytes  # [8]

    @classmethod
    def of(cls, run: str, schema_digest: str, sender: str) -> Stamp:
        """The stamp of a run's name, a schema's digest and a peer's name."""
        return cls(short(run), short(schema_digest), short(sender))


def short(text: str) -> bytes:
    """8 bytes that identify a text in headers: the first 8 of its SHA-256."""
    return hashlib.sha256(text.encode()).digest()[:8]


def pack(header: Header, stamp: Stamp) -> bytes:
    """A header's 64 bytes."""
    h = header
    return _LAYOUT.pack(
        MAGIC, VERSION, h.kind, h.codec, stamp.run, stamp.schema, h.epoch, h.round, stamp.sender,
        h.index, h.count, h.weight, h.degree, h.transfer,
    )  # fmt: skip


def unpack(data: bytes | memoryview) -> tuple[Header, Stamp]:
    """A header's fields from its 64 bytes; WireError when a field is not valid."""
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
    """The body of a message that is neither an offer nor a chunk; WireError when it is over 64 KiB."""
    if len(body) > TEXT_BYTES:
        raise WireError(f"a {header.kind.name} of {len(body)} bytes, at most {TEXT_BYTES} are read")
    return bytes(body)


def chunks_of(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """The number of chunks of a payload of `nbytes`."""
    return -(-nbytes // chunk_bytes)


def pack_offer(nbytes: int, note: bytes) -> bytes:
    """The body of an OFFER, POST or STATE; WireError when the note is over 4 KiB."""
    if len(note) > NOTE_BYTES:
        raise WireError(f"a note of {len(note)} bytes is over the limit of {NOTE_BYTES}")
    return _NBYTES.pack(nbytes) + note


def unpack_offer(
    header: Header, body: bytes | bytearray | memoryview, limit: int, chunk_bytes: int = CHUNK_BYTES
) -> tuple[int, bytes]:
    """(bytes of the payload, note). WireError, before anything is allocated, for more than `limit` bytes."""
    if not _NBYTES.size <= len(body) <= _NBYTES.size + NOTE_BYTES:
        raise WireError(f"an offer's body of {len(body)} bytes")
    (nbytes,) = _NBYTES.unpack_from(body)
    if nbytes > limit:
        raise WireError(f"an offer of {nbytes} bytes, at most {limit} are taken")
    if header.count != chunks_of(nbytes, chunk_bytes):
        raise WireError(f"an offer of {nbytes} bytes in {header.count} chunks")
    return nbytes, bytes(body[_NBYTES.size :])
