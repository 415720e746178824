"""A run is measured and written out with the settings that it was trained with, whatever the file says."""

import json
from contextlib import closing

import pytest
import torch
from click.testing import CliRunner

import fedtrain
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.runtime.trained import as_trained
from fedtrain.store.database import Database
from fedtrain.store.runs import TABLES

TASK = """
import torch
import fedtrain

class Pool(fedtrain.Task):
    away = 0.0

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))

    def rows(self, seed, n):
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)) + self.away
        return x, x.argmax(1)

    def data(self, site):
        return self.rows(1, 240)

    def eval_data(self, site):
        return self.rows(5, 60)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        out = model(batch[0])
        return {"accuracy": (float((out.argmax(1) == batch[1]).sum()), len(out))}
"""
OTHER = "from pool_task import Pool\n\nclass B(Pool):\n    away = 3.0\n"
STRATEGY = """[strategy]
kind = "fedprox"
mu = 0.5
"""
TOML = f"""[run]
task = "pool_task:Pool"
name = "clinic"
rounds = 2
[train]
lr = 0.3
{STRATEGY}[simulate]
sites = 3
workers = 0
"""
FEDPER = {"strategy.kind": "fedper", "strategy.local": ["2.*"]}
TRAINED = {
    "per": FEDPER,
    "shards": {
        "strategy.kind": "fedrep", "strategy.local": ["2.*"], "run.seed": 7, "simulate.sites": 4,
        "simulate.partition": "shards:2",
    },
    "b": {"run.task": "other:B"},
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project whose runs were all trained with other settings than the file's."""
    folder = tmp_path_factory.mktemp("as_trained")
    (folder / "pool_task.py").write_text(TASK)
    (folder / "other.py").write_text(OTHER)
    (folder / "fedtrain.toml").write_text(TOML)
    (folder / "then.toml").write_text(TOML.replace(STRATEGY, ""))
    for name, settings in TRAINED.items():
        fedtrain.simulate(folder / "then.toml", settings | {"run.name": name})
    return folder


@pytest.fixture
def project(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def said(*arguments, code=0):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def measured(name, *more):
    found = json.loads(said("evaluate", name, "--json", *more))
    return {key: found[key] for key in ("metrics", "by_site", "own_models", "run")}


def as_then(settings):
    """As on the day on which it was trained."""
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return ["--config", "then.toml", *sets]


@pytest.mark.parametrize("name", TRAINED)
def test_evaluate_measures_a_run_with_the_settings_that_it_was_trained_with(project, name):
    assert measured(f"{name}+simulate") == measured(f"{name}+simulate", *as_then(TRAINED[name]))


def test_evaluate_measures_the_models_of_sites_that_were_there(project):
    assert measured("per")["own_models"]
    assert [*measured("shards")["by_site"]] == ["site-1", "site-2", "site-3", "site-4"]


def test_evaluate_measures_on_the_data_of_the_task_that_was_trained(project):
    wanted = fedtrain.evaluate(
        fedtrain.open_run("b"), Config.load("then.toml", settings=TRAINED["b"])
    ).metrics
    assert measured("b")["metrics"] == wanted != measured("b", "--set", "run.task=pool_task:Pool")["metrics"]


def test_what_set_gives_in_this_command_is_stronger_than_the_run(project):
    assert not measured("per", "--set", "strategy.kind=fedprox")["own_models"]
    other = said("evaluate", "per", "--set", 'strategy.local=["2.weight"]', code=1)
    assert "2.bias float32[3] is missing there" in other


def test_what_the_environment_gives_is_stronger_than_the_run(project, monkeypatch):
    monkeypatch.setenv("FEDTRAIN_STRATEGY__KIND", "fedprox")
    assert not measured("per")["own_models"]


def test_export_writes_a_sites_own_model_by_the_strategy_that_trained_it(project, tmp_path):
    said("export", "per+simulate", "--site", "site-1", "-o", str(tmp_path / "out"))
    said("export", "per+simulate", "--site", "site-1", "-o", str(tmp_path / "then"), *as_then(FEDPER))
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    same = json.loads((tmp_path / "then" / "model.json").read_text())
    assert (about["run"], about["strategy"], about["config"]["strategy.local"]) == ("per", "fedper", ["2.*"])
    assert about["sha256"] == same["sha256"]
    assert "strategy.mu" not in about["config"]  # of the file's strategy


def test_a_sites_card_has_the_settings_of_the_runs_own(project, tmp_path):
    said("export", "per+simulate", "-o", str(tmp_path / "all"))
    said("export", "per+simulate", "--site", "site-1", "-o", str(tmp_path / "one"))
    alls, ones = (json.loads((tmp_path / n / "model.json").read_text())["config"] for n in ("all", "one"))
    assert ones == {key: value for key, value in alls.items() if not key.startswith("simulate.")}


def test_an_opened_run_has_the_models_that_were_trained(project):
    run = fedtrain.open_run("per")
    model, given = (
        run.model(site="site-2"),
        fedtrain.open_run("per", Config.load("then.toml", settings=FEDPER)),
    )
    for mine, wanted in zip(model.parameters(), given.model(site="site-2").parameters(), strict=True):
        assert torch.equal(mine, wanted)
    assert not torch.equal(model[2].weight, run.model(site="site-1")[2].weight)
    assert fedtrain.evaluate(run).own_models
    assert fedtrain.evaluate("per").metrics == fedtrain.evaluate(given).metrics
    assert fedtrain.load_model("b")


def test_a_matrix_measures_each_model_by_the_task_of_its_own_run(project):
    table = fedtrain.evaluate(["b", "per"], matrix=True)
    assert table.metrics["b+simulate"] == measured("b", *as_then(TRAINED["b"]))["metrics"]
    alone = measured("per", "--set", "strategy.kind=fedprox")  # the global model, not the sites' own ones
    assert table.metrics["per+simulate"] == alone["metrics"]


def test_what_an_older_run_has_not_kept_is_the_files(project, tmp_path):
    config = Config.load()
    assert as_trained(config, project) == config  # no run's folder
    run = begun(tmp_path / "run", {"run.seed": "9"})
    trained = as_trained(config, run)
    assert trained.run.seed == 9
    assert (trained.run.task, trained.strategy, trained.simulate) == (
        config.run.task, config.strategy, config.simulate,
    )  # fmt: skip


def test_infinity_is_taken_as_it_was(project, tmp_path):
    run = begun(tmp_path / "run", {"strategy.kind": "'fedprox'", "strategy.mu": "inf"})
    assert as_trained(Config.load(), run).strategy.options == {"mu": float("inf")}


def test_a_run_decides_on_its_numbers_and_on_nothing_else(project, tmp_path):
    config, odd = Config.load(), {"run.dir": "'/'", "train.command": "'echo {out}'", "network.certs": "'/'"}
    assert as_trained(config, begun(tmp_path / "run", odd)) == config


@pytest.mark.parametrize(
    "key", ["run.task", "strategy.kind", "aggregation.rule", "compression.up", "compression.down"]
)
def test_a_run_can_not_bring_its_own_code(project, key):
    name = key.replace(".", "_")
    folder = begun(project / "runs" / name, {key: f"'runs.{name}.code:Own'"})
    (folder / "code.py").write_text("raise SystemExit('executed')\n")
    (folder / "events.jsonl").touch()
    assert "lies among the runs" in said("evaluate", name, code=1)
    with pytest.raises(ConfigError, match=r"json\.py has the name of one of Python's own modules"):
        as_trained(Config.load(), begun(folder / "2", {key: "'json:JSONDecoder'"}))


def begun(folder, agreed):
    """A run's folder that keeps these settings."""
    folder.mkdir(parents=True)
    with closing(Database(folder / "run.db", TABLES, durable=False, remedy="")) as db:
        db.put("meta", "agreed", json.dumps(agreed))
    return folder
