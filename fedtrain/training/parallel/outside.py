"""A task's loss in two halves, for a pipeline: what its model is called with, and what is made of the output.

A task knows nothing of stages: its loss calls model(x) and makes a number of what comes back. So the first
stage runs the loss with a stand-in that takes down x and goes no further, and the last stage runs it with
one that gives the pipeline's output back. Neither has any part of the model, nor lets a loss think so.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from ...errors import TaskError
from ..batches import Batch

Call = Callable[[nn.Module, Batch], Any]  # the task's loss, or its evaluate
# What nn.Module has of the model's parts, of which there are none here.
OF_PARTS = {
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children",
    "named_children", "state_dict", "load_state_dict", "get_parameter", "get_buffer", "get_submodule",
}  # fmt: skip


class Outside(nn.Module):
    """A model as a loss sees it in a pipeline: to be called, and without any of its parts."""

    def __init__(self, has: Container[str] = (), *, training: bool = True) -> None:
        """`has`: the names of what the model has. What it lacks is missing here alike, as hasattr() asks."""
        super().__init__()
        self._has, self.training = has, training

    def train(self, mode: bool = True) -> Outside:
        self.training = mode
        return self

    def __getattribute__(self, name: str) -> Any:
        if name in OF_PARTS:
            raise no_part(f"{name}()")
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_has", ()):
            raise no_part(name)
        return super().__getattr__(name)

    def __getitem__(self, at: Any) -> Any:
        raise no_part(f"[{at!r}]")


def no_part(name: str) -> TaskError:
    return TaskError(
        f"parallel.pp: loss() and evaluate() ask their model for {name}, but no rank has all of it: in a "
        f"pipeline they call it, once, and know what comes out. Let forward() give what they need; for a "
        f"term on the weights set train.weight_decay, or use parallel.zero = 2 in place of pp."
    )


class ModelCalled(BaseException):
    """The task called its model: all that was wanted of it."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs


class StandIn(Outside):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        others = {type(each).__name__ for each in inputs if not isinstance(each, torch.Tensor)}
        if named or others:
            raise TaskError(
                "in a pipeline the model is called with positional tensors, not with "
                f"{', '.join(sorted(others | {f'{name}=' for name in named}))}"
            )
        raise ModelCalled(inputs)


class Replay(Outside):
    """A model whose output is known: that of one call."""

    def __init__(self, output: Any, has: Container[str] = (), *, training: bool = True) -> None:
        super().__init__(has, training=training)
        self._output = output
        self._called: tuple[Any, ...] | None = None  # with these inputs

    def forward(self, *inputs: Any, **_: Any) -> Any:
        # An evaluation may ask twice for the same: evaluate(), and loss().
        if self._called is not None and (self.training or not same(self._called, inputs)):
            raise TaskError(
                "parallel.pp: loss() calls its model more than once, and a pipeline runs it once for a "
                "batch. Put all that goes in into one call, or use parallel.zero in place of pp."
            )
        self._called = inputs
        return self._output


def same(inputs: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether a model is called with the same tensors."""
    return len(inputs) == len(others) and all(
        a is b or torch.equal(a, b) for a, b in zip(inputs, others, strict=True)
    )


def inputs_of(
    call: Call, batch: Batch, has: Container[str] = (), *, training: bool = True
) -> tuple[Any, ...]:
    """What the task's loss, or evaluate, calls its model with."""
    try:
        call(StandIn(has, training=training), batch)
    except ModelCalled as called:
        return called.inputs
    raise TaskError("loss() never called its model: a pipeline has nothing to run")
