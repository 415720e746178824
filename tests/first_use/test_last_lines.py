"""The last line of a failed command: what happened, and what to change. One mistake a line."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

import fedtrain
from fedtrain import pki, strategies
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import FedtrainError, TaskError
from fedtrain.runtime.simulations import simulation
from tests.inprocess import federation
from tests.ports import free_port

FEDTRAIN = [sys.executable, "-m", "fedtrain"]
TASK = """
import fedtrain, torch


class Tiny(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self, site):
        x = torch.arange(8.0).view(4, 2)
        return x, x.sum(1, keepdim=True)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""
CONFIG = """
[run]
name = "r"
task = "task:Tiny"
rounds = 1

[network]
certs = "certs"

[train]
lr = 0.01

[simulate]
workers = 0
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "fedtrain.toml").write_text(CONFIG)
    return tmp_path


def last_line(*args):
    """The last line of `fedtrain ARGS`, which fails."""
    result = CliRunner().invoke(cli, [*args], prog_name="fedtrain")
    assert result.exit_code == 1, (result.exception, result.output)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("fedtrain: ")
    return last.removeprefix("fedtrain: ")


# --- fedtrain.toml

ENCODED = [
    ("utf-16", "fedtrain.toml is not UTF-8 (byte 0xff at position 0): save it as UTF-8."),
    ("utf-16-le", "fedtrain.toml is not UTF-8 (byte 0x00 at position 1): save it as UTF-8."),
    ("latin-1", "fedtrain.toml is not UTF-8 (byte 0xfc at position 2): save it as UTF-8."),
]


def test_a_file_with_a_byte_order_mark_is_read(project):
    (project / "fedtrain.toml").write_text(CONFIG, "utf-8-sig")
    assert fedtrain.Config.load(project / "fedtrain.toml").run.name == "r"


@pytest.mark.parametrize(("encoding", "says"), ENCODED)
def test_a_file_in_another_encoding_is_to_be_saved_as_utf_8(project, encoding, says):
    (project / "fedtrain.toml").write_text("# ü" + CONFIG, encoding)
    assert last_line("simulate").removeprefix(f"{project}/") == says


TYPES = [
    ("run.rounds", "'5'", "run.rounds must be a whole number, got '5' (text): write 5 without quotes"),
    ("run.rounds", "'five'", "run.rounds must be a whole number, got 'five' (text)"),
    ("run.rounds", "2.5", "run.rounds must be a whole number, got 2.5"),
    ("train.lr", "'0.1'", "train.lr must be a number, got '0.1' (text): write 0.1 without quotes"),
    ("secagg.enabled", "'no'", "secagg.enabled must be true or false, got 'no' (text)"),
    ("secagg.enabled", "'false'",
     "secagg.enabled must be true or false, got 'false' (text): write false without quotes"),
    ("run.name", "7", "run.name must be text, got 7. As text it stands in quotes: run.name = \"7\" "
     "('run.name=\"7\"' in a shell)"),
    ("aggregation.before", "'nnm'", "aggregation.before must be a list in [ ], got 'nnm' (text)"),
    ("evaluate.mode", "'least'", "evaluate.mode: 'least' is not one of auto, min, max."),
    ("strategy.round_deadline", "'soon'",
     "strategy.round_deadline = 'soon': 'soon' is not a duration; write \"500ms\", \"30s\", \"10m\", \"2h\" "
     "or seconds"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "says"), TYPES)
def test_a_value_of_a_wrong_type_is_told_what_to_write(project, key, value, says):
    section, name = key.split(".")
    text = re.sub(rf"^{name} = .*\n", "", CONFIG, flags=re.M)
    head = f"[{section}]\n"
    text = (
        text.replace(head, f"{head}{name} = {value}\n") if head in text else f"{text}{head}{name} = {value}\n"
    )
    (project / "fedtrain.toml").write_text(text)
    assert last_line("simulate") == says


def test_a_policy_of_a_wrong_type_is_told_what_to_write(project):
    pki.init(project / "certs", "r")
    folder = pki.issue(project / "certs", "site", "a")
    (folder / "policy.toml").write_text("rounds = '5'\n", "utf-8-sig")
    assert last_line("policy", "show") == (
        "policy.rounds must be a whole number, got '5' (text): write 5 without quotes"
    )


# --- a strategy of one's own

HEAD = """from dataclasses import dataclass
import torch
from fedtrain.learning import Bounded, Contribution
from fedtrain.strategies import Strategy
@dataclass(frozen=True)
class Mine(Strategy):
"""
STEP = "    def step(self, weights, state, round):\n        "
TRAIN = f"{STEP}return weights + round.mean, state\n    def train(self, local):\n        "
LIKE = "return (weights, state), float32 [3] and a dict of tensors: got"
STRATEGIES = [
    (f"{STEP}return weights", f"my.py:7, in step: {LIKE} float32 [3]"),
    (f"{STEP}weights + round.mean", f"my.py:7, in step: {LIKE} None"),
    (f"{STEP}return weights[:2], state", f"my.py:7, in step: {LIKE} (float32 [2], dict)"),
    (f"{STEP}return weights.long(), state", f"my.py:7, in step: {LIKE} (int64 [3], dict)"),
    (f"{STEP}return weights, None", f"my.py:7, in step: {LIKE} (float32 [3], None)"),
    (f"{STEP}return weights, {{'n': 3}}", f"my.py:7, in step: {LIKE} (float32 [3], dict)"),
    (f"{STEP}return rond.mean, state", "step(): NameError: name 'rond' is not defined. (my.py:8)"),
    (f"{STEP}return 1 / 0, state", "step(): ZeroDivisionError: division by zero. (my.py:8)"),
    (f"{STEP}return weights + round.mean[:2], state", "step(): The size of tensor"),
    ("    def step(self, weights, state):\n        return weights, state", "my.py:7, in step: .*arguments"),
    (f"{STEP}return weights / 0 * 0, state",
     "my.py:7, in step: the strategy Mine returned NaN or Inf in its weights, though all updates were "
     "finite"),
    (f"{TRAIN}local.train()",
     "my.py:9, in train: return a Contribution with delta as float32 [3]: got None"),
    (f"{TRAIN}return local.train().delta",
     "my.py:9, in train: return a Contribution with delta as float32 [3]: got float32 [3]"),
    (f"{TRAIN}return Contribution(local.train().delta[:1])",
     "my.py:9, in train: return a Contribution with delta as float32 [3]: got (float32 [1])"),
    (f"{TRAIN}return Contribution(lokal.train().delta)",
     "train(): NameError: name 'lokal' is not defined. (my.py:10)"),
    (f"{TRAIN}raise ValueError('patient 17')", "my.py:10"),
    (f"{STEP}return weights, state\n    def finish(self, found, local):\n        return None",
     "my.py:9, in finish: return a Contribution with delta as float32 [3]: got None"),
    (f"{STEP}return weights, state\n    def init(self, weights):\n        pass",
     "my.py:9, in init: returned None: is a return missing?"),
    (f"{STEP}return weights, state\n    def site_init(self, start):\n        pass",
     "my.py:9, in site_init: returned None: is a return missing?"),
    (f"{STEP}return weights, {{}}\n    @property\n    def down(self):\n        return ['c']\n"
     "    def init(self, weights):\n        return {'c': torch.zeros_like(weights)}",
     "my.py:7, in step: the state lacks c, named by the property `down`"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), STRATEGIES, ids=[str(i) for i in range(len(STRATEGIES))])
def test_a_strategys_mistake_is_told_with_file_and_line(project, body, says):
    (project / "my.py").write_text(f"{HEAD}{body}\n")
    line = last_line("simulate", "--set", "strategy.kind=my:Mine")
    assert says in line or re.search(says, line), line


PARTS = [
    ("federated", "aggregation.rule", "from fedtrain.aggregation import Rule as Base",
     "    def of(self, stack):\n        stack.reduce(lambda rows: rows.amax(0))",
     "my.py:5, in of: returned None"),
    ("federated", "aggregation.rule", "from fedtrain.aggregation import Rule as Base",
     "    def of(self, stack):\n        return stack.reduce(lambda rows: rows.amix(0))",
     "my.py: AttributeError: 'Tensor' object has no attribute 'amix'. (my.py:6)"),
    ("federated", "compression.up", "from fedtrain.compression import Compressor as Base",
     "    def bytes_for(self, n):\n        return 4 * n\n"
     "    def encode(self, vector, seed, state):\n        pass",
     "my.py:7, in encode: returned None"),
    ("gossip", "gossip.algorithm", "from fedtrain.gossip import Algorithm as Base, LocalSteps, Send, Parcel",
     "    def round(self, x, state, near, t):\n        x = yield LocalSteps(x)\n        return x",
     "my.py:5, in round: return (x, state), float32 [3] and a dict of tensors: got float32 [3]"),
    ("gossip", "gossip.algorithm", "from fedtrain.gossip import Algorithm as Base, LocalSteps, Send, Parcel",
     "    def round(self, x, state, near, t):\n        x = yield LocalStep(x)\n        return x, state",
     "round(): NameError: name 'LocalStep' is not defined. (my.py:6)"),
    ("gossip", "gossip.topology", "from fedtrain.topology import Graph as Base",
     "    def out(self, members, t, draw):\n        return [[nxt] for i in range(len(members))]",
     "NameError: name 'nxt' is not defined. (my.py:6)"),
    ("gossip", "gossip.topology", "from fedtrain.topology import Graph as Base",
     "    def out(self, members, t, draw):\n        pass", "my.py:5, in out: returned None"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "key", "head", "body", "says"), PARTS, ids=[row[-1] for row in PARTS])
def test_a_mistake_in_any_part_of_ones_own_is_told_with_file_and_line(project, mode, key, head, body, says):
    (project / "my.py").write_text(
        f"from dataclasses import dataclass\n{head}\n@dataclass(frozen=True)\nclass Mine(Base):\n{body}\n"
    )
    plain = [] if mode == "gossip" else ["--set", "secagg.enabled=false"]
    line = last_line("simulate", "--mode", mode, "--set", f"{key}=my:Mine", *plain)
    assert says in line


def test_in_python_a_strategys_mistake_is_a_fedtrain_error(project):
    (project / "my.py").write_text(f"{HEAD}{STEP}return weights\n")
    with pytest.raises(FedtrainError, match=r"^my\.py:7, in step: return \(weights, state\)"):
        fedtrain.simulate(project, {"strategy.kind": "my:Mine"})


# --- certificates

JOIN = (
    "`fedtrain join HOST:PORT CODE` makes the key here and fetches a certificate for it. The code is printed "
    "by `fedtrain certs invite a`, where the federation's certificate authority is"
)


@pytest.mark.parametrize("command", ["site", "peer"])
def test_a_site_or_peer_without_a_certificate_is_sent_to_fedtrain_join(project, command):
    line = last_line(command, "a")
    assert JOIN in line
    assert "certs init" not in line
    assert "copy" not in line.lower()


def test_beside_the_authority_a_certificate_is_issued(project):
    pki.init(project / "certs", "r")
    assert last_line("site", "a").endswith("sites/a does not exist. `fedtrain certs issue a` makes it.")


def test_an_aggregator_without_a_certificate_is_told_both_steps(project):
    line = last_line("aggregator")
    assert "`fedtrain certs init` makes the federation's authority, once; then `fedtrain certs issue" in line


@pytest.mark.parametrize(("days", "says"), [(-40, "has expired"), (40, "is not valid yet")])
def test_a_certificate_out_of_its_dates_doubts_the_clock(project, days, says):
    now = datetime.now(UTC) + timedelta(days=days)
    pki.init(project / "certs", "r", now=now)
    pki.issue(project / "certs", "site", "a", now=now)
    line = last_line("site", "a")
    assert f"cert.pem {says}: valid from" in line
    assert "and now it is" in line
    assert "If it is not, this machine's clock is wrong: set it." in line


# --- what this machine lacks

OUT_OF_MEMORY = "Lower train.batch_size or simulate.workers, or end other programs on this machine"
LACKS = [
    (MemoryError(), f"out of memory (MemoryError). {OUT_OF_MEMORY}"),
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
     f"out of memory ([Errno 12] Cannot allocate memory). {OUT_OF_MEMORY}"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
     f"out of memory (DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes). "
     f"{OUT_OF_MEMORY}"),
    (ModuleNotFoundError("No module named 'torch'", name="torch"),
     f"the package torch is not installed here. Install it: {sys.executable} -m pip install torch"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x"),
     "[Errno 28] No space left on device: 'runs/x'. Make room there, then start the same command again."),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says"), LACKS, ids=["memory", "enomem", "torch-memory", "torch", "disk"])
def test_what_the_machine_lacks_is_named_with_what_to_do(project, monkeypatch, error, says):
    async def simulate(*_, **__):
        raise error

    monkeypatch.setattr(simulation, "simulate", simulate)
    assert last_line("simulate").startswith(says)


def test_without_torch_the_functions_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(FedtrainError, match=r"^the package torch is not installed here\. Install it: "):
        fedtrain.__getattr__("simulate")


@pytest.mark.slow
def test_a_full_stdout_is_named(project):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*FEDTRAIN, "runs"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == (
        "fedtrain: stdout: No space left on device. Make room there, then start the same command again.\n"
    )


# --- --json

NOISY = TASK.replace("import fedtrain, torch\n", "import fedtrain, torch\nprint('imported')\n").replace(
    "        x = torch.arange", "        print('data', site)\n        x = torch.arange"
)


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow(3)
def test_json_is_nothing_but_json_whatever_the_task_prints(project):
    (project / "task.py").write_text(NOISY)
    for command in (
        "simulate", "stats", "plan", "evaluate r+simulate", "evaluate r+simulate --matrix",
        "export r+simulate", "datacenter", "runs", "compare r+simulate r+datacenter", "watch r+simulate",
        "simulate --mode gossip", "doctor",
    ):  # fmt: skip
        sys.modules.pop("task", None)
        result = CliRunner().invoke(cli, [*command.split(), "--json"], prog_name="fedtrain")
        assert objects(result.stdout), (command, result.output)
        assert result.exit_code == 0 or command == "doctor", (command, result.output)


@pytest.mark.slow
def test_json_is_all_that_a_real_command_writes_to_descriptor_1(project):
    (project / "task.py").write_text(
        NOISY.replace("print('data', site)", "import os; os.write(1, b'raw\\n')")
    )
    for workers in (0, 1):
        command = [*FEDTRAIN, "simulate", "--fresh", "--json", "--set", f"simulate.workers={workers}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert objects(done.stdout)[-1]["kind"] == "run_finished"
        assert "raw" in done.stderr


@pytest.mark.slow
def test_a_strategys_mistake_in_a_workers_process_has_the_same_line(project):
    (project / "my.py").write_text(f"{HEAD}{TRAIN}return Contribution(lokal.train().delta)\n")
    sets = ["--set", "strategy.kind=my:Mine", "--set", "simulate.workers=1"]
    done = subprocess.run([*FEDTRAIN, "simulate", *sets], capture_output=True, text=True, check=False)
    assert "train(): NameError: name 'lokal' is not defined. (my.py:10)" in done.stderr.splitlines()[-1]


def test_at_an_aggregator_a_strategys_mistake_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "my.py").write_text(f"{HEAD}{STEP}return weights\n")
    table = {
        "run": {"name": "r", "task": "task:Tiny", "rounds": 1},
        "strategy": {"kind": "my:Mine", "min_sites": 3},
        "network": {"listen": f"127.0.0.1:{free_port()}", "certs": "certs"},
    }
    with pytest.raises(ExceptionGroup) as error:
        federation(Config.of(table, tmp_path), ["a", "b", "c"])
    assert [str(each) for each in error.value.exceptions] == [f"my.py:7, in step: {LIKE} float32 [3]"]


def test_s35_a_strategys_error_at_a_site_leaves_without_its_message(project):
    (project / "my.py").write_text(f"{HEAD}{TRAIN}raise ValueError('patient 17')\n")
    with pytest.raises(TaskError, match=r"^ValueError in my\.py:10, in train$"):
        strategies.build("my:Mine", {}, project).train(None)
