"""`fedtrain compare`: runs side by side, and the settings by which they differ."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext

import pytest
from click.testing import CliRunner

import fedtrain
from fedtrain import api
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.events import silent
from fedtrain.runtime.datacenters import datacenter
from tests.worlds import world

TASK = """
import torch
import fedtrain

class Line(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(1, 1)
    def data(self, site):
        x = torch.arange(8.0)[:, None]
        return x, 2 * x
    eval_data = data
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Two runs of three rounds, slow and fast."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "fedtrain.toml").write_text(
        '[run]\ntask = "task:Line"\nrounds = 3\n[simulate]\nsites = 3\nworkers = 0\n'
    )
    monkeypatch.chdir(tmp_path)
    for name, lr in (("slow", 1e-3), ("fast", 1e-2)):
        fedtrain.simulate(".", {"run.name": name, "train.lr": lr}, progress=False)
    return tmp_path


def compare(*arguments):
    done = CliRunner().invoke(cli, ["compare", *arguments], prog_name="fedtrain")
    return done.exit_code, done.output


def test_runs_stand_side_by_side_with_what_differs_and_nothing_else(project):
    code, text = compare("slow", "fast")
    rows = {line[: line.find("  ")]: line.split() for line in text.splitlines() if line.strip()}
    assert code == 0
    assert rows["rounds"] == ["rounds", "3", "of", "3", "3", "of", "3"]
    assert rows["train.lr"] == ["train.lr", "0.001", "0.01"]
    slow, fast = map(float, rows["loss"][1:])
    assert fast < slow
    assert "strategy.kind" not in text
    assert compare("fast", "fast")[1].splitlines()[-1].split()[-2:] == ["the", "same"]


@pytest.mark.usefixtures("forked")
@pytest.mark.slow(2)
def test_settings_that_only_say_how_it_is_worked_at_are_listed_apart(project):
    for name, workers in (("one", 0), ("two", 1)):
        settings = {"run.name": name, "simulate.workers": workers, "train.device": "cpu"}
        fedtrain.simulate(".", settings, progress=False)
    said = [line.split() for line in compare("one", "two")[1].splitlines()[-2:]]
    assert said == [
        ["settings", "that", "decide", "the", "model", "the", "same"], ["simulate.workers", "0", "1"],
    ]  # fmt: skip
    found = json.loads(compare("one", "two", "--json")[1])
    assert (found["settings"], found["others"]) == ({}, {"simulate.workers": ["0", "1"]})


def test_a_program_gets_the_same_as_json(project):
    code, text = compare("slow", "fast", "--json")
    found = json.loads(text)
    assert code == 0
    assert [run["run"] for run in found["runs"]] == ["slow+simulate", "fast+simulate"]
    assert found["settings"] == {"train.lr": ["0.001", "0.01"]}
    assert all(cost["bytes"] > 0 and cost["seconds"] > 0 for cost in found["costs"])


def test_metrics_are_drawn_a_line_a_run(project):
    pytest.importorskip("matplotlib")
    code, text = compare("slow", "fast", "--png", "curves.png")
    assert (code, text.splitlines()[0].split()) == (0, ["slow+simulate", "fast+simulate"])
    assert (project / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_one_run_or_an_unknown_one_is_refused_with_what_to_do(project):
    code, text = compare("slow")
    assert code == 2
    assert "name two runs or more; `fedtrain runs` lists them." in text
    code, text = compare("slow", "fats")
    assert code == 1
    assert "has no run 'fats'. Found here: fast+simulate, slow+simulate." in text


def train_on_ranks(rank, ranks, folder):
    """A run whose ranks each keep the whole model, and one whose ranks keep a part each."""
    os.environ["WORLD_SIZE"] = str(ranks)  # in the group that this world has already
    for name, zero in (("whole", 0), ("sharded", 2)):
        settings = [f"run.name={name}", f"parallel.zero={zero}", "train.device=cpu"]
        config = Config.load(folder / "fedtrain.toml", settings)
        log = api.logged(config.datacenter_dir, silent) if rank == 0 else nullcontext(silent)
        with log as emit:
            datacenter.run(config, emit=emit)


@pytest.mark.slow
def test_a_datacenters_runs_that_differ_in_how_ranks_shard_are_of_the_same_settings(project):
    world(2, train_on_ranks, project)
    runs = "whole+datacenter", "sharded+datacenter"
    found = json.loads(compare(*runs, "--json")[1])
    assert [run["round"] for run in found["runs"]] == [3, 3]
    assert (found["settings"], found["others"]) == ({}, {"parallel.zero": ["0", "2"]})
    said = [line.split() for line in compare(*runs)[1].splitlines()[-2:]]
    assert said == [
        ["settings", "that", "decide", "the", "model", "the", "same"], ["parallel.zero", "0", "2"],
    ]  # fmt: skip
