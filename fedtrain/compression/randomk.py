"""Random-k: a random part of the coordinates, which all senders draw from one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config.values import Fraction
from .base import Keystream, Linear

if TYPE_CHECKING:
    import numpy as np

    from .base import Array

    Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class RandomK(Linear):
    """One coordinate, drawn uniformly, of each of the k = ⌈fraction·n⌉ segments of the vector.

    `lift` multiplies a value by its segment's length (n/k), so it is unbiased. E‖x̂ − x‖² ≤ (⌈n/k⌉ − 1)‖x‖²,
    as for k coordinates drawn anywhere, but with one pass in memory order and no shuffle of n. Without the
    scale δ ≥ 1/⌈n/k⌉. Indices are not sent, so they reveal nothing about a site's values.
    Payload: k float32.
    """

    fraction: Fraction = 0.1
    unbiased: bool = True

    @property
    def needs_feedback(self) -> bool:
        return not self.unbiased

    def project(self, vector: Array, seed: int) -> Array:
        return vector[self._draw(len(vector), seed)[0]]

    def lift(self, vector: Array, seed: int, n: int) -> Array:
        import numpy as np

        places, lengths = self._draw(n, seed)
        lifted = np.zeros(n, dtype=vector.dtype)
        lifted[places] = vector * lengths.astype(vector.dtype) if self.unbiased else vector
        return lifted

    def contraction(self) -> RandomK:
        return replace(self, unbiased=False)

    def length(self, n: int) -> int:
        return min(n, math.ceil(self.fraction * n - 1e-9) or 1)

    def _draw(self, n: int, seed: int) -> tuple[Indices, Indices]:
        """(indices, lengths of the segments), [k] each. Uniform to n/k · 2⁻³²."""
        import numpy as np

        k = self.length(n)
        edges = np.arange(k + 1, dtype=np.int64) * n // max(1, k)
        lengths, draws = np.diff(edges), np.empty(k, dtype=np.uint32)
        Keystream(seed, "randomk").fill(draws)
        return edges[:-1] + ((draws.astype(np.int64) * lengths) >> 32), lengths
