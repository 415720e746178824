"""What a rule that starts from the last aggregate keeps between rounds, as a part of the committed state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..arena import Arena
from ..schema import Schema
from .base import Rule

if TYPE_CHECKING:
    import torch

LAST = "aggregation/"  # in a checkpoint's state, before the dtypes of the last aggregate's trained floats


def kept(rule: Rule, aggregate: Arena) -> dict[str, torch.Tensor]:
    """What the next round needs of this one's aggregate; {} for a rule that doesn't remember."""
    return {f"{LAST}{dtype}": v for dtype, v in aggregate.trained().items()} if rule.remembers else {}


def last(schema: Schema, state: Mapping[str, torch.Tensor]) -> Arena | None:
    """The last round's aggregate, 0 where it is not trained; None before the first, or where none is kept."""
    own = {name.removeprefix(LAST): vector for name, vector in state.items() if name.startswith(LAST)}
    if not own:
        return None
    arena = Arena.zeros(schema)
    for dtype, vector in arena.trained().items():
        vector.copy_(own[dtype])
    return arena
