"""How many updates become one. A new rule is its file and its line in RULES.

A robust rule (median, Krum) will be a class like WeightedMean with `linear = False` and `combine` alone:
it reads the spooled updates as often as it needs to, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from ..update import Arena, Schema, Update
from .mean import WeightedMean


class Rule(Protocol):
    """A way to make one delta of many."""

    linear: ClassVar[bool]  # a sum of contributions is enough: it may be folded on arrival or under masks

    @staticmethod
    def combine(schema: Schema, updates: Sequence[Update]) -> Arena:
        """The one delta; `updates` come in site order and may lie in files."""


RULES: dict[str, type[Rule]] = {"mean": WeightedMean}

__all__ = ["RULES", "Rule", "WeightedMean", "aggregate"]


def aggregate(rule: type[Rule], schema: Schema, updates: Sequence[Update]) -> Arena:
    """One delta of many, given in site order; memory is O(chunk) beside the result when they are files."""
    for update in updates:
        assert update.delta.schema.digest == schema.digest, "updates are checked before they are aggregated"
    return rule.combine(schema, updates)
