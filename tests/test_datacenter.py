"""The datacenter's command on one rank: going on, beginning with another run's model, what it tells."""

import gzip
import itertools
import json
import math
import shutil
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from fedtrain.arena import Arena
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import ConfigError, RoundError, StoreError
from fedtrain.events import silent
from fedtrain.runtime.datacenters import datacenter, resuming
from fedtrain.runtime.datacenters.islands import sound_step
from fedtrain.runtime.datacenters.meter import Meter
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import RunStore
from fedtrain.strategies import beginning, build, server_step
from fedtrain.tracking.board import Board
from fedtrain.tracking.live import line
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.engine import MeshEngine
from tests.equivalence.tiny import case, project
from tests.worlds import world


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return project(tmp_path_factory.mktemp("datacenter"))


def train(folder, name, *, rounds=3, start=None, **changes):
    """(digest of the last model, events)."""
    checkpoint = changes.pop("checkpoint", {})
    table = case("Rows", train={"local_steps": 0, "local_epochs": 1, **changes.pop("train", {})}, **changes)
    table |= {"checkpoint": table["checkpoint"] | checkpoint}
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


def killed_at(config, monkeypatch, owner, method, time):
    """Run it until the `time`-th call of a method."""
    whole, calls = getattr(owner, method), itertools.count(1)

    def dying(*given, **named):
        if next(calls) == time:
            raise KeyboardInterrupt
        return whole(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, dying)
        with pytest.raises(KeyboardInterrupt):
            datacenter.run(config, emit=silent)


def of(folder, name, **changes):
    table = case("Rows", train={"local_steps": 0, "local_epochs": 1}) | {"evaluate": {"every": 1}}
    table["checkpoint"] = table["checkpoint"] | changes.pop("checkpoint", {})
    return Config.of(table | {"run": table["run"] | {"name": name, "rounds": 3}} | changes, folder)


def going_on(config):
    """(what it says, its events) of a run that goes on."""
    events = []
    datacenter.run(config, emit=events.append)
    return [e.text for e in events if e.kind == "notice"], events


def records_of(config):
    store = RunStore(config.datacenter_dir, read_only=True)
    try:
        return [{k: v for k, v in r.record.items() if k != "seconds"} for r in store.rounds()]
    finally:
        store.close()


@pytest.mark.parametrize("gone", ["the folder", "the manifests", "the key"])
def test_a_run_whose_checkpoints_are_gone_never_begins_anew_unasked(folder, gone):
    name = f"lost-{gone.split()[-1]}"
    train(folder, name)
    config = of(folder, name)
    before = rounds_of(config)
    away = config.checkpoint_dir.with_name("away")
    shutil.copytree(config.checkpoint_dir, away)
    if gone == "the folder":
        shutil.rmtree(config.checkpoint_dir)
    elif gone == "the manifests":
        for manifest in config.checkpoint_dir.glob("*/manifest.json"):
            manifest.unlink()
    else:
        config = of(folder, name, checkpoint={"dir": "mistyped"})
    told = rf"has round 3, .* were written to .*{name}\+datacenter/checkpoints, but there is none in "
    with pytest.raises(StoreError, match=told):
        datacenter.run(config, emit=silent)
    assert rounds_of(config) == before
    again = of(folder, name)
    shutil.rmtree(again.checkpoint_dir, ignore_errors=True)
    away.rename(again.checkpoint_dir)
    again = replace(again, run=replace(again.run, rounds=4))
    datacenter.run(again, emit=silent)
    assert rounds_of(again)[:3] == before


def test_a_run_that_died_before_its_first_checkpoint_begins_anew_and_says_so(folder, monkeypatch):
    config, calm = of(folder, "unsaved"), of(folder, "calm")
    killed_at(config, monkeypatch, RunStore, "commit", 2)
    told, _ = going_on(config)
    assert "round 1 was committed, but there is no good checkpoint of it: the run begins anew" in told
    datacenter.run(calm, emit=silent)
    assert rounds_of(config) == rounds_of(calm)


def test_a_run_that_goes_on_within_a_round_says_where(folder, monkeypatch):
    config = of(folder, "within", checkpoint={"every": 4})
    killed_at(config, monkeypatch, MeshEngine, "backward", 8)  # in round 2; the last checkpoint is in round 1
    told, events = going_on(config)
    lost = "round 1 was committed, but there is no good checkpoint of it"
    assert f"{lost}: the run goes on after step 4, in round 1" in told
    (started,) = (e for e in events if e.kind == "run_started")
    assert started.resumed_step == 4
    assert line(started, Board()).endswith("going on after step 4")


@pytest.mark.parametrize(("owner", "method", "time"), [
    (MeshEngine, "backward", 10),  # within round 2, after the checkpoint of step 9
    (RunStore, "commit", 2),  # round 2 has its checkpoint, and no row
])  # fmt: skip
def test_the_record_of_a_round_that_went_on_is_of_all_its_steps(folder, monkeypatch, owner, method, time):
    calm = of(folder, f"calm-{method}", checkpoint={"every": 1})
    datacenter.run(calm, emit=silent)
    config = of(folder, f"died-{method}", checkpoint={"every": 1})
    killed_at(config, monkeypatch, owner, method, time)
    going_on(config)
    assert records_of(config) == records_of(calm)
    assert all(record["loss"] > 0 for record in records_of(calm))


