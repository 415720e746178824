"""Discrete Gaussian noise on integers in the ring, each site's part of the noise that a sum has.

Sites add noise before they mask, so nobody sees the sum without it (Kairouz, Liu, Steinke 2021). The sum of n
such noises of variance s² has variance n·s², and hides as much as one discrete Gaussian of that variance
where s is MIN_STD or more: what it hides less is below 10·n·d·exp(-π²s²) (Theorem 1, τ), less than 1e-50.

A number is drawn by rejection from a discrete Laplace distribution (Canonne, Kamath, Steinke 2020, Algorithm
3) whose scale is a power of two, from the AES keystream of a key: in integers but for the probability of
acceptance, which float64 has to 2^-52.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from .masking import KEY_BYTES, Parallel, RingVector, exhaust, serial

BLOCK = 1 << 15  # numbers that come from one stream, so that threads can share the work
WORDS = 3  # 64-bit words for each number that is proposed
ACCEPTED = 0.4  # at least, of the proposed
MIN_STD = 4.0  # of one site's noise, in units of the integers


@dataclass(frozen=True)
class DiscreteGaussian:
    """N_Z(0, std²) on each coordinate: an integer x has a probability proportional to exp(-x²/2std²)."""

    std: float
    coordinates: int  # the first elements of a vector, which get noise

    def add_to(self, vector: RingVector, key: bytes, parallel: Parallel = serial) -> None:
        """vector += noise modulo 2^r, the same whichever threads work. `key` [16 bytes]: another one for each
        vector, unknown to whoever reads the sum."""
        assert len(key) == KEY_BYTES
        whole = vector[: self.coordinates]

        def add(block: int) -> None:
            part = whole[block * BLOCK : (block + 1) * BLOCK]
            noise = self.draw(hashlib.sha256(key + block.to_bytes(8, "big")).digest(), len(part))
            with np.errstate(over="ignore"):
                part += noise.astype(part.dtype)

        with parallel(add, range(-(-len(whole) // BLOCK))) as mine:
            exhaust(mine)

    def draw(self, key: bytes, count: int) -> NDArray[np.int64]:
        """Independent numbers [count] from the stream of a key."""
        stream: Any = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        bits = max(0, round(math.log2(self.std)))  # of t, the Laplace distribution's scale
        found: list[NDArray[np.int64]] = []
        missing = count
        while missing > 0:
            proposed = int(missing / ACCEPTED) + 16
            words = np.frombuffer(stream.update(bytes(8 * WORDS * proposed)), "<u8").reshape(WORDS, -1)
            found.append(self._accepted(words, bits)[:missing])
            missing -= len(found[-1])
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _accepted(self, words: NDArray[np.uint64], bits: int) -> NDArray[np.int64]:
        """±(u + t·v): u uniform in [0, t), v geometric with P(v) ∝ e^-v, where exp(v − x²/2std² − std²/2t²)
        is more than a uniform number. That is at most 1, and −0 is left out, so 0 has no probability too
        much."""
        first, second, third = words
        negative, uniform = first >> np.uint64(63), first & np.uint64((1 << bits) - 1)
        turns = np.floor(-np.log((second + 1.0) * 2.0**-64))
        size = uniform.astype(np.int64) + (turns.astype(np.int64) << bits)
        exponent = turns - (size / self.std) ** 2 / 2 - (self.std / (1 << bits)) ** 2 / 2
        taken = (third < np.exp(exponent) * 2.0**64) & ~((negative == 1) & (size == 0))
        found: NDArray[np.int64] = np.where(negative == 1, -size, size)[taken]
        return found
