"""How peers average with their neighbours, one file an algorithm. A new one is its file and its line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .. import config
from ..errors import ConfigError
from .adpsgd import ADPSGD
from .base import (
    Algorithm,
    Blend,
    Compressor,
    Heard,
    LocalSteps,
    Mailbox,
    Parcel,
    Receive,
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
from .sgp import SGP
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
    "swift": Swift,
}

__all__ = [
    "ALGORITHMS", "Algorithm", "Blend", "Compressor", "Heard", "LocalSteps", "Mailbox", "Parcel", "Receive",
    "Request", "Send", "build", "step",
]  # fmt: skip


def build(kind: str, options: Mapping[str, Any], compressor: Compressor | None = None) -> Algorithm:
    """The algorithm that [gossip] describes: its name, and the keys that are its own fields."""
    config.one_of("gossip.algorithm", kind, ALGORITHMS)
    cls = ALGORITHMS[kind]
    own = [f.name for f in fields(cls)]  # type: ignore[arg-type]  # each is a dataclass
    if "compressor" in own:
        if compressor is None:
            raise ConfigError(
                f'gossip.algorithm: {kind} sends compressed differences. Set gossip.compressor = "int8".'
            )
        own.remove("compressor")
    for name in options:
        if name not in own:
            raise ConfigError(
                f"gossip.{name}: {kind} has no such option. It has {', '.join(own) or 'none of its own'}."
            )
    table = dict(options)
    if compressor is not None and "compressor" in {f.name for f in fields(cls)}:  # type: ignore[arg-type]  # a dataclass
        return cls(compressor=compressor, **table)  # type: ignore[call-arg]  # it has that field
    return config.build(cls, table, "gossip")
