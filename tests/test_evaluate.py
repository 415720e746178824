"""`fedtrain evaluate`: a finished model on test data."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sklearn.metrics import f1_score

from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.runtime.simulations import gossip_simulation
from fedtrain.tracking.export import export
from fedtrain.training.task import load_task

TASK = """
import torch
import fedtrain
from fedtrain import metrics

class Rows(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return torch.nn.Linear(3, 3)

    def rows(self, seed, n):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 3, generator=draw)
        return x, x.argmax(1)

    def data(self, site):
        return self.rows(ord(site), 40)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return metrics.confusion(model(batch[0]), batch[1], 3)

    def metrics(self, sums):
        return {"f1": metrics.macro_f1(sums)}

class Tested(Rows):
    def test_data(self, site):
        where = self.data_dir / site
        return self.rows(1000 + ord(site), int(where.read_text()) if where.exists() else 30 + ord(site) % 7)

class Pool(Rows):
    sites = fedtrain.Task.sites

    def eval_data(self, site):
        return self.rows(5, 60)
"""
TOML = '[run]\nname = "r"\ntask = "rows_task:Tested"\nrounds = 2\nseed = 2\n[gossip]\ntopology = "complete"\n'


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A project with a finished run, made in this process."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "rows_task.py").write_text(TASK)
    (folder / "fedtrain.toml").write_text(TOML + '[evaluate]\nmetric = "f1"\n')
    asyncio.run(gossip_simulation.simulate(Config.load(folder / "fedtrain.toml"), emit=told(folder)))
    return folder


def told(folder):
    from fedtrain.tracking import EventLog

    return EventLog(folder / "runs" / "r+gossip").emit


@pytest.fixture
def project(trained, tmp_path, monkeypatch) -> Path:
    shutil.copytree(trained, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def evaluated(*arguments, code=0):
    result = CliRunner().invoke(cli, ["evaluate", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_a_run_is_measured_on_the_test_data_of_all_its_sites(project):
    found = json.loads(evaluated("r+gossip", "--json"))
    task = load_task("rows_task:Tested", project)
    model = task.model()
    from safetensors.torch import load_model

    load_model(model, project / "runs" / "r+gossip" / "model" / "model.safetensors")
    x, y = (torch.cat(each) for each in zip(*map(task.test_data, "abc"), strict=True))
    with torch.no_grad():
        assert found["metrics"]["f1"] == pytest.approx(
            f1_score(y, model(x).argmax(1), average="macro"), abs=1e-12
        )
    assert found["by_site"].keys() == {"a", "b", "c"}
    assert found["by_site"]["a"].keys() == {"loss", "f1"}
    f1 = np.array([found["by_site"][site]["f1"] for site in "abc"])
    over = {"f1/uniform": f1.mean(), "f1/worst_decile": f1.min(), "f1/std": f1.std()}
    assert {name: found["metrics"][name] for name in over} == pytest.approx(over, abs=1e-12)
    assert len(found["metrics"]) == 2 * (1 + len(over))
    assert (found["run"], found["round"], found["data"]) == ("r+gossip", 2, "test_data")


def test_what_it_found_is_written_down_and_stands_in_the_model_card(project):
    run = project / "runs" / "r+gossip"
    text = evaluated("r+gossip")
    over = ["all", "uniform", "worst_decile", "std"]
    assert [line.split()[0] for line in text.splitlines()] == ["SITE", "a", "b", "c", *over, "written"]
    assert "confusion" not in text
    found = json.loads((run / "evaluation.json").read_text())
    card = (run / "model" / "MODEL_CARD.md").read_text()
    assert "## On the test data of a, b, c" in card
    assert f"| f1 | {found['metrics']['f1']:.4f} |" in card
    assert json.loads((run / "model" / "model.json").read_text())["test"]["metrics"] == found["metrics"]
    again = export(run, project / "again")
    assert (again / "MODEL_CARD.md").read_text() == card
    earlier = export(run, project / "earlier", 1)  # another model: nothing is known of it
    assert "test data" not in (earlier / "MODEL_CARD.md").read_text()


def test_a_site_measures_an_export_on_its_own_data(project):
    exported = export(project / "runs" / "r+gossip", project / "model")
    (project / "here").mkdir()
    (project / "here" / "b").write_text("11")
    shutil.rmtree(project / "runs")
    found = json.loads(evaluated("model", "--site", "b", "--data", "here", "--json"))
    assert found["by_site"] == {"b": found["metrics"]}
    assert (found["run"], found["round"]) == ("r", 2)
    assert "## On the test data of b" in (exported / "MODEL_CARD.md").read_text()
    assert json.loads((exported / "evaluation.json").read_text()) == found


@pytest.mark.parametrize(
    ("task", "data", "sites"),
    [
        ("Rows", "data", {"a", "b", "c"}),
        ("Pool", "eval_data", {"central"}),
        ("Tested", "test_data", {"a", "b", "c"}),
    ],
)
def test_without_test_data_it_says_what_it_measured_on(project, task, data, sites):
    text = evaluated("r+gossip", "--set", f"run.task=rows_task:{task}")
    assert (f"The task has no test_data(): this is its {data}()" in text) == (data != "test_data")
    assert (
        json.loads((project / "runs" / "r+gossip" / "evaluation.json").read_text())["by_site"].keys() == sites
    )


def test_an_earlier_round_is_another_model(project):
    last, first = (json.loads(evaluated("r+gossip", "--json", *more)) for more in ((), ("--round", "1")))
    assert first["round"] == 1
    assert first["metrics"]["loss"] > last["metrics"]["loss"]
    assert first["weights_digest"] != last["weights_digest"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "has no run 'nowhere'"),
        (["model", "--round", "1"], "is no run directory: it has one model. Leave --round out."),
        (["r+gossip", "--round", "7"], "has no round 7; its last one is 2"),
        (["r@a"], "holds no model. Name a run that has one"),
        (["r+gossip", "--site", "a", "--set", "run.task=rows_task:Wider"], "holds another model: weight is"),
    ],
)
def test_what_can_not_be_measured_is_refused_in_one_line(project, arguments, says):
    export(project / "runs" / "r+gossip", project / "model")
    with (project / "rows_task.py").open("a") as file:
        file.write("\nclass Wider(Tested):\n    def model(self):\n        return torch.nn.Linear(4, 3)\n")
    (project / "runs" / "r@a").mkdir()
    (project / "runs" / "r@a" / "events.jsonl").touch()
    text = evaluated(*arguments, code=1)
    assert says in text
    assert len(text.splitlines()) == 1
