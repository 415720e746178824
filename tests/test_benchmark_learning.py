"""benchmarks/learning.py on a case that takes seconds: its runs, figures and tables, and that it goes on."""

import importlib
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from fedtrain.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]


@pytest.fixture
def learning(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("learning")


def figures(text):
    lines = [json.loads(line) for line in text.splitlines()]
    return {(line["case"], line["metric"]): line["value"] for line in lines if "bench" in line}


def test_every_strategy_is_measured_but_that_which_is_private(learning):
    assert {learning.KIND.get(method, method) for method in learning.METHODS} == set(STRATEGIES) - {
        "dp_fedavg"
    }


def test_a_small_benchmark_gives_figures_and_goes_on_where_it_was_stopped(
    learning, tmp_path, capsys, monkeypatch
):
    roles = learning.Case("roles", lambda seed: learning.Roles(400), 0.0, 1.0, rounds=2, batch_size=8)
    monkeypatch.setattr(learning, "cases", lambda full: {"roles": roles})
    monkeypatch.setattr(learning, "LADDER", (1.0,))
    out, markdown = tmp_path / "runs.jsonl", tmp_path / "tables.md"
    asked = ["--json", "--out", str(out), "--method", "fedavg", "--method", "fedper", "--seeds", "2"]
    learning.main(asked)
    first, lines = figures(capsys.readouterr().out), out.read_text().strip().splitlines()
    courses = {line["key"]: line["accuracy"] for line in map(json.loads, lines)}
    ends = [
        statistics.fmean(course[-learning.LAST :])
        for key, course in courses.items()
        if (run := json.loads(key))["method"] == "fedavg" and run["run.seed"] > 0
    ]
    assert len(ends) == 2
    assert first["roles: fedavg", "accuracy"] == statistics.fmean(ends)
    assert first["roles: fedavg", "rounds_to_target"] == 1  # of 0 %
    assert first["roles: fedper", "against_fedavg"] == pytest.approx(
        first["roles: fedper", "accuracy"] - first["roles: fedavg", "accuracy"]
    )

    out.write_text("\n".join([*lines[:-1], lines[-1][:40]]))  # killed while it wrote
    again, train = [], learning.train
    monkeypatch.setattr(learning, "train", lambda task, settings: again.append(task) or train(task, settings))
    learning.main([*asked, "--markdown", str(markdown)])
    assert figures(capsys.readouterr().out) == first
    assert len(again) == 1
    learning.main(asked)
    assert len(again) == 1
    assert [line.split("`")[1] for line in markdown.read_text().splitlines() if "`" in line] == [
        "fedavg", "fedper",
    ]  # fmt: skip


def test_every_example_of_a_deal_is_at_one_site_in_equal_shares_of_both_kinds(learning):
    labels = np.random.default_rng(0).integers(0, 10, 3000)
    dealt = importlib.import_module("learning_tasks").deal(tuple(labels.tolist()), 2000, 1.0, seed=1)
    for which, count in ((0, 2000), (1, 1000)):
        assert sorted(i for parts in dealt.values() for i in parts[which]) == list(range(count))
    assert min(len(own) for own, _ in dealt.values()) >= 10
    large = [(own, tests) for own, tests in dealt.values() if len(own) > 100]
    assert large
    for own, tests in large:
        assert len(own) / 2000 == pytest.approx(len(tests) / 1000, rel=0.5)


def test_an_interval_is_students(learning):
    """Worked by hand: the standard deviation of 1, 2, 3 is 1, t for 2 degrees of freedom 4.303."""
    assert learning.interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert learning.interval([1.0]) == float("inf")
    assert learning.verdict(0.1, 0.2) == "noise"
    assert (learning.verdict(0.3, 0.2), learning.verdict(-0.3, 0.2)) == ("better", "worse")


@pytest.mark.parametrize("best", [0.003, 0.1, 3.0])
def test_the_search_for_a_rate_climbs_to_the_best_one_and_ignores_less_than_a_point(learning, best):
    at = learning.LADDER.index(best)
    assert learning.climbed(lambda rate: -abs(learning.LADDER.index(rate) - at) / 10, 0.1) == best
    assert learning.climbed(lambda rate: -abs(learning.LADDER.index(rate) - at) / 1000, 0.1) == 0.1
