"""Globals of a notebook or script reach worker processes as they are, or are refused by name."""

import ast
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedtrain
from fedtrain.errors import ConfigError, StoreError
from fedtrain.events import RunStarted
from fedtrain.tracking import notebook
from fedtrain.training.extract import check_sendable, kept, named
from fedtrain.training.task import arguments_of, load_task

HERE = {"simulate.min_examples": 1, "simulate.workers": 0, "simulate.sites": 3, "run.rounds": 1}
IMPORTS = """
import functools, threading
from dataclasses import dataclass, field
import numpy as np
import torch
from torch import nn
import fedtrain
"""
TASK = """
class Table(fedtrain.Task):
    rate = 0.1
    def model(self):
        return nn.Linear(1, 2)
    def data(self, site):
        return {}
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def task(data, base="fedtrain.Task"):
    """The source of a task whose data() gives this expression."""
    return TASK.replace("fedtrain.Task", base).replace("{}", data)


class Kernel:
    """Runs cells in a module that is `__main__`, as ipykernel does."""

    def __init__(self, monkeypatch):
        self.module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", self.module)
        monkeypatch.setattr(linecache, "cache", {})
        self.run(IMPORTS)

    def run(self, *cells):
        for text in cells:
            file = f"/tmp/ipykernel_1/{abs(hash(text))}.py"
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            for statement in ast.parse(text).body:  # as IPython does
                exec(compile(ast.Module([statement], []), file, "exec"), vars(self.module))

    def remade(self, name="Table"):
        """(the task here, the task as a worker process imports it, the name of the module)."""
        mine = getattr(self.module, name)()
        root, spec, lacks = named(type(mine))
        check_sendable(mine, lacks)
        return mine, load_task(spec + arguments_of(mine), root), spec


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Kernel(monkeypatch)


# Each case: the cells in the order in which they ran, and the data() that shows what a worker has.
SENT = {
    "an array cleaned in place": (["x = np.ones((4, 2))", "x[:, 0] -= 0.5"], "x"),
    "drawn tensors": (["torch.manual_seed(7)\nx = torch.randn(2000, 3)"], "x, x.stride()"),
    "a re-run cell": (
        ["c = nn.NLLLoss()", "c = nn.NLLLoss(reduction='sum')", "c = nn.NLLLoss()"], "c.reduction",
    ),
    "a function of a re-run cell": (["def f(): return 1", "def f(): return 2", "def f(): return 1"], "f()"),
    "an earlier function by another name": (["def f(): return 1\ng = f", "def f(): return 2"], "f(), g()"),
    "a class without functions of a re-run cell": (
        ["class C:\n    a = 1", "class C:\n    a = 1\n    b = 2", "class C:\n    a = 1", "C.k = 3"],
        "C.a, C.k, hasattr(C, 'b')",
    ),
    "a closure": (
        ["def scaled(by):\n    def f(x): return by * x\n    return f",
         "g, h = scaled(2), scaled(np.ones(2))"],
        "g(3), h(4)",
    ),
    "a lambda with a default": (["k = 2\nf = lambda x, by=k: by * x", "k = 5"], "f(3), k"),
    "a default that has changed since": (["k = 2\ndef f(x, *, by=k): return by * x", "k = 5"], "f(3)"),
    "a partial": (
        ["def f(a, b): return a, b", "k = [1]\ng = functools.partial(f, b=k)", "k.append(2)"], "g(0)",
    ),
    "a dict of arrays": (["d = {'a': np.arange(3), 'b': [torch.ones(2)]}", "d['a'] *= 2"], "d"),
    "a global that a function changed": (
        ["total = 1", "def more():\n    global total\n    total += 1\nmore()"], "total",
    ),
    "a module changed since": (
        ["net = nn.Linear(2, 1)\nnet.flag = 'on'", "net.bias.data.fill_(3.0)"], "net.state_dict(), net.flag",
    ),
    "an instance changed since": (
        ["@dataclass\nclass C:\n    lr: float = 0.1\n    names: list = field(default_factory=list)",
         "c = C()", "c.lr = 3; c.names.append('a')"],
        "c, C()",
    ),
    "a dataclass's default that has changed since": (
        ["k = 1\n@dataclass\nclass C:\n    lr: int = k", "k = 2"], "C()",
    ),
    "decorated functions": (
        ["def twice(f):\n    @functools.wraps(f)\n    def g(*a): return 2 * f(*a)\n    return g",
         "@twice\ndef f(x): return x\n@torch.no_grad()\ndef g(x): return f(x)",
         "@functools.cache\ndef h(x): return g(x)"],
        "f(1), g(2), h(3)",
    ),
    "a class that a decorator of the notebook changed": (
        ["def doubled(cls):\n    cls.by *= 2\n    cls.more = lambda self: self.by\n    return cls",
         "@doubled\n@dataclass\nclass C:\n    by: float = -1.5\n    def own(self): return self.by"],
        "C.by, C().own(), C().more(), C()",
    ),
    "views of arrays": (
        ["a = np.arange(20.0).reshape(4, 5)\nb, c, d = a[::2, 1:3], a[::-1].T, torch.tensor(a)[:, 1]"],
        "b, c, d, b.strides, c.strides, d.stride()",
    ),
    "what literals don't have": (
        ["q = [float('nan'), -0.0, 2j, {1, 2}, slice(1), b'x' * 9000, ['a'] * 9000]",
         "q += [torch.float64, np.float32(2)]"],
        "q",
    ),
    "a function that uses an import of its cell": (["import math\ndef f(): return math.sqrt(2)"], "f()"),
    "one object of two names": (["a = np.ones(2)\nb = [a]"], "a is b[0]"),
    "a name of Python's own": (["max = 3"], "max"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_a_worker_has_the_value_that_counts_now(kernel, name):
    cells, data = SENT[name]
    kernel.run(*cells, task(data))
    mine, theirs, spec = kernel.remade()
    assert repr(theirs.data("a")) == repr(mine.data("a"))
    assert kernel.remade()[2] == spec, "equal values have another digest"


def test_a_table_of_pandas_arrives_as_it_was_cleaned(kernel):
    pandas = pytest.importorskip("pandas")
    kernel.run(
        "import pandas as pd\np = pd.DataFrame({'z': [1.0, 9999.0], 'k': ['a', None]})",
        "p['c'], p['t'] = pd.Categorical(['u', 'v']), pd.to_datetime(['2020-01-01', None])",
        "p.loc[p.z > 999, 'z'] = 0.0\np['kind'] = [1, 2]",
        task("p"),
    )
    mine, theirs, _ = kernel.remade()
    pandas.testing.assert_frame_equal(theirs.data("a"), mine.data("a"))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("Table.rate = 0.5", "(0.5, 0.1)"),
        ("Table.rate = np.ones(1)", "(array([1.]), 0.1)"),
        ("Table.data = lambda self, site: 'other'", "other"),
        ("Table.more = {'a': [1]}\nTable.data = lambda self, site: self.more", "{'a': [1]}"),
    ],
)
def test_a_class_changed_after_its_cell_is_sent_as_it_is(kernel, change, found):
    kernel.run(task("self.rate, 0.1"), change)
    mine, theirs, _ = kernel.remade()
    assert repr(theirs.data("a")).strip("'") == repr(mine.data("a")).strip("'") == found


REFUSED = {
    "a lock": (["l = threading.Lock()"], "l", "uses l, a lock that only this process has"),
    "numpy's generator": (["g = np.random.default_rng(0)"], "g", "uses g, a Generator from which each"),
    "torch's generator": (["g = {0: torch.Generator()}"], "g", "uses g, which has a Generator from which"),
    "a generator": (["g = (i for i in range(3))"], "g", "uses g, a generator that only this process has"),
    "a file": (["f = open('/dev/null')\nf.close()"], "f", "uses f, a TextIOWrapper that only this process"),
    "an object of an earlier class": (
        ["class Net(nn.Module):\n    a = 1", "net = Net()", "class Net(nn.Module):\n    a = 2"],
        "net", "it uses net, which has a class that is not the Net of now: run the cell",
    ),
    "two lambdas in a line": (["fs = lambda: 1, lambda: 2"], "fs", "in one line with another"),
    "a function with other parts": (
        ["@functools.singledispatch\ndef f(x): return 1\n@f.register\ndef _(x: int): return 2"],
        "f(1)", "it uses f, a function that its decorator made",
    ),
    "an attribute of the class": (["lock = threading.Lock()"], "1\n    own = lock", "uses Table.own, a lock"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_sent_is_refused_by_name(kernel, name):
    cells, data, words = REFUSED[name]
    kernel.run(*cells, task(data))
    with pytest.raises(ConfigError, match=words) as error:
        fedtrain.simulate(kernel.module.Table, {"simulate.workers": 1})
    assert str(error.value).endswith("data() or model(), or set simulate.workers = 0.")


def test_a_base_class_of_a_re_run_cell_is_refused_by_name(kernel):
    base = "class Base(fedtrain.Task):\n    a = {}"
    kernel.run(base.format(1), task("self.a", "Base"), base.format(2))
    with pytest.raises(ConfigError, match="a Base that is not the one of now: run its cell again"):
        fedtrain.simulate(kernel.module.Table, {"simulate.workers": 1})


@pytest.mark.parametrize("after", ["", "task.x = torch.zeros(3)"])
def test_an_object_that_its_constructor_does_not_make_again_is_refused(kernel, after):
    made = "None" if after else "torch.randn(3)"
    kernel.run(f"{task('self.x')}\n    def __init__(self):\n        self.x = {made}\ntask = Table()\n{after}")
    with pytest.raises(ConfigError, match="its x was set after it was made, or is another one each time"):
        fedtrain.simulate(kernel.module.task, {"simulate.workers": 1})


def test_a_strategy_that_can_t_be_sent_is_refused_also_without_workers(kernel):
    kernel.run(
        "lock = threading.Lock()\nclass Mine(fedtrain.Strategy):\n    def step(self): return lock", task("1")
    )
    with pytest.raises(ConfigError, match="Mine uses lock, a lock that only this process has"):
        fedtrain.simulate(kernel.module.Table, {"strategy.kind": kernel.module.Mine, **HERE})


def test_another_value_is_another_task(kernel):
    kernel.run("x = np.arange(2000.0)", task("x"))
    *_, before = kernel.remade()
    kernel.run("x[7] = 0.5")
    *_, after = kernel.remade()
    assert before != after


def test_a_changed_file_of_a_value_is_not_read(kernel):
    kernel.run("x = np.arange(2000.0)", task("x"))
    kernel.remade()
    (file,) = Path("__fedtrain__").glob("*.bin")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(ConfigError, match="is missing or changed: call fedtrain again"):
        kept(str(file), file.stem)


def test_an_edited_script_is_refused(kernel):
    kernel.run(task("1"))
    (file,) = (name for name in linecache.cache if "Table" in "".join(linecache.cache[name][2]))
    lines = [line.replace("return 1", "return 2") for line in linecache.cache[file][2]]
    linecache.cache[file] = (1, None, lines, file)
    with pytest.raises(ConfigError, match="its source is not what it was: run that again"):
        fedtrain.simulate(kernel.module.Table, {"simulate.workers": 1})


RUNS = "(torch.tensor([[x], [1.0], [2.0]]), torch.tensor([0, 1, 1]))"


def test_a_class_changed_since_its_run_began_is_named_in_python_words(kernel):
    kernel.run("x = 1.0", task(RUNS))
    fedtrain.simulate(kernel.module.Table, HERE)
    kernel.run("x = 2.0")
    with pytest.raises(StoreError) as error:
        fedtrain.simulate(kernel.module.Table, HERE)
    assert str(error.value).endswith(
        "your class Table, or what it uses, has changed. Change it back, give the new run its own run.name, "
        "or pass fresh=True."
    )
    assert fedtrain.simulate(kernel.module.Table, HERE, fresh=True).metrics


def test_a_notebook_without_html_shows_the_newest_line(monkeypatch):
    display = ModuleType("IPython.display")
    display.display = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    cell = notebook.Notebook()
    assert repr(cell) == "starting"
    cell._board.add(RunStarted(run="table", mode="simulate", rounds=5, resumed_from=None))
    assert repr(cell) == "table round 0 of 5"


# --- whole runs: a site of each kind, so that one model shows that all were the same

CELLS = [
    IMPORTS + "import random\nimport pandas as pd\nnp.savetxt('t.csv', np.arange(24.0).reshape(12, 2) ** 2)",
    "table = np.loadtxt('t.csv')",
    "table -= table.mean(0)\ntable /= table.std(0)",
    "patients = pd.DataFrame({'z': [1.0, 9999.0, 2.0, 3.0], 'k': list('abab')})",
    "patients.loc[patients.z > 999, 'z'] = 0.0\npatients['kind'] = [0, 1, 1, 0]",
    "torch.manual_seed(7)\ndrawn = torch.randn(12, 2)",
    "crit = nn.CrossEntropyLoss()",
    "crit = nn.CrossEntropyLoss(label_smoothing=0.9)",
    "crit = nn.CrossEntropyLoss()",
    "def scaled(by):\n    def f(x): return by * x\n    return f",
    "closure = scaled(torch.rand(2))",
    "factor = 3.0\ndefault = lambda x, by=factor: by * x",
    "factor = 0.5",
    "partial = functools.partial(torch.add, torch.ones(2), alpha=2)",
    "arrays = {'a': torch.ones(4, 2), 'b': np.ones((4, 2))}",
    "def clean():\n    global count\n    arrays['a'][0] = 5.0\n    count = 7.0\nclean()",
    "net = nn.Linear(2, 2).requires_grad_(False)",
    "net.bias.fill_(2.0)",
    """class Kinds(fedtrain.Task):
    rate = 1.0

    def sites(self):
        return sorted(self.kinds())

    def kinds(self):
        x = torch.linspace(-1, 1, 8).view(4, 2)
        return {
            "inplace": lambda: torch.tensor(table[:4]), "draws": lambda: drawn[:4],
            "pandas": lambda: torch.tensor(patients[["z", "kind"]].values),
            "closure": lambda: closure(x), "default": lambda: default(x),
            "partial": lambda: partial(x), "dict": lambda: arrays["a"] + torch.tensor(arrays["b"]),
            "global": lambda: x * count, "module": lambda: net(x), "attribute": lambda: x * self.rate,
            "factor": lambda: x * factor,
            "own draws": lambda: torch.rand(4, 2) + random.random() + np.random.rand(),
        }

    def model(self):
        return nn.Linear(2, 2)

    def data(self, site):
        x = self.kinds()[site]().float()
        return x, (x[:, 0] > x[:, 1]).long()

    def loss(self, model, batch):
        return crit(model(batch[0]), batch[1])""",
    "Kinds.rate = 0.25",
    """def same():
    for workers in (0, 1, 2):
        settings = {"run.rounds": 1, "run.name": "kinds", "simulate.workers": workers, "evaluate.every": 0}
        run = fedtrain.simulate(Kinds, settings, fresh=True, progress=False)
        yield torch.nn.utils.parameters_to_vector(run.model().parameters()).tolist()

