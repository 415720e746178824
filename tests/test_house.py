"""Numbers of the package that the caps of CI (.ci/run) don't count. Limits only fall."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fedtrain
from tests.conftest import TOGETHER

ROOT = Path(fedtrain.__file__).parent
LONG_FILE = 450  # lines
RUNTIME_FILE = 350  # lines, in fedtrain/runtime/

# Today's numbers:
LONG_FILES = 0
# ... of those in runtime/
RUNTIME_FILES = 0
# ... of class names that two modules define
NAMES_WITH_TWO_MEANINGS = 5
# ... of places that spell them
DTYPES_WITHOUT_DIFFERENCES = 1
# ... of groups of modules that import each other
CIRCLES = 0
# the events of a run itself: each is emitted in one place
RUN_EVENTS = {
    "run_started", "waiting", "round_started", "round_failed", "round_committed", "evaluated", "best", "step",
    "privacy_spent", "run_finished",
}  # fmt: skip


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every module of the package; templates are the user's, not ours."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["fedtrain", *path.relative_to(ROOT).with_suffix("").parts]
        if "templates" not in parts:
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text())
    return found


def lines_of(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in folder.rglob("*.py")}


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """The modules of ours that a module imports when it runs, inside functions too; not for types alone."""
    is_package = (ROOT / Path(*name.split(".")[1:])).is_dir()
    package = name.split(".") if is_package else name.split(".")[:-1]
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in modules())
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # from a package one module, or a name that the package itself holds
                inner = f"{origin}.{alias.name}"
                if inner in modules():
                    yield inner
                elif origin in modules():
                    yield origin


def circles() -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others (Tarjan)."""
    edges = {
        name: {other for other in imported(name, tree) if other != name} for name, tree in modules().items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in edges:
        if name not in index:
            visit(name)
    return found


def emitted() -> dict[str, list[str]]:
    """Event -> where it is emitted: where a RunStarted(...), say, is made."""
    from fedtrain import events

    kinds = {kind.__name__: kind.__struct_config__.tag for kind in events.Event.__subclasses__()}
    places = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in kinds and kinds[called] in RUN_EVENTS:
                places[str(kinds[called])].append(f"{name}:{node.lineno}")
    return places


def test_few_files_are_long():
    assert len(long := {p: n for p, n in lines_of(ROOT).items() if n > LONG_FILE}) <= LONG_FILES, long
    runtime = {p: n for p, n in lines_of(ROOT / "runtime").items() if n > RUNTIME_FILE}
    assert len(runtime) <= RUNTIME_FILES, runtime


def test_no_modules_import_each_other_in_a_circle():
    found = circles()
    assert len(found) <= CIRCLES, found


def test_a_class_name_has_one_meaning():
    homes = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    several = {name: places for name, places in homes.items() if len(places) > 1}
    assert len(several) <= NAMES_WITH_TWO_MEANINGS, several


def test_each_event_of_a_run_is_emitted_in_one_place():
    places = emitted()
    assert places.keys() >= RUN_EVENTS, "the way to emit events has changed: teach emitted() the new one"
    several = {k: v for k, v in places.items() if k in RUN_EVENTS and len(v) > 1}
    assert several == {}


def test_one_place_says_which_dtypes_have_no_differences():
    spelled = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and {getattr(e, "value", None) for e in node.elts} == {"bool", "uint8"}
    ]
    assert len(spelled) <= DTYPES_WITHOUT_DIFFERENCES, spelled


def test_one_place_takes_optimizer_steps():
    """Whoever lets a strategy correct a gradient, and an optimizer step on it, has a step loop."""
    loops = {
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        if name.startswith("fedtrain.training")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("self.correct", "self.optimizer.step")
    }
    assert {place.split(":")[0] for place in loops} == {"fedtrain.training.engine"}, loops
    assert len(loops) == 2, loops


def test_the_files_whose_slow_tests_share_a_worker_are_there():
    assert [file for file in TOGETHER if not (ROOT.parent / file).is_file()] == []
