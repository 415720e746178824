"""Graphs of a finished model that other programs run: ONNX, or an archive of torch.export
(`fedtrain export --format`).

The task's own evaluate(), on a few examples, shows what the model is called with. A dimension in which these
calls differ may have any size in the file, the batch's among them. The file holds the model and shapes, and
nothing of the data. It stays only if it answers as the model does.
"""

from __future__ import annotations

import inspect
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import Task
from ...errors import ConfigError, writing
from ...training.compat import tree_leaves, tree_map

Model = Callable[..., Any]
Save = Callable[[torch.export.ExportedProgram, dict[str, Any], Path], Model]
TOLERANCE = 1e-5  # of an output's largest value, or of 1 where that is larger
PROTOBUF_LIMIT = 2**31 - 2**24  # bytes; a model over it has its weights in a file beside it


class Call(NamedTuple):
    """What forward() is called with for a batch, and how many examples that has."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    examples: int


def onnx(task: Task, model: nn.Module, batches: Sequence[tuple[Any, int]], file: Path) -> float:
    """Write ONNX's file; see `write`."""
    return write(task, model, batches, file, _save_onnx)


def torch_export(task: Task, model: nn.Module, batches: Sequence[tuple[Any, int]], file: Path) -> float:
    """Write an archive of torch.export; see `write`."""
    return write(task, model, batches, file, _save_archive)


def write(task: Task, model: nn.Module, batches: Sequence[tuple[Any, int]], file: Path, save: Save) -> float:
    """Write the graph of a model; returns how far its outputs are from the model's, at most.

    `batches`: batches of the task with their numbers of examples, of which one is smaller. ConfigError where
    torch can't follow the model, or where the file answers otherwise; there is no file then."""
    calls = [_call(task, model, batch, examples) for batch, examples in batches]
    file.unlink(missing_ok=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of its own inner parts
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        exported = _exported(model, calls)
        with writing(file), tempfile.TemporaryDirectory(dir=file.parent, prefix=".export-") as made:
            load = save(exported, _shapes(model, calls, "batch"), Path(made) / file.name)
            worst = max(_difference(model(*c.args, **c.kwargs), load(*c.args, **c.kwargs)) for c in calls)
            if not worst < TOLERANCE:
                raise ConfigError(
                    f"{file.name} was not written: its outputs are {worst:.1e} from the model's, and "
                    f"{TOLERANCE:.0e} is allowed. Export it as safetensors, or in another format."
                )
            for each in Path(made).iterdir():
                each.replace(file.with_name(each.name))
    return worst


def _call(task: Task, model: nn.Module, batch: Any, examples: int) -> Call:
    seen: list[Call] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Call(args, kwargs, examples))

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        task.evaluate(model, batch)
    hook.remove()
    if not seen:
        raise ConfigError("--format: the task's evaluate() never calls model(...); it has to, once.")
    return seen[0]


def _exported(model: nn.Module, calls: list[Call]) -> torch.export.ExportedProgram:
    """The model's graph. Zeros stand for the data, of which an archive keeps what it was made with."""
    first = calls[0]
    args, kwargs = tree_map(
        lambda x: torch.zeros_like(x) if torch.is_tensor(x) else x, (first.args, first.kwargs)
    )
    shapes = _shapes(model, calls, torch.export.Dim.DYNAMIC)
    try:
        exported = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    except RuntimeError as e:  # torch's own errors of tracing among them
        why = " ".join(str(e).split()).partition(" The error above occurred")[0]
        raise ConfigError(f"--format: torch.export can't follow the model: {why[:500]}") from e
    for node in exported.graph.nodes:  # where the task's file lies on this machine
        node.meta.pop("stack_trace", None)
    return exported


def _shapes(model: nn.Module, calls: list[Call], batch: Any) -> dict[str, Any]:
    """By forward()'s parameter: the dimensions that differ; `batch` stands for that of the examples."""
    bound = [dict(inspect.signature(model.forward).bind(*c.args, **c.kwargs).arguments) for c in calls]
    counts = tuple(call.examples for call in calls)

    def free(*tensors: Any) -> dict[int, Any] | None:
        if not torch.is_tensor(tensors[0]):
            return None
        sizes = enumerate(zip(*(tensor.shape for tensor in tensors), strict=True))
        return {
            i: batch if each == counts else torch.export.Dim.DYNAMIC
            for i, each in sizes
            if len(set(each)) > 1
        }

    found: dict[str, Any] = tree_map(free, *bound)
    return found


def _save_archive(exported: torch.export.ExportedProgram, _: dict[str, Any], file: Path) -> Model:
    torch.export.save(exported, file)
    return torch.export.load(file).module()


def _save_onnx(exported: torch.export.ExportedProgram, names: dict[str, Any], file: Path) -> Model:
    """Write the file, with these names of dimensions; what answers from it alone."""
    try:
        import onnxruntime

        program = torch.onnx.export(exported, dynamic_shapes=names, dynamo=True, verbose=False)
    except ModuleNotFoundError as e:
        raise ConfigError(f"--format onnx needs {e.name}: pip install 'fedtrain[onnx]'.") from None
    assert program is not None, "dynamo=True gives one"
    size = sum(tensor.nbytes for tensor in exported.state_dict.values())
    program.save(str(file), external_data=size > PROTOBUF_LIMIT)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    inputs = [each.name for each in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        tensors = [leaf.numpy() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        return [*map(torch.from_numpy, session.run(None, dict(zip(inputs, tensors, strict=True))))]

    return run


def _difference(expected: Any, found: Any) -> float:
    """The largest between two outputs' tensors, relative to the largest value where that is over 1."""
    pairs = [[leaf for leaf in tree_leaves(each) if torch.is_tensor(leaf)] for each in (expected, found)]
    worst = torch.zeros((), dtype=torch.float64)
    for a, b in zip(*pairs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        size = a.double().nan_to_num(0, 0, 0).abs().amax().clamp(min=1)
        apart = ((a.double() - b.double()).abs() / size).nan_to_num(math.inf)
        worst = torch.maximum(worst, apart.where((a != b) & ~(a.isnan() & b.isnan()), 0).amax())
    return float(worst)
