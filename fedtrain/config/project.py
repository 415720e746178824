"""Source files of a project: which ones a task's imports reach, and the loader of their modules.

A module of a project is found by its name in a table of the files that `sources` has read, never by searching
the project's folder. So a project's module never takes the place of one of Python's or of an installed
package, and at a site the bytes that are compiled are the bytes that were approved.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import threading
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Self

from ..errors import ConfigError, TaskError, nearest

OURS = Path(__file__).resolve().parents[1]
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages

_parsing = threading.Lock()


class SourceFile(NamedTuple):
    """A file of a project, and the bytes that it held when it was read."""

    root: Path  # of the project, resolved
    name: str  # the path from there
    content: bytes

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self.root / self.name

    @property
    def sha256(self) -> str:
        """Of its bytes, in hex."""
        return hashlib.sha256(self.content).hexdigest()

    @classmethod
    def read(cls, path: Path, root: Path) -> Self:
        """The file that lies here in the project `root`."""
        return cls(root, path.relative_to(root).as_posix(), path.read_bytes())


_modules: dict[str, SourceFile] = {}  # a module's name -> what is loaded for it
_approved: dict[Path, dict[str, str] | None] = {}  # a project -> its files that may be loaded; None: all


class SourceOnly(SourceFileLoader):
    """Finds and loads the modules of the table, from their source: compiled files are not read, for Python
    would believe a compiled file that claims to be of the source."""

    def __init__(self, name: str, source: SourceFile) -> None:
        super().__init__(name, str(source.path))
        self.source = source

    @classmethod
    def find_spec(cls, name: str, *_: object) -> ModuleSpec | None:
        """The module of the table; a package without __init__.py where the table has modules in it."""
        inside = (_modules[each] for each in _modules if each.startswith(f"{name}."))
        source = _modules.get(name) or next(inside, None)
        if source is None or not source.path.is_file():
            return None
        closed = _approved.get(source.root) is not None
        spec: ModuleSpec | None = ModuleSpec(name, None, is_package=True)
        locations = [str(source.root.joinpath(*name.split(".")))]
        if name in _modules:
            current = source if closed else SourceFile.read(source.path, source.root)
            spec = spec_from_file_location(name, source.path, loader=cls(name, current))
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = [] if closed else locations
        return spec

    def get_data(self, path: str) -> bytes:
        """The bytes of the table; of another file, as of data in a package, what is on the disk."""
        return self.source.content if path == self.path else super().get_data(path)

    def path_stats(self, path: object) -> NoReturn:
        """Without the source's time no compiled file is looked for, nor written."""
        raise OSError("compiled files are not read")


def load(name: str, files: Mapping[str, SourceFile]) -> ModuleType:
    """The module of this name, made of these files of its project, as `sources` has read them; anew where
    another file or other bytes are loaded. ConfigError where a file is not as it was approved."""
    for each, source in files.items():
        check_approved(source)
        if getattr(getattr(sys.modules.get(each), "__loader__", None), "source", None) != source:
            sys.modules.pop(each, None)
        _modules[each] = source
    if SourceOnly not in sys.meta_path:
        sys.meta_path.append(SourceOnly)
    sys.meta_path.insert(0, SourceOnly)
    try:
        return import_module(name)
    finally:  # what a program imports later comes by its own sys.path first
        sys.meta_path.remove(SourceOnly)


def is_of_project(thing: Any) -> bool:
    """Whether a class or function is of a module that `load` loaded."""
    return isinstance(getattr(sys.modules.get(thing.__module__), "__loader__", None), SourceOnly)


def load_only(root: Path, approved: dict[str, str] | None) -> None:
    """From here on load no file of the project `root` but with its SHA-256 here; None: each is loaded."""
    _approved[root.resolve()] = approved
    if approved is not None:
        sys.meta_path.insert(0, SourceOnly)


def approved_in(root: Path) -> dict[str, str] | None:
    """The files to which `load_only` holds this process."""
    return _approved.get(root.resolve())


def check_approved(source: SourceFile) -> None:
    """ConfigError unless the bytes are those of an approved file, where only such may be loaded."""
    approved = _approved.get(source.root)
    if approved is not None and approved.get(source.name) != source.sha256:
        raise ConfigError(
            f"{source.name} changed since it was approved at this site, and no line of it has run. Read what "
            f"changed, then: fedtrain task approve"
        )


