"""Low-rank projections: each matrix times a narrow random matrix that all senders draw from one seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from ..config.values import AtLeastOne
from .base import Keystream, Linear

if TYPE_CHECKING:
    from .base import Array


@dataclass(frozen=True)
class LowRank(Linear):
    """P = M·B with B random [columns, rank]; M̂ = P·Bᵀ, which is unbiased since E BBᵀ = I.

    Each row of B has a single entry, ±1: column j of M is added into, or taken from, column j mod rank of P.
    So B costs one random bit a column, the product one pass over M, and no error is lower for a P of this
    size: E‖M̂ − M‖² ≤ (⌈columns/rank⌉ − 1)‖M‖², what random orthonormal columns give. Without the scale (each
    column of B divided by its length) it is the orthogonal projection, with δ ≥ 1/⌈columns/rank⌉.

    A tensor is a matrix of its first dimension by all others. Matrices with no more columns than the rank,
    so biases and scalars too, are sent unchanged. Without shapes the vector is one nearly square matrix.
    Payload: P of each matrix as float32, one after the other.
    """

    rank: AtLeastOne = 4
    unbiased: bool = True
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors in the vector; see shaped()

    @property
    def needs_feedback(self) -> bool:
        return not self.unbiased

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Self:
        return replace(self, shapes=tuple(shapes))

    def project(self, vector: Array, seed: int) -> Array:
        import numpy as np

        n = len(vector)
        projected, at = np.empty(self.length(n), dtype=vector.dtype), 0
        for (start, rows, columns), basis in self._bases(n, seed, vector.dtype):
            matrix = vector[start : start + rows * columns].reshape(rows, columns)
            width = matrix.shape[1] if basis is None else self.rank
            out = projected[at : at + rows * width].reshape(rows, width)
            if basis is None:
                out[:] = matrix
            else:
                np.matmul(matrix, basis, out=out)
            at += out.size
        return projected

    def lift(self, vector: Array, seed: int, n: int) -> Array:
        import numpy as np

        lifted, at = np.empty(n, dtype=vector.dtype), 0
        for (start, rows, columns), basis in self._bases(n, seed, vector.dtype):
            out = lifted[start : start + rows * columns].reshape(rows, columns)
            width = columns if basis is None else self.rank
            part = vector[at : at + rows * width].reshape(rows, width)
            if basis is None:
                out[:] = part
            else:
                back = basis if self.unbiased else basis / np.abs(basis).sum(0)
                np.matmul(part, back.T, out=out)
            at += part.size
        return lifted

    def length(self, n: int) -> int:
        return sum(rows * min(columns, self.rank) for _, rows, columns in matrices(self.shapes, n))

    def contraction(self) -> LowRank:
        return replace(self, unbiased=False)

    def _bases(self, n: int, seed: int, dtype: object) -> Iterator[tuple[tuple[int, int, int], Array | None]]:
        """Every matrix as (start, rows, columns), with its B; None for a matrix that is sent unchanged."""
        import numpy as np

        stream = Keystream(seed, "lowrank")
        for place in matrices(self.shapes, n):
            columns = place[2]
            if columns <= self.rank:
                yield place, None
                continue
            bits, each = np.empty(columns, dtype=np.uint8), np.arange(columns)
            stream.fill(bits)
            basis = np.zeros((columns, self.rank), dtype=dtype)  # type: ignore[call-overload]  # a dtype
            basis[each, each % self.rank] = np.where(bits & 1, 1, -1)
            yield place, basis


def matrices(shapes: Sequence[tuple[int, ...]], n: int) -> list[tuple[int, int, int]]:
    """(start, rows, columns) of each tensor in a vector of n; a tensor of one dimension is a column.

    Without shapes: one nearly square matrix, and a column of the values left over.
    """
    if not shapes:
        rows = math.isqrt(n)
        columns = n // max(1, rows)
        return [(0, rows, columns), (rows * columns, n - rows * columns, 1)]
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else size
        found.append((start, rows, size // rows if rows else 0))
        start += size
    assert start == n, f"the shapes hold {start} values, the vector {n}"
    return found