import json
if __name__ == "__main__":
    print(json.dumps([*same()]))""",
]  # fmt: skip


def assert_all_the_same(printed):
    models = json.loads(printed.splitlines()[-1])
    assert len(models) == 3
    assert models[0] == models[1] == models[2]


@pytest.mark.slow(10)
def test_a_script_trains_the_same_model_with_0_1_and_2_workers(tmp_path):
    (tmp_path / "study.py").write_text("\n".join(CELLS))
    env = {**os.environ, "PYTHONPATH": str(Path(fedtrain.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "study.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert_all_the_same(done.stdout)


# --- notebooks, one after the other in one kernel; their worker processes are forked

FIRST = """%reset -f
__spec__ = None  # which %reset takes, and a fork server looks for
import functools, json
from dataclasses import dataclass, field
import numpy as np
import pandas as pd
import torch
from torch import nn
import fedtrain

x = torch.linspace(-1, 1, 8).view(4, 2)"""
STUDY = """class Study(fedtrain.Task):
    rate = 1.0

    def sites(self):
        return ["north", "south", "west"]

    def model(self):
        net = nn.Linear(2, 2)
        net.load_state_dict({"weight": torch.tensor([[0.1, -0.2], [0.3, 0.4]]), "bias": torch.zeros(2)})
        return net

    def data(self, site):
        inputs = torch.as_tensor(DATA).float()
        return inputs, (inputs[:, 0] > inputs[:, 1]).long()

    def loss(self, model, batch):
        return LOSS(model(batch[0]), batch[1])"""
LAST = """def stepped(task):
    model = task.model()
    task.loss(model, task.data("north")).backward()
    return [(p - 0.5 * p.grad).tolist() for p in model.parameters()]

