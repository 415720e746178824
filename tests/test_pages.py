"""What the pages show is run as it stands: Python blocks, and what is typed into Python. Commands: see
tests/first_use/test_typed.py."""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedtrain.cli.projects import new
from tests.limits import WAIT_S

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.M | re.S)

# What the text around a page's blocks speaks of, and what must hold after them.
BEFORE = {
    "checkpoints.md": """
import torch
from fedtrain.training.checkpoint import Checkpoints
dataset = [(torch.ones(4), i % 2) for i in range(100)]
model_state = torch.nn.Linear(4, 2)
class Sampler:
    def state_dict(self): return {"seen": torch.tensor(3)}
    def load_state_dict(self, state): self.seen = state["seen"]
sampler = Sampler()
""",
    "compression.md": """
import torch
shapes, n, vector, run_seed, round, site = [(10, 10), (10,)], 110, torch.randn(110), 0, 3, "north"
""",
    "datacenter.md": """
import fedtrain
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel
def stage(model, blocks, first, last): return model
""",
    "gossip.md": """
import torch
from fedtrain.exchange import Share
from fedtrain.transport.memory import Faults, LocalNetwork
from tests.gossip import Sum, share
payload, mixer = share(torch.ones(4)).payload, Sum(torch.zeros(4))
""",
    "simulation.md": """
import fedtrain
from pathlib import Path
settings = Path("clinic/fedtrain.toml")
settings.write_text(settings.read_text() + "\\n[simulate]\\nspeeds = 'lognormal:0.5'\\n")
""",
    "start-researcher.md": "import os; os.chdir('clinic')",
    "training.md": """
import torch
from torch import nn
import fedtrain
def read(path): return [([1, 2], 0), ([3], 1)]
""",
}
AFTER = {
    "aggregation.md": "assert Midway.__mro__[1] is Rule",
    "checkpoints.md": "assert step == 0 and len(Tokens().data('site-1')) == 100",
    "compression.md": "assert vector.shape == (110,) and vector.count_nonzero() <= 2 and state",
    "datacenter.md": "assert Shakespeare.parallel_plan(None).blocks == 'blocks'",
    "gossip.md": "assert done.arrived == set()",
    "python.md": "assert len(run.history) == 10",
    "strategies.md": "assert Damped().damping == 0.5",
    "topology.md": "assert Damped().share == 0.5",
    "training.md": "assert isinstance(optimizer(None, [nn.Parameter(torch.ones(1))], 3), torch.optim.SGD)",
}


def blocks(page, language):
    return [
        (options, block)
        for found, options, block in BLOCK.findall((DOCS / page).read_text())
        if found == language
    ]


def pages_with(language):
    return sorted(page.name for page in DOCS.glob("*.md") if blocks(page.name, language))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the project clinic, as `fedtrain new` makes it."""
    monkeypatch.chdir(tmp_path)
    new.callback(Path("clinic"), "tabular")
    return tmp_path


TRAINS = {"python.md": 15, "simulation.md": 4}  # in processes; seconds


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=pytest.mark.slow(TRAINS[page]) if page in TRAINS else ())
    for page in pages_with("python")
])  # fmt: skip
def test_python_on_a_page_runs(page, project):
    names = {"__name__": "__main__"}
    shown = "\n".join(block for _, block in blocks(page, "python")).replace("s3://my-bucket", str(project))
    if page == "python.md":  # with a task of the script itself
        (project / "page.py").write_text("\n".join([shown, AFTER[page]]))
        subprocess.run([sys.executable, "page.py"], check=True, timeout=2 * WAIT_S)
        return
    for source in (BEFORE.get(page, ""), shown, AFTER.get(page, "")):
        code = compile(source, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.iscoroutine(work := eval(code, names)):
            asyncio.run(work)


@pytest.mark.parametrize("page", pages_with("pycon"))
def test_what_a_page_types_into_python_gives_what_it_shows(page):
    names = {}
    for _, block in blocks(page, "pycon"):
        typed = doctest.DocTestParser().get_doctest(block, names, page, None, None)
        runner = doctest.DocTestRunner()
        assert runner.run(typed, clear_globs=False).failed == 0
        names = typed.globs
