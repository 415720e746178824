"""Aggregation rules, which make one update of many, one file each. A new rule needs a line in RULES."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import config
from ..arena import Arena
from ..errors import ConfigError
from ..messages import Update
from ..schema import Schema
from .base import Rule, Stack
from .centered_clip import CenteredClip
from .geometric_median import GeometricMedian
from .krum import Krum
from .mean import Mean, WeightedMean
from .median import Median
from .multi_krum import MultiKrum
from .trimmed_mean import TrimmedMean

RULES: dict[str, type[Rule]] = {
    "centered_clip": CenteredClip,
    "geometric_median": GeometricMedian,
    "krum": Krum,
    "mean": Mean,
    "median": Median,
    "multi_krum": MultiKrum,
    "trimmed_mean": TrimmedMean,
}

__all__ = ["RULES", "Mean", "Rule", "Stack", "WeightedMean", "aggregate", "build"]


def build(kind: str, options: Mapping[str, Any], updates: int | None = None) -> Rule:
    """The rule that [aggregation] describes: its name, and the keys that are the rule's own fields.

    `updates`: the fewest updates in a round; ConfigError when the rule needs more, or for a wrong option.
    """
    config.one_of("aggregation.rule", kind, RULES)
    config.check_options("aggregation.rule", kind, options, RULES, also=["rule"])
    rule = config.build(RULES[kind], dict(options), "aggregation")
    if updates is not None and updates < rule.needs:
        raise ConfigError(
            f"aggregation.rule: {_named(kind, rule)} needs {rule.needs} updates a round, but {updates} "
            f"may be all that come. Raise strategy.min_sites (secagg.groups, where groups are compared; "
            f"asynchronous.buffer, without rounds) to {rule.needs}, or choose a rule that needs less."
        )
    return rule


def aggregate(rule: Rule, schema: Schema, updates: Sequence[Update]) -> Arena:
    """One delta of many updates, given in site order. For updates in files it takes O(chunk) extra memory."""
    for update in updates:
        assert update.delta.schema.digest == schema.digest, "updates are checked before they are aggregated"
    return rule.combine(schema, updates)


def _named(kind: str, rule: Rule) -> str:
    """The rule's name with its options, for a message."""
    options = ", ".join(f"{name} = {getattr(rule, name)!r}" for name in config.options_of(type(rule)))
    return f"{kind} with {options}" if options else kind
