"""Finding the user's task, fingerprinting it, and saying what is wrong with it."""

import gc
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from fedtrain.config.project import sources
from fedtrain.errors import ConfigError, TaskError, story_of
from fedtrain.training.signatures import model_of
from fedtrain.training.task import load_task, mean_and_weight, task_digest, user_code
from tests.limits import WAIT_S

TASK = """
import fedtrain
class Heart(fedtrain.Task):
    def model(self): ...
    def data(self, site): ...
    def loss(self, model, batch): ...
"""


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_importing_the_task_base_loads_neither_torch_nor_numpy():
    code = "import sys, fedtrain; fedtrain.Task; print(*{'torch', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""


def test_a_task_is_found_beside_its_config_and_knows_its_data_folder(tmp_path):
    task = load_task("task:Heart", write(tmp_path, task=TASK))
    assert type(task).__name__ == "Heart"
    assert task.data_dir == tmp_path / "data"
    assert load_task("task:Heart", tmp_path, Path("/elsewhere")).data_dir == Path("/elsewhere")


def test_a_task_may_read_its_data_folder_while_it_is_made(tmp_path):
    init = "    def __init__(self): self.seen = self.data_dir\n"
    assert load_task("task:Heart", write(tmp_path, task=TASK + init)).seen == tmp_path / "data"


def test_two_projects_in_one_process_do_not_mix_their_modules(tmp_path):
    for name in ("one", "two"):
        write(
            tmp_path / name, task=TASK + "    import helper\n    who = helper.WHO\n", helper=f"WHO = {name!r}"
        )
    assert [load_task("task:Heart", tmp_path / name).who for name in ("one", "two", "one")] == [
        "one",
        "two",
        "one",
    ]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("task", 'must be "module:Class"'),
        ("tusk:Heart", "Did you mean task?"),
        ("task:Hart", "Did you mean Heart?"),
        ("task:fedtrain", "is not a fedtrain.Task"),
        ("task:Half", "does not define data(), loss()"),
        ("random:Heart", "one of Python's own"),
    ],
)
def test_a_wrong_task_name_is_refused_with_what_to_change(tmp_path, spec, says):
    half = "class Half(fedtrain.Task):\n    def model(self): ...\n"
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_task(spec, write(tmp_path, task=TASK + half, random=""))


@pytest.mark.parametrize("name", ["on_round_end", "on_epoch_start", "on_before_optimizer_step"])
def test_a_callback_is_refused_with_what_is_there_instead(tmp_path, name):
    task = load_task("task:Heart", write(tmp_path, task=f"{TASK}    def {name}(self, round): ...\n"))
    with pytest.raises(ConfigError, match=rf"{name}\(\): a round calls nothing back.*fedtrain track"):
        model_of(task, 0)


def test_a_method_that_only_begins_like_a_callback_is_the_users_own(tmp_path):
    model_of(load_task("task:Heart", write(tmp_path, task=f"{TASK}    def on_device(self): ...\n")), 0)


def test_an_error_in_the_task_names_its_type_and_line_but_not_its_message(tmp_path):
    write(tmp_path, task="import helper\n", helper="x = 1\nraise ValueError('patient 17')\n")
    with pytest.raises(TaskError, match=r"^ValueError in helper\.py:2") as caught:
        load_task("task:Heart", tmp_path)
    assert "patient" not in str(caught.value)


def test_a_syntax_error_and_a_missing_package_are_named(tmp_path):
    with pytest.raises(TaskError, match=r"SyntaxError in task\.py:2"):
        load_task("task:Heart", write(tmp_path, task="x = 1\ny = = 2\n"))
    with pytest.raises(TaskError, match="no module named 'no_such_package'"):
        load_task("task:Heart", write(tmp_path, task="import no_such_package\n"))


def test_the_memory_of_a_failed_step_is_free_when_its_error_is_gone(tmp_path):
    """Without the garbage collector. Python 3.12 keeps it where a generator translates the error."""
    kept = []

    def fail():
        batch = torch.ones(3)
        kept.append(weakref.ref(batch))
        raise KeyError(len(batch))

    gc.disable()
    try:
        with pytest.raises(TaskError, match="KeyError"), user_code(tmp_path):
            fail()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_errors_of_fedtrain_pass_through_user_code_unchanged(tmp_path):
    with pytest.raises(ConfigError, match="as it is"), user_code(tmp_path):
        raise ConfigError("as it is")


def test_the_digest_covers_all_that_the_task_imports_and_nothing_else(tmp_path):
    imports = (
        "import net.layers\nfrom net import heads\nimport torch, json\ndef later():\n    from lazy import x\n"
    )
    package = {"net/__init__": "", "net/layers": "from . import parts\n", "net/heads": "", "net/parts": ""}
    write(tmp_path, task=imports + TASK, lazy="x = 1\n", unrelated="", **package)
    names = {"task", "net", "net.layers", "net.heads", "net.parts", "lazy"}
    assert set(sources("task:Heart", tmp_path)) == names
    before = task_digest("task:Heart", tmp_path)
    write(tmp_path, unrelated="changed")
    assert task_digest("task:Heart", tmp_path) == before
    write(tmp_path, **{"net/parts": "x = 1\n"})
    assert task_digest("task:Heart", tmp_path) != before


