"""S22 where a site's people look at their own data: what a command with --site runs was approved before."""

import py_compile
import shutil
import sys

import pytest
from click.testing import CliRunner

import fedtrain
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.pki import init, issue
from fedtrain.runtime.sites.approval import Approvals, approve

TASK = """
import torch
import fedtrain

class Own(fedtrain.Task):
    def sites(self):
        return ["north", "south"]

    def model(self):
        return torch.nn.Linear(3, 2)

    def data(self, site):
        x = torch.randn(40, 3, generator=torch.Generator().manual_seed(len(site)))
        return x, (x[:, 0] > 0).long()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
STRATEGY = "from fedtrain.strategies import FedPer\n\nclass Mine(FedPer):\n    pass\n"
TOML = """[run]
name = "r"
task = "own_task:Own"
rounds = 1
[strategy]
kind = "own_strategy:Mine"
local = ["bias"]
min_sites = 2
[simulate]
workers = 0
[secagg]
enabled = false
"""
RAN = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
COMMANDS = [
    ["stats", "--site", "north"],
    ["evaluate", "r+simulate", "--site", "north"],
    ["evaluate", "r+simulate", "--site", "north", "--matrix"],
    ["export", "r+simulate", "--site", "north"],
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project with a run, made before anybody had a key."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_task.py").write_text(TASK)
    (folder / "own_strategy.py").write_text(STRATEGY)
    (folder / "fedtrain.toml").write_text(TOML)
    fedtrain.simulate(folder)
    init(folder / "certs")
    issue(folder / "certs", "site", "north")
    return folder


@pytest.fixture
def project(trained, tmp_path, monkeypatch):
    """A copy, in which a task that is loaded leaves a file."""
    folder = tmp_path / "project"
    shutil.copytree(trained, folder)
    (folder / "own_task.py").write_text(RAN + TASK)
    monkeypatch.chdir(folder)
    return folder


def said(*arguments):
    done = CliRunner().invoke(cli, arguments, prog_name="fedtrain")
    return done.exit_code, done.output


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(words[::4]))
def test_s22_a_command_at_a_site_runs_nothing_that_its_people_did_not_approve(project, arguments):
    code, output = said(*arguments)
    assert (code, "fedtrain task approve north" in output) == (1, True)
    approvals = Approvals(approve(Config.load())[1][0])
    (digest,) = approvals.valid
    approvals.withdraw(digest)
    code, output = said(*arguments)
    assert (code, "own_task:Own is not approved at this site" in output) == (4, True)
    approve(Config.load())
    for file in ("own_task.py", "own_strategy.py"):
        before = (project / file).read_text()
        (project / file).write_text(RAN + before + "# a byte\n")
        code, output = said(*arguments)
        assert code == 4
        assert f"{file} changed since" in output
        (project / file).write_text(before)
    assert not (project / "ran").exists()
    assert said(*arguments)[0] == 0
    assert (project / "ran").exists()


def test_s22_a_model_of_a_sites_own_is_loaded_for_python_after_the_same_approval(project):
    run = fedtrain.open_run("r+simulate")
    with pytest.raises(fedtrain.errors.ConfigError, match="fedtrain task approve north"):
        run.model(site="north")
    assert not (project / "ran").exists()
    assert run.model() is not None


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(words[::4]))
def test_where_the_sites_key_does_not_lie_as_at_the_tasks_author_nobody_is_asked(project, arguments):
    (project / "certs" / "sites" / "north" / "key.pem").unlink()
    assert said(*arguments)[0] == 0


@pytest.mark.parametrize("command", [["stats"], ["evaluate", "r+simulate"], ["simulate", "--fresh"]])
def test_what_is_done_as_no_site_asks_nobody(project, command):
    assert said(*command)[0] == 0


def test_s29_an_approval_that_others_may_have_written_counts_for_nothing_here_either(project):
    approve(Config.load())
    (project / "certs" / "sites" / "north").chmod(0o770)
    code, output = said("stats", "--site", "north")
    assert (code, "can be written by others" in output) == (1, True)
    assert not (project / "ran").exists()


def test_s22_a_compiled_file_beside_the_approved_source_is_not_read(project):
    approve(Config.load())
    (project / "evil.py").write_text(TASK + "\nopen('compiled', 'w').close()\n")
    cached = project / "__pycache__" / f"own_task.{sys.implementation.cache_tag}.pyc"
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(project / "evil.py"), str(cached), invalidation_mode=unchecked)
    assert said("stats", "--site", "north")[0] == 0
    assert (project / "ran").exists()
    assert not (project / "compiled").exists()
