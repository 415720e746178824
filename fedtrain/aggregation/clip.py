"""Norm clipping: an update that is too long is shortened, not refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ..config.values import Positive
from .base import Stack
from .before import Mixed, PreAggregation

T = TypeVar("T")


@dataclass(frozen=True)
class Clip(PreAggregation):
    """x·min(1, norm/‖x‖₂), the norm over all floats as in limits.max_norm (Sun et al. 2019, §3.2).

    One pass. How much each update counts stays as it is, so that `mean` weights by examples.
    """

    norm: Positive  # L2 norm to which a longer update is shortened

    def over(self, stack: Stack[T]) -> Stack[T]:
        import torch

        squares = torch.zeros(stack.count, dtype=torch.float64)
        for rows in stack.floats():
            squares += torch.linalg.vector_norm(rows, dim=1).square()
        scales = [min(1.0, self.norm / far) if far else 1.0 for far in squares.sqrt().tolist()]
        shares = [[scale if i == j else 0.0 for j in range(stack.count)] for i, scale in enumerate(scales)]
        return Mixed(stack, shares, stack.weights)
