"""fedtrain: one training engine, four ways to exchange."""

import sys

# `python -m fedtrain` has put the current folder first: nothing there is to run in place of Python's modules.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and {"fedtrain", "-mfedtrain"} & {*sys.orig_argv}:
    del sys.path[0]

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import (
        aggregate,
        aggregate_stats,
        evaluate,
        load_model,
        load_task,
        open_run,
        peer,
        simulate,
        site,
        stats,
    )
    from .arena import Arena
    from .config import Config
    from .errors import FedtrainError
    from .messages import Update
    from .population import Population
    from .results import Run
    from .schema import Schema
    from .statistics import Statistics
    from .strategies import Strategy
    from .training.parallel.plan import Plan
    from .training.partition import partition
    from .training.shards import ShardedDataset, write_shards
    from .training.task import Task

# Loaded on first use, so that `import fedtrain` takes milliseconds and pulls in neither torch nor grpc.
_HOME = {
    "Arena": "arena",
    "Config": "config",
    "FedtrainError": "errors",
    "Plan": "training.parallel.plan",
    "Population": "population",
    "Run": "results",
    "Schema": "schema",
    "ShardedDataset": "training.shards",
    "Statistics": "statistics",
    "Strategy": "strategies",
    "Task": "training.task",
    "Update": "messages",
    "aggregate": "api",
    "aggregate_stats": "api",
    "evaluate": "api",
    "load_model": "api",
    "load_task": "api",
    "open_run": "api",
    "partition": "training.partition",
    "peer": "api",
    "simulate": "api",
    "site": "api",
    "stats": "api",
    "write_shards": "training.shards",
}

__all__ = [
    "Arena", "Config", "FedtrainError", "Plan", "Population", "Run", "Schema", "ShardedDataset", "Statistics",
    "Strategy", "Task", "Update", "aggregate", "aggregate_stats", "evaluate", "load_model", "load_task",
    "open_run", "partition", "peer", "simulate", "site", "stats", "write_shards",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "metrics":  # all of a module, not a name in one
        return import_module(".metrics", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'fedtrain' has no attribute {name!r}")
    if _HOME[name] == "api" and find_spec("torch") is None:  # before half of it is imported
        from .errors import not_installed

        raise not_installed("torch")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return ["__version__", *__all__, "metrics"]
