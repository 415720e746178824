"""fedtrain: one training engine, four ways to exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .arena import Arena
    from .config import Config
    from .errors import FedtrainError
    from .messages import Update
    from .schema import Schema
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
    "Schema": "schema",
    "ShardedDataset": "training.shards",
    "Task": "training.task",
    "Update": "messages",
    "partition": "training.partition",
    "write_shards": "training.shards",
}

__all__ = [
    "Arena",
    "Config",
    "FedtrainError",
    "Plan",
    "Schema",
    "ShardedDataset",
    "Task",
    "Update",
    "partition",
    "write_shards",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME and name != "metrics":
        raise AttributeError(f"module 'fedtrain' has no attribute {name!r}")
    from importlib import import_module

    if name == "metrics":  # all of a module, not a name in one
        return import_module(".metrics", __name__)
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
