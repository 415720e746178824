"""A finished model as a file that other programs run: ONNX, or an archive of torch.export.

The task's own evaluate(), on a few examples of the data that is here, shows what the model is called with. A
dimension in which these calls differ may have any size in the file, the batch's among them. The file holds
the model and shapes, and nothing of the data. It stays only if it answers as the model does.
"""

from __future__ import annotations

import inspect
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..config import Config
from ..errors import ConfigError, TaskError, writing
from ..training.batches import cut, examples_in
from ..training.compat import tree_leaves, tree_map
from ..training.devices import generators_kept
from ..training.examples import examples_of
from ..training.task import Task, collate_of, folder_of, user_code
from .evaluation import model_with_weights
from .sites.start import task_for
from .trained import as_trained

Format = Literal["onnx", "torch-export"]
Model = Callable[..., Any]
FILES: dict[Format, str] = {"onnx": "model.onnx", "torch-export": "model.pt2"}
TOLERANCE = 1e-5  # of an output's largest value, or of 1 where that is larger
EXAMPLES = 4  # in a batch: 0 and 1 are sizes of their own to torch.export
PROTOBUF_LIMIT = 2**31 - 2**24  # bytes; a model over it has its weights in a file beside it


class Call(NamedTuple):
    """What forward() is called with for a batch, and how many examples that has."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    examples: int


def add(
    config: Config, source: Path, folder: Path, kind: Format, *, round: int | Literal["best"] | None = None,
    site: str | None = None, data_dir: Path | None = None, sites: Sequence[str] = (),
) -> float:  # fmt: skip
    """Put the model of `source` into `folder`; returns how far its outputs are from the model's, at most.

    `site`: that one's own model. `sites`: whose data to try beside those that the task names. ConfigError
    where torch can't follow the model, or where the file answers otherwise; there is no file then."""
    config = as_trained(config, source)
    task = task_for(config, site, data_dir)
    with generators_kept():
        model = model_with_weights(config, source, round, task, site).cpu()
        calls = _calls(task, model, _data(task, site, sites))
        return _write(model, calls, folder / FILES[kind], kind)


def _data(task: Task, site: str | None, joined: Sequence[str]) -> Any:
    """The evaluation data of this site; without one, of the first whose data is here."""
    with user_code(folder_of(task), "sites()"):
        names = [site] if site else [*islice(task.sites() or ["central"], 100), *joined]

    def of(name: str) -> Any:
        with user_code(folder_of(task), f"eval_data({name!r})"):
            return task.eval_data(name)

    for name in names[:-1]:
        with suppress(TaskError):
            return of(name)
    return of(names[-1])


def _calls(task: Task, model: nn.Module, data: Any) -> list[Call]:
    """Two batches of the data, and one of them without its last example."""
    with user_code(folder_of(task), "a batch for --format"):
        batches = [*islice(examples_of(data, collate_of(task)).batches(EXAMPLES, False, None), 2)]
        if not batches or examples_in(batches[0]) < 2:
            raise ConfigError("--format needs a batch of two examples or more; eval_data() has none.")
        batches.append(cut(batches[0], 0, min(examples_in(batches[0]), EXAMPLES) - 1))
        return [_call(task, model, batch) for batch in batches]


def _call(task: Task, model: nn.Module, batch: Any) -> Call:
    seen: list[Call] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Call(args, kwargs, examples_in(batch)))

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        task.evaluate(model, batch)
    hook.remove()
    if not seen:
        raise ConfigError("--format: the task's evaluate() never calls model(...); it has to, once.")
    return seen[0]


def _write(model: nn.Module, calls: list[Call], file: Path, kind: Format) -> float:
    file.unlink(missing_ok=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of its own inner parts
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        exported = _exported(model, calls)
        with writing(file), tempfile.TemporaryDirectory(dir=file.parent, prefix=".export-") as made:
            load = _save(exported, _shapes(model, calls, "batch"), Path(made) / file.name, kind)
            worst = max(_difference(model(*c.args, **c.kwargs), load(*c.args, **c.kwargs)) for c in calls)
            if not worst < TOLERANCE:
                raise ConfigError(
                    f"{file.name} was not written: its outputs are {worst:.1e} from the model's, and "
                    f"{TOLERANCE:.0e} is allowed. Export it as safetensors, or in another format."
                )
            for each in Path(made).iterdir():
                each.replace(file.with_name(each.name))
    return worst


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


def _save(exported: torch.export.ExportedProgram, names: dict[str, Any], file: Path, kind: Format) -> Model:
    """Write the file, with these names of dimensions; what answers from it alone."""
    if kind == "torch-export":
        torch.export.save(exported, file)
        return torch.export.load(file).module()
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
