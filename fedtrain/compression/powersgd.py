"""PowerSGD: each matrix as the product of two narrow ones, found by one power iteration a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from ..config.values import AtLeastOne
from .base import Compressor, Keystream, buffer_of, checked, sized
from .lowrank import matrices

if TYPE_CHECKING:
    from .base import Payload, State, Vector


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """P = orthonormalize(M·Q), Q ← Mᵀ·P, M̂ = P·Qᵀ (Vogels et al. 2019, Algorithm 1, for one sender).

    Q is kept from call to call, so that P finds the leading directions of matrices that change slowly. M̂ is M
    projected on `rank` directions: biased, a contraction; use it with error feedback. Matrices are as for
    lowrank; a matrix that is no larger than its P and Q is sent unchanged.
    Payload: P and Q of each matrix as float32.
    """

    rank: AtLeastOne = 4
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors in the vector; see shaped()

    @property
    def needs_feedback(self) -> bool:
        return True

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Self:
        return replace(self, shapes=tuple(shapes))

    def init(self, n: int) -> State:
        """A pseudo-random first Q."""
        import numpy as np
        import torch

        values = np.empty(
            sum(columns * self.rank for *_, columns, small in self._places(n) if small), np.int16
        )
        Keystream(0, "powersgd").fill(values)
        return {"q": torch.from_numpy(values).float().div_(1 << 15)}

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        import torch

        vector, r, done, parts = checked(vector), self.rank, 0, []
        old, new = state["q"], torch.empty_like(state["q"])
        for start, rows, columns, small in self._places(len(vector)):
            values = vector[start : start + rows * columns]
            if not small:
                parts.append(values)
                continue
            matrix, place = values.view(rows, columns), slice(done, done + columns * r)
            p = torch.linalg.qr(matrix @ old[place].view(columns, r)).Q
            q = torch.mm(matrix.T, p, out=new[place].view(columns, r))
            parts += [p.reshape(-1), q.view(-1)]
            done += columns * r
        return torch.cat(parts).view(torch.uint8), {"q": new}

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        import torch

        values, vector, r, at = sized(payload, self, n).view(torch.float32), buffer_of(n, out), self.rank, 0
        for start, rows, columns, small in self._places(n):
            there = vector[start : start + rows * columns]
            if small:
                p = values[at : at + rows * r].view(rows, r)
                q = values[at + rows * r : at + (rows + columns) * r].view(columns, r)
                torch.mm(p, q.T, out=there.view(rows, columns))
                at += (rows + columns) * r
            else:
                there.copy_(values[at : at + len(there)])
                at += len(there)
        return vector

    def bytes_for(self, n: int) -> int:
        r = self.rank
        return 4 * sum(
            (rows + cols) * r if small else rows * cols for _, rows, cols, small in self._places(n)
        )

    def _places(self, n: int) -> Iterator[tuple[int, int, int, bool]]:
        """(start, rows, columns, whether P and Q are smaller) of each matrix."""
        for start, rows, columns in matrices(self.shapes, n):
            yield start, rows, columns, (rows + columns) * self.rank < rows * columns
