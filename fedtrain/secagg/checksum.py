"""Checksums that add up, so that sites can tell a sum from what is only said to be one.

Each site adds to its vector a checksum of the vector, under a key that all sites of the session have and the
aggregator has not, and under a pad of its own. Masked vectors add up, and the checksums in them: whoever has
the key can hold the sum that the aggregator shows against the sum of the checksums.

Each value of a site has q_max added to it (FixedPoint.unsigned): so it is in [0, 2·q_max], and the values of
n sites add up below 2^r. Then the bytes of a sum are the sum of the bytes as numbers of 128
bits. Poly1305 (RFC 8439, 2.5) is a polynomial in its key over such numbers, modulo p = 2^130 - 5, so it adds
up too, but for the 2^128 that it adds to each number, and for its two highest bits, which a tag leaves out.
Each MiB has a key of its own, with 106 random bits.

Another sum passes for at most 3·blocks·(sites + 1) + 1 of the values that the two bits may make of p, and for
each with a chance of 2^16 / 2^106 at most, the roots of a polynomial of degree 2^16: below 2^-60 as long as
blocks · sites is below 2^27. That holds for any difference in any coordinate, and whatever the aggregator
can work out: because of the pads, what the sum's checksum is tells nothing of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.poly1305 import Poly1305

from ..messages import SiteId
from .fixedpoint import FixedPoint
from .keys import hkdf
from .masking import (
    BLOCK_BYTES,
    KEY_BYTES,
    TAG_BYTES,
    Parallel,
    RingVector,
    add_masks,
    blocks_of,
    exhaust,
    keystream,
    serial,
)
from .messages import CHECKSUM_BITS, statement

PRIME = 2**130 - 5
HIGHEST = 2**128  # what a tag leaves out is a multiple of it, by 0 to LEFT_OUT
LEFT_OUT = 3
WORD = 16  # bytes that Poly1305 reads as one number
CLAMP = 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF


@dataclass(frozen=True)
class Checksums:
    """The checksums of one session, for those who have its `seed` [32 bytes]."""

    seed: bytes
    point: FixedPoint
    parallel: Parallel = serial

    def mask(
        self,
        vector: RingVector,
        numel: int,
        site: SiteId,
        masks: Sequence[tuple[bytes, int]],
        wrote: Callable[[int, int], object],
    ) -> None:
        """Put what a site adds to its vector [:numel] behind it, and add_masks to both. A block is read for
        its tag while it is fetched for its masks; those that the checksum is in are the last."""
        keys = self._keys(blocks_of(vector))
        tags, whole = list[int](), numel * vector.itemsize // BLOCK_BYTES

        def read(block: int) -> None:
            tags.append(tag_of(vector[:numel], block, keys))

        add_masks(vector, masks, self.parallel, wrote, read, range(whole))
        for block in range(whole, blocks_of(vector[:numel])):
            read(block)
        vector[numel:] = self._digits(sum(tags), site)
        add_masks(vector, masks, self.parallel, wrote, blocks=range(whole, blocks_of(vector)))

    def of(self, vector: RingVector, site: SiteId) -> RingVector:
        """What a site adds to its vector, [point.digits(CHECKSUM_BITS)]."""
        return self._digits(self._tags(vector), site)

    def _digits(self, tags: int, site: SiteId) -> RingVector:
        number, bits = (tags + self._pad(site)) % PRIME, self.point.limb_bits
        count = self.point.digits(CHECKSUM_BITS)
        return np.array([number >> (i * bits) & self.point.q_max for i in range(count)], self.point.dtype)

    def fits(self, total: RingVector, checksum: RingVector, sites: tuple[SiteId, ...]) -> bool:
        """Whether `total` is the sum of the vectors of these sites, whose checksums add up to `checksum`."""
        places = (1 << (i * self.point.limb_bits) for i in range(len(checksum)))
        found = sum(digit * place for digit, place in zip(checksum.tolist(), places, strict=True))
        left = found - sum(map(self._pad, sites)) - self._tags(total, len(sites))
        times = left * pow(HIGHEST, -1, PRIME) % PRIME
        most = LEFT_OUT * blocks_of(total)
        return bool(times <= most or PRIME - times <= most * len(sites))

    def _tags(self, vector: RingVector, sites: int = 1) -> int:
        """Σ of the tags of all blocks of a vector that is the sum of so many."""
        found, keys = list[int](), self._keys(blocks_of(vector))

        def add(block: int) -> None:
            found.append(tag_of(vector, block, keys, sites))

        with self.parallel(add, range(blocks_of(vector))) as mine:
            exhaust(mine)
        return sum(found)

    def _keys(self, blocks: int) -> bytes:
        """WORD bytes for each block, of one keystream."""
        keys = np.empty(blocks * WORD + TAG_BYTES, np.uint8)
        assert len(keys) <= BLOCK_BYTES + TAG_BYTES
        keystream(hkdf(self.seed, statement("checksum"), KEY_BYTES), 0, keys, blocks * WORD)
        return keys.tobytes()

    def _pad(self, site: SiteId) -> int:
        """As good as evenly spread below PRIME."""
        return int.from_bytes(hkdf(self.seed, statement("pad", site), 32), "little") % PRIME


def tag_of(vector: RingVector, block: int, keys: bytes, sites: int = 1) -> int:
    """A block's tag, and what Poly1305 would have made of zeros at all sites but one."""
    key, per_block = keys[block * WORD : (block + 1) * WORD], BLOCK_BYTES // vector.itemsize
    data = vector[block * per_block : (block + 1) * per_block].data.cast("B")
    tag = int.from_bytes(Poly1305.generate_tag(key + bytes(WORD), data), "little")
    return tag + (sites - 1) * of_zeros(key, len(data)) if sites > 1 else tag


def of_zeros(key: bytes, nbytes: int) -> int:
    """What Poly1305 makes of zeros, modulo PRIME: Σ of 2^128 times the powers of its key."""
    number = int.from_bytes(key, "little") & CLAMP
    words, rest = divmod(nbytes, WORD)
    powers = words if number == 1 else (pow(number, words, PRIME) - 1) * pow(number - 1, -1, PRIME)
    found = HIGHEST * number * powers
    return ((found + (1 << (8 * rest))) * number if rest else found) % PRIME