def close_paths(root: Path, approved: dict[str, str] | None) -> None:
    """As load_only; and from here on sys.path leads to nothing in the project `root`, also where its entries
    are added later, but to packages installed in an environment that lies in it."""
    load_only(root, approved)
    root, entries = root.resolve(), [Path(entry).resolve() for entry in sys.path]
    homes = [path for path in map(Path, (sys.prefix, sys.base_prefix)) if root in path.parents]
    kept = [OURS, *homes, *(path for path in entries if INSTALLED.intersection(path.parts))]

    def hook(entry: str) -> Any:
        path = Path(entry).resolve()
        if not path.is_relative_to(root) or any(map(path.is_relative_to, kept)):
            raise ImportError(f"{path} is not in the project")
        return SourceOnly

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


def sources(spec: str, root: Path, key: str = "run.task") -> dict[str, SourceFile]:
    """Module name -> file, for the module of "module:Class", which `key` names, and all modules in `root`
    that its imports reach: statements, also inside functions, and importlib.import_module("...").

    ConfigError where a file has the name of a module that is not the project's.
    """
    name = spec.partition(":")[0]
    found = reached([name], root, key)
    if name not in found:
        here = [f.stem for f in sorted(root.glob("*.py"))]
        file = root.resolve().joinpath(*name.split("."))
        if name.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigError(f"{key}: {file}.py has the name of one of Python's own modules. Rename it.")
        raise ConfigError(f"{key}: {file}.py does not exist.{nearest(name, here)}")
    return found


def reached(names: Iterable[str], root: Path, key: str, folder: Path | None = None) -> dict[str, SourceFile]:
    """As `sources`, for the modules of these names and what they import; of those in a `folder` of `root`."""
    found: dict[str, SourceFile] = {}
    root, todo = root.resolve(), [*names]
    while todo:
        name = todo.pop()
        if name not in found and (path := _path_of(name, folder or root, key)) is not None:
            found[name] = SourceFile.read(path, root)
            todo += [*_parents(name), *imports_of(found[name], name)]
    return found


def _path_of(module: str, folder: Path, key: str) -> Path | None:
    top = module.partition(".")[0]
    if top == OURS.name or not all(part.isidentifier() for part in module.split(".")):
        return None
    path = folder.joinpath(*module.split("."))
    files = path / "__init__.py", path.with_name(f"{path.name}.py")
    if found := next((file for file in files if file.is_file()), None):
        installed = [entry for entry in sys.path if INSTALLED.intersection(Path(entry).parts)]
        spec = PathFinder.find_spec(top, installed)
        theirs = "one of Python's own modules" if top in sys.stdlib_module_names else ""
        if spec is not None and spec.origin and Path(spec.origin).resolve() != found.resolve():
            theirs = theirs or f"an installed package, {spec.origin}"
        if theirs:
            raise ConfigError(f"{key}: {found} has the name of {theirs}. Rename it, and what imports it.")
    return found


def parsed(source: str | bytes, filename: str = "<unknown>", mode: str = "exec") -> Any:
    """ast.parse for several threads, which Python 3.11 mixes up where one of them collects garbage."""
    with _parsing:
        return ast.parse(source, filename, mode)


def tree_of(source: SourceFile) -> ast.Module:
    """The syntax tree of a file; TaskError where it is not Python source."""
    try:
        tree: ast.Module = parsed(source.content, str(source.path))
        return tree
    except SyntaxError as e:
        raise TaskError(f"SyntaxError in {source.path.name}:{e.lineno}: {e.msg}") from None
    except ValueError as e:  # null bytes
        raise TaskError(f"{source.path.name} is not Python source: {e}") from None


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def imports_of(source: SourceFile, module: str = "") -> list[str]:
    """The absolute name of every module that a file, which is loaded as `module`, may import by a constant
    name."""
    package = module if source.path.name == "__init__.py" else module.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(tree_of(source)):
        match node:
            case ast.Import():
                names += [name for alias in node.names for name in (*_parents(alias.name), alias.name)]
            case ast.ImportFrom():
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join(part for part in (*above, node.module or "") if part)
                names += [*_parents(base), base, *(f"{base}.{a.name}".lstrip(".") for a in node.names)]
            case ast.Call(
                ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                [ast.Constant(str(name)), *_],
            ):
                names += [*_parents(name), name]
    return names
