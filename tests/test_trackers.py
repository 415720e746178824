"""Trackers: what their own libraries read back is what stands in the event log."""

from __future__ import annotations

import struct

import pytest
from click.testing import CliRunner

from fedtrain import events as e
from fedtrain.cli import cli
from fedtrain.contrib.dashboard.prometheus import Prometheus, exposition
from fedtrain.contrib.trackers.base import Telling, scalars, tracker_of
from fedtrain.errors import ConfigError
from fedtrain.tracking.log import read
from tests.logs import SCRIPT, datacenter, federation, rounds, write

OWN = """
from fedtrain.contrib.trackers.base import Tracker

class Lines(Tracker):
    def __call__(self, event):
        with open(self.where, "a") as f:
            print(event.kind, self.kept.setdefault("run", "1"), file=f)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one run, and a tracker of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedtrain.toml").write_text('[run]\ntask = "task:T"\n')
    (tmp_path / "ownlines.py").write_text(OWN)
    events = [*federation(sites=("north", SCRIPT)), e.RunFinished(round=4, reason="rounds done")]
    write(tmp_path / "runs" / "clinic", events)
    return tmp_path


def track(*arguments):
    done = CliRunner().invoke(cli, ["track", *arguments], prog_name="fedtrain")
    return done.exit_code, done.output


def expected(folder, change=lambda value: value):
    """name -> {round or step: value} of all numbers in a log."""
    found = {}
    for event in read(folder):
        at, values = scalars(event)
        for name, value in values.items():
            found.setdefault(name, {})[at] = change(value)
    return found


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def test_tensorboard_reads_the_numbers_of_the_log(project):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pytest.importorskip("tensorboard")
    write(project / "runs" / "gpt", datacenter())
    for run in ("clinic", "gpt"):
        assert track(run, "--to", "tensorboard") == (
            0,
            f"tensorboard: told of {_count(project, run)} events of {run}\n",
        )
        board = EventAccumulator(str(project / "runs" / run / "tensorboard"))
        board.Reload()
        found = {tag: {s.step: s.value for s in board.Scalars(tag)} for tag in board.Tags()["scalars"]}
        assert found == expected(project / "runs" / run, float32)
        assert found


def _count(project, run):
    return len([*read(project / "runs" / run)])


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow's own tables
def test_mlflow_reads_the_numbers_of_the_log(project, monkeypatch):
    mlflow = pytest.importorskip(
        "mlflow", reason="mlflow is large: pip install 'fedtrain[mlflow]' for this test"
    )
    store = f"sqlite:///{project}/mlflow.db"
    code, text = track("clinic", "--to", f"mlflow={store}")
    assert code == 0, text
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("clinic").experiment_id])
    assert (run.info.run_name, run.info.status) == ("clinic", "FINISHED")
    assert run.data.tags["fedtrain.mode"] == "federated"
    wanted = expected(project / "runs" / "clinic")
    from fedtrain.contrib.trackers.mlflow import ODD

    for name, values in wanted.items():
        history = client.get_metric_history(run.info.run_id, ODD.sub("_", name))
        assert {metric.step: metric.value for metric in history} == values
    assert track("clinic", "--to", f"mlflow={store}", "--once")[0] == 0
    assert len(client.search_runs([run.info.experiment_id])) == 1, "the same run when it is started again"


def test_wandb_has_the_numbers_of_the_log_without_a_network(project):
    pytest.importorskip("wandb", reason="wandb is large: pip install 'fedtrain[wandb]' for this test")
    code, text = track("clinic", "--to", "wandb")
    assert code == 0, text
    (file,) = (project / "runs" / "clinic" / "wandb").glob("offline-run-*/run-*.wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        row = {item.key or "/".join(item.nested_key): float(item.value_json) for item in record.history.item
               if not item.value_json.startswith("{")}  # fmt: skip
        for name in row.keys() - {"at_round", "at_step"}:
            if not name.startswith("_"):
                found.setdefault(name, {})[int(row["at_round"])] = row[name]
    assert found == expected(project / "runs" / "clinic")


def _records(log):
    """The records of a W&B file, which is a LevelDB log after 7 bytes: blocks of 32 KiB, parts behind
    checksum, length and kind (1 whole, 2 first, 3 middle, 4 last)."""
    at, whole = 7, b""
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def test_prometheus_reads_the_newest_numbers_of_the_log(project):
    parser = pytest.importorskip("prometheus_client.parser")
    tracker = Prometheus("clinic")
    tracker.running(False)
    for event in read(project / "runs" / "clinic"):
        tracker(event)
    families = {
        family.name: family for family in parser.text_string_to_metric_families(exposition([tracker]))
    }
    samples = {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "run")): sample.value
        for family in families.values() for sample in family.samples
    }  # fmt: skip
    last = {name: values[max(values)] for name, values in expected(project / "runs" / "clinic").items()}
    assert samples["fedtrain_training_loss",] == last["train/loss"]
    assert samples["fedtrain_metric", "accuracy"] == last["eval/accuracy"]
    assert samples["fedtrain_site_metric", "accuracy", SCRIPT] == last[f"site/{SCRIPT}/eval/accuracy"]
    assert samples["fedtrain_site_loss", "north"] == last["site/north/train/loss"]
    assert samples["fedtrain_epsilon", "north", "site"] == last["site/north/epsilon"]
    assert samples["fedtrain_bytes_total", "in"] == 4 * 200
    assert samples["fedtrain_updates_refused_total", "north"] == 1
    assert (samples["fedtrain_round",], samples["fedtrain_running",]) == (4, 0)
    assert families["fedtrain_bytes"].type == "counter"


def test_a_round_is_a_trace_with_a_span_for_each_phase_of_each_site(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from fedtrain.contrib.trackers.opentelemetry import OpenTelemetry

    events = write(tmp_path / "clinic", federation(sites=("north", "south")), every=1.0)

    def spans():
        kept = InMemorySpanExporter()
        tracker = OpenTelemetry(tmp_path / "clinic", "", {}, kept)
        for event in events:
            tracker(event)
        tracker.flush()
        tracker.close()
        return kept.get_finished_spans()

    first = spans()
    whole = [span for span in first if span.name.startswith("round")]
    assert [span.name for span in whole] == ["round 1", "round 2", "round 3", "round 4"]
    assert len({span.context.trace_id for span in whole}) == 4
    of_one = [span for span in first if span.context.trace_id == whole[0].context.trace_id]
    assert sorted(span.name for span in of_one) == sorted(
        [
            "round 1",
            "fold",
            "commit",
            *(f"{what} {site}" for what in ("fetch", "train", "upload") for site in ("north", "south")),
        ]
    )
    assert all(span.parent.span_id == whole[0].context.span_id for span in of_one if span is not whole[0])
    (training,) = [span for span in of_one if span.name == "train south"]
    assert (training.end_time - training.start_time) / 1e9 == pytest.approx(2.0)
    assert whole[0].attributes["train/loss"] == 1.0
    assert [span.context.span_id for span in spans()] == [span.context.span_id for span in first]


def test_a_tracker_of_ones_own_is_one_class_and_is_told_each_event_once(project):
    to = f"ownlines:Lines={project}/told"
    assert track("clinic", "--to", to, "--once")[0] == 0
    told = (project / "told").read_text().split("\n")[:-1]
    assert told == [f"{event.kind} 1" for event in read(project / "runs" / "clinic")]
    again = [
        e.RunStarted(run="clinic", mode="federated", rounds=6, resumed_from=4),
        *rounds(("north",), 5, 5),
    ]
    write(project / "runs" / "clinic", again)
    assert track("clinic", "--to", to, "--once")[0] == 0
    assert (project / "told").read_text().split("\n")[:-1] == [
        f"{event.kind} 1" for event in read(project / "runs" / "clinic")
    ]


def test_a_tracker_that_is_killed_in_a_round_is_told_of_that_round_again(project):
    folder, events = project / "runs" / "clinic", [*read(project / "runs" / "clinic")]
    committed = [i for i, event in enumerate(events) if isinstance(event, e.RoundCommitted)]
    first = Telling(folder, "ownlines:Lines", f"{project}/told", project)
    for event in events[: committed[1] + 3]:  # some of round 3
        first.take(event)
    second = Telling(folder, "ownlines:Lines", f"{project}/told", project)  # the first was killed
    for event in events:
        second.take(event)
    second.close()
    assert (project / "told").read_text().split("\n")[:-1] == [f"{event.kind} 1" for event in events]


def test_a_run_that_was_made_anew_is_told_from_its_start(project):
    folder = project / "runs" / "clinic"
    to = f"ownlines:Lines={project}/told"
    track("clinic", "--to", to, "--once")
    (folder / "events.jsonl").unlink()
    events = write(folder, federation(sites=("east",), last=1), began=1_800_000_000.0)
    (project / "told").unlink()
    assert track("clinic", "--to", to, "--once")[0] == 0
    assert len((project / "told").read_text().splitlines()) == len(events)


def test_a_tracker_that_is_not_there_says_what_to_install_or_to_write(project, monkeypatch):
    import sys

    assert (
        "there is no tracker 'tensorbord'. Did you mean tensorboard?"
        in track("clinic", "--to", "tensorbord")[1]
    )
    assert "no class Gone" in track("clinic", "--to", "ownlines:Gone")[1]
    for name, missing in (
        ("mlflow", "mlflow"),
        ("wandb", "wandb"),
        ("tensorboard", "tensorboard.compat.proto.event_pb2"),
    ):
        monkeypatch.setitem(sys.modules, missing, None)
        monkeypatch.delitem(sys.modules, f"fedtrain.contrib.trackers.{name}", raising=False)
        with pytest.raises(ConfigError, match=rf"pip install 'fedtrain\[{name}\]'"):
            tracker_of(name, project)
