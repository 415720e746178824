"""Aggregation rules, which make one update of many, and pre-aggregations in front of them, one file each.

A new rule of ours needs a line in RULES, a new pre-aggregation a line in BEFORE; one of the user's own is a
class in a file beside the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import config
from ..arena import Arena
from ..errors import ConfigError
from ..messages import Update
from ..schema import Schema
from .base import NOTHING, Known, Rule, Stack
from .before import After, PreAggregation
from .bucketing import Bucketing
from .centered_clip import CenteredClip
from .clip import Clip
from .fltrust import FLTrust
from .geometric_median import GeometricMedian
from .krum import Krum
from .last import kept, last
from .mean import Mean, WeightedMean, weight_of
from .median import Median
from .multi_krum import MultiKrum
from .nnm import NearestNeighborMixing
from .trimmed_mean import TrimmedMean

RULES: dict[str, type[Rule]] = {
    "centered_clip": CenteredClip,
    "fltrust": FLTrust,
    "geometric_median": GeometricMedian,
    "krum": Krum,
    "mean": Mean,
    "median": Median,
    "multi_krum": MultiKrum,
    "trimmed_mean": TrimmedMean,
}

BEFORE: dict[str, type[PreAggregation]] = {"bucketing": Bucketing, "clip": Clip, "nnm": NearestNeighborMixing}

__all__ = ["BEFORE", "RULES", "Known", "Mean", "PreAggregation", "Rule", "Stack", "WeightedMean", "aggregate",
           "build", "kept", "last", "parse", "weight_of"]  # fmt: skip


def build(
    kind: str,
    options: Mapping[str, Any],
    updates: int | None = None,
    before: Sequence[str] = (),
    root: Path | None = None,
) -> Rule:
    """The rule that [aggregation] describes: its name, and the keys that are the rule's own fields. "module:
    Class" is a class of the user's in module.py in the folder `root`, next to the task.

    `updates`: the fewest updates in a round; ConfigError when the rule needs more, or for a wrong option.
    `before`: the pre-aggregations in front of the rule, as `parse` reads them.
    """
    cls = config.class_of("aggregation.rule", kind, RULES, Rule, root, "a rule")
    config.check_options("aggregation.rule", kind, options, {**RULES, kind: cls}, also=["rule", "before"])
    rule = config.build(cls, dict(options), "aggregation")
    if rule.linear and not isinstance(rule, Mean):
        raise ConfigError(
            f"aggregation.rule: {kind} says that it is linear, and of linear rules the plain mean is folded, "
            f"so its own of() would not be asked. Leave out its `linear`."
        )
    named = _named(kind, rule)
    if before:
        if rule.must_have:
            raise ConfigError(
                f"aggregation.before: {kind} reads the update of each single site, and {before[0]} would "
                f"change it. Leave aggregation.before out."
            )
        rule = After(tuple(parse(text, root) for text in before), rule)
        named += f" after {', '.join(before)}"
    if updates is not None and updates < rule.needs:
        raise ConfigError(
            f"aggregation.rule: {named} needs {rule.needs} updates a round, but {updates} "
            f"may be all that come. Raise strategy.min_sites (secagg.groups, where groups are compared; "
            f"asynchronous.buffer, without rounds) to {rule.needs}, or choose a rule that needs less."
        )
    return rule


def parse(text: str, root: Path | None = None) -> PreAggregation:
    """The pre-aggregation of a text: "nnm:2", "bucketing:s=3", "clip:1.5", or "module:Class:2" of the user's.
    The options after the colon have names, or stand in the order of the fields. ConfigError for one that is
    not known."""
    key = "aggregation.before"
    kind, rest = config.kind_in(text, BEFORE)
    cls = config.class_of(key, kind, BEFORE, PreAggregation, root, "a pre-aggregation")
    options = config.options_in(key, kind, rest, config.options_of(cls))
    config.check_options(key, kind, options, {**BEFORE, kind: cls})
    return config.build(cls, options, key)


def aggregate(rule: Rule, schema: Schema, updates: Sequence[Update], known: Known = NOTHING) -> Arena:
    """One delta of many updates, given in site order. For updates in files it takes O(chunk) extra memory."""
    for update in updates:
        assert update.delta.schema.digest == schema.digest, "updates are checked before they are aggregated"
    return rule.combine(schema, updates, known)


def _named(kind: str, rule: Rule) -> str:
    """The rule's name with its options, for a message."""
    options = ", ".join(f"{name} = {getattr(rule, name)!r}" for name in config.options_of(type(rule)))
    return f"{kind} with {options}" if options else kind
