"""Classes of a script's or notebook's `__main__` as a module of their own, which other processes can import.

A function or class is there as its source, from the cell or file of its own code; a module as an import; any
other value as it is now, never as the call that made it: a literal, or calls that build an equal object
(copyreg's protocol). Long bytes, as of arrays, lie beside the module in files named by their SHA-256, so that
the digest of the module's source covers all values. The module lies in `__fedtrain__/` beside the script.
"""

from __future__ import annotations

import ast
import builtins
import copy
import copyreg
import hashlib
import inspect
import json
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import CodeType, EllipsisType, FunctionType, ModuleType, NoneType
from typing import Any

from ..config.project import parsed
from ..errors import ConfigError, writing
from .task import Task, arguments_of, words

ATOMS = {bool, int, float, str, bytes, NoneType, EllipsisType}
LONG = 4096  # bytes, or items of a list: more lie in a file
CELL = re.compile(r"ipykernel_|<ipython-input-")  # in the name that IPython gives to the source of a cell
DRAWN_FROM = re.compile(r"numpy\.random\..+|random\.\w*Random|torch\._C\.Generator")  # types
FUTURE = annotations.compiler_flag  # of code under that import


class Unsendable(Exception):
    """A value that other processes can't have, and why."""

    def __init__(self, value: Any, why: str = "that only this process has") -> None:
        super().__init__(f"a {'class' if isinstance(value, type) else type(value).__name__} {why}")
        self.value = value


def named(cls: type, root: Path | None = None) -> tuple[Path, str, dict[str, str]]:
    """The folder (`root` where it is given) from which a class can be imported, and its "module:Class" there.
    The last is name -> what it is, of what a class of `__main__` uses and no other process can have.
    ConfigError for a class of another folder than `root`."""
    home, module, lacks = home_of(cls), cls.__module__, dict[str, str]()
    root = root or home
    if module == "__main__":
        module, lacks = written(cls, root)
    elif home != root:
        raise ConfigError(f"{cls.__name__} is imported from {home}, not {root}. Put both in one folder.")
    return root, f"{module}:{cls.__name__}", lacks


def home_of(cls: type) -> Path:
    """The folder from which a class's module is imported; of a class of `__main__`, where it is put."""
    if cls.__qualname__ != cls.__name__ and not issubclass(cls, Task):
        raise ConfigError(f"{cls.__qualname__} is defined inside a function or class. Define it outside.")
    module = sys.modules[cls.__module__]
    file = getattr(module, "__file__", None)
    if file is None or (module.__name__ == "__main__" and getattr(module, "__spec__", None) is not None):
        return Path.cwd()  # a notebook, or `python -m`
    return Path(file).resolve().parents[module.__name__.count(".") + (Path(file).name == "__init__.py")]


def check_sendable(task: Task, lacks: Mapping[str, str]) -> None:
    """ConfigError unless other processes can make the same task, of its source and its arguments."""
    why = ""
    if arguments_of(task) is None:
        why = "its constructor was given more than constants (numbers, texts, lists and dicts of them)"
    elif "." in type(task).__qualname__:
        why = "it is defined inside a function or class, and not outside"
    elif lacks:
        why = "it uses {}, {}".format(*next(iter(lacks.items())))
    else:
        args, kwargs = task._arguments
        made = vars(type(task)(*args, **kwargs))
        mine = {name: value for name, value in vars(task).items() if name != "data_dir"}  # sent by itself
        other = [n for n, value in mine.items() if n not in made or described(value) != described(made[n])]
        if other:
            why = f"its {other[0]} was set after it was made, or is another one each time that it is made"
    if why:
        raise ConfigError(
            f"{type(task).__name__}: worker processes can't make it: {why}. Make that in its __init__(), "
            f"data() or model(), or set simulate.workers = 0."
        )


def described(value: Any) -> tuple[list[str], dict[str, str]]:
    """What builds a value, with digests in place of long bytes."""
    module = Extraction()
    with module.attempt("", value):
        module.value(value, "value")
    return module.statements, module.lacks


