"""Strategies, which say how the global model moves, one file each. A new one needs a line in STRATEGIES."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import config
from ..config.values import require
from .adaptive_fedprox import AdaptiveFedProx
from .base import (
    Strategy,
    beginning,
    check_parts,
    corrects,
    extras_of,
    has_personal,
    overrides,
    remembers,
    server_step,
)
from .cyclic import Cyclic
from .diloco import DiLoCo
from .ditto import Ditto
from .dp_fedavg import DPFedAvg
from .fedadagrad import FedAdagrad
from .fedadam import FedAdam
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedbn import FedBN
from .feddyn import FedDyn
from .fednova import FedNova
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .fedsgd import FedSGD
from .fedyogi import FedYogi
from .ifca import Ifca
from .inexact_fedprox import InexactFedProx
from .mimelite import MimeLite
from .per_fedavg import PerFedAvg
from .qfedavg import QFedAvg
from .scaffold import Scaffold

STRATEGIES: dict[str, type[Strategy]] = {
    "diloco": DiLoCo,
    "cyclic": Cyclic,
    "ditto": Ditto,
    "dp_fedavg": DPFedAvg,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedbn": FedBN,
    "feddyn": FedDyn,
    "fednova": FedNova,
    "fedper": FedPer,
    "fedprox": FedProx,
    "adaptive_fedprox": AdaptiveFedProx,
    "inexact_fedprox": InexactFedProx,
    "fedrep": FedRep,
    "fedsgd": FedSGD,
    "fedyogi": FedYogi,
    "ifca": Ifca,
    "mimelite": MimeLite,
    "per_fedavg": PerFedAvg,
    "qfedavg": QFedAvg,
    "scaffold": Scaffold,
}

__all__ = [
    "STRATEGIES", "Strategy", "beginning", "build", "check_parts", "corrects", "extras_of", "has_personal",
    "overrides", "remembers", "server_step",
]  # fmt: skip


def build(kind: str, options: Mapping[str, Any], root: Path | None = None) -> Strategy:
    """The strategy that [strategy] describes: its kind, and the keys that are the strategy's own fields.

    A kind "module:Class" is a class of the user in module.py in the folder `root`, next to the task.
    ConfigError for an unknown kind or option, or where there is no such class.
    """
    cls = config.class_of("strategy.kind", kind, STRATEGIES, Strategy, root, "a strategy")
    everywhere = config.options_of(config.StrategyConfig, ["options"])
    config.check_options("strategy.kind", kind, options, {**STRATEGIES, kind: cls}, also=everywhere)
    found = config.build(cls, dict(options), "strategy")
    require(
        found.weights in ("auto", *found.weighs),
        "strategy.weights",
        f"{kind} has weights by a formula of its own: set it to {' or '.join(('auto', *found.weighs))}",
    )
    return found
