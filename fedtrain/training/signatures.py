"""What a task's model() and optimizer() may ask for by their signatures: model(self, seed) is given the run's
seed, optimizer(self, parameters, round) the round. A method that does not name an argument is not given it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .task import Task

OwnOptimizer = Callable[["Iterable[nn.Parameter]", int], "torch.optim.Optimizer | None"]
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

WHEN = "fit|train|training|evaluat[a-z]*|validation|round|epoch|step|batch|update|optimizer_step|commit"
CALLBACK = re.compile(rf"on_(?:before_|after_)?(?:{WHEN})(?:_\w*)?")


def _refuse_callbacks(task: type[Task]) -> None:
    """ConfigError for a method that is named like other frameworks' callbacks: nobody would call it."""
    for name in dir(task):
        if CALLBACK.fullmatch(name) and callable(getattr(task, name)):
            raise ConfigError(
                f"run.task: {task.__name__}.{name}(): a round calls nothing back, so that it gives the same "
                f"bits everywhere. To log, use `fedtrain track --to MODULE:CLASS`; for the learning rate "
                f"train.warmup and train.decay; to stop early evaluate.patience (docs/trackers.md)."
            )


def model_of(task: Task, seed: int) -> nn.Module:
    """What the task's model() returns; it is told the run's seed if it asks for `seed`. ConfigError where it
    asks for something else, or the task has callbacks."""
    _refuse_callbacks(type(task))
    model: nn.Module = task.model(**asked(task.model, (), {"seed": seed}))
    return model


def optimizer_of(task: Task) -> OwnOptimizer:
    """A function that calls the task's optimizer() with the parameters, and with the round (the first is 0)
    if it asks for `round`. ConfigError where it asks for something else."""
    asks = bool(asked(task.optimizer, ("parameters",), {"round": 0}))

    def own(parameters: Iterable[nn.Parameter], round: int) -> torch.optim.Optimizer | None:
        return task.optimizer(parameters, **({"round": round} if asks else {}))

    return own


def asked(method: Callable[..., Any], given: tuple[str, ...], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the `offered` arguments that a method's signature names. `given`: the positional ones that it
    is called with anyway. ConfigError for a signature with an argument that would be left without a value."""
    signature = inspect.signature(method)
    named = {p.name for p in signature.parameters.values() if p.kind in NAMED}
    found = {name: value for name, value in offered.items() if name in named}
    try:
        signature.bind(*given, **found)
    except TypeError as e:
        may = " or ".join(
            f"{method.__name__}({', '.join(['self', *given, *more])})" for more in ((), offered)
        )
        raise ConfigError(
            f"run.task: {method.__name__}{signature} can't be called: {e}. Write {may}; any other argument "
            f"needs a default value."
        ) from None
    return found