def written(cls: type, root: Path) -> tuple[str, dict[str, str]]:
    """Write the module of a class of `__main__` below `root`: its dotted name, and what it lacks."""
    module, folder = Extraction(), root / "__fedtrain__"
    module.add(cls.__qualname__.partition(".")[0])  # or what it is defined in
    future = ["from __future__ import annotations"] * module.future
    text = "\n\n".join([*future, *module.statements]) + "\n"
    digest = hashlib.sha256("\0".join(words(parsed(text))).encode()).hexdigest()
    name = f"{cls.__name__.lower()}_{digest[:12]}"
    texts = {".gitignore": b"*\n", f"{name}.py": text.encode()}
    with writing(folder):
        folder.mkdir(exist_ok=True)
        for file, held in (module.files | texts).items():
            if not (folder / file).exists() or (folder / file).stat().st_size != len(held):
                (folder / file).touch(mode=0o600)
                (folder / file).write_bytes(held)
    return f"__fedtrain__.{name}", module.lacks


class Extraction:
    """The statements that a module needs for some names of `__main__` to mean there what they mean here."""

    def __init__(self) -> None:
        self._main = vars(sys.modules["__main__"])
        self._done: set[str] = set()
        self._made: dict[int, str] = {}  # id of a value -> its name; "" while its statements are made
        self._alive: list[Any] = []  # so that no two values have one id
        self.statements: list[str] = []
        self.future = False  # whether annotations are not evaluated
        self.files: dict[str, bytes] = {}
        self.lacks: dict[str, str] = {}

    def add(self, name: str) -> None:
        """Add what gives a name of `__main__` its value, after the statements for what that uses."""
        value = self._main.get(name)
        if name in self._done or name not in self._main or vars(builtins).get(name, self) is value:
            return
        if not name.startswith("__") or name == "__file__":
            self._done.add(name)
            with self.attempt(name, value):
                if (expression := self.value(value, name)) != name:
                    self.statements.append(f"{name} = {expression}")

    @contextmanager
    def attempt(self, name: str, value: Any) -> Iterator[None]:
        """Where a value can't be sent, drop the statements made for it and keep its name in `lacks`."""
        before, done, made = len(self.statements), self._done.copy(), self._made.copy()
        try:
            yield
        except Exception as e:
            del self.statements[before:]
            self._done, self._made = done, made
            error = e if isinstance(e, Unsendable) else Unsendable(value)
            self.lacks[name] = f"{'' if error.value is value else 'which has '}{error}"

    def value(self, value: Any, name: str = "") -> str:
        """An expression for a value; statements that it needs are added. `name`: what a new one is called."""
        if type(value) in (*ATOMS, tuple) and plain(value):
            return repr(value)
        if id(value) not in self._made:
            self._alive.append(value)
            own = value.__name__ if isinstance(value, type | FunctionType) else ""
            name = own if self._main.get(own, self) is value else name or f"_held_{len(self._alive)}"
            self._done.add(name)
            self._made[id(value)] = ""
            self._make(value, name)
            self._made[id(value)] = name
        if not self._made[id(value)]:
            raise Unsendable(value, "that refers to itself")
        return self._made[id(value)]

    def _make(self, value: Any, name: str) -> None:
        """Add the statement that gives a name this value, after those for what it uses."""
        kind = type(value)
        of = f"{kind.__module__}.{kind.__qualname__}"
        if DRAWN_FROM.fullmatch(of):
            raise Unsendable(value, "from which each worker would draw its own numbers")
        if statement := imported(name, value):
            text = statement
        elif isinstance(value, type):
            return self._class(value)
        elif self._own(value) or (self._function_in(value) and hasattr(value, "__wrapped__")):
            return self._function(value, name)
        elif of == "numpy.ndarray" and not value.dtype.hasobject:
            text = f"{name} = {self._array(value)}"
        elif of == "torch.Tensor" and not value.requires_grad:
            own = ".clone()" if value.clone().stride() == value.stride() else ""  # memory aligned by torch
            make = self.value(sys.modules["torch"].from_numpy)
            text = f"{name} = {make}({self._array(value.numpy())}){own}"
        elif kind in (*ATOMS, list, tuple, dict, set, frozenset):
            text = f"{name} = {self._literal(value)}"
        else:
            text = self._rebuilt(value, name)
        self.statements.append(text)

    def _define(self, text: str) -> None:
        """Add a definition, after what it refers to."""
        for other in referred(text):
            self.add(other)
        self.statements.append(text)

    def _own(self, value: Any) -> bool:
        """Whether this is a function that the script or notebook has as source, unlike a dataclass's."""
        own = isinstance(value, FunctionType) and value.__globals__ is self._main
        return own and value.__code__.co_filename != "<string>"

    def _function_in(self, value: Any) -> Any:
        """The first function of `__main__` in a method, a property or a decorated function; None without."""
        for name in ("__func__", "fget", "func"):
            value = getattr(value, name, value)
        value = inspect.unwrap(value, stop=self._own)
        return value if self._own(value) else None

    def _known(self, decorator: ast.expr) -> bool:
        """Whether all names of an expression are of other modules than `__main__`."""
        return all(imported(n, self._main[n]) for n in referred(ast.unparse(decorator)) if n in self._main)

    def _check(self, function: FunctionType) -> str:
        """The text of a function's cell or file. Unsendable where that is no longer what it was made of."""
        code = function.__code__
        text, flags = "".join(linecache.getlines(code.co_filename)), code.co_flags & FUTURE
        if code not in compiled(text, flags):
            raise Unsendable(function, "and its source is not what it was: run that again")
        self.future |= bool(flags)
        return text

    def _function(self, value: Any, name: str) -> None:
        """A function from the syntax of its own code, with the defaults and the closure of now."""
        function = self._function_in(value)
        found, free = at(parsed(self._check(function)), function.__code__), function.__code__.co_freevars
        if len(found) > 1:
            raise Unsendable(function, "in one line with another: write them in two")
        node = found[0]
        self._defaults(function, node)
        if function is not value:  # a library's decorator, which is applied again
            if free or "registry" in vars(value) or not all(map(self._known, node.decorator_list)):
                raise Unsendable(value, "that its decorator made, which only this process has")
        elif not isinstance(node, ast.Lambda):
            node.decorator_list = []
        node.name = inner = "_inner" if free else name
        text = f"{inner} = {ast.unparse(node)}" if isinstance(node, ast.Lambda) else ast.unparse(node)
        if free:
            cells = ", ".join(self.value(cell.cell_contents) for cell in function.__closure__)
            text = textwrap.indent(text, "    ")
            text = f"def _outer({', '.join(free)}):\n{text}\n    return _inner\n{name} = _outer({cells})"
        self._define(text)

    def _defaults(self, function: FunctionType, node: Any) -> None:
        """Put the values that a function's defaults have into its syntax, but for literals of these."""
        by_name = [(function.__kwdefaults__ or {}).get(each.arg) for each in node.args.kwonlyargs]
        of = (node.args.defaults, function.__defaults__ or ()), (node.args.kw_defaults, by_name)
        for nodes, values in of:
            for i, (default, value) in enumerate(zip(nodes, values, strict=True)):
                if default is not None and not says(default, value):
                    nodes[i] = parsed(self.value(value), mode="eval").body

    def _class(self, cls: type) -> None:
        """A class from its source, with the attributes of now, which own decorators would change again."""
        name, later = cls.__name__, dict[str, Any]()
        if self._main.get(name) is not cls:
            raise Unsendable(cls, f"that is not the {name} of now: run the cell again that uses it")
        node, file = self._class_syntax(cls)
        bases = (*cls.__bases__, *getattr(cls, "__orig_bases__", ()))
        for base in {n.id for n in node.bases if isinstance(n, ast.Name)} & self._main.keys():
            if self._main[base] not in bases:
                raise Unsendable(cls, f"of a {base} that is not the one of now: run its cell again")
        node.decorator_list = [each for each in node.decorator_list if self._known(each)]
        if not issubclass(cls, Enum | tuple):  # these make their attributes themselves
            self._attributes(cls, node, file, later)
        self._define(ast.unparse(node))
        self._made[id(cls)] = name
        for key, value in later.items():
            with self.attempt(f"{name}.{key}", value):
                self.statements.append(f"{name}.{key} = {self.value(value)}")

    def _class_syntax(self, cls: type) -> tuple[Any, str]:
        """The syntax of a class and its file or cell: that of its own functions; or, for a class without, the
        newest cell with a class of this name and these attributes."""
        own = [f.__code__ for f in map(self._function_in, vars(cls).values()) if f]
        own = [code for code in own if code.co_qualname.startswith(f"{cls.__qualname__}.")]
        script = self._main.get("__file__")
        cells = [script] if script else [file for file in reversed(linecache.cache) if CELL.search(file)]
        annotated = vars(cls).get("__annotations__", {}).keys()
        for file in dict.fromkeys(code.co_filename for code in own) or cells:
            with suppress(SyntaxError):  # a cell of another language
                for node in ast.walk(parsed("".join(linecache.getlines(file)))):
                    if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                        same = annotated <= parts_of(node).keys() <= vars(cls).keys() | annotated
                        if any(at(node, code) for code in own) if own else same:
                            return node, file
        raise Unsendable(cls, "without its source: run its cell again")

    def _attributes(self, cls: type, node: ast.ClassDef, file: str, later: dict[str, Any]) -> None:
        """Put the values of a class's attributes into its syntax, but for literals of these; those that the
        class got afterwards are added to `later`."""
        parts, fields = parts_of(node), vars(cls).get("__dataclass_fields__", {})
        for key, value in vars(cls).items():
            part: Any = parts.get(key)
            function = self._function_in(value)
            assigned = isinstance(part, ast.Assign | ast.AnnAssign)
            inside = at(node, function.__code__) if function and function.__code__.co_filename == file else []
            if inside and (assigned or function.__name__ == key):
                self._check(function)
                self._defaults(function, inside[0])
            elif assigned and not inspect.ismemberdescriptor(value):
                default = getattr(fields.get(key), "default", value)
                if not says(part.value, default) and not (fields and "field(" in ast.unparse(part.value)):
                    with self.attempt(f"{cls.__name__}.{key}", value):
                        part.value = parsed(self.value(default), mode="eval").body
                if default is not value:
                    later[key] = value
            elif isinstance(part, ast.ClassDef) and isinstance(value, type):
                nested = dict[str, Any]()
                self._attributes(value, part, file, nested)
                later |= {f"{key}.{name}": each for name, each in nested.items()}
            elif (not key.startswith("__") or function) and key not in ("_abc_impl", "_backward_cls"):
                later[key] = value

    def _literal(self, value: Any) -> str:
        """A constant or a container: a literal where it is short and plain."""
        kind = type(value)
        if plain(value):
            return repr(value)
        if kind is float:
            return f"{self.value(float)}({str(value)!r})"
        if kind is bytes:
            digest = hashlib.sha256(value).hexdigest()
            self.files[f"{digest}.bin"] = value
            return f"{self.value(kept)}(__spec__.origin, {digest!r})"
        if kind is list and {*map(type, value)} <= ATOMS - {bytes, EllipsisType}:
            return f"{self.value(json.loads)}({self._literal(json.dumps(value).encode())})"
        if kind is dict:
            return f"{{{', '.join(f'{self.value(k)}: {self.value(v)}' for k, v in value.items())}}}"
        parts = [self.value(each) for each in value]
        if kind in (set, frozenset):
            return f"{self.value(kind)}([{', '.join(sorted(parts))}])"
        return f"[{', '.join(parts)}]" if kind is list else f"({''.join(f'{part}, ' for part in parts)})"

    def _array(self, value: Any) -> str:
        """An array of numbers with its elements in memory as here, so that sums of them round alike."""
        reach = [(n - 1) * step for n, step in zip(value.shape, value.strides, strict=True) if value.size]
        first = -sum(step for step in reach if step < 0)
        held = bytearray(sum(map(abs, reach)) + (value.itemsize if value.size else 0))
        type(value)(value.shape, value.dtype, held, first, value.strides)[...] = value
        memory = f"{self.value(bytearray)}({self._literal(bytes(held))})"
        dtype = self.value(value.dtype)
        return f"{self.value(type(value))}({value.shape}, {dtype}, {memory}, {first}, {value.strides})"

    def _rebuilt(self, value: Any, name: str) -> str:
        """Any other object, by the calls that copyreg's protocol names for it."""
        reduce = copyreg.dispatch_table.get(type(value))
        parts: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(parts, str) and (text := imported(name, value, parts)):
            return text
        make, args, *rest = parts
        if rest[3:] or getattr(make, "__name__", "") == "_load_from_bytes":  # of torch: a pickle
            raise Unsendable(value)
        rest[1:] = [each and [*each] for each in rest[1:]]
        given = ", ".join(map(self.value, (make, args, *rest)))
        return f"{name} = {self.value(vars(copy)['_reconstruct'])}(None, None, {given})"


