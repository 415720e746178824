"""A part of the user's own in place of one of ours: a class "module:Class", in module.py beside the task.

Strategies, rules, compressors, algorithms and graphs are all found here, so that each is named, checked and
refused in the same way.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar

from ..errors import ConfigError, FedtrainError, TaskError, out_of_memory
from .project import load, reached
from .values import one_of

T = TypeVar("T")
OURS = __name__.partition(".")[0]
# Methods that see a site's data, which the message of an error may quote (S35).
AT_SITES = {
    "train",
    "finish",
    "correct",
    "personal",
    "site_init",
    "round",
    "take_back",
    "encode",
    "decode",
}
OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # module:Class

NOT_OWN = Path(__file__).parents[1], Path(difflib.__file__).parent  # fedtrain and Python


def is_own(kind: str) -> bool:
    """Whether a kind is a class of the user's, "module:Class"."""
    return OWN.fullmatch(kind) is not None


def kind_in(text: str, table: Container[str]) -> tuple[str, str | None]:
    """(kind, its options) of a text with a colon between them: "topk:0.01" of the table, "mine:Half:4" of the
    user's own; None for a text without options."""
    kind, colon, rest = text.strip().partition(":")
    name, colons, options = rest.partition(":")
    if kind not in table and is_own(f"{kind}:{name}"):
        return f"{kind}:{name}", options if colons else None
    return kind, rest if colon else None


def class_of(
    key: str, kind: str, table: Mapping[str, type[T]], base: type[T], root: Path | None, what: str
) -> type[T]:
    """The class of a kind: of the table, or the user's as in `own_class`. ConfigError for an unknown one."""
    if is_own(kind):
        return own_class(key, kind, base, root, what, table)
    one_of(key, kind, table)
    return table[kind]


def own_class(
    key: str, spec: str, base: type[T], root: Path | None, what: str, table: Iterable[str] = ()
) -> type[T]:
    """The class "module:Class", from module.py or a package in `root`; without one, from sys.path.

    ConfigError unless it is a frozen dataclass derived from `base` (`what`: "a strategy", say); TaskError
    where its file can't be imported. `table`: the names of ours, one of which may have been meant.
    """
    module_name, _, name = spec.partition(":")
    try:
        module = load(module_name, {} if root is None else reached([module_name], root, key))
    except FedtrainError:
        raise
    except Exception as e:  # whatever the user's code raises while it is imported
        if isinstance(e, ModuleNotFoundError) and e.name and f"{module_name}.".startswith(f"{e.name}."):
            near = difflib.get_close_matches(module_name, table, n=1)
            raise ConfigError(
                f"{key}: {spec!r}: there is no module {e.name!r} in {root or 'sys.path'}."
                f"{f' Did you mean {near[0]!r}?' if near else ''}"
            ) from None
        raise TaskError(f"{key}: {spec!r}: {told(e, root or Path.cwd())}") from e
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, base) and _frozen(cls)):
        raise ConfigError(
            f"{key}: {spec!r} is not {what}. Write @dataclass(frozen=True) class {name}"
            f"({base.__module__.removesuffix('.base')}.{base.__name__}) in {module_name}.py."
        )
    for method, theirs in inspect.getmembers(base, inspect.isfunction):
        own = getattr(cls, method)
        if method[0] != "_" and own.__module__.partition(".")[0] != OURS:
            must = "None" not in theirs.__annotations__["return"]
            setattr(cls, method, _guarded(own, root or Path.cwd(), must_return=must))
    return cls


def _guarded(method: Callable[..., Any], folder: Path, *, must_return: bool) -> Callable[..., Any]:
    """A method of the user's own, with a TaskError that names its file and line for what the method
    raises, and for a wrong result: None, or what `wrong` of the base class names."""
    code = method.__code__
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}, in {method.__name__}"

    def good(found: Any, own: Any, *given: Any) -> Any:
        nothing = "returned None: is a return missing?" * (found is None and must_return)
        wrong = own.wrong(method.__name__, given, found) if hasattr(own, "wrong") else ()
        if text := next(filter(None, wrong), nothing):
            raise TaskError(f"{place}: {text}")
        return found

    @contextmanager
    def placed() -> Iterator[None]:
        try:
            yield
        except FedtrainError:
            raise
        except Exception as e:
            if (text := told(e, folder)).startswith(f"{type(e).__name__} in own.py"):
                raise TaskError(f"{place}: {e}") from e  # the method takes other arguments
            if method.__name__ not in AT_SITES or isinstance(e, NameError):
                text += f": {e}"
            raise TaskError(text, told_openly(e, folder, "")) from e

    def call(*args: Any, **named: Any) -> Any:
        with placed():
            return good(method(*args, **named), *args, *named.values())

    def generate(*args: Any, **named: Any) -> Any:
        with placed():
            return good((yield from method(*args, **named)), *args, *named.values())

    return functools.wraps(method, ["__name__"])(generate if inspect.isgeneratorfunction(method) else call)


def wrong_pair(found: Any, like: Any, names: str) -> str:
    """What is wrong with a pair that a method returned, a vector of floats `like` another and a dict of
    tensors; "" where nothing is. `names`: of the pair, as in "(weights, state)"."""
    pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
    good = pair and fits(found[0], like) and all(hasattr(each, "dtype") for each in found[1].values())
    wanted = f"{names}, {kind_of(like)} and a dict of tensors"
    return "" if good else f"return {wanted}: got {kind_of(found)}"


