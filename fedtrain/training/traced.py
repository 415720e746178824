"""A function of tensors as the kernels that it called once: called again, nothing of its Python runs.

Of a small model's step most of the time is Python's: autograd's, vmap's and the task's own.
"""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..errors import TaskError

SAME_VALUES = {torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.expand.default}


def traced(function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """`function` as a graph of its kernels, for inputs of these shapes and strides. What is no tensor, and
    tensors that are no input, are as they were when it was traced. TaskError where it changes such a tensor,
    or draws random numbers that torch doesn't know of."""
    with _no_draws(), Recorder(inputs) as recorder:
        outputs = function(*inputs)
    graph: fx.GraphModule = recorder.finished(outputs)
    return graph


def compiled(graph: fx.GraphModule) -> Callable[..., Any]:
    """The same graph as machine code of its own (torch.compile), kept for other runs in the user's cache.
    TaskError where there is no C++ compiler."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedtrain" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    from torch._inductor.exc import InvalidCxxCompiler  # this import takes a second

    function = torch.compile(graph, dynamic=False, fullgraph=True)

    def call(*inputs: torch.Tensor) -> Any:
        try:
            return function(*inputs)
        except Exception as e:
            if isinstance(e, InvalidCxxCompiler) or "InvalidCxxCompiler" in str(e):
                raise TaskError("torch.compile needs a C++ compiler, such as g++, which isn't here") from e
            raise

    return call


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Makes a graph of the kernels that are called within it."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._graph, self._others = fx.Graph(), nn.Module()
        self._nodes: dict[int, Any] = {}  # by the id of the tensor
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets its id
        for number, tensor in enumerate(inputs):
            self._name(tensor, self._graph.placeholder(f"input_{number}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and id(args[0]) not in self._nodes:
            raise TaskError("the loss changes a tensor that outlives it, a buffer say")
        result = func(*args, **kwargs)
        if func in SAME_VALUES and _alike(args[0], result):
            self._name(result, self._node(args[0]))
            return result
        node = self._graph.call_function(func, *tree_map(self._node, (tuple(args), kwargs)))
        if isinstance(result, torch.Tensor):
            self._name(result, node)
        for number, part in enumerate(result if isinstance(result, tuple | list) else ()):
            self._name(part, self._graph.call_function(operator.getitem, (node, number)))
        return result

    def _name(self, tensor: Any, node: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            self._nodes[id(tensor)] = node
            self._alive.append(tensor)

    def _node(self, argument: Any) -> Any:
        """What stands for an argument in the graph."""
        if not isinstance(argument, torch.Tensor):
            return argument
        if id(argument) not in self._nodes:
            name = f"other_{len(self._nodes)}"
            self._others.register_buffer(name, argument)
            self._name(argument, self._graph.get_attr(name))
        return self._nodes[id(argument)]

    def finished(self, outputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        self._graph.output(tuple(map(self._node, outputs)))
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._others, self._graph)


def _alike(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.shape == after.shape and before.stride() == after.stride() and before.dtype == after.dtype


@contextmanager
def _no_draws() -> Iterator[None]:
    """TaskError where the block draws from Python's or numpy's generator: a graph would not."""
    before = _drawn()
    yield
    if before != _drawn():
        raise TaskError("the loss draws from random or from numpy.random")


def _drawn() -> object:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return random.getstate(), state["state"]["pos"], state["state"]["key"].tobytes()


class Dropout(TorchFunctionMode):
    """Within it F.dropout multiplies with the noise that it is given, that of its first call first. Without
    any, its calls are listed."""

    def __init__(self, noise: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.noise, self.calls = noise, list[tuple[float, torch.Tensor]]()  # (p, input)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "p", "training"), args, strict=False)) | (kwargs or {})
        x, p = given["input"], given.get("p", 0.5)
        if not given.get("training", True) or p in (0.0, 1.0):
            return func(*args, **(kwargs or {}))
        self.calls.append((p, x))
        return x * self.noise[len(self.calls) - 1] if self.noise else x
