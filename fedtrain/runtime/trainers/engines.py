"""The engine of a simulation's sites: simulate.engine names it, or "auto" chooses it by the model's size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...config import Config
from ...errors import BadUpdate, ConfigError, Forgotten, TaskError
from ...strategies import Strategy, overrides
from ...training.local import Engine
from ...training.stacked import CHUNK_BYTES, Stacked, refusal
from .trainer_messages import Chosen

FEW = 2000  # updates of a worker: the loop has trained them before a stack is ready
FEWEST = 16  # sites in a stack; where fewer fit, the loop is as fast


def stack_of(
    config: Config, engine: Engine, strategy: Strategy, samples: Callable[[], Iterable[Any]]
) -> Stacked:
    """The stacked engine. ConfigError where it can't train the task."""
    private = config.privacy
    if private.noise_multiplier and not private.in_sums:
        raise refusal("it adds no noise, which privacy.noise_multiplier asks for")
    return Stacked(engine, own_training=overrides(strategy, "train"), samples=samples)


def choose(nbytes: int, updates: int, rehearse: Callable[[], None]) -> Chosen:
    """The engine for so many updates of one worker, and why. `nbytes`: of the model. `rehearse` trains
    some sites in a stack; it raises where a stack can't train them."""
    if updates < FEW:
        return Chosen("loop", "")
    size = f"a model of {nbytes / 1e6:.3g} MB"
    if CHUNK_BYTES // max(1, nbytes) < FEWEST:
        return Chosen("loop", f"{size} trains as fast alone as in a stack")
    try:
        rehearse()
    except ConfigError as e:
        return Chosen("loop", str(e).partition(". Use ")[0])
    except (TaskError, BadUpdate, Forgotten) as e:
        return Chosen("loop", f"a stack of sites could not be tried: {e}")
    return Chosen("stacked", f"{size} trains faster in a stack")