def kept(module: str, digest: str) -> bytes:
    """The bytes that a module's text names by their digest. ConfigError where their file is not as it was."""
    file = Path(module).with_name(f"{digest}.bin")
    held = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(held).hexdigest() != digest:
        raise ConfigError(f"{file} is missing or changed: call fedtrain again where the task is.")
    return held


def imported(name: str, value: Any, there: str = "") -> str:
    """The import of a module, or of what a module other than `__main__` holds as its own name or `there`."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    there = there or getattr(value, "__name__", "")
    if not isinstance(there, str) or not there.isidentifier():
        return ""
    known: list[Any] = [
        getattr(value, "__module__", None),
        *sorted(sys.modules, key=lambda m: (m.count("."), m)),
    ]
    for module in filter(set(sys.modules).difference(["__main__", "__mp_main__"]).__contains__, known):
        if getattr(sys.modules[module], "__dict__", {}).get(there) is value:
            return f"from {module} import {there} as {name}"
    return ""


def plain(value: Any) -> bool:
    """Whether a value's repr() is a literal of it, and short."""
    kind = type(value)
    if kind in (list, tuple, dict):
        items = value.items() if kind is dict else value
        return (kind is dict or len(value) <= LONG) and all(map(plain, items))
    return kind in ATOMS and not (
        (kind is bytes and len(value) > LONG) or (kind is float and value - value != 0)
    )


