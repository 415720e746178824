"""Fixed point: a site's numbers as integers modulo 2^r, whose sum over all sites cannot wrap.

A site's vector in the ring is [coordinates | scalars].

**Coordinates** are (w/w_max)·Δ, one ring element each, so that a site's weight w never shows. x becomes
floor(clip(x, ±c) · q_max/c + u), where q_max = 2^(b−1) − 1 and u is uniform in [0, 1): right in expectation,
off by less than one step, c/q_max. So the mean over n sites of equal weight is off by a standard deviation
of at most step/(2√n). u is an odd multiple of 2^-16, of 2^-10 where a float has no more bits beside b, and
comes from the AES keystream of a seed: a simulated site rounds as the real one does.

**Scalars** must add up exactly: the weight itself, counts, sums of metrics, a model's buffers. round(x·2^20)
is cut into limbs of b − 1 bits, the top one signed, which add up without carrying. 20 bits below the point
and 42 above it hold counts and sums up to 4·10^12, to a millionth.

Both lie within ±q_max, so n sites cannot wrap if n·q_max <= 2^(r−1) − 1: checked when a FixedPoint is made.
Where sums have checksums, q_max is added to each integer of a site: then none is negative, and none wraps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arena import AnyArena
from ..errors import ConfigError, SecAggError
from ..schema import Section
from .masking import (
    BLOCK_BYTES,
    KEY_BYTES,
    RINGS,
    TAG_BYTES,
    Buffers,
    Parallel,
    RingVector,
    exhaust,
    keystream,
    serial,
)

MIN_VALUE_BITS = 4
MAX_VALUE_BITS = 43  # leaves 10 of float64's 53 bits to u
RANDOM_BYTES = 2  # of keystream for each coordinate
PER_BLOCK = BLOCK_BYTES // RANDOM_BYTES  # coordinates that one block of the keystream rounds
ONE = 2**20  # a scalar of 1.0
SCALAR_LIMIT = 2**62 // ONE  # of a scalar's magnitude at one site

Floats = NDArray[np.floating[Any]]  # 1-D, rows of these 2-D
Counts = NDArray[np.int64]  # 1-D
Read = Callable[[int, int], AbstractContextManager[Floats]]  # (start, stop) -> these, while it is open


@dataclass(frozen=True)
class FixedPoint:
    """How numbers become integers that add up; alike at all sites of a session and the aggregator."""

    sites: int  # n, the most that are summed
    ring_bits: int  # r: 16, 32 or 64
    clip: float  # c, the bound on a coordinate of (w/w_max)·Δ
    max_weight: float  # w_max
    value_bits: int = 0  # b; 0: as many as n sites leave in the ring
    # Each integer of a site has q_max added to it. Not in repr(), of which keys of noise are made.
    unsigned: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        n, r = self.sites, self.ring_bits
        _require(r in RINGS, f"ring_bits = {r} must be one of {', '.join(map(str, RINGS))}")
        _require(n >= 1, f"a sum over {n} sites; there must be one at least")
        _require(0 < self.clip < float("inf"), f"clip = {self.clip:g} must be positive and finite")
        _require(1 / ONE <= self.max_weight <= SCALAR_LIMIT,
                 f"max_weight = {self.max_weight:g} must be in 1e-6..{SCALAR_LIMIT:.3g}")  # fmt: skip
        fit = (((1 << (r - 1)) - 1) // n + 1).bit_length()
        if self.value_bits == 0:
            object.__setattr__(self, "value_bits", min(fit, MAX_VALUE_BITS))
        b = self.value_bits
        advice = f"Raise ring_bits above {r}, or sum fewer sites." if r < 64 else "Sum fewer sites."
        _require(b >= MIN_VALUE_BITS, f"{n} sites in a ring of {r} bits leave {b} bits a value, "
                 f"{MIN_VALUE_BITS} are the least that is of use. {advice}")  # fmt: skip
        _require(b <= MAX_VALUE_BITS, f"value_bits = {b} is more than float64 can round: "
                 f"{MAX_VALUE_BITS} is the most. Lower it, or leave it at 0.")  # fmt: skip
        _require(n * self.q_max < 1 << (r - 1),
                 f"{n} sites of value_bits = {b} could sum to {n * self.q_max}, and {r} bits hold "
                 f"{(1 << (r - 1)) - 1}: the sum would wrap. Lower value_bits to {min(fit, MAX_VALUE_BITS)}, "
                 f"or leave it at 0.")  # fmt: skip

    @property
    def q_max(self) -> int:
        """The largest integer that one site sends."""
        return (1 << (self.value_bits - 1)) - 1

    @property
    def weight_unit(self) -> float:
        """What one unit of a weight's scalar stands for: 2^-20, or less where all weights are below 1."""
        return min(1.0, 2.0 ** math.ceil(math.log2(self.max_weight))) / ONE

    def bits(self, weight: float) -> float:
        """How many bits a coordinate at the bound keeps that counts with this weight: as many as its integer
        has, and not more than the weight's own."""
        share = min(weight / self.max_weight * self.q_max, weight / self.weight_unit)
        return math.log2(share) if share > 0 else 0.0

    @property
    def zero(self) -> int:
        """The integer that stands for 0."""
        return self.q_max if self.unsigned else 0

    @property
    def step(self) -> float:
        """What one unit of the integers stands for in a coordinate of (w/w_max)·Δ."""
        return self.clip / self.q_max

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a vector in the ring: uint16, uint32 or uint64."""
        return RINGS[self.ring_bits]

    # --- Coordinates

    def encode_into(
        self,
        read: Read,
        weight: float,
        seed: bytes,
        out: RingVector,
        offset: int = 0,
        parallel: Parallel = serial,
    ) -> int:
        """Coordinates offset, offset + 1, .. of a site's Δ into the ring; how many were clipped.

        `read(start, stop)` gives a part of them, counted from 0, to the thread that works on it. The integers
        are the same whichever parts they are made in. `seed` [16 bytes]: another one for each update.
        SecAggError for a `weight` out of (0, max_weight] and for a value that is not finite.
        """
        assert len(seed) == KEY_BYTES
        assert out.ndim == 1
        assert out.dtype == self.dtype
        self._check_weight(weight)
        clipped: list[int] = []

        def encode(block: int) -> None:
            start, stop = max(block * PER_BLOCK, offset), min((block + 1) * PER_BLOCK, offset + len(out))
            with (
                _noise.one() as noise,
                _scratch.one() as scratch,
                read(start - offset, stop - offset) as values,
                np.errstate(over="ignore"),
            ):
                assert values.shape == (stop - start,)
                keystream(seed, block, noise, (stop - block * PER_BLOCK) * RANDOM_BYTES)
                random = noise[:BLOCK_BYTES].view("<i2")[start - block * PER_BLOCK : stop - block * PER_BLOCK]
                integers, count = self._round(values[None], np.array([weight]), random[None], scratch)
                part = out[start - offset : stop - offset].view(f"i{out.itemsize}")
                np.copyto(part, integers[0], casting="unsafe")
                clipped.append(int(count[0]))

        if len(out):
            with parallel(encode, range(offset // PER_BLOCK, -(-(offset + len(out)) // PER_BLOCK))) as mine:
                exhaust(mine)
        return sum(clipped)

    def add_rows(
        self,
        rows: Floats,
        weights: NDArray[np.float64],
        seeds: Sequence[bytes],
        out: RingVector,
        offset: int = 0,
    ) -> Counts:
        """out [n] += Σ of what `encode_into` makes of each of `rows` [k, n]; how many were clipped [k].

        Faster than one by one for small models, whose coordinates lie in one block: offset + n <= PER_BLOCK.
        SecAggError for a value that is not finite; some rows may be in `out` then.
        """
        assert rows.shape == (len(seeds), len(out))
        assert weights.shape == (len(seeds),)
        assert all(len(seed) == KEY_BYTES for seed in seeds)
        assert out.dtype == self.dtype
        drawn = offset + len(out)  # coordinates of each row that random bits are drawn for
        counts, nbytes, at_once = [], drawn * RANDOM_BYTES, PER_BLOCK // drawn
        sums = out.view(f"i{out.itemsize}")
        with _noise.one() as noise, _scratch.one() as scratch, np.errstate(over="ignore"):
            for at in range(0, len(seeds), at_once):
                some = seeds[at : at + at_once]
                for i, seed in enumerate(some):
                    keystream(seed, 0, noise[i * nbytes :], nbytes)
                random = noise[: len(some) * nbytes].view("<i2").reshape(len(some), drawn)[:, offset:]
                integers, count = self._round(
                    rows[at : at + at_once], weights[at : at + at_once], random, scratch
                )
                sums += integers.sum(axis=0).astype(sums.dtype)
                counts.append(count)
        return np.concatenate(counts)

    def _round(self, x: Floats, weights: NDArray[np.float64], random: NDArray[np.int16],
               scratch: NDArray[np.uint8]) -> tuple[NDArray[np.signedinteger[Any]], Counts]:  # fmt: skip
        """Rows [k, n] of a block or less as integers, modulo 2^r or more; how many of each row were clipped.

        They are held `bits` bits higher than they go out, where u − ½ is an odd integer. A float of
        1.5 · 2^(mantissa − 1 + bits) has 2^bits as its last place: what is added to it is rounded to the
        integer wanted, which is then in its low bits. Scaling, floor and conversion take longer.
        """
        kind, mantissa = (np.float32, 24) if self.value_bits <= 14 else (np.float64, 53)
        bits = min(16, mantissa - self.value_bits)
        limit, shift = self.q_max << bits, kind(1.5 * 2.0 ** (mantissa - 1 + bits))
        scales = (weights / self.max_weight / self.step * 2.0**bits).astype(kind)
        values: Floats = scratch.view(kind)
        y = values[: x.size].reshape(x.shape)
        if x.itemsize < 4:
            x = x.astype(np.float32)  # numpy's minimum of float16 takes twenty times as long
        np.multiply(x, scales[:, None], out=y, casting="same_kind")
        clipped = np.zeros(len(x), np.int64)
        least, most = x.min(axis=1).astype(kind) * scales, x.max(axis=1).astype(kind) * scales
        for i in np.flatnonzero(~((least >= -limit) & (most <= limit))):
            if not np.isfinite(x[i]).all():
                raise SecAggError(
                    "an update with values that are not finite can't be summed: look for NaN in the data, or "
                    "lower train.lr"
                )
            beyond = limit + (1 << bits) / 2  # not those just beside ±c
            clipped[i] = np.count_nonzero(np.abs(y[i]) > beyond)
            np.clip(y[i], -limit, limit, out=y[i])
        if bits < 16:
            random >>= 16 - bits
        random |= 1
        np.add(y, random, out=y)
        y += kind(float(shift) + self.zero * 2.0**bits)
        integers = y.view(f"i{y.itemsize}")
        if self.dtype.itemsize >= y.itemsize:
            integers -= shift.view(integers.dtype)  # whose own bits a narrower ring doesn't see
        return integers, clipped

    def weight(self, weight: float) -> float:
        """A site's weight as it counts: the multiple of weight_unit that its scalar can say."""
        self._check_weight(weight)
        return max(1, round(weight / self.weight_unit)) * self.weight_unit

    def _check_weight(self, weight: float) -> None:
        if not 0 < weight <= self.max_weight:
            raise SecAggError(
                f"a weight of {weight:g}, and it must be in (0, {self.max_weight:g}]. "
                f"Raise the bound at the aggregator and all sites."
            )

    def decode_into(
        self, total: RingVector, sites: int, weights: float, out: Floats, parallel: Parallel = serial
    ) -> None:
        """The weighted mean Σ wΔ / Σ w from the sum of `sites` encoded vectors, into floats of any size.

        `weights` is Σ w, which came as a scalar. SecAggError for a sum that so many sites can't make.
        """
        assert total.shape == out.shape
        assert total.dtype == self.dtype
        if not weights > 0:
            raise SecAggError(f"the weights of {sites} sites sum to {weights:g}, so they have no mean")
        factor = self.step * self.max_weight / weights

        def decode(block: int) -> None:
            these = slice(block * PER_BLOCK, (block + 1) * PER_BLOCK)
            part = self._signed(total[these], sites)
            self._check_sums(part, sites)
            np.multiply(part, factor, out=out[these], dtype=np.float64, casting="unsafe")

        with parallel(decode, range(-(-len(out) // PER_BLOCK))) as mine:
            exhaust(mine)

    def decode(self, total: RingVector, sites: int, weights: float) -> NDArray[np.float64]:
        """The same as new float64 numbers."""
        mean = np.empty(len(total))
        self.decode_into(total, sites, weights, mean)
        return mean

    def _signed(self, sums: RingVector, sites: int) -> NDArray[np.signedinteger[Any]]:
        """Without what was added at each site."""
        if self.unsigned:
            sums = sums - sums.dtype.type(sites * self.zero)
        return sums.view(f"i{sums.itemsize}")

    def _check_sums(self, sums: NDArray[np.signedinteger[Any]], sites: int) -> None:
        most = sites * self.q_max
        if len(sums) and not (-most <= sums.min() and sums.max() <= most):
            raise SecAggError(
                f"a sum has values from {sums.min()} to {sums.max()}, and its {sites} sites can reach "
                f"±{most} at most: one of them sent what no update gives, or masked for another model"
            )

    # --- Scalars

    @property
    def limb_bits(self) -> int:
        return self.value_bits - 1

    @property
    def limbs(self) -> int:
        """Ring elements that each scalar takes: enough for 64 bits."""
        return self.digits(64)

    def digits(self, bits: int) -> int:
        """Ring elements of a number of so many bits, cut into limbs that add up without carrying."""
        return -(-bits // self.limb_bits)

    def encode_scalars(
        self, values: NDArray[np.float64], name: Callable[[int], str] = "scalar {}".format
    ) -> RingVector:
        """Numbers [.., m] whose sums must be exact, as ring elements [.., limbs · m].

        SecAggError for one that is not finite or beyond ±4.4e12; name(i) says which.
        """
        bad = np.argwhere(~(np.abs(values) <= SCALAR_LIMIT))
        if len(bad):
            raise SecAggError(  # which the aggregator reads, so without the number
                f"{name(int(bad[0, -1]))} is not finite, or too large: sums are kept for ±{SCALAR_LIMIT:.3g} "
                f"at each site"
            )
        whole = np.rint(values * ONE).astype(np.int64)
        digits = [whole >> (i * self.limb_bits) for i in range(self.limbs)]
        low = [digit & self.q_max for digit in digits[:-1]]
        return (np.concatenate([*low, digits[-1]], axis=-1) + self.zero).astype(self.dtype)

    def decode_scalars(self, total: RingVector, sites: int) -> NDArray[np.float64]:
        """Σ over sites of each scalar, rounded once, to float64; from the sum of `sites` encoded vectors."""
        signed = self._signed(total, sites)
        self._check_sums(signed, sites)
        columns = signed.reshape(self.limbs, -1).T.tolist()
        places = [1 << (i * self.limb_bits) for i in range(self.limbs)]
        return np.array([sum(map(mul, limbs, places)) / ONE for limbs in columns], np.float64)


def held(values: Floats) -> Read:
    """Reads numbers that are in memory."""
    return lambda start, stop: nullcontext(values[start:stop])


def reading(arena: AnyArena, section: Section, first: int = 0) -> Read:
    """Reads the coordinates of a section from `first` on, at most PER_BLOCK at a time."""

    @contextmanager
    def read(start: int, stop: int) -> Iterator[Floats]:
        with _read.one() as buffer:
            yield numbers(arena, section, first + start, first + stop, buffer.data)

    return read


def numbers(
    arena: AnyArena, section: Section, start: int, stop: int, buffer: memoryview | None = None
) -> NDArray[Any]:
    """Coordinates [start, stop) of a section, read-only and only until the next call; bfloat16 as float32.
    `buffer`: as in AnyArena.span."""
    span = arena.span(section, start, stop, buffer)
    if section.dtype == "bfloat16":
        return (np.frombuffer(span, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(span, section.dtype)


_read = Buffers(PER_BLOCK * 8)
_noise = Buffers(BLOCK_BYTES + TAG_BYTES)
_scratch = Buffers(PER_BLOCK * 8)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"secagg: {message}")
