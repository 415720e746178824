"""A function of tensors as the kernels that it called once: called again, nothing of its Python runs.

Of a small model's step most of the time is Python's: autograd's, vmap's and the task's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import TaskError
from .compat import TorchDispatchMode, tree_map
from .devices import generator_states

aten = torch.ops.aten
DENSE: dict[str, Any] = {"memory_format": torch.contiguous_format}
NARROW = 16  # classes, below which torch takes softmax of a last dimension number by number
VIEWS = {aten.detach.default, aten.view.default, aten._unsafe_view.default, aten.expand.default}


def traced(function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """`function` as a graph of its kernels, for inputs of these shapes and strides. What is no tensor, and
    tensors that are no input, are as they were when it was traced. TaskError where it changes such a tensor,
    or draws random numbers that torch doesn't know of."""
    before = generator_states()
    with Recorder(inputs) as recorder:
        outputs = function(*inputs)
    if before != generator_states():
        raise TaskError("the loss draws from random or from numpy.random")
    graph: fx.GraphModule = recorder.finished(outputs)
    return graph


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
        if func in VIEWS and _alike(args[0], result):
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
            node.meta |= {"dtype": tensor.dtype, "shape": tensor.shape}
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
        if not any(node.op == "call_function" and node.is_impure() for node in self._graph.nodes):
            simplify(self._graph)
            turn_softmax(self._graph)
        keep_apart(self._graph)
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._others, self._graph)


def simplify(graph: fx.Graph) -> None:
    """Leave out what is computed twice, products with 1, and transposes of products; nothing in the graph
    changes a tensor in place."""
    known: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        first = known.setdefault(repr((node.target, node.args, node.kwargs)), node)
        target, of = node.target, cast(Any, node.args[0] if node.args else None)
        if first is not node:
            node.replace_all_uses_with(first)
        elif target is aten.mul.Scalar and node.args[1] == 1 and of.meta["dtype"] is node.meta["dtype"]:
            node.replace_all_uses_with(of)
        elif target is aten.clone.default and of.target is aten.bmm.default:
            node.replace_all_uses_with(of)  # which nothing in the graph changes
        elif target is aten.transpose.int and node.args[1:] == (1, 2) and _only_product(of):
            with graph.inserting_before(node):  # (ab)' = b'a', which comes as it is wanted
                flipped = [graph.call_function(target, (each, 1, 2)) for each in reversed(of.args)]
                node.replace_all_uses_with(graph.call_function(of.target, tuple(flipped)))


def turn_softmax(graph: fx.Graph) -> None:
    """Have softmax over few classes, which are the last dimension, computed for many rows at a time."""
    for node in graph.nodes:
        shape = node.meta.get("shape", ())
        if len(shape) < 2 or shape[-1] >= NARROW:
            continue
        with graph.inserting_before(node):
            call = graph.call_function
            match node.target, node.args:
                case aten._log_softmax.default | aten._softmax.default, (x, dim, half) if _last(dim, shape):
                    turned = call(aten.transpose.int, (x, -2, -1))
                    found = call(node.target, (call(aten.clone.default, (turned,), DENSE), -2, half))
                    back = call(aten.transpose.int, (found, -2, -1))
                    node.replace_all_uses_with(call(aten.clone.default, (back,), DENSE))
                case aten._log_softmax_backward_data.default, (slope, out, dim, _) if _last(dim, shape):
                    total = call(aten.sum.dim_IntList, (slope, [-1], True))
                    share = call(aten.mul.Tensor, (call(aten.exp.default, (out,)), total))
                    node.replace_all_uses_with(call(aten.sub.Tensor, (slope, share)))
                case aten._softmax_backward_data.default, (slope, out, dim, _) if _last(dim, shape):
                    product = call(aten.mul.Tensor, (slope, out))
                    total = call(aten.sum.dim_IntList, (product, [-1], True))
                    share = call(aten.mul.Tensor, (out, total))
                    node.replace_all_uses_with(call(aten.sub.Tensor, (product, share)))


def _last(dim: int, shape: torch.Size) -> bool:
    return dim in (-1, len(shape) - 1)


def keep_apart(graph: fx.Graph) -> None:
    """Have no two outputs in the same memory, and none in an input's: whoever gets them changes them."""
    end, owners = graph.output_node(), set[fx.Node]()
    outputs = []
    for output in cast(Any, end.args[0]):
        owner = output
        while owner.op == "call_function" and (
            owner.target in VIEWS or getattr(owner.target, "is_view", False)
        ):
            owner = owner.args[0]
        if owner in owners or owner.op != "call_function":
            with graph.inserting_before(end):
                output = graph.call_function(aten.clone.default, (output,))
        owners.add(owner)
        outputs.append(output)
    end.args = (tuple(outputs),)


def _only_product(node: fx.Node) -> bool:
    """Whether it is a product that nothing else is made from."""
    return node.target is aten.bmm.default and len(node.users) == 1


def _alike(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.shape == after.shape and before.stride() == after.stride() and before.dtype == after.dtype


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