def fits(vector: Any, like: Any) -> bool:
    """Whether it is a tensor of floats, of the shape of another."""
    return getattr(vector, "shape", None) == like.shape and "float" in str(vector.dtype)


def kind_of(value: Any) -> str:
    """What a value is, for an error, without its numbers: "(float32 [14], None)"."""
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    kind = "None" if value is None else type(value).__name__
    return f"({', '.join(map(kind_of, value))})" if isinstance(value, tuple) else kind


def _frozen(cls: type) -> bool:
    """Whether it is a frozen dataclass; one that derives from such a class, and has no fields of its own that
    would be none without the decorator, is as good."""
    made, own = getattr(cls, "__dataclass_params__", None), vars(cls)
    if made is None or not made.frozen:
        return False
    fields = [a for a in own.get("__annotations__", {}).values() if "ClassVar" not in str(a)]
    return "__dataclass_params__" in own or not fields


def told(error: Exception, folder: Path) -> str:
    """An exception of the user's code by its type ("out of memory" where that is it) and its place, as
    "KeyError in file:line, in function". Its message may quote data, and is left out (S35)."""
    what = "out of memory" if out_of_memory(error) else type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        path = folder.joinpath(*error.name.split(".")).with_suffix(".py")
        left_out = f"{path.name} is there, but no import statement of the task's files names it: add one"
        what += f" ({left_out if path.is_file() else f'no module named {error.name!r}'})"
    file, line, function = _place_of(error, folder)
    return f"{what} in {file}:{line}{function and f', in {function}'}"


def told_openly(error: Exception, folder: Path, during: str) -> str:
    """The same with its message and what to change, for people at a machine that has all the data."""
    file, line, function = _place_of(error, folder)
    said = str(error).strip().partition("\n")[0].rstrip(".")
    if not said or not isinstance(error, RuntimeError | ValueError):
        said = f"{type(error).__name__}{said and f': {said}'}"
    where = during or file
    if function and function[0] != "<" and not during.startswith(f"{function}("):
        where = f"{function}(){' at' if during.startswith('site ') else ','} {during}".removesuffix(", ")
    found = ((re.search(pattern, said), hint) for pattern, hint in HINTS.items())
    hint = next((f" {match.expand(hint)}" for match, hint in found if match), "")
    return f"{where}: {said}.{hint} ({file}:{line})"


def _place_of(error: Exception, folder: Path) -> tuple[str, int, str]:
    """(file, line, function) of the innermost frame in the user's own `folder`, else in what is neither ours
    nor Python's nor installed, as a notebook; without a function of the innermost of all."""
    frames = [
        (Path(f.f_code.co_filename), line, f.f_code.co_name) for f, line in walk_tb(error.__traceback__)
    ]
    for home in (folder, Path("/")):
        for file, line, function in reversed(frames):
            installed = "site-packages" in file.parts or any(map(file.is_relative_to, NOT_OWN))
            if file.is_relative_to(home) and not installed:
                return file.relative_to(home).as_posix() if home == folder else file.name, line, function
    return frames[-1][0].name, frames[-1][1], ""


HINTS = {  # what a message says -> what to change
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x": (
        r"The model gets \1 features an example and its layer wants \2."
    ),
    r"must have the same dtype, but got|Input type .* and bias type": (
        "Return x.float() from data(), or model.double() from model()."
    ),
    "target dtype to be Long": "Labels of classes are integers: return y.long() from data().",
    r"Target -?\d+ is out of bounds|Class values must be smaller": (
        "Labels count from 0, and the model's last layer has an output for each of them."
    ),
    "multi-target not supported": (
        "Labels of classes have no second dimension: return y.squeeze(1), or y.argmax(1) of one-hot rows."
    ),
    "output type Long|Found dtype Long|Expected floating point type for target": (
        "This loss wants numbers: return y.float() from data()."
    ),
    "arget size|size of tensor a .* must match": (
        "Compare the shapes of what is combined there; an output of one column wants model(x).squeeze(1)."
    ),
    "Expected input batch_size": (
        "The first dimension of output and target is the examples, which x.flatten(1) keeps."
    ),
    "more than 1 (value|spatial)": (
        "BatchNorm wants two examples or more in a batch: set train.drop_last = true or another "
        "train.batch_size; a site with one example wants GroupNorm."
    ),
    r"input to conv\dd|channels, but got": (
        "Convolutions want [examples, channels, height, width], as in x.view(-1, 1, 28, 28)."
    ),
    "index out of range in self": "An index into an Embedding must be smaller than its num_embeddings.",
    "Expected tensor for argument #1 'indices'": "Return x.long() from data() for an Embedding.",
    r"must be Tensor, not": "Let data() or collate() return tensors there.",
    "unpack": "A batch has the parts that data() returns, in their order.",
    "second time": "A tensor of an earlier step is kept and used again: detach() it.",
    "(same|expected) device": "Make new tensors where the batch is: device=x.device.",
    "can't allocate|out of memory|MemoryError": (
        "Lower train.batch_size; train.accumulate keeps the size of a step."
    ),
    "FileNotFoundError: .*: '[^/]": "Paths begin in the current folder: use self.data_dir.",
    "No module named": "Install it for this Python, or put its file beside the task's.",
}
