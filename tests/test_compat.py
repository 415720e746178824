"""What of torch fedtrain uses that is private, and which releases of torch it is installed with."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

import fedtrain
from fedtrain.errors import ConfigError
from fedtrain.training import compat

ROOT = Path(fedtrain.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
# The state of nn.Module as torch.save() keeps it, and what namedtuple documents.
KEPT = {"_buffers", "_modules", "_parameters", "_non_persistent_buffers_set", "_fields"}
NOT_TORCH = ("os.", "sys.", "aten.")  # `aten`: operators, by names that exported models have


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("name", sorted(compat.NAMES))
def test_torch_has_each_private_name_that_fedtrain_uses(name):
    assert callable(getattr(compat, name))


def test_a_private_name_that_torch_lost_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(compat.NAMES, "tree_map", "torch.utils._pytree:_gone")
    window = f"{compat.OLDEST} to {compat.NEWEST}"
    with pytest.raises(ConfigError, match=rf"torch .* has no torch.utils._pytree._gone, .*{window}"):
        from fedtrain.training.compat import tree_map  # noqa: F401


def test_no_other_file_uses_a_private_name_of_torch():
    named = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    ours, asked = set(KEPT), []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, named):
                ours.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(getattr(node, "attr", getattr(node, "id", "")))
            elif isinstance(node, ast.ImportFrom) and re.match(r"torch\b", node.module or ""):
                parts = [*node.module.split("."), *(alias.name for alias in node.names)]
                asked += [(path.name, f"torch's {part}") for part in parts if private(part)]
            elif isinstance(node, ast.Attribute) and private(node.attr):
                asked += [(path.name, node.attr)] * (not ast.unparse(node).startswith(NOT_TORCH))
    found = [(file, name) for file, name in asked if name not in ours and file != "compat.py"]
    assert found == []


def test_a_parameter_that_the_loss_does_not_use_has_zeros_where_torch_lacks_a_way():
    module = nn.ModuleDict({"used": nn.Linear(2, 1), "other": nn.Linear(3, 1)})
    module.forward = module["used"].forward
    module.register_forward_hook(compat._fill_unused)
    module(torch.ones(1, 2)).sum().backward()
    assert module["used"].weight.grad.tolist() == [[1.0, 1.0]]
    assert module["other"].weight.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_the_package_asks_for_the_torch_that_the_matrix_begins_with():
    assert f"torch>={compat.OLDEST}" in PROJECT["dependencies"]
    pythons = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    table = (ROOT.parent / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\d\.\d+)\S* \| (\d\.\d+)\S* \|", table, re.M)
    assert {compat.OLDEST, "2.13", compat.NEWEST} <= {release for release, _ in rows}
    assert sorted({python for _, python in rows}) == pythons


@pytest.mark.slow(5)
def test_pip_leaves_the_oldest_torch_where_it_is(tmp_path):
    """pip plans an installation of fedtrain beside packages that are there by name alone."""
    there = tmp_path / "there"
    for requirement in PROJECT["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        known = f"{compat.OLDEST}.0+cu128" if name == "torch" else version(name)
        (info := there / f"{name}-{known}.dist-info").mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {known}\n")
        (info / "INSTALLER").write_text("pip\n")
    import pip

    shutil.copytree(Path(pip.__file__).parent, there / "pip")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=ROOT.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    env = {**os.environ, "PYTHONPATH": str(there), "PIP_CONFIG_FILE": os.devnull}
    plan = [sys.executable, "-S", "-m", "pip", "install", "--dry-run", "--no-index", wheel]
    done = subprocess.run(plan, env=env, capture_output=True, text=True, check=False)
    would = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    assert would == [f"Would install fedtrain-{fedtrain.__version__}"], done.stdout + done.stderr
