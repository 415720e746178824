"""The user's task file: a subclass of Task with a model, data and a loss, the same in all four modes.

This module imports no torch, so that a site's supervisor can compute a task's digest, and refuse the task,
without running a line of the task's code.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from ..config.own import told, told_openly
from ..config.project import load, parsed, sources, tree_of
from ..errors import ConfigError, ErrorTranslation, FedtrainError, TaskError, nearest
from ..messages import MAX_SUMS, Metrics, SiteId, Sum, averages, name_and_size
from .signatures import check_methods

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .batches import Batch
    from .examples import Collate
    from .parallel.plan import Plan


class Task:
    """What to train. Subclass Task in task.py; override model, data and loss, and the others where needed.

    >>> class Line(Task):
    ...     def model(self):
    ...         return torch.nn.Linear(1, 1)
    ...     def data(self, site):
    ...         x = torch.linspace(0, 1, 8)[:, None]
    ...         return x, 2 * x
    ...     def loss(self, model, batch):
    ...         x, y = batch
    ...         return torch.nn.functional.mse_loss(model(x), y)
    >>> import torch
    >>> line = Line()
    >>> _, examples = line.evaluate(line.model(), line.data("a"))["loss"]
    >>> examples
    8.0
    """

    data_dir: Path = Path("data")  # <project>/data, or the folder given by --data
    _arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # the constructor's arguments

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        object.__setattr__(self, "_arguments", (args, kwargs))  # works for a frozen dataclass too
        return self

    def model(self) -> nn.Module:
        """A fresh model. Called under a seed that is the same at every site; model(self, seed) is told it."""
        raise NotImplementedError

    def data(self, site: str) -> Any:
        """The examples of this site: a Dataset, a tuple or dict of columns (tensors, arrays or lists with an
        entry for each example), a list of single examples, or an iterable of ready batches.

        An iterable of batches, such as a DataLoader, decides their size and order, and [train] does not.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The mean loss of a batch as a scalar, or (sum, weight) for another weight, such as tokens."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        """Each metric as (sum, count), so that averages over batches and sites are exact. A sum may also be
        a tensor for metrics(), such as a count for each class."""
        mean, weight = mean_and_weight(self.loss(model, batch), batch)
        return {"loss": (float(mean.detach()) * weight, weight)}

    def test_data(self, site: str) -> Any:
        """The data on which `fedtrain evaluate` measures a finished model; by default eval_data(site)."""
        return self.eval_data(site)

    def metrics(self, sums: Mapping[str, tuple[Any, float]]) -> Mapping[str, Any]:
        """The metrics of an evaluation, shown in addition to the loss, from the sums and counts of evaluate()
        over all batches and sites. Tensors are float64 and flat. By default the averages."""
        whole = {name: pair for name, pair in sums.items() if isinstance(pair[0], int | float) and pair[1]}
        return {name: total / count for name, (total, count) in whole.items()}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """The local optimizer, made anew in each round; None: the optimizer that train.optimizer names. As
        optimizer(self, parameters, round) it is told how many rounds are done."""
        return None

    def eval_data(self, site: str) -> Any:
        """The data to evaluate on; by default the training data."""
        return self.data(site)

    def collate(self, examples: list[Any]) -> Batch:
        """A batch of these examples, called when data() returns single ones; pad sequences here."""
        from .examples import collated

        return collated(examples)

    def columns(self, site: str) -> Mapping[str, Any] | None:
        """For `fedtrain stats`: name -> values, or (values, labels) of categories; None: those of data()."""
        return None

    def sites(self) -> Sequence[str] | None:
        """The names of the data's natural sites, for simulation, as a list or, of very many, a
        fedtrain.Population; None: the data is one pool to partition."""
        return None

    def weights(self) -> Path | str | None:
        """A safetensors file, or a folder of them, with which the model begins; None: as model() makes it."""
        return None

    def parallel_plan(self) -> Plan | None:
        """How tp, sp, cp and pp split the model; None: as a transformers' model says (parallel.families)."""
        return None


