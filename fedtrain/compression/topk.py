"""Top-k: the k largest values, and their indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..config.values import Fraction
from ..errors import BadUpdate
from .base import Compressor, buffer_of, checked, sized

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .base import Array, Payload, State, Vector

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Indices = np.ndarray[Any, np.dtype[np.int64]]

CHUNK = 1 << 16  # values compared at a time, so that they stay in a core's cache
SAMPLE = 1 << 17  # values from which the threshold is estimated


@dataclass(frozen=True)
class TopK(Compressor):
    """x̂ = x at the k = ⌈fraction·n⌉ largest |x|, 0 elsewhere; ties go to the first (Stich et al. 2018).

    Biased: use it with error feedback, never on parameters themselves. A contraction with δ ≥ k/n.
    Payload: the k values, as float32 or bfloat16, then their indices (see Places). Error feedback keeps the
    rounding errors of bfloat16 for the next call, like the smaller values.
    """

    fraction: Fraction = 0.01
    values: Literal["float32", "bfloat16"] = "float32"

    @property
    def needs_feedback(self) -> bool:
        return True

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        import torch

        vector = checked(vector)
        n, k = len(vector), self.count(len(vector))
        places, split = largest(vector.numpy(), k), k * self._dtype.itemsize
        payload = torch.empty(self.bytes_for(n), dtype=torch.uint8)
        payload[:split].view(self._dtype).copy_(torch.from_numpy(vector.numpy()[places]))
        payload[split:].copy_(torch.from_numpy(Places.of(n, k).encode(places)))
        return payload, state

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        k = self.count(n)
        data, split = sized(payload, self, n), k * self._dtype.itemsize
        places = Places.of(n, k).decode(data[split:].numpy())
        vector = buffer_of(n, out).zero_()
        vector.numpy()[places] = data[:split].view(self._dtype).float().numpy()
        return vector

    def bytes_for(self, n: int) -> int:
        k = self.count(n)
        return k * self._dtype.itemsize + Places.of(n, k).nbytes

    def count(self, n: int) -> int:
        """k for a vector of n: at least 1 where n is not 0."""
        return min(n, math.ceil(self.fraction * n - 1e-9) or 1)

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.values == "bfloat16" else torch.float32


@dataclass(frozen=True)
class Places:
    """A code for k rising numbers below n in about k·(2 + log₂ n/k) bits, whatever the numbers (Elias 1974).

    The `low` lowest bits of each number are stored in planes: all first bits, then all second ones. The high
    part of the i-th number, h, is stored as a 1 at position h + i of a row of bits.
    """

    n: int
    k: int
    low: int

    @classmethod
    def of(cls, n: int, k: int) -> Places:
        """The code for k places of n."""
        return cls(n, k, (n // k).bit_length() - 1) if k else cls(n, 0, 0)

    @property
    def nbytes(self) -> int:
        """The length of the code."""
        return self.low * self._plane + -(-self._row // 8)

    @property
    def _plane(self) -> int:
        """Bytes of a plane, which has one bit of each number."""
        return -(-self.k // 8)

    @property
    def _row(self) -> int:
        """Bits of the row, which has the high parts."""
        return self.k + ((self.n - 1) >> self.low) if self.k else 0

    def encode(self, places: Indices) -> Bytes:
        """The bytes of k rising numbers below n."""
        import numpy as np

        row = np.zeros(self._row, dtype=bool)
        row[(places >> self.low) + np.arange(self.k)] = True
        planes = [np.packbits((places & (1 << bit)) != 0) for bit in range(self.low)]
        return np.concatenate([*planes, np.packbits(row)])

    def decode(self, data: Bytes) -> Indices:
        """The numbers in the bytes; BadUpdate unless there are k of them, rising and below n."""
        import numpy as np

        row = np.flatnonzero(np.unpackbits(data[self.low * self._plane :], count=self._row))
        if len(row) == self.k:
            places: Indices = (row - np.arange(self.k)) << self.low
            for bit in range(self.low):
                plane = data[bit * self._plane : (bit + 1) * self._plane]
                places |= np.unpackbits(plane, count=self.k).astype(np.int64) << bit
            if not self.k or (places[-1] < self.n and bool((places[1:] > places[:-1]).all())):
                return places
        raise BadUpdate(
            f"the places of the {self.k} largest values are not {self.k} rising numbers below {self.n}"
        )


def largest(values: Array, k: int) -> Indices:
    """The indices of the k largest |values|, rising; ties go to the first. Exact.

    Values are not sorted: a sample gives a threshold that a few more than k values should reach, one pass
    selects those, and the k largest are chosen among them. When too few reach it, the threshold is lowered.
    """
    import numpy as np

    n = len(values)
    if k == 0 or k >= n:
        return np.arange(k)
    sample = np.sort(np.abs(values[:: max(1, n // SAMPLE)]))
    expected = k / n * len(sample)
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    while True:
        threshold = sample[-rank] if rank <= len(sample) else np.float32(0)
        places = _reaching(values, threshold)
        if len(places) >= k:
            break
        rank *= 2
    sizes = np.abs(values[places])
    last = np.partition(sizes, len(sizes) - k)[len(sizes) - k]
    chosen = sizes > last
    chosen[np.flatnonzero(sizes == last)[: k - int(chosen.sum())]] = True
    kept: Indices = places[chosen]
    return kept


def _reaching(values: Array, threshold: np.float32) -> Indices:
    """Indices with |value| >= threshold."""
    import numpy as np

    sizes, found = np.empty(min(CHUNK, len(values)), dtype=values.dtype), []
    for at in range(0, len(values), CHUNK):
        part = values[at : at + CHUNK]
        found.append(np.flatnonzero(np.abs(part, out=sizes[: len(part)]) >= threshold) + at)
    return np.concatenate(found)
