"""Scaled signs: one bit a value, and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Compressor, buffer_of, checked, sized
from .blocks import CHUNK, check_block, chunks, parts, scale_, scale_bytes

if TYPE_CHECKING:
    from .base import Payload, State, Vector


@dataclass(frozen=True)
class Sign(Compressor):
    """x̂ = mean |x| · sign(x) in each block (Karimireddy et al. 2019, scaled sign); 0 counts as positive.

    Biased: use it with error feedback. A contraction with δ = ‖x‖₁²/(n‖x‖₂²) in a block, which is 1/n at the
    worst and 0.64 for normal values.
    Payload: a float32 a block, then a bit a value, 1 for a negative value, the first in a byte's highest bit.
    """

    block: int = 4096  # values with one scale

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self.block)

    @property
    def needs_feedback(self) -> bool:
        return True

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        import numpy as np
        import torch

        vector = checked(vector)
        n, scratch = len(vector), torch.empty(CHUNK)
        payload = torch.empty(self.bytes_for(n), dtype=torch.uint8)
        scales, bits = parts(payload, n, self.block)
        for at, part in chunks(vector, self.block):
            sizes = torch.abs(part, out=scratch[: part.numel()].view(part.shape))
            sizes.mul_(1 / self.block)  # before the sum, which can't overflow so
            scales[at // self.block :][: len(part)] = sizes.sum(1)
            packed = torch.from_numpy(np.packbits(part.lt(0).view(-1).numpy()))
            there = bits[at // 8 :][: len(packed)]
            there.copy_(packed[: len(there)])
        if short := n % self.block:
            scales[-1] *= self.block / short
        return payload, state

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        import numpy as np
        import torch

        scales, bits = parts(sized(payload, self, n), n, self.block)
        vector = buffer_of(n, out)
        for at in range(0, n, CHUNK):
            there = vector[at : at + CHUNK]
            packed = bits[at // 8 :][: -(-len(there) // 8)]
            there.copy_(torch.from_numpy(np.unpackbits(packed.numpy(), count=len(there)))).mul_(-2).add_(1)
            scale_(there, scales[at // self.block :], self.block)
        return vector

    def bytes_for(self, n: int) -> int:
        return scale_bytes(n, self.block) + -(-n // 8)
