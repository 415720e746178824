"""Data that the server holds: evaluated beside the sites' own, in simulations and at a real aggregator."""

import asyncio

import pytest
from click.testing import CliRunner

import fedtrain
import fedtrain.api
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import ConfigError, TaskError
from fedtrain.events import Best, Evaluated, RunFinished
from fedtrain.modes import MODES, reads
from fedtrain.runtime.star import aggregator
from fedtrain.runtime.trainers.trainer import Trainer
from fedtrain.tracking import log
from tests import inprocess
from tests.inprocess import InProcess, federation
from tests.ports import free_port
from tests.wards import WARDS, measured

SOURCE = (
    WARDS
    + """
class Served(Wards):
    def eval_data(self, site):
        if site == "server" and not (self.data_dir / "server").exists():
            raise FileNotFoundError("secret")
        return self.data("b" if site == "server" else site)

class Pool(Served):
    sites = fedtrain.Task.sites

class Clash(Served):
    def sites(self):
        return ["a", "b", "server"]

class Derived(Served):
    def metrics(self, sums):
        return {"wrong": 1 - sums["accuracy"][0] / sums["accuracy"][1]}
"""
)
SETTINGS = {"run": {"name": "r", "rounds": 3, "seed": 4}, "train": {"lr": 0.3}, "evaluate": {"server": True}}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A function that makes the configuration of a project with data of the server's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ward_task.py").write_text(SOURCE)
    (tmp_path / "data" / "server").mkdir(parents=True)
    (tmp_path / "fedtrain.toml").write_text("[evaluate]\nserver = true\n")

    def make(task="Served", **changes):
        table = {name: dict(own) for name, own in SETTINGS.items()}
        table["run"]["task"] = f"ward_task:{task}"
        table |= {"simulate": {"workers": 0}, "network": {"listen": f"127.0.0.1:{free_port()}"}}
        for name, own in changes.items():
            table[name] = table.get(name, {}) | own
        return Config.of(table, tmp_path)

    return make


def run_of(config):
    return asyncio.run(fedtrain.api.simulation(config))


def by_hand(run):
    """What the run's last model is worth on the server's data, by plain torch."""
    x, y = fedtrain.load_task(run.config).eval_data("server")
    return {f"server/{name}": value for name, value in measured(run.model(), x, y).items()}


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
@pytest.mark.parametrize("rounds", [True, False], ids=["rounds", "asynchronous"])
def test_a_simulation_evaluates_the_servers_data_beside_that_of_natural_sites(project, masks, rounds):
    if masks and not rounds:
        pytest.skip("there are no masks without rounds")
    found = run_of(project(secagg={"enabled": masks}, asynchronous={"enabled": not rounds}))
    expected = by_hand(found)
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    events = [e for e in log.read(found.path) if isinstance(e, Evaluated)]
    assert all({*e.by_site} == {"a", "b", "c"} and "server/loss" in e.metrics for e in events)
    b = events[-1].by_site["b"]  # whose data the server's are too
    assert found.metrics["server/loss"] == b["loss"]


def test_a_run_may_stop_on_the_servers_data(project):
    evaluate = {"server": True, "metric": "server/loss", "mode": "max", "patience": 1}
    found = run_of(project(evaluate=evaluate))
    events = list(log.read(found.path))
    assert [(e.round, e.metric) for e in events if isinstance(e, Best)] == [(1, "server/loss")]
    (end,) = [e for e in events if isinstance(e, RunFinished)]
    assert (end.round, end.reason) == (2, "server/loss has not improved for 1 evaluations")


def test_a_run_that_goes_on_finds_the_same_on_the_servers_data(project):
    openly = {"enabled": False}
    whole = run_of(project(secagg=openly))
    run_of(project(secagg=openly, run={"name": "parts", "rounds": 1}))
    assert run_of(project(secagg=openly, run={"name": "parts"})).metrics == whole.metrics


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("Pool", "evaluate.server: the simulated sites share one pool of data"),
        ("Clash", "evaluate.server: the task has a site 'server'"),
    ],
)
def test_data_of_the_server_that_would_not_be_its_own_is_refused(project, task, says):
    with pytest.raises(ConfigError, match=says):
        run_of(project(task))