BEFORE = '''"""A model of hearts."""
import fedtrain

class Heart(fedtrain.Task):
    rate = 0.001

    def model(self):
        return [self.rate, "x" "y", {"a": None, **{}}]
'''
ALIKE = '''import fedtrain  # of PyTorch
class Heart(fedtrain.Task):
  """Doc."""
  rate = 1e-3
  def model(self):
    """A list."""
    return [
        self.rate,
        'xy',
        {"a": None, **{}},
    ]
'''


def digest_of(folder: Path, text: str) -> str:
    return task_digest("task:Heart", write(folder, task=text))


def test_comments_layout_and_docstrings_do_not_count(tmp_path):
    assert digest_of(tmp_path, BEFORE) == digest_of(tmp_path, ALIKE)


@pytest.mark.parametrize(
    ("was", "is_"),
    [
        ("0.001", "0.0010000001"), ("self.rate", "self.rates"), ("self.rate, ", ""), ('"y"', '"y" ""  "z"'),
        ("None", "False"), ("None", "0"), ("**{}", "'b': {}"), ("Task)", "Task, object)"), ('"y"', '+ "y"'),
        ("        return", "        if 1: return"), ("0.001", "True"), ("0.001", "1"),
    ],
)  # fmt: skip
def test_all_that_the_code_does_counts(tmp_path, was, is_):
    assert digest_of(tmp_path, BEFORE) != digest_of(tmp_path, BEFORE.replace(was, is_))


def test_a_docstring_alone_does_not_count_but_other_text_does(tmp_path):
    assert digest_of(tmp_path, '"""One."""\nx = "a"\n') == digest_of(tmp_path, '"""Two."""\nx = "a"\n')
    assert digest_of(tmp_path, 'x = "a"\n"b"\n') != digest_of(tmp_path, 'x = "a"\n"c"\n')


def test_deep_and_huge_expressions_have_a_digest(tmp_path):
    deep = "x = " + " + ".join(["1"] * 900) + "\n"
    assert digest_of(tmp_path, deep) != digest_of(tmp_path, deep.replace("1 + 1\n", "1 + 2\n"))
    huge = "x = 0x" + "f" * 5000 + "\n"
    assert digest_of(tmp_path, huge) != digest_of(tmp_path, huge.replace("ff\n", "fe\n"))


def test_the_digest_is_of_the_grammar_not_of_this_python(tmp_path):
    """The same number in each version of Python, or sites of two would refuse each other."""
    known = "419a0ed126e8bd6be0606db7b606950bd7f6443df2e04fb04ff2b3ec4a1bbf6d"
    assert (
        digest_of(tmp_path, BEFORE + "async def f(a, /, *, b: int = 1) -> str: return f'{a!r:>{b}}'\n")
        == known
    )


def test_the_digest_is_the_same_wherever_the_project_lies_and_runs_none_of_it(tmp_path):
    one, two = (write(tmp_path / name, task=TASK + "raise SystemExit\n") for name in ("one", "two"))
    assert task_digest("task:Heart", one) == task_digest("task:Other", two)


def test_the_digest_covers_a_strategy_of_ones_own(tmp_path):
    (tmp_path / "task.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text("y = 1\n")
    before = task_digest("task:Heart", tmp_path, {"strategy.kind": "mine:Half"})
    (tmp_path / "mine.py").write_text("y = 2\n")
    assert task_digest("task:Heart", tmp_path, {"strategy.kind": "mine:Half"}) != before


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (0.5, "loss() returned a float. Return a tensor"),
        (None, "loss() returned a NoneType. Return a tensor"),
        ((0.5, 3), "loss() returned a tuple. Return a tensor"),
        (torch.ones(3), "loss() returned a tensor of shape [3]. Return its mean"),
    ],
)
def test_a_loss_of_another_kind_is_refused_with_the_right_ones(loss, says):
    with pytest.raises(TaskError, match=re.escape(says)):
        mean_and_weight(loss, (torch.ones(3),))


def test_a_loss_is_a_mean_or_a_sum_and_a_weight():
    assert mean_and_weight(torch.tensor(2.0), (torch.ones(3),)) == (2.0, 3.0)
    assert mean_and_weight((torch.tensor(6.0), 4), (torch.ones(3),)) == (1.5, 4.0)


def test_the_traceback_for_people_begins_in_their_code_and_shows_little_of_others(tmp_path):
    deep = "".join(f"def f{n}():\n    return f{n - 1}()\n" for n in range(1, 10))
    write(tmp_path, task="import helper\nhelper.f9()\n", helper="def f0():\n    1 / 0\n" + deep)
    with pytest.raises(TaskError) as caught:
        load_task("task:Heart", tmp_path)
    story = story_of(caught.value)
    assert story.splitlines()[1].endswith('task.py", line 2, in <module>')
    assert story.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert story.count("File") == 4
    assert "… 7 more" in story
    assert story_of(ConfigError("train.lr: as it is")) == ""


@pytest.mark.slow(9)
def test_threads_may_take_digests_while_garbage_is_collected(tmp_path, monkeypatch):
    """Python 3.11 keeps the depth of the tree that it builds for the process, not for the thread."""
    root = write(tmp_path, task=TASK + "\n".join(f"x{i} = [{i}, ({i}, {{'a': {i}}})]" for i in range(2000)))
    found: list[str] = []
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    callback = lambda phase, info: [None for _ in range(50)]
    gc.callbacks.append(callback)
    gc.set_threshold(200)
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: found.extend(task_digest("task:Heart", root) for _ in range(4)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * WAIT_S)
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*before)
        sys.setswitchinterval(interval)
    assert len(found) == 16
    assert len(set(found)) == 1
