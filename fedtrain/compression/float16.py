"""Half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Linear, buffer_of, checked, sized
from .blocks import CHUNK

if TYPE_CHECKING:
    from .base import Array, Payload, State, Vector


@dataclass(frozen=True)
class Float16(Linear):
    """2 bytes a value, rounded to the nearest: relative error at most 2⁻¹¹ from 6·10⁻⁵ on, absolute 3·10⁻⁸
    below. Values beyond ±65504 become ±65504.

    Under secure aggregation it is the identity, because the ring's bits decide the size there.
    """

    dtype: ClassVar[str] = "float16"
    largest: ClassVar[float] = 65504.0

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        import torch

        vector, scratch = checked(vector), torch.empty(CHUNK)
        narrow = torch.empty(len(vector), dtype=getattr(torch, self.dtype))
        for at in range(0, len(vector), CHUNK):
            there = narrow[at : at + CHUNK]
            part = vector[at : at + CHUNK]
            there.copy_(torch.clamp(part, -self.largest, self.largest, out=scratch[: len(part)]))
        return narrow.view(torch.uint8), state

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        import torch

        return buffer_of(n, out).copy_(sized(payload, self, n).view(getattr(torch, self.dtype)))

    def bytes_for(self, n: int) -> int:
        return 2 * n

    def project(self, vector: Array, seed: int) -> Array:
        return vector

    def lift(self, vector: Array, seed: int, n: int) -> Array:
        return vector

    def length(self, n: int) -> int:
        return n
