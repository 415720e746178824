"""Integers of 8, 4 or 2 bits, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .base import Compressor, Keystream, buffer_of, checked, sized
from .blocks import CHUNK, check_block, chunks, parts, scale_, scale_bytes

if TYPE_CHECKING:
    import torch

    from .base import Payload, State, Vector

SMALLEST = 1e-36  # a block below this is sent as zeros: its scale has no reciprocal in float32


@dataclass(frozen=True)
class Quantize(Compressor):
    """q = floor(x·L/s + u), x̂ = q·s/L with s = max |x| in the block, L = 2^(bits − 1) − 1 and u uniform.

    Stochastic rounding (Alistarh et al. 2017, §3.1, with the largest value for the norm) is unbiased:
    E x̂ = x to 2⁻¹⁷ of a step, |x̂ − x| < s/L, and its variance is at most (s/2L)² a value. Rounding to the
    nearest (u = ½) is biased, |x̂ − x| ≤ s/2L and ≤ |x|, and δ ≥ 1/block.
    Payload: a float32 a block (s/L), then the integers in two's complement, 1, 2 or 4 in a byte, the first in
    its lowest bits.
    """

    bits: Literal[2, 4, 8] = 8
    block: int = 1024  # values with one scale: a smaller block is more exact, and costs 32/block bits a value
    unbiased: bool = True  # stochastic rounding; false: to the nearest

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self.block)

    @property
    def needs_feedback(self) -> bool:
        return not self.unbiased

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        import numpy as np
        import torch

        vector, levels = checked(vector), (1 << (self.bits - 1)) - 1
        payload = torch.empty(self.bytes_for(len(vector)), dtype=torch.uint8)
        scales, codes = parts(payload, len(vector), self.block)
        scratch, dither = torch.empty(CHUNK), torch.empty(CHUNK)
        stream, draws = Keystream(seed, "quantize"), np.empty(CHUNK, dtype=np.int16)
        for at, part in chunks(vector, self.block):
            steps = scratch[: part.numel()].view(part.shape)
            largest = torch.abs(part, out=steps).amax(1)
            scales[at // self.block :][: len(part)] = largest / levels
            factor = torch.where(largest < SMALLEST, 0.0, levels / largest)
            torch.mul(part, factor[:, None], out=steps)
            if self.unbiased:
                stream.fill(draws[: steps.numel()])  # u - ½: the sum is rounded below, not floored
                dither.copy_(torch.from_numpy(draws))
                steps.view(-1).add_(dither[: steps.numel()], alpha=2.0**-16)
            _pack(steps.round_().clamp_(-levels, levels).view(-1), self.bits, codes[at * self.bits // 8 :])
        return payload, state

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        scales, codes = parts(sized(payload, self, n), n, self.block)
        vector = buffer_of(n, out)
        for at in range(0, n, CHUNK):
            there = vector[at : at + CHUNK]
            _unpack(codes[at * self.bits // 8 :], self.bits, there)
            scale_(there, scales[at // self.block :], self.block)
        return vector

    def bytes_for(self, n: int) -> int:
        return scale_bytes(n, self.block) + -(-n * self.bits // 8)

    def contraction(self) -> Quantize:
        return replace(self, unbiased=False)


WORDS = {4: ("int16", 0x0F0F), 2: ("int32", 0x03030303)}  # bits -> the integer for one byte of codes, a mask


def _pack(steps: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Write `steps` (whole numbers in float32, a multiple of 8 of them) to `out` as codes of `bits` each."""
    import torch

    count = min(len(out), len(steps) * bits // 8)
    if bits == 8:
        out[:count].view(torch.int8).copy_(steps[:count])
        return
    word, mask = WORDS[bits]
    spread = steps.to(torch.int8).view(getattr(torch, word)).bitwise_and_(mask)
    packed = spread.clone()
    for i in range(1, 8 // bits):
        packed |= spread >> (i * (8 - bits))
    out[:count].copy_(packed.view(torch.uint8)[:: 8 // bits][:count])


def _unpack(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Read the first len(out) codes of `packed` into `out` as float32."""
    import torch

    packed = packed[: -(-len(out) * bits // 8)]
    if bits == 8:
        out.copy_(packed.view(torch.int8))
        return
    word, mask = WORDS[bits]
    bytes_ = packed.to(getattr(torch, word))
    spread = bytes_.clone()
    for i in range(1, 8 // bits):
        spread |= bytes_ << (i * (8 - bits))
    sign = 1 << (bits - 1)
    codes = spread.bitwise_and_(mask).view(torch.int8).bitwise_xor_(sign).sub_(sign)
    out.copy_(codes[: len(out)])
