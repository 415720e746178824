"""What a site and the aggregator say to each other in one session of secure aggregation.

  step  asks       answers   what it brings
  0     Advertise  Keys      fresh keys, signed
  1     Share      Shares    shares of the site's two secrets, sealed for their holders; one roster, signed
  2     Mask       Masked    the update under its masks
  3     Agree      Agreed    one list of survivors, signed
  4     Unmask     Unmasked  shares: of self masks for survivors, of mask keys for those that dropped out

U1 are the sites in the roster, U2 those that dealt shares, U3 the survivors, whose vectors are in the sum.
Protocol: Bonawitz et al., CCS 2017 (malicious aggregator); its sparse graph: Bell et al., CCS 2020.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..arena import AnyArena, Arena
from ..digest import PiecewiseDigest
from ..messages import Evaluate, Message, Request, SiteId, Train, numbers_in
from ..questions import Tally
from ..schema import Schema, Section, TensorSpec
from .fixedpoint import FixedPoint

if TYPE_CHECKING:
    import torch

VERSION = 8  # of all that is hashed, signed or sealed here
NONCE_BYTES = 16
SHARE_COMMITMENT_BYTES = 24  # two shares with the same one take 2^96 hashes to find
CHECKSUM_BITS = 130  # a number modulo 2^130 - 5, see checksum.py
MAX_NAMES, MAX_NAME = 256, 128  # metrics in one session, and characters in the name of one


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What one session is about: all of it is in its id, and so in every key, seal and signature."""

    federation: str
    run: str
    round: int
    attempt: int
    nonce: bytes  # fresh from the aggregator: a session is never had twice
    cohort: dict[SiteId, bytes]  # who is asked: site -> fingerprint of its key, in order of names
    quorum: int  # fewest sites in U1, in U2, in U3 and among those that unmask
    threshold: int  # shares that rebuild a secret
    degree: int = 0  # neighbours of a site that hold its shares and mask with it; 0: all sites
    ring_bits: Literal[16, 32, 64] = 32
    value_bits: int
    clip: float
    max_weight: float
    length: int  # ring elements of the vector before those of metrics
    privacy: str = ""  # what differential privacy adds at sites, as it was agreed
    verify: bool = False  # whether a checksum follows in the vector, so that sites can check the sum

    def sid(self, model: bytes) -> bytes:
        """The session's id, 32 bytes. `model`: a hash that binds to the weights at this end.

        Sites that were given different models have different ids, so that their masks don't cancel.
        """
        members = [part for site in sorted(self.cohort) for part in (site, self.cohort[site])]
        return hash_of(
            "session", VERSION, self.federation, self.run, self.round, self.attempt, self.nonce,
            len(self.cohort), *members, self.quorum, self.threshold, self.degree, self.ring_bits,
            self.value_bits, float(self.clip), float(self.max_weight), self.length, self.privacy,
            int(self.verify), model,
        )  # fmt: skip

    def request_id(self, step: str) -> str:
        """Two sessions for one plan, before and after an aggregator's restart, differ in it."""
        return f"{self.run}/{self.round}/{self.attempt}/{step}-{self.nonce[:4].hex()}"

    @property
    def fixed_point(self) -> FixedPoint:
        n, ring = len(self.cohort), self.ring_bits
        return FixedPoint(n, ring, self.clip, self.max_weight, self.value_bits, self.verify)

    def numel(self, names: tuple[str, ...]) -> int:
        """Ring elements of what is summed: `length`, then the sum or sums and count of each metric."""
        return self.length + self.fixed_point.limbs * numbers_in(names)

    def schema(self, names: tuple[str, ...]) -> Schema:
        """The masked vector as an arena, so that it travels as any model does: what is summed, and perhaps
        its checksum."""
        numel = self.numel(names) + (self.fixed_point.digits(CHECKSUM_BITS) if self.verify else 0)
        return Schema((TensorSpec("masked", (numel,), f"int{self.ring_bits}", False),))


class Advertise(Train, frozen=True, kw_only=True, tag=True):
    """Train on these weights, keep the update, and offer keys under these terms."""

    terms: Terms


class AdvertiseEvaluation(Evaluate, frozen=True, kw_only=True, tag=True):
    """The same for an evaluation, whose vector is its metrics alone."""

    terms: Terms


