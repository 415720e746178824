"""Mixing rules, which make one model of a neighbourhood's, one file each. A new rule needs a line in RULES.

A mixing rule knows which model is the peer's own. The rules of aggregation/ treat all models alike; they
serve a neighbourhood as well, and `parse` is given their table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ... import config
from ...errors import ConfigError
from .balance import Balance
from .base import GraphMean, MixingRule, RowRule, Unweighted
from .self_clip import SelfClip

RULES: dict[str, type[MixingRule]] = {"balance": Balance, "mean": GraphMean, "self_clip": SelfClip}

__all__ = ["RULES", "GraphMean", "MixingRule", "Unweighted", "parse"]


def parse(
    text: str,
    others: Mapping[str, type[RowRule]],
    build: Callable[[str, Mapping[str, Any]], RowRule],
    rounds: int = 0,
) -> MixingRule:
    """The rule of a text: "median", "trimmed_mean:f=2", "self_clip:f=1", "balance:gamma=0.5".

    `others`: the table of aggregation rules, and `build` makes one of them. `rounds`: the rounds of the run,
    over which some rules change. ConfigError for an unknown rule or option.
    """
    kind, colon, rest = text.strip().partition(":")
    config.one_of("gossip.rule", kind, sorted({*RULES, *others}))
    cls: type[Any] = RULES.get(kind) or others[kind]
    own, options = [f.name for f in fields(cls)], dict[str, Any]()
    for item in rest.split(",") if colon else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in own or not equals:
            raise ConfigError(
                f'gossip.rule: {text!r}: write "{kind}:NAME=VALUE,...". '
                f"{kind} has {', '.join(own) or 'no options'}."
            )
        options[name] = config.value_of(value)
    if kind not in RULES:
        return Unweighted(build(kind, options))
    if rounds and "rounds" in own:
        options.setdefault("rounds", rounds)
    return config.build(RULES[kind], options, "gossip.rule")
