"""Classes of a script's or notebook's `__main__` as a module of their own, which other processes can import.

The module holds what the classes refer to and nothing else: other definitions of `__main__`, imports of what
modules hold, and constants. To import it does not run the script again. It lies in `__fedtrain__/` beside the
script, or in the notebook's working folder; its name has a digest of its syntax.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import linecache
import re
import symtable
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ..errors import ConfigError, writing
from .task import Task, arguments_of, parsed, words

CONSTANTS = (bool, int, float, str, tuple, list, dict)
CELL = re.compile(r"ipykernel_|<ipython-input-")  # in the name that IPython gives to the source of a cell
MADE = (ast.Call, ast.Attribute, ast.Lambda)  # what may be made again: a loss, a dtype, a function


def named(classes: list[type], root: Path | None = None) -> tuple[Path, list[str], dict[str, str]]:
    """The folder (`root` where it is given) from which all these classes can be imported, and "module:Class"
    of each. The last is name -> type of what those of `__main__` use and no other process can have.
    ConfigError for classes of several folders."""
    homes = [home_of(cls) for cls in classes]
    root = root or homes[0]
    here = [cls for cls in classes if cls.__module__ == "__main__"]
    module, lacks = written(here, root) if here else ("", {})
    for cls, home in zip(classes, homes, strict=True):
        if cls not in here and home != root:
            raise ConfigError(f"{cls.__name__} is imported from {home}, not {root}. Put both in one folder.")
    return root, [f"{module if c in here else c.__module__}:{c.__name__}" for c in classes], lacks


def home_of(cls: type) -> Path:
    """The folder from which a class's module is imported; of a class of `__main__`, where it is put."""
    if cls.__qualname__ != cls.__name__ and not issubclass(cls, Task):
        raise ConfigError(f"{cls.__qualname__} is defined inside a function or class. Define it outside.")
    module = sys.modules[cls.__module__]
    file = getattr(module, "__file__", None)
    if file is None or (module.__name__ == "__main__" and getattr(module, "__spec__", None) is not None):
        return Path.cwd()  # a notebook, or `python -m`
    above = module.__name__.count(".") + (Path(file).name == "__init__.py")
    return Path(file).resolve().parents[above]


def check_sendable(task: Task, lacks: Mapping[str, str]) -> None:
    """ConfigError unless other processes can make the same task, of its source and its arguments."""
    why = ""
    if arguments_of(task) is None:
        why = "its constructor was given more than constants (numbers, texts, lists and dicts of them)"
    elif "." in type(task).__qualname__:
        why = "it is defined inside a function or class, and not outside"
    elif lacks:
        name, kind = next(iter(lacks.items()))
        why = f"it uses {name}, a {kind} that only this process has"
    else:
        args, kwargs = task._arguments
        made = vars(type(task)(*args, **kwargs))
        for name, value in vars(task).items():
            if name == "data_dir":  # which is told apart
                continue
            if name not in made or (type(value) in CONSTANTS and value != made[name]):
                why = f"its {name} was set after it was made"
    if why:
        raise ConfigError(
            f"{type(task).__name__}: worker processes can't make it: {why}. Make that in its __init__(), "
            f"data() or model(), or set simulate.workers = 0."
        )


def written(classes: list[type], root: Path) -> tuple[str, dict[str, str]]:
    """Write the module of these classes of `__main__` below `root`: its dotted name, and what it lacks."""
    module = Extraction()
    for cls in classes:
        module.add(cls.__qualname__.partition(".")[0])  # or what it is defined in
    text = "\n\n".join([*sorted(module.future), *module.statements])
    digest = hashlib.sha256("\0".join(words(parsed(text))).encode()).hexdigest()
    name = f"{classes[0].__name__.lower()}_{digest[:12]}"
    file = root / "__fedtrain__" / f"{name}.py"
    with writing(file):
        file.parent.mkdir(exist_ok=True)
        (file.parent / ".gitignore").write_text("*\n")
        file.write_text(text, encoding="utf-8")
    return f"__fedtrain__.{name}", module.lacks


class Extraction:
    """The statements that a module needs for some names of `__main__` to mean there what they mean here."""

    def __init__(self) -> None:
        self._main = vars(sys.modules["__main__"])
        self._done: set[str] = set()
        self.statements: list[str] = []
        self.future: set[str] = set()
        self.lacks: dict[str, str] = {}

    def add(self, name: str) -> None:
        """Add the statement that defines a name, after those for what it uses."""
        if name in self._done or name not in self._main:
            return
        self._done.add(name)
        value = self._main[name]
        statement = imported(name, value) or constant(name, value) or self._defined(name, value)
        for other in referred(statement):
            self.add(other)
        if statement:
            self.statements.append(statement)
        else:
            self.lacks[name] = type(value).__name__

    def _defined(self, name: str, value: Any) -> str:
        """A class, a function, or a name that one call gave its value, as its source has it: the cell or file
        of its own code, or else the script, or the last cell that has it."""
        functions = vars(value).values() if isinstance(value, type) else [value]
        own = [f.__code__.co_filename for f in functions if isinstance(f, FunctionType)]
        script = getattr(sys.modules["__main__"], "__file__", None)
        cells = [script] if script else [file for file in reversed(linecache.cache) if CELL.search(file)]
        for file in [*own, *cells]:
            text = "".join(linecache.getlines(file))
            try:
                nodes = [node for node in parsed(text).body if binds(node, name)]
            except SyntaxError:  # a cell of another language
                continue
            if not nodes:
                continue
            if isinstance(nodes[-1], ast.Assign) and (nodes[1:] or not isinstance(nodes[-1].value, MADE)):
                return ""
            if re.search(r"^from __future__ import .*\bannotations\b", text, re.M):
                self.future.add("from __future__ import annotations\n")
            first = min(n.lineno for n in (nodes[-1], *getattr(nodes[-1], "decorator_list", ())))
            return "\n".join(text.splitlines()[first - 1 : nodes[-1].end_lineno]) + "\n"
        return ""


def imported(name: str, value: Any) -> str:
    """The import of a module, or of what a module other than `__main__` holds under its own name."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module, there = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module in (None, "__main__") or getattr(sys.modules.get(module), str(there), None) is not value:
        return ""
    return f"from {module} import {there} as {name}"


def constant(name: str, value: Any) -> str:
    """The assignment of a value that its own repr() gives."""
    try:
        return f"{name} = {value!r}" if ast.literal_eval(repr(value)) == value else ""
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""


def binds(node: ast.stmt, name: str) -> bool:
    """Whether a statement defines the name."""
    if isinstance(node, ast.Assign):
        return any(ast.unparse(target) == name for target in node.targets)
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name


def referred(statement: str) -> list[str]:
    """Names of the module that a statement uses, its functions' included."""
    table = symtable.symtable(statement, "<source>", "exec")
    found, todo = set[str](), [table]
    while todo:
        scope = todo.pop()
        used = (symbol for symbol in scope.get_symbols() if symbol.is_referenced())
        found |= {symbol.get_name() for symbol in used if scope is table or symbol.is_global()}
        todo += scope.get_children()
    return sorted(found - vars(builtins).keys())
