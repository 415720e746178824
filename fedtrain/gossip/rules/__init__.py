"""Mixing rules, which make one model of a neighbourhood's, one file each.

A new one of ours needs a line in RULES; one of the user's own is a class in a file beside the task.

A mixing rule knows which model is the peer's own. The rules of aggregation/ treat all models alike; they
serve a neighbourhood as well, and `parse` is given their table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
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
    root: Path | None = None,
) -> MixingRule:
    """The rule of a text: "median", "trimmed_mean:f=2", "self_clip:f=1", "balance:gamma=0.5", "module:Class",
    "module:Class:f=1" of the user's own, a MixingRule in module.py in the folder `root`.

    `others`: the table of aggregation rules, and `build` makes one of them. `rounds`: the rounds of the run,
    over which some rules change. ConfigError for an unknown rule or option.
    """
    known: dict[str, type[Any]] = {**others, **RULES}
    kind, rest = config.kind_in(text, known)
    if config.is_own(kind) and kind not in known:
        known[kind] = config.own_class("gossip.rule", kind, MixingRule, root, "a mixing rule", [*known])
    config.one_of("gossip.rule", kind, sorted(known))
    cls = known[kind]
    own, options = [f.name for f in fields(cls)], dict[str, Any]()
    for item in rest.split(",") if rest is not None else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in own or not equals:
            raise ConfigError(
                f'gossip.rule: {text!r}: write "{kind}:NAME=VALUE,...". '
                f"{kind} has {', '.join(own) or 'no options'}."
            )
        options[name] = config.value_of(value)
    if kind in others and kind not in RULES:
        return Unweighted(build(kind, options))
    if rounds and "rounds" in own:
        options.setdefault("rounds", rounds)
    rule: MixingRule = config.build(cls, options, "gossip.rule")
    return rule
