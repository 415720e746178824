"""The k largest values, and where they were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import require
from ..errors import BadUpdate
from .base import Compressor, checked, room, sized

if TYPE_CHECKING:
    import numpy as np

    from .base import Array, Payload, State, Vector

    Indices = np.ndarray[Any, np.dtype[np.int64]]

CHUNK = 1 << 16  # values looked at at a time, so that they stay in a core's cache
SAMPLE = 1 << 17  # values from which the threshold is guessed


@dataclass(frozen=True)
class TopK(Compressor):
    """x̂ = x at the k = ⌈fraction·n⌉ largest |x|, 0 elsewhere; of equal ones the first (Stich et al. 2018).

    Biased: use it with error feedback, never on parameters themselves. A contraction with δ ≥ k/n.
    Payload: k float32, then their places, as int32 or as one bit for each of n, whichever is less.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        require(0 < self.fraction <= 1, "compression.fraction", f"{self.fraction} must be in (0, 1]")

    @property
    def needs_feedback(self) -> bool:
        return True

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        import numpy as np
        import torch

        values = checked(vector).numpy()
        n, k = len(values), self.count(len(values))
        places = largest(values, k)
        payload = np.empty(self.bytes_for(n), dtype=np.uint8)
        payload[: 4 * k].view(np.float32)[:] = values[places]
        if self._by_bits(n):
            there = np.zeros(n, dtype=bool)
            there[places] = True
            payload[4 * k :] = np.packbits(there)
        else:
            payload[4 * k :].view(np.int32)[:] = places
        return torch.from_numpy(payload), state

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        import numpy as np

        k, data = self.count(n), sized(payload, self, n).numpy()
        if self._by_bits(n):
            places = np.flatnonzero(np.unpackbits(data[4 * k :], count=n))
            good = len(places) == k
        else:
            places = data[4 * k :].view(np.int32)
            good = not k or (places[0] >= 0 and places[-1] < n and bool((places[1:] > places[:-1]).all()))
        if not good:
            raise BadUpdate(f"the places of the {k} largest values are not {k} rising numbers below {n}")
        vector = room(n, out).zero_()
        vector.numpy()[places] = data[: 4 * k].view(np.float32)
        return vector

    def bytes_for(self, n: int) -> int:
        k = self.count(n)
        return 4 * k + (-(-n // 8) if self._by_bits(n) else 4 * k)

    def count(self, n: int) -> int:
        """k: at least 1, where there is one."""
        return min(n, math.ceil(self.fraction * n - 1e-9) or 1)

    def _by_bits(self, n: int) -> bool:
        return -(-n // 8) < 4 * self.count(n) or n >= 2**31


def largest(values: Array, k: int) -> Indices:
    """The places of the k largest |values|, rising; of equal ones the first. Exact.

    No sort: a sample gives a threshold that a few more than k should reach, those are picked in one pass, and
    the exact k among them. When too few reach it, the threshold is lowered.
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
    """Places with |value| >= threshold."""
    import numpy as np

    sizes, found = np.empty(min(CHUNK, len(values)), dtype=values.dtype), []
    for at in range(0, len(values), CHUNK):
        part = values[at : at + CHUNK]
        found.append(np.flatnonzero(np.abs(part, out=sizes[: len(part)]) >= threshold) + at)
    return np.concatenate(found)
