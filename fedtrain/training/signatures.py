"""What a task's methods may be called, and what they may ask for by their signatures: model(self, seed) is
given the run's seed, optimizer(self, parameters, round) the round. A method that does not name an argument is
not given it.
"""

from __future__ import annotations

import difflib
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
NEAR = 0.85  # of two names, by difflib: eval_dta or val_data for eval_data, but not train_data


def check_methods(task: Task, base: type[Task]) -> None:
    """ConfigError for a method that nobody would call, as its name is nearly one of the `base` class's, and
    for one that can't be called as the base class's is. `base`: fedtrain.Task."""
    public = [name for name, value in vars(base).items() if name[0] != "_" and inspect.isfunction(value)]
    own = [name for name in public if getattr(type(task), name) is not getattr(base, name)]
    for name in own:
        if name not in OFFERED and _is_method(method := getattr(task, name)):
            asked(method, _arguments(base, name), {})
    for kind in type(task).__mro__[: type(task).__mro__.index(base)]:
        for name in (each for each, value in vars(kind).items() if each[0] != "_" and _is_method(value)):
            near = difflib.get_close_matches(name, [each for each in public if each not in own], 1, NEAR)
            if name not in public and near and _takes(getattr(task, name), _arguments(base, near[0])):
                raise ConfigError(
                    f"run.task: {type(task).__name__}.{name}(): nobody calls it. Did you mean {near[0]}()? A "
                    f"helper of your own may be _{name}()."
                )


OFFERED = ("model", "optimizer")  # whose signatures are looked at where they are called


def _arguments(base: type[Task], name: str) -> tuple[str, ...]:
    """What a method of the base class is called with."""
    return tuple(inspect.signature(getattr(base, name)).parameters)[1:]


def _is_method(value: object) -> bool:
    return (
        inspect.isfunction(value) or inspect.ismethod(value) or isinstance(value, staticmethod | classmethod)
    )


def _takes(method: Callable[..., Any], given: tuple[str, ...]) -> bool:
    try:
        inspect.signature(method).bind(*given)
    except TypeError:
        return False
    return True


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
        found = task.optimizer(parameters, **({"round": round} if asks else {}))
        if found is not None:
            _check_optimizer(found)
        return found

    return own


def _check_optimizer(found: Any) -> None:
    """ConfigError for what can't be stepped with a gradient that is there already."""
    from torch.optim import SparseAdam

    name, instead = type(found).__name__, "Return another torch.optim.Optimizer, or None for train.optimizer."
    if not hasattr(found, "param_groups"):
        raise ConfigError(
            f"run.task: optimizer() returned a {name}. {instead} A schedule of learning rates is "
            f"train.warmup and train.decay, or optimizer(self, parameters, round)."
        )
    required = [p for p in inspect.signature(found.step).parameters.values() if p.default is p.empty]
    if any(p.kind in (p.POSITIONAL_ONLY, *NAMED) for p in required):
        raise ConfigError(
            f"run.task: optimizer() returned {name}, whose step() wants a closure that computes the loss "
            f"anew, and a step here has one gradient. {instead}"
        )
    if isinstance(found, SparseAdam):
        raise ConfigError(f"run.task: optimizer() returned {name}, and gradients are dense here. {instead}")


def asked(method: Callable[..., Any], given: tuple[str, ...], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the `offered` arguments that a method's signature names. `given`: the positional ones that it
    is called with anyway. ConfigError for a signature with an argument that would be left without a value."""
    signature = inspect.signature(method)
    named = {p.name for p in signature.parameters.values() if p.kind in NAMED}
    found = {name: value for name, value in offered.items() if name in named}
    try:
        signature.bind(*given, **found)
    except TypeError as e:
        forms = [f"{method.__name__}({', '.join(['self', *given, *more])})" for more in ((), offered)]
        may = " or ".join(dict.fromkeys(forms))
        raise ConfigError(
            f"run.task: {method.__name__}{signature} can't be called: {e}. Write {may}; any other argument "
            f"needs a default value."
        ) from None
    return found
