"""The last line of a failed command: what happened, and what to change. One mistake a line."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

import fedtrain
from fedtrain import pki
from fedtrain.cli import cli
from fedtrain.errors import FedtrainError
from fedtrain.runtime.simulations import simulation

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
    (f"{STEP}return rond.mean, state", "NameError in my.py:8, in step: name 'rond' is not defined"),
    (f"{STEP}return 1 / 0, state", "ZeroDivisionError in my.py:8, in step: division by zero"),
    (f"{STEP}return weights + round.mean[:2], state", "RuntimeError in my.py:8, in step: The size of tensor"),
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
     "NameError in my.py:10, in train: name 'lokal' is not defined"),
    (f"{TRAIN}raise ValueError('patient 17')", "ValueError in my.py:10, in train"),
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
     "AttributeError in my.py:6, in <lambda>: 'Tensor' object has no attribute 'amix'"),
    ("federated", "compression.up", "from fedtrain.compression import Compressor as Base",
     "    def bytes_for(self, n):\n        return 4 * n\n"
     "    def encode(self, vector, seed, state):\n        pass",
     "my.py:7, in encode: returned None"),
    ("gossip", "gossip.algorithm", "from fedtrain.gossip import Algorithm as Base, LocalSteps, Send, Parcel",
     "    def round(self, x, state, near, t):\n        x = yield LocalSteps(x)\n        return x",
     "my.py:5, in round: return (x, state), float32 [3] and a dict of tensors: got float32 [3]"),
    ("gossip", "gossip.algorithm", "from fedtrain.gossip import Algorithm as Base, LocalSteps, Send, Parcel",
     "    def round(self, x, state, near, t):\n        x = yield LocalStep(x)\n        return x, state",
     "NameError in my.py:6, in round: name 'LocalStep' is not defined"),
    ("gossip", "gossip.topology", "from fedtrain.topology import Graph as Base",
     "    def out(self, members, t, draw):\n        return [[nxt] for i in range(len(members))]",
     "NameError in my.py:6, in <listcomp>: name 'nxt' is not defined"),
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