class AdvertiseTally(Tally, frozen=True, kw_only=True, tag=True):
    """The same for statistics of the site's data."""

    terms: Terms


class Keys(Message, frozen=True, kw_only=True, tag=True):
    """A site's fresh keys, and the names of its metrics. Signed with the key of its certificate."""

    certificate: bytes  # PEM: the site's, then that of who issued it
    mask_key: bytes  # X25519 public: agrees on pairwise masks. [32]
    seal_key: bytes  # X25519 public: agrees on what seals shares. [32]
    commitment: bytes  # to the seed of its self mask. [32]
    names: tuple[str, ...]  # sized, sorted; see messages.sized_names
    checked: bool = False  # whether the site checked the sum that the model was made of
    signature: bytes


class Share(Request, frozen=True, kw_only=True, tag=True):
    """U1: the keys of this site's neighbours and its own, and of all sites what binds them to theirs."""

    sid: bytes
    roster: dict[SiteId, Keys]
    lines: dict[SiteId, bytes]  # site -> entry_hash; empty where all are in `roster`
    names: tuple[str, ...]  # of all metrics at any site, sorted


class SealedShares(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One holder's shares of one site's secrets."""

    # AES-128-GCM of self-mask share ‖ mask-key share, and with Terms.verify a part of the checksums' seed.
    text: bytes  # [32 + 32 (+ 32) + 16]
    seed: bytes  # share_commitment to the first. [24]
    key: bytes  # to the second. [24]


class Shares(Message, frozen=True, kw_only=True, tag=True):
    sealed: dict[SiteId, SealedShares]  # by holder
    signature: bytes  # over the roster's hash and dealt_hash(sealed)


class Mask(Request, frozen=True, kw_only=True, tag=True):
    """U2, and what this site's peers among them dealt to it. What opens was sealed under the same roster."""

    sid: bytes
    sites: tuple[SiteId, ...]  # U2, sorted
    sealed: dict[SiteId, SealedShares]  # by who sealed it


class Masked(Message, frozen=True, kw_only=True, tag=True):
    vector: AnyArena  # of Terms.schema: the update plus its masks, modulo 2^ring_bits
    signature: bytes  # over the digest by which the vector travels


class Agree(Request, frozen=True, kw_only=True, tag=True):
    """U3: whose vectors arrived."""

    sid: bytes
    sites: tuple[SiteId, ...]  # sorted


class Agreed(Message, frozen=True, kw_only=True, tag=True):
    signature: bytes  # over the session, the roster and U3


class Unmask(Request, frozen=True, kw_only=True, tag=True):
    """That enough of this site's neighbours agreed to the same U3."""

    sid: bytes
    signatures: dict[SiteId, bytes]


class Unmasked(Message, frozen=True, kw_only=True, tag=True):
    """Exactly one share for each site whose shares are held here."""

    seeds: dict[SiteId, bytes]  # of self masks, for U3
    keys: dict[SiteId, bytes]  # of mask keys, for U2 without U3


Ask = Advertise | Share | Mask | Agree | Unmask
Answer = Keys | Shares | Masked | Agreed | Unmasked


class RingArena(AnyArena):
    """One vector of unsigned integers in memory, for a process that loads no torch."""

    def __init__(self, schema: Schema, memory: NDArray[np.uint8] | None = None) -> None:
        """Zeros, or what is in `memory` [schema.nbytes]."""
        self.schema = schema
        self.bytes = np.zeros(schema.nbytes, np.uint8) if memory is None else memory
        (section,) = schema.sections
        self.vector: NDArray[Any] = self.bytes[: section.nbytes].view(f"u{section.dtype}")
        self._digest, self._found = PiecewiseDigest(self.payload), ""

    def give_up(self) -> NDArray[np.uint8]:
        """Take its memory away, for another vector. This arena is empty from then on: what is written next
        into the memory is not masked yet."""
        memory = self.bytes
        self.bytes, self.vector = memory[:0], self.vector[:0]
        self._digest = PiecewiseDigest(self.payload)
        return memory

    @property
    def payload(self) -> memoryview:
        return self.bytes.data

    @property
    def digest(self) -> str:
        if not self._found:  # written once, then only read
            self._found = self._digest.hexdigest()
        return self._found

    def wrote(self, start: int, stop: int) -> None:
        """These numbers are as they will travel: the digest may go on with them."""
        self._digest.wrote(start * self.vector.itemsize, stop * self.vector.itemsize)

    def span(self, section: Section, start: int, stop: int, room: memoryview | None = None) -> memoryview:
        return self.vector[start:stop].data.cast("B")

    def chunk(self, section: Section, start: int, stop: int) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.vector[start:stop].view(section.dtype))

    def load(self) -> Arena:
        return Arena.wrap(self.schema, self.bytes.copy())