def says(node: ast.expr, value: Any) -> bool:
    """Whether an expression is a literal of this very value."""
    try:
        return plain(value) and repr(ast.literal_eval(node)) == repr(value)
    except (ValueError, TypeError):
        return False


def at(tree: ast.AST, code: CodeType) -> list[Any]:
    """The functions in a syntax tree that begin in the line of a code object and have its name."""
    nodes: list[Any] = [n for n in ast.walk(tree) if getattr(n, "name", "<lambda>") == code.co_name]
    nodes = [n for n in nodes if hasattr(n, "args") and hasattr(n, "body")]
    return [n for n in nodes if (*getattr(n, "decorator_list", ()), n)[0].lineno == code.co_firstlineno]


@lru_cache(maxsize=4)
def compiled(text: str, flags: int) -> list[CodeType]:
    """All code objects of a file; and of a cell, which IPython compiles statement by statement."""
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    modules = [ast.Module([each], []) for each in parsed(text).body]
    codes = [compile(each, "", "exec", flags, dont_inherit=True) for each in (parsed(text), *modules)]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return codes


def parts_of(node: ast.ClassDef) -> dict[str, Any]:
    """Name -> the statement in a class's body that gives it a value."""
    found: dict[str, Any] = {}
    for part in node.body:
        match part:
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                found[name] = part
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                found[name] = part
    return found


def referred(statement: str) -> list[str]:
    """Names of the module that a statement uses, its functions' included."""
    table = symtable.symtable(statement, "<source>", "exec")
    found, todo = set[str](), [table]
    while todo:
        scope = todo.pop()
        used = (symbol for symbol in scope.get_symbols() if symbol.is_referenced())
        found |= {symbol.get_name() for symbol in used if scope is table or symbol.is_global()}
        todo += scope.get_children()
    return sorted(found)
