"""Gossip algorithms: how peers average with neighbours, one file each.

A new one of ours needs a line in ALGORITHMS; one of the user's own is a class in a file beside the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import config
from ..errors import ConfigError
from .adpsgd import ADPSGD, partner
from .base import (
    Algorithm,
    Blend,
    CompressorLike,
    Fold,
    Judged,
    LocalSteps,
    Mailbox,
    Meet,
    Mix,
    Parcel,
    Receive,
    Received,
    Request,
    Send,
)
from .choco import Choco
from .diloco import DiLoCo
from .dpsgd import DPSGD
from .driver import step
from .epidemic import Epidemic
from .noloco import NoLoCo
from .periodic import PeriodicAverage
from .rules import GraphMean, MixingRule
from .rules.base import Ruled
from .sgp import SGP
from .streaming import StreamingDiLoCo
from .swift import Swift
from .tracking import GradientTracking

ALGORITHMS: dict[str, type[Algorithm]] = {
    "adpsgd": ADPSGD,
    "choco": Choco,
    "diloco": DiLoCo,
    "dpsgd": DPSGD,
    "epidemic": Epidemic,
    "gradient-tracking": GradientTracking,
    "noloco": NoLoCo,
    "periodic": PeriodicAverage,
    "sgp": SGP,
    "streaming-diloco": StreamingDiLoCo,
    "swift": Swift,
}

__all__ = [
    "ALGORITHMS", "Algorithm", "Blend", "Choco", "CompressorLike", "Fold", "Judged", "LocalSteps", "Mailbox",
    "Meet", "Mix", "MixingRule", "Parcel", "Receive", "Received", "Request", "Ruled", "Send", "build",
    "class_of", "partner", "step",
]  # fmt: skip


def class_of(kind: str, root: Path | None = None) -> type[Algorithm]:
    """The class of an algorithm, ours or, as "module:Class", the user's; ConfigError where there is none."""
    return config.class_of("gossip.algorithm", kind, ALGORITHMS, Algorithm, root, "an algorithm")


def build(
    kind: str,
    options: Mapping[str, Any],
    compressor: CompressorLike | None = None,
    rule: MixingRule | None = None,
    root: Path | None = None,
) -> Algorithm:
    """The algorithm that [gossip] describes. `options`: the keys that are its fields. "module:Class" is a
    class of the user's in module.py in the folder `root`, next to the task. ConfigError for an unknown
    algorithm or option, for a compressor that is missing, or a rule that the algorithm can't use."""
    cls = class_of(kind, root)
    own = config.options_of(cls)
    parts: dict[str, Any] = {}
    if "compressor" in own:
        if compressor is None and issubclass(cls, Choco):
            raise ConfigError(
                f"gossip.algorithm: {kind} sends compressed differences. "
                'Set gossip.compressor = "quantize:8".'
            )
        parts["compressor"] = compressor
    if rule is not None and not isinstance(rule, GraphMean):
        if "rule" not in own:
            able = ", ".join(name for name, other in ALGORITHMS.items() if issubclass(other, Ruled))
            raise ConfigError(
                f"gossip.rule: {kind} keeps mass, trackers or copies that are right only for the graph's own "
                f'weights, so it takes "mean" alone. These take any rule: {able}.'
            )
        parts["rule"] = rule
    config.check_options(
        "gossip.algorithm", kind, options, {**ALGORITHMS, kind: cls},
        parts=("compressor", "rule"), also=config.options_of(config.GossipConfig, ["options"]),
    )  # fmt: skip
    if "compressor" in parts:
        return cls(**options, **parts)
    return replace(config.build(cls, dict(options), "gossip"), **parts)  # type: ignore[type-var]  # a dataclass