Averages = dict[str, float]
REQUIRED = ("model", "data", "loss")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load_task(spec: str, root: Path, data_dir: Path | None = None) -> Task:
    """The task of a spec "module:Class" or "module:Class(size=3)", from module.py or a package in `root`.

    The task can import other files in `root`: those that its import statements name. ConfigError when there
    is no such task; TaskError when its code fails.
    """
    root = root.resolve()
    module_name, class_name, args, kwargs = _split(spec)
    with user_code(root):
        module = load(module_name, sources(spec, root))
    found = getattr(module, class_name, None)
    if found is None:
        tasks = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task)]
        raise ConfigError(f"run.task: {module_name} has no class {class_name!r}.{nearest(class_name, tasks)}")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(
            f"run.task: {spec} is not a fedtrain.Task. Write class {class_name}(fedtrain.Task)."
        )
    if missing := [name for name in REQUIRED if getattr(found, name) is getattr(Task, name)]:
        raise ConfigError(f"run.task: {spec} does not define {', '.join(f'{name}()' for name in missing)}.")
    with user_code(root):
        task = found.__new__(found, *args, **kwargs)
        # data_dir is set before __init__, which may read it, and works for a frozen dataclass too
        object.__setattr__(task, "data_dir", data_dir or root / "data")
        task.__init__(*args, **kwargs)  # type: ignore[misc]  # it is a new object
    check_methods(task, Task)
    return task


def task_digest(spec: str, root: Path, also: Mapping[str, str] = MappingProxyType({})) -> str:
    """SHA-256 of a task's source: of the relative path and the syntax tree of its module and each module in
    `root` that it imports; likewise for `also`, key -> a class of the user's own that it names. Comments,
    layout, docstrings don't count. Files are parsed, never imported, so a site can refuse code before it
    runs."""
    digest = hashlib.sha256()
    named = [("run.task", spec), *also.items()]
    files = {file for key, each in named for file in sources(each, root, key).values()}
    for file in sorted(files, key=lambda each: each.name):
        for word in (file.name, *words(tree_of(file))):
            digest.update(f"{word}\0".encode())
    return digest.hexdigest()


def words(tree: ast.AST) -> Iterator[str]:
    """A syntax tree as words, without positions and docstrings, parents first: in every version of Python the
    same, unlike ast.dump, for empty fields are left out."""
    todo: list[Any] = [tree]
    while todo:  # no recursion: the tree of a sum of a thousand terms is a thousand deep
        match todo.pop():
            case ast.AST() as node:
                found = {n: v for n, v in ast.iter_fields(node) if v is not None and v != [] and n != "kind"}
                if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                    found["body"] = node.body[1:]
                yield " ".join((type(node).__name__, *found))
                todo += reversed(found.values())
            case list() as nodes:
                yield f"[{len(nodes)}]"
                todo += reversed(nodes)
            case value:
                yield hex(value) if type(value) is int else ascii(value)  # a huge int has no decimal form


def _split(spec: str) -> tuple[str, str, list[Any], dict[str, Any]]:
    """(module, class, arguments, keyword arguments) of "module:Class" or "module:Class(3, size=4)"."""
    module, _, call = spec.partition(":")
    try:
        match parsed(call, mode="eval").body:
            case ast.Name(name):
                args, kwargs = [], {}
            case ast.Call(ast.Name(name), positional, named):
                args = [ast.literal_eval(each) for each in positional]
                kwargs = {str(each.arg): ast.literal_eval(each.value) for each in named}
            case _:
                raise ValueError
        if all(part.isidentifier() for part in module.split(".")):
            return module, name, args, kwargs
    except (SyntaxError, ValueError):
        pass
    raise ConfigError(
        f'run.task: {spec!r} must be "module:Class", as in "task:Heart", or with constants for its '
        f'constructor, as in "task:Heart(hidden=64)"'
    )


def arguments_of(task: Task) -> str | None:
    """The constructor's arguments in the form of `run.task`, like "(64, dropout=0.1)"; "" for none, and None
    where an argument is no constant, which `run.task` can't have."""
    args, kwargs = task._arguments
    said = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
    try:
        same = not said or _split(f"m:T({said})")[2:] == ([*args], kwargs)
    except (ConfigError, ValueError):  # ValueError: an array has no single truth value for ==
        same = False
    return (said and f"({said})") if same else None


def user_code(folder: Path, during: str = "") -> ErrorTranslation:
    """Turn any exception of the user's code, which runs inside the block, into a TaskError.

    A TaskError is sent over the network, so it has the exception's type and place, but not its message, which
    may quote data (S35). The message is in `openly`, for a run of which all is on one machine, and the
    exception itself is chained, for a reader at the site.
    """

    def translate(e: Exception) -> TaskError | None:
        if isinstance(e, FedtrainError):
            return None
        place = f"{told(e, folder)}{during and f', {during}'}"
        return TaskError(place, told_openly(e, folder, during))

    return ErrorTranslation(translate)


def folder_of(task: Task) -> Path:
    """The folder of the task's source; the working directory where it has no file."""
    file = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    return Path(file).parent if file else Path.cwd()


