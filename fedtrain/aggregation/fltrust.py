"""FLTrust: each update counts as far as it points where a trusted site's update does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ..errors import RoundError
from ..messages import SiteId
from .base import Rule, Stack, weighted_sum

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class FLTrust(Rule):
    """Σ tᵢ·(‖x₀‖/‖xᵢ‖)·xᵢ / Σ tᵢ with tᵢ = max(0, cos(xᵢ, x₀)), where x₀ is the root site's update, which is
    in no sum itself (Cao et al. 2021, Algorithm 2). Zero where no tᵢ is above 0.

    Norms and angles are over the trained floats; coordinates that are not trained move as at the root. Any
    number of the others may be hostile.
    """

    of_rows: ClassVar[bool] = False

    root: str  # the site whose data and update are trusted

    @property
    def needs(self) -> int:
        return 2

    @property
    def must_have(self) -> Sequence[SiteId]:
        return (self.root,)

    def of(self, stack: Stack[T]) -> T:
        if self.root not in stack.known.sites:
            raise RoundError(f"fltrust compares with the update of {self.root!r}, and there is none")
        root = stack.known.sites.index(self.root)
        trust, norms = _trust(stack, root)
        trust[root] = 0.0
        weights = (trust * norms[root] / norms.where(trust > 0, 1.0)).tolist()
        total = float(trust.sum()) or 1.0
        return stack.reduce(
            lambda rows: weighted_sum(rows, weights).div_(total), rest=lambda rows: rows[root].clone()
        )


def _trust(stack: Stack[T], root: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([n] max(0, cosine of each row to the root's), 0 for a row without length; [n] norms): one pass."""
    import torch

    dots, squares = torch.zeros(2, stack.count, dtype=torch.float64)
    for rows in stack.trained():
        dots += (rows * rows[root]).sum(dim=1)
        squares += torch.linalg.vector_norm(rows, dim=1).square()
    norms = squares.sqrt()
    cosines = dots / (norms * norms[root])
    return cosines.nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0), norms
