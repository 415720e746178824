"""Checksums that add up, so that sites can tell a sum from what is only said to be one.

Each site adds to its vector a checksum of the vector, under a key that all sites of the session have and the
aggregator has not, and under a pad of its own. Masked vectors add up, and the checksums in them: whoever has
the key can hold the sum that the aggregator shows against the sum of the checksums.

A vector is read with q_max added to each value, modulo 2^r: so every value of a site is in [0, 2·q_max], and
the values of n sites add up below 2^r. Then the bytes of a sum are the sum of the bytes as numbers of 128
bits. Poly1305 (RFC 8439, 2.5) is a polynomial in its key over such numbers, modulo p = 2^130 - 5, so it adds
up too, but for the 2^128 that it adds to each number, and for its two highest bits, which a tag leaves out.
Each MiB has a key of its own, with 106 random bits.

Another sum passes for at most 3·blocks·(sites + 1) + 1 of the values that the two bits may make of p, and for
each with a chance of 2^16 / 2^106 at most, the roots of a polynomial of degree 2^16: below 2^-60 as long as
blocks · sites is below 2^27. That holds for any difference in any coordinate, and whatever the aggregator
can work out: because of the pads, what the sum's checksum is tells nothing of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.poly1305 import Poly1305

from ..messages import SiteId
from .fixedpoint import FixedPoint
from .keys import hkdf
from .masking import BLOCK_BYTES, Parallel, RingVector, buffers, exhaust, serial
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

    def of(self, vector: RingVector, site: SiteId) -> RingVector:
        """What a site adds to its vector, [point.digits(CHECKSUM_BITS)]."""
        number, bits = (self._tags(vector, 1) + self._pad(site)) % PRIME, self.point.limb_bits
        count = self.point.digits(CHECKSUM_BITS)
        return np.array([number >> (i * bits) & self.point.q_max for i in range(count)], self.point.dtype)

    def fits(self, total: RingVector, checksum: RingVector, sites: tuple[SiteId, ...]) -> bool:
        """Whether `total` is the sum of the vectors of these sites, whose checksums add up to `checksum`."""
        places = (1 << (i * self.point.limb_bits) for i in range(len(checksum)))
        found = sum(digit * place for digit, place in zip(checksum.tolist(), places, strict=True))
        blocks = range(-(-total.nbytes // BLOCK_BYTES))
        left = found - sum(map(self._pad, sites)) - self._tags(total, len(sites))
        left -= (len(sites) - 1) * sum(self._of_zeros(block, total.nbytes) for block in blocks)
        times = left * pow(HIGHEST, -1, PRIME) % PRIME
        most = LEFT_OUT * len(blocks)
        return bool(times <= most or PRIME - times <= most * len(sites))

    def _tags(self, vector: RingVector, sites: int) -> int:
        """Σ of the tags of all blocks, of a vector of one site or a sum of several."""
        per_block = BLOCK_BYTES // vector.itemsize
        offset = vector.dtype.type(sites * self.point.q_max)
        found: list[int] = []

        def add(block: int) -> None:
            part = vector[block * per_block : (block + 1) * per_block]
            with buffers.one() as buffer:
                data: Any = buffer[: part.nbytes].view(vector.dtype)
                np.add(part, offset, out=data)
                tag = Poly1305.generate_tag(self._key(block) + bytes(WORD), buffer.data[: part.nbytes])
            found.append(int.from_bytes(tag, "little"))

        with self.parallel(add, range(-(-len(vector) // per_block))) as mine:
            exhaust(mine)
        return sum(found)

    def _of_zeros(self, block: int, nbytes: int) -> int:
        """What Poly1305 makes of zeros, modulo PRIME: Σ of 2^128 times the powers of its key."""
        key = int.from_bytes(self._key(block), "little") & CLAMP
        words, rest = divmod(min(nbytes - block * BLOCK_BYTES, BLOCK_BYTES), WORD)
        powers = words if key == 1 else (pow(key, words, PRIME) - 1) * pow(key - 1, -1, PRIME)
        found = HIGHEST * key * powers
        return ((found + (1 << (8 * rest))) * key if rest else found) % PRIME

    def _key(self, block: int) -> bytes:
        return hkdf(self.seed, statement("checksum", block), WORD)

    def _pad(self, site: SiteId) -> int:
        """As good as evenly spread below PRIME."""
        return int.from_bytes(hkdf(self.seed, statement("pad", site), 32), "little") % PRIME