def collate_of(task: Task) -> Collate | None:
    """The task's own collate(); None where the task does not override it."""
    return None if type(task).collate is Task.collate else task.collate


def mean_and_weight(loss: Any, batch: Batch) -> tuple[torch.Tensor, float]:
    """loss()'s result in either form as (mean, weight), or TaskError; for weight 0 the mean is the sum."""
    total = loss[0] if isinstance(loss, tuple) and len(loss) == 2 else loss
    if not hasattr(total, "backward"):
        raise TaskError(
            f"loss() returned a {type(loss).__name__}. Return a tensor, without .item() or float(); "
            f"or a tuple of two, (sum, weight)."
        )
    if total.numel() != 1:
        raise TaskError(f"loss() returned a tensor of shape {list(total.shape)}. Return its mean, a scalar.")
    if total is not loss:
        weight = float(loss[1])
        return (total / weight if weight else total), weight
    from .batches import examples_in

    return loss, float(examples_in(batch))


def measured(task: Task, model: nn.Module, batch: Batch) -> Metrics:
    """The result of evaluate() for a batch, as floats, with the loss added where it is missing. TaskError for
    a wrong form; its message has no values, which would leave the site (S35)."""
    metrics = _checked(task.evaluate(model, batch))
    several = [name for name, (total, _) in metrics.items() if isinstance(total, list)]
    if several and not derives(task):
        raise TaskError(
            f"evaluate() gives several numbers for {several[0]}, and nothing says what to show of them. "
            f"Define metrics(sums), which makes numbers of what evaluate() gave at all sites."
        )
    if odd := [name for name in metrics if name_and_size(name)[1] is not None]:
        raise TaskError(f"evaluate() gives {odd[0]!r}: a metric's name doesn't end with a number in brackets")
    numbers = sum(len(total) for total, _ in metrics.values() if isinstance(total, list)) + len(metrics)
    if numbers > MAX_SUMS:
        raise TaskError(f"evaluate() gives {numbers:,} numbers, at most {MAX_SUMS:,} travel. Use fewer bins.")
    if "loss" not in metrics:
        mean, weight = mean_and_weight(task.loss(model, batch), batch)
        metrics["loss"] = float(mean) * weight, weight
    return metrics


def _checked(metrics: Mapping[str, tuple[Any, Any]]) -> Metrics:
    form = 'Return {"accuracy": (number right, number seen)}: sums and counts, so that averages are exact.'
    if not isinstance(metrics, Mapping):
        raise TaskError(f"evaluate() gives a {type(metrics).__name__}. {form}")
    found: Metrics = {}
    for name, pair in metrics.items():
        try:
            total, count = pair
            found[name] = _floats(total), float(count)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a count of several values
            raise TaskError(f"evaluate() gives a {type(pair).__name__} as {name!r}. {form}") from None
    return found


def _floats(total: Any) -> Sum:
    if getattr(total, "ndim", 0):
        return [float(value) for value in total.flatten().tolist()]
    return float(total)


def test_split(task: Task) -> Literal["test_data", "eval_data", "data"]:
    """The method of the task that gives its test data, by the defaults of test_data() and eval_data()."""
    if type(task).test_data is not Task.test_data:
        return "test_data"
    return "eval_data" if type(task).eval_data is not Task.eval_data else "data"


def derives(task: Task) -> bool:
    """Whether the task has its own metrics()."""
    return type(task).metrics is not Task.metrics


def shown(
    task: Task, total: Metrics, by_site: Mapping[SiteId, Metrics]
) -> tuple[Averages, dict[SiteId, Averages]]:
    """(metrics over all sites, metrics of each site), to be shown: the result of metrics(), and the loss. A
    site whose metrics() fails, because it lacks a class for example, has the loss alone."""
    each = {}
    for site, sums in by_site.items():
        try:
            each[site] = _derived(task, sums)
        except TaskError:
            each[site] = averages({"": {"loss": sums["loss"]}}) if "loss" in sums else {}
    return _derived(task, total), each


def _derived(task: Task, sums: Metrics) -> Averages:
    if not derives(task):
        return averages({"": sums})
    if not any(count for _, count in sums.values()):
        return {}
    import torch

    given = {
        name: (torch.tensor(total, dtype=torch.float64) if isinstance(total, list) else total, count)
        for name, (total, count) in sums.items()
    }
    with user_code(folder_of(task), "metrics()"):
        found = task.metrics(given)
    try:
        own = {str(name): float(value) for name, value in found.items()}
    except (TypeError, ValueError, AttributeError):
        raise TaskError('metrics() must return {"name": number}') from None
    return averages({"": {n: v for n, v in sums.items() if n == "loss"}}) | own
