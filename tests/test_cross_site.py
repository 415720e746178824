"""`fedtrain evaluate --matrix`: each of several models on each site's data."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import fedtrain
from fedtrain.arena import Arena
from fedtrain.cli import cli
from fedtrain.errors import ConfigError, StoreError
from fedtrain.store import RunStore
from fedtrain.tracking.export import export
from tests.wards import SITES, WARDS, measured

SOURCE = (
    WARDS
    + """
class Tested(Wards):
    def test_data(self, site):
        return tuple(column[:20] for column in self.data(site))

class Wider(Tested):
    def model(self):
        return torch.nn.Linear(3, 4, dtype=torch.float64)

class Deep(Tested):
    def model(self):
        wide = torch.nn.Linear(3, 8, dtype=torch.float64)
        return torch.nn.Sequential(wide, torch.nn.Tanh(), torch.nn.Linear(8, 2, dtype=torch.float64))

class Elsewhere(Tested):
    def sites(self):
        return ["a", "b"]

class Longer(Tested):
    def test_data(self, site):
        return tuple(column[:21] for column in self.data(site))

class Otherwise(Tested):
    def evaluate(self, model, batch):
        return {"error": super().evaluate(model, batch)["accuracy"]}
"""
)
TOML = """[run]
name = "r"
task = "matrix_task:Tested"
rounds = 3
seed = 4
[train]
lr = 0.3
[simulate]
workers = 0
[gossip]
topology = "star"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project with two runs around an aggregator and one of peers."""
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "matrix_task.py").write_text(SOURCE)
    (folder / "fedtrain.toml").write_text(TOML)
    fedtrain.simulate(folder)
    fedtrain.simulate(folder, {"run.name": "short", "run.rounds": 2})
    fedtrain.simulate(folder, mode="gossip")
    return folder


@pytest.fixture
def project(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def evaluated(*arguments, code=0):
    result = CliRunner().invoke(cli, ["evaluate", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def cell(model, site):
    return measured(model, *fedtrain.load_task().test_data(site))


def check_row(found, row, model):
    cells = {site: cell(model, site) for site in SITES}
    for site in SITES:
        assert found["by_model"][row][site] == pytest.approx(cells[site], abs=1e-12)
    accuracy = np.array([cells[site]["accuracy"] for site in SITES])
    over = {"accuracy": accuracy.mean(), "accuracy/uniform": accuracy.mean(), "accuracy/std": accuracy.std(),
            "accuracy/worst_decile": accuracy.min()}  # fmt: skip
    assert {name: found["metrics"][row][name] for name in over} == pytest.approx(over, abs=1e-12)


def test_runs_and_rounds_are_rows_and_sites_columns(project):
    found = json.loads(evaluated("r", "short", "--matrix", "--round", "2", "--round", "best", "--json"))
    best = fedtrain.open_run("r").board.best.round
    rows = ["r+simulate round 2", f"r+simulate round {best}", "short+simulate round 2"]
    assert list(found["by_model"]) == rows
    for row, (run, number) in zip(rows, [("r", 2), ("r", best), ("short", 2)], strict=True):
        check_row(found, row, fedtrain.load_model(run, round=number))
    assert found["data"] == "test_data"


def test_peers_that_were_simulated_together_have_a_row_each(project):
    found = json.loads(evaluated("r+gossip", "--matrix", "--json"))
    assert list(found["by_model"]) == ["r+gossip", "r+gossip@a", "r+gossip@b", "r+gossip@c"]
    check_row(found, "r+gossip", fedtrain.load_model("r+gossip"))
    store = RunStore(project / "runs" / "r+gossip", read_only=True)
    last = store.latest()
    store.close()
    for peer in SITES:
        model = fedtrain.load_task().model()
        model.load_state_dict(Arena(last.weights.schema, last.state[f"{peer}/model"]).views())
        check_row(found, f"r+gossip@{peer}", model)
    rows = [str(found["by_model"][f"r+gossip@{peer}"]) for peer in SITES]
    assert len({*rows}) == len(SITES), "peers' models differ"  # the hub's is the mean, but for its last bits


def test_the_table_has_a_part_for_each_metric_and_nothing_is_written(project):
    before = {path: path.stat().st_mtime_ns for path in project.rglob("evaluation.json")}
    lines = evaluated("r", "short", "--matrix").splitlines()
    over = ["all", "uniform", "worst_decile", "std"]
    assert lines[0].split() == ["ACCURACY", *SITES, *over]
    assert lines[4].split() == ["LOSS", *SITES, *over]
    assert [line.split()[0] for line in lines[1:3]] == ["r+simulate", "short+simulate"]
    first = fedtrain.evaluate(["r", "short"], matrix=True).of("accuracy")["r+simulate"]
    assert lines[1].split()[1:4] == [f"{first[site]:.4f}" for site in SITES]
    assert {path: path.stat().st_mtime_ns for path in project.rglob("evaluation.json")} == before


def test_python_gives_what_the_command_prints(project):
    runs = [fedtrain.open_run("r"), "short"]
    found = fedtrain.evaluate(runs, round=[2], matrix=True)
    printed = json.loads(evaluated("r", "short", "--matrix", "--round", "2", "--json"))
    assert found.by_model == printed["by_model"]
    assert found.metrics == printed["metrics"]
    assert fedtrain.evaluate("short", matrix=True).by_model.keys() == {"short+simulate"}


def test_an_export_is_a_row_and_one_site_a_column(project, tmp_path):
    export(project / "runs" / "r+simulate", tmp_path / "kept", 2)
    found = json.loads(evaluated(str(tmp_path / "kept"), "r", "--matrix", "--site", "b", "--json"))
    assert list(found["by_model"]) == ["kept", "r+simulate"]
    assert found["by_model"]["kept"] == {
        "b": pytest.approx(cell(fedtrain.load_model(tmp_path / "kept"), "b"))
    }
    assert found["metrics"]["kept"].keys() == {"accuracy", "loss"}


def test_two_models_of_one_name_are_told_apart(project, tmp_path):
    for number in (2, 3):
        export(project / "runs" / "r+simulate", tmp_path / str(number) / "model", number)
    found = fedtrain.evaluate([tmp_path / "2" / "model", tmp_path / "3" / "model"], ".", matrix=True)
    assert list(found.by_model) == ["model", f"model ({tmp_path / '3' / 'model'})"]


def test_several_runs_without_the_matrix_are_refused(project):
    says = "one run, and one round of it, is measured; several are with --matrix."
    assert says in evaluated("r", "short", code=2)
    assert says in evaluated("r", "--round", "1", "--round", "2", code=2)
    with pytest.raises(ConfigError, match="name one run and one round; or at least one, with matrix=True"):
        fedtrain.evaluate(["r", "short"])
    with pytest.raises(ConfigError, match="at least one"):
        fedtrain.evaluate([], ".", matrix=True)


def test_a_run_of_another_model_is_refused_by_name(project):
    with pytest.raises(StoreError, match=r"short\+simulate holds another model: weight is"):
        fedtrain.evaluate(
            ["short"], fedtrain.Config.load(settings={"run.task": "matrix_task:Wider"}), matrix=True
        )


# --- runs of other tasks


@pytest.fixture(scope="module")
def others(trained):
    """Runs of the same project that were trained by other tasks than its file names."""
    for name in ("Deep", "Elsewhere", "Longer", "Otherwise"):
        task = f"matrix_task:{name}"
        own = {"run.name": name.lower(), "run.task": task}
        fedtrain.simulate(trained, own | {"secagg.enabled": False, "strategy.min_sites": 2})


def test_each_model_is_measured_by_the_task_that_it_was_trained_with(project, others):
    found = json.loads(evaluated("r", "deep", "--matrix", "--json"))
    check_row(found, "r+simulate", fedtrain.load_model("r"))
    check_row(found, "deep+simulate", fedtrain.load_model("deep"))
    turned = json.loads(evaluated("deep", "r", "--matrix", "--json"))
    assert turned["by_model"] == found["by_model"]


def test_the_task_is_the_runs_own_whichever_way_it_is_named_in_python(project, others):
    runs = [fedtrain.open_run("r"), fedtrain.open_run("deep")]
    assert fedtrain.evaluate(runs, matrix=True) == fedtrain.evaluate(["r", "deep"], matrix=True)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("elsewhere", r"elsewhere\+simulate on test_data\(\) of a, b: what they are worth can't be compared"),
        ("longer", r"at a the task of r\+simulate has 20 examples .* and that of longer\+simulate 21"),
        ("otherwise", r"r\+simulate has accuracy and otherwise\+simulate error"),
    ],
)
def test_models_that_were_trained_for_other_sites_examples_or_metrics_are_not_compared(
    project, others, run, says
):
    with pytest.raises(ConfigError, match=says) as refused:
        fedtrain.evaluate(["r", run], matrix=True)
    assert "--set run.task=" in str(refused.value)
    config = fedtrain.Config.load(settings={"run.task": "matrix_task:Tested"})
    found = fedtrain.evaluate(["r", run], config, matrix=True)  # by one task, which fits all
    assert list(found.by_model) == ["r+simulate", f"{run}+simulate"]
    assert list(found.by_model["r+simulate"]) == list(SITES)
