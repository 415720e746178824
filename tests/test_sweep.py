"""`fedtrain sweep`: simulations over settings, resumable, the best first."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.contrib.sweep import trials as runs
from fedtrain.errors import ConfigError
from tests.test_compare import TASK


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "fedtrain.toml").write_text(
        '[run]\nname = "line"\ntask = "task:Line"\nrounds = 2\n[simulate]\nsites = 3\nworkers = 0\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def inside(monkeypatch):
    """Trials run in this process; the names of those that were started."""
    started = []

    class Ended:
        def __init__(self, config, file, sets, trial, jobs):
            started.append(trial.run)
            given = [
                *sets,
                *(f"{key}={value}" for key, value in trial.settings.items()),
                f"run.name={trial.run}",
            ]
            words = ["simulate", "--config", str(file), *(word for each in given for word in ("--set", each))]
            done = CliRunner().invoke(cli, words, prog_name="fedtrain")
            self.returncode = done.exit_code
            runs._errors(config, trial).write_text(done.stderr)

        def poll(self):
            return self.returncode

    monkeypatch.setattr(runs, "_start", Ended)
    return started


def sweep(*arguments):
    done = CliRunner().invoke(cli, ["sweep", *arguments], prog_name="fedtrain")
    return done.exit_code, done.stdout, done.stderr


def test_a_grid_is_every_combination_and_the_best_is_first(project, inside):
    code, out, _ = sweep("--grid", "train.lr=0.001,0.01", "--grid", "train.local_epochs=1,3", "--json")
    done = json.loads(out)
    assert (code, len(done), len(inside)) == (0, 4, 4)
    assert done[0]["settings"] == {"train.lr": "0.01", "train.local_epochs": "3"}
    values = [each["value"] for each in done]
    assert values == sorted(values)
    from fedtrain.tracking.runs import summary_of

    for each in done:
        summary = summary_of(project / "runs" / f"{each['run']}+simulate")
        assert (summary.state, summary.best_value) == ("finished", each["value"])


def test_the_same_sweep_again_starts_nothing_and_a_larger_one_what_is_new(project, inside):
    sweep("--grid", "train.lr=0.001,0.01")
    first = list(inside)
    code, out, _ = sweep("--grid", "train.lr=0.001,0.01,0.02", "--png", "lr.png")
    assert code == 0
    assert len(inside) == len(first) + 1
    assert [line.split()[1] for line in out.splitlines()] == ["train.lr", "0.02", "0.01", "0.001"]
    assert (project / "lr.png").read_bytes().startswith(b"\x89PNG")


def test_draws_follow_from_the_seed_and_stay_in_their_ranges():
    ranges = ["train.lr=0.0001:1:log", "train.local_epochs=1:5", "train.optimizer=sgd,adam"]
    points = [*runs.drawn(ranges, 200, 0)]
    assert points == [*runs.drawn(ranges, 200, 0)] != [*runs.drawn(ranges, 200, 1)]
    rates = sorted(float(point["train.lr"]) for point in points)
    assert 1e-4 <= rates[0] < rates[100] < 0.05 < rates[-1] <= 1
    assert {point["train.local_epochs"] for point in points} == {"1", "2", "3", "4", "5"}
    assert {point["train.optimizer"] for point in points} == {"sgd", "adam"}


@pytest.mark.parametrize("text", ["train.lr", "train.lr=", "train.lr=1,,2"])
def test_a_range_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="write KEY=VALUE,VALUE"):
        list(runs.grid([text]))


@pytest.mark.parametrize("text", ["train.lr=1:0", "train.lr=0:1:log", "train.lr=a:b", "train.lr=1:2:3"])
def test_a_draw_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"--random train\.lr="):
        list(runs.drawn([text], 1, 0))


def test_a_setting_that_simulate_would_refuse_is_refused_before_anything_runs(project, inside):
    code, _, said = sweep("--grid", "train.lr=0.1,-1")
    assert (code, inside) == (1, [])
    assert "train.lr" in said
    code, _, said = sweep("--grid", "train.lrr=0.1")
    assert (code, inside, "train.lrr" in said) == (1, [], True)
    code, _, said = sweep("--grid", "strategy.kind=fedprox,fedavg", "--set", "strategy.mu=0.1")
    assert (code, inside, "fedavg has no such option" in said) == (1, [], True)
    assert sweep()[0] == 2


def test_a_trial_that_fails_is_told_and_the_others_go_on(project, inside):
    (project / "task.py").write_text(
        TASK.replace("2 * x", "{1: 2}[len(self.rows)] * x").replace(
            "    def model", "    def __init__(self, n=1):\n        self.rows = [0] * n\n    def model"
        )
    )
    code, out, said = sweep("--grid", "run.task=task:Line(n=1),task:Line(n=2)")
    assert code == 1
    assert "1 of 2 trials failed" in said
    assert "KeyError" in said
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["finished", "failed"]


@pytest.mark.slow(12)
def test_trials_run_side_by_side_as_processes_and_one_that_was_stopped_goes_on(project):
    config = Config.load(project / "fedtrain.toml")
    points = [{"train.lr": "0.001"}, {"train.lr": "0.01"}]
    wanted = runs.trials(project / "fedtrain.toml", (), points)

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.sweep(config, project / "fedtrain.toml", (), wanted, 1, stop)
    states = [runs.outcome(config, trial).state for trial in wanted]
    assert states == ["finished", "waiting"]
    told = []
    done = runs.sweep(config, project / "fedtrain.toml", (), wanted, 2, told.append)
    assert [each.state for each in done] == ["finished", "finished"]
    assert done[0].settings == {"train.lr": "0.01"}