def sum_schema(sid: bytes, numel: int, ring_bits: int) -> Schema:
    """Of a sum as sites are shown it: named by its session, so that a site knows whether it was in it."""
    return Schema((TensorSpec(sid.hex(), (numel,), f"int{ring_bits}", False),))


def shown(sid: bytes, total: NDArray[Any]) -> RingArena:
    """A sum and its checksum as sites are shown them; a copy."""
    arena = RingArena(sum_schema(sid, len(total), 8 * total.itemsize))
    arena.vector[:] = total
    return arena


# --- What is hashed, committed to and signed. Nothing else is, and no two of these are ever equal.


def statement(what: str, *parts: bytes | str | int | float) -> bytes:
    """Bytes that stand for exactly these parts: MessagePack says the type and length of each before it."""
    return b"fedtrain secagg;" + msgspec.msgpack.encode((what, *parts))


def hash_of(what: str, *parts: bytes | str | int | float) -> bytes:
    return hashlib.sha256(statement(what, *parts)).digest()


def keys_statement(sid: bytes, site: SiteId, keys: Keys) -> bytes:
    """What Keys.signature is over."""
    return statement(
        "keys", sid, site, keys.mask_key, keys.seal_key, keys.commitment, int(keys.checked), *keys.names
    )


def entry_hash(site: SiteId, keys: Keys) -> bytes:
    """One line of the roster."""
    return hash_of(
        "entry", site, keys.certificate, keys.mask_key, keys.seal_key, keys.commitment, int(keys.checked),
        len(keys.names), *keys.names, keys.signature,
    )  # fmt: skip


def graph_seed(sid: bytes, lines: Mapping[SiteId, bytes]) -> bytes:
    """Of all of U1, by entry_hash: what sites signed, and nothing that the aggregator adds to it."""
    return hash_of("graph", sid, *(part for site in sorted(lines) for part in (site, lines[site])))


def roster_hash(seed: bytes, names: tuple[str, ...]) -> bytes:
    """Of a roster: its graph_seed, and the metrics' names."""
    return hash_of("roster", seed, *names)


def dealt_hash(sealed: dict[SiteId, SealedShares]) -> bytes:
    """Of all that a site dealt, as it travels."""
    return hash_of("dealt", msgspec.msgpack.encode(sealed))


def shares_statement(sid: bytes, roster: bytes, dealt: bytes) -> bytes:
    """What Shares.signature is over, so that a site answers for what it dealt; `roster`: a roster_hash."""
    return statement("shares", sid, roster, dealt)


def masked_statement(sid: bytes, roster: bytes, digest: str) -> bytes:
    """What Masked.signature is over.

    The digest finds damage and mix-ups; it is no commitment (digest.Digest), and none is needed: the
    aggregator that got a vector is the only one to use it.
    """
    return statement("masked", sid, roster, digest)


def survivors_statement(sid: bytes, roster: bytes, sites: tuple[SiteId, ...]) -> bytes:
    """What Agreed.signature is over. With the roster in it, whose keys are fresh, no signature of another
    session counts in this one, whatever its nonce."""
    return statement("survivors", sid, roster, *sites)


def check_seed(sid: bytes, roster: bytes, parts: Mapping[SiteId, bytes]) -> bytes:
    """Of a session's checksums: of parts, one of each site that dealt shares. The aggregator knows it only
    when one of these sites tells."""
    return hash_of("check", sid, roster, *(each for site in sorted(parts) for each in (site, parts[site])))


def seed_commitment(sid: bytes, site: SiteId, seed: bytes) -> bytes:
    """Keys.commitment: to a site's self mask."""
    return hash_of("seed", sid, site, seed)


def share_commitment(
    kind: Literal["seed", "key"], sid: bytes, site: SiteId, holder: SiteId, share: bytes
) -> bytes:
    """To one share, so that whoever opens another one later is known."""
    return hash_of("share", kind, sid, site, holder, share)[:SHARE_COMMITMENT_BYTES]