def test_a_simulated_server_without_its_data_is_told_where_and_why(project, tmp_path):
    (tmp_path / "data" / "server").rmdir()
    with pytest.raises(
        TaskError, match=r"^eval_data\('server'\): FileNotFoundError: .* \(ward_task.py:\d+\)$"
    ):
        run_of(project())


def test_a_name_of_the_servers_says_what_switches_it_on(project):
    with pytest.raises(ConfigError, match=r"gives no 'server/loss'.*evaluate.server = true"):
        run_of(project(evaluate={"server": False, "metric": "server/loss"}))


# --- a real aggregator


def inline(monkeypatch):
    """The aggregator's trainer works in this process; how often it was started."""
    started = []

    async def start(config, *, data_dir=None, scratch, simulated=False, metrics_only=False, **_):
        started.append(metrics_only)
        return InProcess(config, scratch, simulated=simulated)

    monkeypatch.setattr(Trainer, "start", start)
    return started


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
@pytest.mark.parametrize("task", ["Served", "Derived"])
def test_an_aggregator_evaluates_its_own_data_as_the_simulation_does(project, monkeypatch, masks, task):
    config = project(task, secagg={"enabled": masks}, evaluate={"server": True, "metric": "loss"})
    simulated = run_of(config)
    started = inline(monkeypatch)
    told = federation(config, ["a", "b", "c"]).of("evaluated")
    assert started == [False], "one trainer evaluates and shows"
    assert [e["round"] for e in told] == [1, 2, 3]
    last = told[-1]["metrics"]
    assert {name: simulated.metrics[name] for name in last} == last
    assert {"server/loss", "server/wrong" if task == "Derived" else "server/accuracy"} <= last.keys()


def test_where_no_site_evaluates_the_server_still_does(project, monkeypatch):
    """Each site's own file says never: what it has told of its data is its updates."""
    config = project(evaluate={"server": True, "metric": "server/accuracy"})
    inline(monkeypatch)
    serve_site = inprocess.serve_site
    monkeypatch.setattr(
        inprocess, "serve_site", lambda _, name, emit: serve_site(project(evaluate={"every": 0},
        network={"listen": config.network.listen}), name, emit),
    )  # fmt: skip
    told = federation(config, ["a", "b", "c"]).of("evaluated")
    assert [e["metrics"].keys() for e in told] == [{"server/accuracy", "server/loss"}] * 3


@pytest.mark.slow(8)  # one process that loads torch
def test_the_tasks_code_runs_in_a_process_of_its_own_that_gets_the_folder_of_data(project, tmp_path):
    (tmp_path / "data" / "server").rmdir()
    (tmp_path / "elsewhere" / "server").mkdir(parents=True)
    config = project(run={"rounds": 1}, secagg={"enabled": False})
    serve = aggregator.serve

    async def with_data(config, *, emit):
        return await serve(config, emit=emit, data_dir=tmp_path / "elsewhere")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregator, "serve", with_data)
        (told,) = federation(config, ["a", "b", "c"]).of("evaluated")
    assert told["metrics"]["server/loss"] == told["by_site"]["b"]["loss"]


def test_a_finished_model_is_measured_on_the_servers_data_by_its_name(project):
    found = run_of(project())
    measured = fedtrain.evaluate(found, site="server")
    assert measured.metrics == {
        name: pytest.approx(found.metrics[f"server/{name}"]) for name in ("accuracy", "loss")
    }


def test_a_folder_of_data_that_nobody_would_read_is_refused(project, tmp_path):
    config = project(evaluate={"server": False})
    inprocess.certify(config, [])
    inprocess.begin(config)
    (tmp_path / "fedtrain.toml").write_text(
        '[run]\nname = "r"\ntask = "ward_task:Served"\nrounds = 3\nseed = 4\n[train]\nlr = 0.3\n'
    )
    found = CliRunner().invoke(cli, ["aggregator", "--data", "data"])
    assert found.exit_code == 1
    assert "--data: the aggregator looks at data with evaluate.server = true" in found.output


def test_the_table_of_modes_says_who_reads_it():
    on = Config.of({"evaluate": {"server": True}})
    assert {mode for mode in MODES if "evaluate.server" in reads(on, mode)} == {"simulate", "aggregator"}
    assert "train.device" in reads(on, "aggregator")
    assert "train.device" not in reads(Config(), "aggregator")
