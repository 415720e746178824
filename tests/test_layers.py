"""What may import what (ARCHITECTURE.md). A failure names the line to move, not a rule to look up."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch.distributed

import fedtrain

ROOT = Path(fedtrain.__file__).parent
BOTTOM = {
    "arena",
    "config",
    "digest",
    "errors",
    "events",
    "exchange",
    "fairness",
    "keystream",
    "learning",
    "malloc",
    "messages",
    "modes",
    "population",
    "questions",
    "schema",
}
MATHS = {"strategies", "aggregation", "compression", "privacy", "secagg", "statistics", "topology", "gossip"}
EVERYTHING = {*BOTTOM, *MATHS, "training", "wire", "transport", "store", "pki", "tracking", "runtime"}
OUTSIDE = {"grpc", "zmq", "asyncio", "socket", "threading", "time", "torch.distributed"}  # maths has no I/O

# layer -> what of fedtrain it may import, besides itself. A new package begins with a line here.
MAY_IMPORT = {
    **dict.fromkeys(BOTTOM, BOTTOM),
    **dict.fromkeys(MATHS, BOTTOM),
    "training": BOTTOM,
    "store": BOTTOM,
    "pki": BOTTOM,
    "tracking": BOTTOM | {"store"},
    "contrib": BOTTOM | {"api", "cli", "store", "strategies", "topology", "tracking"},
    "wire": BOTTOM,
    "metrics": BOTTOM,
    "transport": BOTTOM | {"wire"},
    "runtime": EVERYTHING,
    "results": EVERYTHING,
    "api": EVERYTHING | {"results"},
    "cli": EVERYTHING | {"api"},
    "__main__": EVERYTHING | {"cli"},
    "__init__": EVERYTHING | {"api", "results"},  # names only: what they load is tested below
}
# layer -> what of the world it may not import
MAY_NOT_IMPORT = {
    **dict.fromkeys(BOTTOM, OUTSIDE),
    **dict.fromkeys(MATHS, OUTSIDE),
    "config": OUTSIDE - {"threading"},  # a lock around ast.parse
    "training": {"grpc", "zmq", "asyncio", "socket"},
    "store": {"grpc", "zmq", "torch.distributed"},
    "pki": {"grpc", "zmq", "torch"},
    "wire": {"grpc", "zmq", "asyncio", "socket", "torch.distributed"},
    "transport": {"torch.distributed"},
}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imports(source: str, package: list[str]) -> Iterator[tuple[str, int]]:
    """(full dotted name, line) of every import, those inside functions too, relative ones resolved."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from ((".".join([*base, a.name]), node.lineno) for a in node.names)


def layer_of(name: str) -> str | None:
    """The layer that a dotted name of ours lies in; None for others', and for fedtrain.__version__."""
    parts = name.split(".")
    if parts[0] != "fedtrain" or len(parts) == 1 or parts[1] == "__version__":
        return None
    return fedtrain._HOME.get(parts[1], parts[1]).split(".")[0]


def breaches(source: str, layer: str, package: list[str]) -> Iterator[tuple[int, str]]:
    for name, line in imports(source, package):
        ours = name.removeprefix("fedtrain.")
        if layer == "contrib" and (ours in fedtrain._HOME or ours.startswith("training.compat.")):
            continue  # a public name, from fedtrain itself, or one of torch's
        inside = layer_of(name)
        if inside is not None and inside not in MAY_IMPORT[layer] | {layer}:
            yield line, f"{layer} may not import {name}"
        for outside in MAY_NOT_IMPORT.get(layer, ()):
            if f"{name}.".startswith(f"{outside}."):
                yield line, f"{layer} may not import {outside}"


def files_of(layer: str) -> list[Path]:
    return sorted([*(ROOT / layer).rglob("*.py"), *ROOT.glob(f"{layer}.py")])


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_a_layer_imports_only_what_is_below_it(layer):
    bad = [
        f"{path.relative_to(ROOT.parent)}:{line}: {what}"
        for path in files_of(layer)
        for line, what in breaches(
            path.read_text(), layer, ["fedtrain", *path.relative_to(ROOT).parent.parts]
        )
    ]
    assert bad == []


