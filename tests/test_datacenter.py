"""The datacenter's command on one rank: going on, beginning with another run's model, what it tells."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fedtrain.arena import Arena
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import ConfigError, RoundError, StoreError
from fedtrain.events import silent
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.datacenters.islands import sound_step
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import RunStore
from fedtrain.strategies import beginning, build, server_step
from tests.equivalence.tiny import case, project


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return project(tmp_path_factory.mktemp("datacenter"))


def train(folder, name, *, rounds=3, start=None, **changes):
    """(digest of the last model, events)."""
    table = case("Rows", train={"local_steps": 0, "local_epochs": 1, **changes.pop("train", {})}, **changes)
    table |= {"run": table["run"] | {"name": name, "rounds": rounds}, "evaluate": {"every": 1}}
    config, events = Config.of(table, folder), []
    result = datacenter.run(
        config, emit=lambda event: events.append({"kind": event.kind, **event.fields()}), start=start
    )
    assert result.rounds == rounds
    store = RunStore(config.datacenter_dir, read_only=True)
    last = store.latest()
    store.close()
    return last.weights, events


@pytest.mark.parametrize("sync", ["step", "local"])
def test_a_run_that_stopped_and_went_on_is_one_that_did_not(folder, sync):
    train(folder, f"stopped-{sync}", rounds=1, sync=sync)
    stopped, events = train(folder, f"stopped-{sync}", rounds=3, sync=sync)
    straight, _ = train(folder, f"straight-{sync}", rounds=3, sync=sync)
    assert stopped.digest == straight.digest
    assert [e["resumed_from"] for e in events if e["kind"] == "run_started"] == [1]
    assert [e["round"] for e in events if e["kind"] == "round_committed"] == [2, 3]


def rounds_of(config):
    store = RunStore(config.datacenter_dir, read_only=True)
    try:
        return [(r.round, r.weights, r.metrics, r.best) for r in store.rounds()]
    finally:
        store.close()


@pytest.mark.parametrize("method", ["commit", "evaluated"])
def test_what_a_last_round_lacks_when_its_process_dies_is_had_by_who_goes_on(folder, monkeypatch, method):
    """It was checkpointed, and not committed; or committed, and not evaluated."""
    table = case("Rows", sync="local") | {"evaluate": {"every": 1}}
    names = [f"{when}-{method}" for when in ("left", "stayed")]
    runs = [Config.of(table | {"run": table["run"] | {"name": name}}, folder) for name in names]
    whole = getattr(RunStore, method)

    def until(store, after, *rest, **more):
        if getattr(after, "round", after) == 2:
            raise KeyboardInterrupt
        whole(store, after, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, method, until)
        with pytest.raises(KeyboardInterrupt):
            datacenter.run(runs[0], emit=silent)
    for config in runs:
        datacenter.run(config, emit=silent)
    assert rounds_of(runs[0]) == rounds_of(runs[1])


def test_rounds_without_their_checkpoint_are_had_again_and_a_person_is_told(folder):
    """What was found of them counts no more: not for the best one, and not for an early end."""
    first, _ = train(folder, "lost")
    config = Config.of(case("Rows") | {"run": {"task": "mesh_task:Rows", "name": "lost"}}, folder)
    before = rounds_of(config)
    shutil.rmtree(config.checkpoint_dir)
    again, events = train(folder, "lost")
    told = [e["text"] for e in events if e["kind"] == "notice"]
    assert any(
        "round 3 was committed, but there is no good checkpoint of it: the run begins anew" in t for t in told
    )
    assert again.digest == first.digest
    assert rounds_of(config) == before


def test_a_new_run_begins_with_the_model_of_another(folder):
    first, _ = train(folder, "first", rounds=1)
    still = {"optimizer": "sgd", "lr": 1e-30}  # moves nothing
    same, _ = train(folder, "second", rounds=1, train=still, start=folder / "runs" / "first+datacenter")
    assert torch.equal(same.data, first.data)


def test_another_model_is_refused(folder):
    train(folder, "rows", rounds=1)
    config = Config.of(case("Text", rounds=1) | {"run": {"task": "mesh_task:Text", "name": "text"}}, folder)
    with pytest.raises(StoreError, match="holds another model"):
        datacenter.run(config, emit=silent, start=folder / "runs" / "rows+datacenter")


def test_a_run_of_other_settings_is_refused(folder):
    train(folder, "settled", rounds=1)
    with pytest.raises(StoreError, match=r"train\.lr was 0\.01, is 0\.5"):
        train(folder, "settled", rounds=1, train={"lr": 0.5})


def test_events_tell_steps_rounds_and_evaluations(folder):
    _, events = train(folder, "told", rounds=2, log_every=2, peak_tflops=0.1)
    kinds = [e["kind"] for e in events]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_finished"
    steps = [e for e in events if e["kind"] == "step"]
    assert [e["step"] for e in steps] == [2, 4, 6, 8, 10, 12]
    assert all(e["mfu"] > 0 and e["memory_bytes"] > 1e6 and e["lr"] == 0.01 for e in steps)
    assert [e["round"] for e in events if e["kind"] == "evaluated"] == [1, 2]


def test_early_stop_counts_evaluations_without_improvement(folder):
    table = case("Rows", train={"local_steps": 1, "lr": 1e-30, "optimizer": "sgd"})
    table |= {"run": table["run"] | {"name": "early", "rounds": 9}, "evaluate": {"patience": 2}}
    result = datacenter.run(Config.of(table, folder), emit=silent)
    assert (result.rounds, result.reason) == (3, "loss has not improved for 2 evaluations")


def test_the_plan_is_what_the_mesh_leaves(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "fedtrain.toml").write_text('[run]\ntask = "mesh_task:Text"\n[train]\noptimizer = "adamw"\n')
    runner = CliRunner()
    whole = json.loads(runner.invoke(cli, ["plan", "--json", "--ranks", "1"]).output)
    arguments = ["plan", "--json", "--ranks", "8", "--set", "parallel.zero=3", "--set", "parallel.tp=2"]
    part = json.loads(runner.invoke(cli, arguments).output)
    assert part["mesh"] == "dp_shard 4 × tp 2"
    assert part["memory_bytes"]["optimizer"] < whole["memory_bytes"]["optimizer"] / 4
    refused = runner.invoke(cli, ["plan", "--ranks", "3", "--set", "parallel.tp=2"])
    assert refused.exit_code == 1
    assert "tp 2 = 2, but there are 3 ranks" in refused.output


def test_the_plan_of_a_loaders_batches_is_that_of_its_dataset_in_such_batches(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "loader_task.py").write_text(
        "from mesh_task import Rows\nfrom torch.utils.data import DataLoader, TensorDataset\n\n"
        "class Loader(Rows):\n    def data(self, site):\n"
        "        return DataLoader(TensorDataset(*super().data(site)), batch_size=24, shuffle=True)\n"
    )
    (folder / "fedtrain.toml").write_text('[run]\ntask = "mesh_task:Rows"\n[train]\nbatch_size = 24\n')
    found = [
        json.loads(CliRunner().invoke(cli, ["plan", "--json", "--ranks", "4", *more]).output)
        for more in ([], ["--set", "run.task=loader_task:Loader", "--set", "train.batch_size=7"])
    ]
    assert found[0] == found[1]


def test_more_islands_than_sites_are_refused(folder):
    config = Config.of(case("Natural", sync="local", rounds=1), folder)
    mesh = datacenter.Mesh(datacenter.Sizes(), torch.device("cpu"))
    mesh.islands = 3
    sites = datacenter.sites_of(datacenter.load_task(config.run.task, folder), replace(config), 3)
    with pytest.raises(ConfigError, match="3 islands, but the task has 2 sites"):
        datacenter.data_of(sites, mesh)


@pytest.mark.parametrize("kind", ["fedavg", "fedadam", "diloco"])
def test_islands_never_move_to_a_model_that_can_not_be_trained_further(kind):
    schema = Schema((TensorSpec("w", (8,), "float32", True),))
    weights, mean, strategy = Arena.zeros(schema), Arena.zeros(schema), build(kind, {})
    mean.views()["w"].fill_(0.1)
    state = beginning(strategy, weights)[1]
    new, after = sound_step(strategy, weights, state, mean)
    expected, _ = server_step(strategy, weights, state, mean)
    assert new.digest == expected.digest
    mean.views()["w"].fill_(3e38)
    with pytest.raises(RoundError, match=r"the islands' new model is of no use .*lower train\.lr"):
        sound_step(strategy, new, after, mean)


def test_steps_are_recorded_as_a_trace_that_perfetto_shows(folder):
    table = case("Rows", steps=8) | {"run": case("Rows")["run"] | {"name": "recorded"}}
    config = Config.of(table, folder)
    datacenter.run(config, emit=silent, profile=3)
    (file,) = (config.datacenter_dir / "profile").iterdir()  # a CPU's memory has no snapshot
    assert file.name == "rank-00000.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    named = [event.get("name", "") for event in events if event.get("ph") == "X"]
    assert sum(name.startswith("ProfilerStep#") for name in named) == 3
    assert any("addmm" in name for name in named)