@pytest.mark.parametrize(("ranks", "expected"), [
    (2, [[1.0, 2.0, 1.0], [3.0, 4.0, 1.0]]),  # each goes on with its own
    (3, [[4.0, 6.0, 2.0], [0.0] * 3, [0.0] * 3]),
    (1, [[4.0, 6.0, 2.0]]),
])  # fmt: skip
def test_the_sums_of_a_round_go_on_in_any_mesh(ranks, expected):
    found = []
    for rank in range(ranks):
        mesh = Mesh(Sizes(dp_shard=ranks), torch.device("cpu"))
        mesh.at["dp_shard"] = rank
        meter = Meter(SimpleNamespace(mesh=mesh), Config(), silent)
        meter.load_state_dict({"sums": [1.0, 2.0, 1.0, 3.0, 4.0, 1.0], "seconds": 5.0})
        meter.begin(anew=False)
        assert meter.seconds >= 5
        found.append(meter._round)
    assert found == expected


def test_steps_that_were_left_out_are_told_at_the_rounds_end_and_are_not_in_its_loss(folder):
    (folder / "nan_task.py").write_text(NAN)
    found = {}
    for kind in ("Sometimes", "Always", "Never"):
        config = of(folder, kind, checkpoint={"every": 1})
        config = replace(config, run=replace(config.run, task=f"nan_task:{kind}", rounds=2))
        events = going_on(config)[1]
        found[kind] = [e for e in events if e.kind == "round_committed"]
    assert [e.skipped for e in found["Sometimes"]] == [2, 0]
    assert "2 steps skipped" in line(found["Sometimes"][0], Board())
    assert all(math.isfinite(e.loss) for e in found["Sometimes"])
    assert [(e.skipped, e.loss) for e in found["Always"]] == [(6, None)] * 2
    assert [e.skipped for e in found["Never"]] == [0, 0]
    assert "skipped" not in line(found["Never"][0], Board())


@pytest.mark.parametrize("where", ["mesh_task.py", "/proc/nope"])
def test_a_checkpoint_dir_that_can_not_be_written_is_told_before_the_first_step(folder, where):
    config, events = of(folder, "nowhere", checkpoint={"dir": where}), []
    told = rf"{where}/nowhere can't be written: .*Name another checkpoint\.dir"
    with pytest.raises(StoreError, match=told):
        datacenter.run(config, emit=events.append)
    assert not [e for e in events if e.kind in ("step", "round_committed")]


@pytest.mark.slow(6)
def test_what_the_first_rank_can_not_do_for_all_ends_all_for_its_reason(folder):
    world(2, second_start, folder)


def second_start(rank, ranks, folder):
    config = of(folder, "in-use")

    @resuming.of_first(torch.device("cpu"))
    def again():
        if rank == 0:
            RunStore(config.datacenter_dir)

    held = closing(RunStore(config.datacenter_dir)) if rank == 0 else nullcontext()
    with held, pytest.raises(StoreError, match=r"in-use\+datacenter is in use by process"):
        again()


def test_a_bad_value_is_said_by_one_rank_of_a_machine_and_told_torchrun_by_each(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "fedtrain.toml").write_text('[run]\ntask = "mesh_task:Rows"\n')
    for rank in range(2):
        file = folder / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        result = CliRunner().invoke(cli, ["datacenter", "--set", "parallel.zero=5"])
        assert result.exit_code == 1
        assert ("parallel.zero: 5 is not one of" in result.output) == (rank == 0)
        assert "parallel.zero: 5 is not one of" in json.loads(file.read_text())["message"]["message"]


def test_a_warmup_that_outlasts_the_run_is_told(folder):
    _, events = train(folder, "cold", rounds=1, train={"warmup": 100})
    told = [e["text"] for e in events if e["kind"] == "notice"]
    assert "train.warmup: 100 steps, and the run has 6: the learning rate rises to its end" in told


NAN = """
from mesh_task import Rows

class Never(Rows):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) * (float("nan") if self.bad(self.calls) else 1.0)

    def bad(self, call):
        return False

class Sometimes(Never):
    def bad(self, call):
        return call in (1, 3)

class Always(Never):
    def bad(self, call):
        return True
"""


def test_runs_with_one_checkpoint_dir_go_each_their_own_way(folder):
    """Another name is another run: it neither takes over what the first one trained, nor removes it."""
    shared = {"checkpoint": {"dir": "shared", "every": 1, "keep": 1, "background": False}}
    first, _ = train(folder, "one", rounds=1, **shared)
    second, events = train(folder, "two", rounds=2, train={"lr": 0.5}, **shared)
    alone, _ = train(folder, "two-alone", rounds=2, train={"lr": 0.5})
    assert next(e for e in events if e["kind"] == "run_started")["resumed_from"] is None
    assert second.digest == alone.digest != first.digest
    onwards, events = train(folder, "one", rounds=2, **shared)
    assert next(e for e in events if e["kind"] == "run_started")["resumed_from"] == 1
    assert onwards.digest == train(folder, "one-alone", rounds=2)[0].digest


def test_a_checkpoint_of_a_run_of_other_settings_is_refused_by_name(folder):
    """Also where the run directory, which would have refused them, is not there any more."""
    shared = {"checkpoint": {"dir": "shared", "background": False}}
    train(folder, "same", rounds=1, **shared)
    shutil.rmtree(folder / "runs" / "same+datacenter")
    with pytest.raises(StoreError, match=r"of a run of other settings: train\.lr was 0\.01, is 0\.5"):
        train(folder, "same", rounds=1, train={"lr": 0.5}, **shared)
    _, events = train(folder, "same", rounds=2, **shared)
    assert [e["round"] for e in events if e["kind"] == "round_committed"] == [1, 2], "the store has it anew"


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