def test_every_module_lies_in_a_layer_of_the_table():
    found = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert found - MAY_IMPORT.keys() == set()


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("strategies", "from ..aggregation import mean"),
        ("strategies", "from .. import transport"),
        ("strategies", "import fedtrain.training.local"),
        ("strategies", "from fedtrain import Task"),
        ("aggregation", "from torch import distributed"),
        ("aggregation", "def f():\n    import time"),
        ("training", "from ..runtime.federated import run"),
        ("wire", "from ..transport import grpc"),
        ("transport", "if True:\n    from ..store import log"),
        ("store", "from ..pki import issue"),
        ("runtime", "from ..cli import main"),
        ("arena", "from .strategies import base"),
    ],
)
def test_a_forbidden_import_is_seen_in_each_of_its_forms(layer, line):
    package = ["fedtrain"] if layer in BOTTOM else ["fedtrain", layer]
    assert len(list(breaches(line, layer, package))) == 1


def test_what_is_below_or_at_home_may_be_imported():
    source = "from ..arena import Arena\nfrom .base import Strategy\nfrom .. import __version__\nimport torch"
    assert list(breaches(source, "strategies", ["fedtrain", "strategies"])) == []


# --- Public names, and what they cost


def test_public_names_are_sorted_and_each_has_a_home():
    assert sorted(fedtrain.__all__) == fedtrain.__all__ == sorted(fedtrain._HOME)


def test_every_public_name_can_be_had():
    for name in fedtrain.__all__:
        assert getattr(fedtrain, name).__name__ == name


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("fedtrain", {"torch", "numpy", "grpc", "zmq", "cryptography", "rich", "click", "msgspec"}),
        ("fedtrain.messages", {"torch", "numpy", "grpc", "cryptography", "rich", "click"}),
        ("fedtrain.config", {"torch", "numpy", "grpc", "cryptography", "rich", "click"}),
    ],
)
def test_importing_loads_nothing_heavy(module, heavy):
    code = f"import sys, {module}; print(*{{m.split('.')[0] for m in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) & heavy == set()


# --- Bytes are data, never code

CODE_CARRIERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
RUNNERS = {"eval", "exec", "torch.load", "torch.jit.load"}
# What torch exchanges among ranks, or keeps in checkpoints, as pickles.
TORCHS_PICKLES = {name for name in dir(torch.distributed) if "_object" in name} | {
    "broadcast_object", "scatter_object", "consolidate_state_dict", "_DistWrapper",
    "FileSystemWriter", "FileSystemReader", "async_save", "TCPStore", "rpc_async", "rpc_sync",
}  # fmt: skip
PICKLING_MODULES = ("torch.distributed.checkpoint.state_dict_", "torch.distributed.rpc")
TAKES_NO_CALLS = "False"  # TCPStore's fourth argument: it is a caller and listens to nobody


def unsafe(source: str) -> Iterator[tuple[int, str]]:
    for name, line in imports(source, ["fedtrain"]):
        if name.split(".")[0] in CODE_CARRIERS:
            yield line, name
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            if (name := ast.unparse(node.func)) in RUNNERS:
                yield node.lineno, name
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", 0):
            yield node.value.lineno, "allow_pickle"
    yield from torchs_pickles(source)


def torchs_pickles(source: str) -> Iterator[tuple[int, str]]:
    tree = parsed(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PICKLING_MODULES):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            call = calls.get(id(node))
            caller = call is not None and [ast.unparse(arg) for arg in call.args[3:4]] == [TAKES_NO_CALLS]
            if name in TORCHS_PICKLES and not (name == "TCPStore" and (caller or call is None)):
                yield node.lineno, name


def test_s20_nothing_in_fedtrain_can_turn_bytes_into_code():
    bad = [
        f"{path.relative_to(ROOT.parent)}:{line}: {what}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, what in unsafe(path.read_text())
    ]
    assert bad == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "eval(text)",
        "np.load(f, allow_pickle=True)",
        "dist.all_gather_object(found, mine)",
        "dist.broadcast_object_list(box, 0)",
        "send = torch.distributed.scatter_object_list",
        "from torch.distributed.checkpoint.state_dict_saver import save",
        "TCPStore(address, port, 2, True)",
        "dist.TCPStore(address, port)",
    ],
)
def test_s20_the_search_finds_what_it_looks_for(line):
    assert list(unsafe(f"def f():\n    {line}"))


def test_s20_the_search_lets_a_model_be_evaluated():
    assert list(unsafe("model.eval()\nCredentials.load(folder)")) == []