def trained(workers):
    settings = {
        "run.rounds": 1, "train.lr": 0.5, "train.batch_size": 64, "evaluate.every": 0,
        "simulate.workers": workers, "secagg.enabled": False,
    }
    try:
        run = fedtrain.simulate(Study, settings, fresh=True, progress=False)
    except fedtrain.errors.ConfigError as error:
        return str(error)
    return [p.tolist() for p in run.model().parameters()]

print(json.dumps([stepped(Study()), *map(trained, (0, 1, 2))]))"""
ENTROPY = "nn.functional.cross_entropy"

# Each: the cells in the order in which they ran, what data() gives, and what loss() calls.
NOTEBOOKS = {
    "a table cleaned in place": (
        ["np.savetxt('t.csv', np.arange(24.0).reshape(12, 2) ** 2)\ntable = np.loadtxt('t.csv')",
         "table[:, 0] *= -1\ntable -= table.mean(0)\ntable /= table.std(0)"],
        "table", ENTROPY,
    ),
    "missing codes replaced in a DataFrame": (
        ["pd.DataFrame({'z': [1.0, 9999, 2, 3], 'k': [1, 2, 3, 4]}).to_csv('p.csv')",
         "patients = pd.read_csv('p.csv')", "patients.loc[patients.z > 999, 'z'] = 0.0"],
        "patients[['z', 'k']].values", ENTROPY,
    ),
    "a column added to a DataFrame": (
        ["df = pd.DataFrame({'a': [1.0, 2, 3]})", "df['kind'] = [0.5, 4, 1]"], "df.values", ENTROPY,
    ),
    "draws after manual_seed": (
        ["torch.manual_seed(7)\ndrawn = torch.randn(12, 2)", "later = torch.randn(12, 2)"],
        "drawn - later", ENTROPY,
    ),
    "draws after numpy's seed": (
        ["np.random.seed(3)", "noise = np.random.rand(12, 2)", "np.random.seed(4)"], "noise", ENTROPY,
    ),
    "a cell that ran again": (
        ["crit = nn.CrossEntropyLoss()", "crit = nn.CrossEntropyLoss(label_smoothing=0.9)",
         "crit = nn.CrossEntropyLoss()"],
        "x", "crit",
    ),
    "a cell that ran again and changed its own result": (
        ["total = torch.ones(4, 2)", "total += total * x", "total += total * x"], "total", ENTROPY,
    ),
    "a name bound in two cells": (["factor = 3.0", "factor = -0.5"], "x * factor", ENTROPY),
    "a closure": (
        ["def scaled(by):\n    def f(x): return by * x\n    return f", "f = scaled(torch.rand(2) - 1)"],
        "f(x)", ENTROPY,
    ),
    "a class attribute changed later": ([], "x * self.rate", ENTROPY, "Study.rate = -2.0"),
    "a method changed later": (
        [], "x * self.rate", ENTROPY,
        "def loss(self, model, batch):\n    return model(batch[0]).square().sum()", "Study.loss = loss",
    ),
    "a model changed in place": (
        ["net = nn.Linear(2, 2).requires_grad_(False)", "net.bias[0] = 2.0\nnet.weight *= -3"],
        "net(x)", ENTROPY,
    ),
    "a dict of lists filled in a loop": (
        ["parts = {}", "for i in range(6):\n    parts.setdefault(i % 2, []).append(np.array([i, 2.5]))",
         "parts[0] += [np.array([9.0, -1.0])]"],
        "np.stack(parts[0] + parts[1])", ENTROPY,
    ),
    "a function defined again after its use": (
        ["def turn(x): return -x", "before, first = turn(x), turn", "def turn(x): return x.flip(1)"],
        "before + first(x) * 0.1 + turn(x) * 3", ENTROPY,
    ),
    "a lambda's default": (["k = 2.0\nf = lambda x, by=k: by * x", "k = -5.0"], "f(x) + k * x", ENTROPY),
    "a tensor that the loss uses": (
        ["weights = torch.ones(2)", "weights[1] = 5.0",
         f"loss = functools.partial({ENTROPY}, weight=weights)", "weights[0] = 0.25"],
        "x", "loss",
    ),
    "a decorated class": (
        ["def doubled(cls):\n    cls.by *= 2\n    return cls", "@doubled\nclass Scale:\n    by = -1.5",
         "@dataclass\nclass More:\n    by: float = 1.0\n    names: list = field(default_factory=list)",
         "more = More()", "more.by = 0.25"],
        "x * Scale.by + more.by", ENTROPY,
    ),
    "a global that a function changes": (
        ["count = 1.0", "def again():\n    global count\n    count *= -2", "again()", "again()", "again()"],
        "x * count", ENTROPY,
    ),
    "numpy's generator": (["rng = np.random.default_rng(0)"], "rng.random((4, 2))", ENTROPY),
    "torch's generator": (
        ["g = torch.Generator().manual_seed(1)"], "torch.rand(4, 2, generator=g)", ENTROPY,
    ),
    "a generator": (["rows = (row for row in x)"], "x if rows else x", ENTROPY),
}  # fmt: skip
NOT_SENT = {
    "numpy's generator": "rng, a Generator",
    "torch's generator": "g, a Generator",
    "a generator": "rows, a generator",
}


@pytest.mark.slow(30)
@pytest.mark.timeout(600)
def test_notebooks_train_on_what_they_show_with_0_1_and_2_workers(tmp_path):
    """Their model is one step of plain torch on what data() gives in the notebook, or workers are refused."""
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    forked = "import pytest\nfrom tests.forked import fork_trainers\nfork_trainers(pytest.MonkeyPatch(), 1)"
    cells = [forked]
    for before, data, loss, *after in NOTEBOOKS.values():
        cells += [FIRST, *before, STUDY.replace("DATA", data).replace("LOSS", loss), *after, LAST]
    cells += ["%reset -f\n__spec__ = None", *CELLS]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(fedtrain.__file__).parents[1]), *sys.path])}
    shell = client.NotebookClient(book, timeout=300, resources={"metadata": {"path": tmp_path}})
    done = shell.execute(env=env)
    printed = [out.text for cell in done.cells for out in cell.outputs if out.output_type == "stream"]
    *found, kinds = [text.splitlines()[-1] for text in printed if text.startswith("[")]
    for name, text in zip(NOTEBOOKS, found, strict=True):
        shown, *models = json.loads(text)
        if name in NOT_SENT:
            assert all(f"uses {NOT_SENT[name]}" in refused for refused in models[1:]), (name, models)
            continue
        assert models[0] == models[1] == models[2], (name, models)
        assert isinstance(models[0], list), (name, models)
        for mine, theirs in zip(shown, models[0], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=1e-6, msg=name)
    assert_all_the_same(kinds)


def test_tensors_of_a_worker_lie_in_memory_of_torchs_alignment(kernel):
    kernel.run("x = torch.arange(3000.0)", task("x"))
    mine, theirs, _ = kernel.remade()
    assert torch.equal(theirs.data("a"), mine.data("a"))
    assert theirs.data("a").data_ptr() % 64 == 0
