"""Runs in folders with odd names, on media that can't be written, and copied as hard links."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedtrain
from fedtrain import api
from fedtrain.config import Config
from fedtrain.runtime import personal
from fedtrain.store import RunStore
from fedtrain.store.database import Database
from fedtrain.store.disk import write_over
from fedtrain.tracking import log
from fedtrain.tracking.board import Board
from fedtrain.tracking.export import export
from tests.first_use.crossed import Crossed
from tests.inprocess import federation, final, with_port
from tests.toy import SITES, config

HERE = {"simulate.workers": 0, "run.rounds": 2, "run.name": "first", "train.lr": 0.05}
NAMES = [
    "ward #3",
    "what?",
    "100%25",
    "study%20A",
    "50% done",
    "a&b=c;d",
    "[x]*",
    "ä ö",
    'it\'s "so"',
    "file:x?mode=rwc",
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i > 2 else ()) for i, name in enumerate(NAMES)]
)
def test_a_run_in_a_folder_of_any_name_is_trained_and_used(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    run = fedtrain.simulate(Crossed(), HERE | {"strategy.kind": "fedbn"})
    opened = fedtrain.open_run(run.path, Crossed())
    assert opened.metrics == run.metrics
    found = load_file(export(run.path, folder / "out") / "model.safetensors")
    assert all(torch.equal(run.model().state_dict()[n], t) for n, t in found.items())
    assert personal.export(run.config, run.path, "a", folder / "own").exists()
    assert fedtrain.evaluate(run).by_site
    assert fedtrain.simulate(Crossed(), HERE | {"strategy.kind": "fedbn", "run.rounds": 3}).metrics
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_a_database_of_any_name_is_read_as_it_was_written(tmp_path, name):
    (tmp_path / name).mkdir()
    path = tmp_path / name / "run.db"
    written = Database(path, "CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY);", remedy="")
    written.put("t", 5)
    read = Database(path, read_only=True, remedy="")
    assert read.all("SELECT k FROM t") == [(5,)]
    read.close()
    written.close()
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ward #3", "100%25?"])
def test_a_federation_in_a_folder_of_any_name_ends_with_its_model(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    table = with_port(config(folder, "fedper", {"local": ["head.*"]}).table())
    table["run"]["rounds"] = 2
    table["strategy"] |= {"fraction": 1.0, "min_sites": 3}
    cfg = Config.of(table, folder)
    assert federation(cfg, SITES[:3]).of("run_finished")
    assert load_file(export(cfg.run_dir, folder / "out") / "model.safetensors").keys() == {
        *final(cfg.run_dir).views()
    }
    own = personal.export(cfg, cfg.run_dir, SITES[0], folder / "own")
    assert "head.weight" in load_file(own / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == [name]


READ_ONLY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import fedtrain
from fedtrain.runtime import personal
from fedtrain.tracking.export import export
from tests.first_use.crossed import Crossed
os.chdir(sys.argv[1])
assert not os.access(".", os.W_OK)
out = Path(sys.argv[3])
for name in ("first", "killed"):
    run = fedtrain.open_run(f"runs/{name}+simulate", Crossed())
    before = sorted(os.listdir(run.path))
    assert run.metrics and run.history
    export(run.path, out / name)
    personal.export(run.config, run.path, "a", out / f"{name}-a")
    run.model(), run.model(site="a")
    assert fedtrain.evaluate(run).by_site.keys() == {"a", "b", "c"}
    fedtrain.simulate(Crossed(), {"run.dir": str(out / "runs"), "run.name": name, "simulate.workers": 0,
                                  "run.rounds": 1, "strategy.kind": "fedbn"}, start=run.path)
    assert sorted(os.listdir(run.path)) == before
"""


@pytest.mark.slow
def test_a_run_on_read_only_media_is_exported_and_measured(tmp_path, monkeypatch):
    folder, out = tmp_path / "archive", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    monkeypatch.chdir(folder)
    run = fedtrain.simulate(Crossed(), HERE | {"strategy.kind": "fedbn"})
    wanted = run.model().state_dict()
    killed = run.path.with_name("killed+simulate")
    shutil.copytree(run.path, killed)
    with_its_log(killed / "run.db")
    (folder / "fedtrain.toml").write_text('[run]\ntask = "crossed:Crossed"\n')
    mount = f"mount --bind -o ro '{folder}' '{folder}' && exec \"$@\""
    root = str(Path(__file__).parents[2])
    arguments = [sys.executable, "-c", READ_ONLY, str(folder), root, str(out)]
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("no file system can be mounted here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", *arguments], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    assert "can't be written: this evaluation is not kept there" in done.stderr
    for name in ("first", "killed"):
        for tensor, value in load_file(out / name / "model.safetensors").items():
            assert torch.equal(value, wanted[tensor])


def with_its_log(path: Path) -> None:
    """Leave a database as a killed process does: SQLite's own files beside it."""
    reads = f"sqlite3.connect({str(path)!r}).execute('SELECT * FROM seal').fetchall()"
    code = f"import os, sqlite3; _ = {reads}; os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert path.with_name("run.db-wal").exists()


def test_a_database_in_a_folder_that_can_not_be_written_is_read(tmp_path, monkeypatch):
    written = Database(tmp_path / "run.db", "CREATE TABLE t (k INTEGER PRIMARY KEY);", remedy="")
    written.put("t", 5)
    written.close()
    opened: list[str] = []
    connect = sqlite3.connect

    def note(*where, **more):
        opened.append(str(where[0]))
        return connect(*where, **more)

    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(sqlite3, "connect", note)
    read = Database(tmp_path / "run.db", read_only=True, remedy="")
    assert read.all("SELECT k FROM t") == [(5,)]
    read.close()
    assert opened[0].endswith("run.db?mode=ro&immutable=1")


def linked(source: Path, copy: Path) -> None:
    """What `cp -al` makes of a folder."""
    shutil.copytree(source, copy, copy_function=os.link)


def digests(folder: Path) -> list[str]:
    """The digest of each round's model that a run directory can give."""
    store = RunStore(folder, read_only=True)
    rounds = [row.round for row in store.rounds()]
    last = store.latest()
    store.close()
    assert last is not None
    assert last.round == rounds[-1]
    return [*map(str, rounds), last.weights.load().digest]


@pytest.mark.parametrize("kind", ["fedavg", "fedbn", "scaffold"])
def test_a_hard_linked_backup_survives_the_run_that_goes_on(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    settings = HERE | {"strategy.kind": kind}
    run = fedtrain.simulate(Crossed(), settings)
    backup = tmp_path / "backup" / run.path.name
    linked(run.path, backup)
    before, files = digests(backup), contents(backup)
    later = fedtrain.simulate(Crossed(), settings | {"run.rounds": 5})
    assert contents(backup) == files
    assert digests(backup) == before
    shutil.move(run.path, tmp_path / "lost")
    shutil.move(backup, run.path)
    again = fedtrain.simulate(Crossed(), settings | {"run.rounds": 5})
    assert digests(again.path) == digests(tmp_path / "lost")
    assert later.metrics == again.metrics


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file of a run directory but its lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "free")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", ["fedavg", "fedadam"])
def test_a_hard_linked_backup_in_mid_run_goes_on_to_the_same_model(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    run, backup = tmp_path / "runs" / "first+simulate", tmp_path / "backup" / "first+simulate"
    cfg, task = api.resolved(Crossed(), HERE | {"strategy.kind": kind, "run.rounds": 6}, "simulate")
    committed, before = [], []

    def copy(event):
        if event.kind == "round_committed":
            committed.append(event)
            if len(committed) == 3:
                linked(run, backup)
                before.extend(digests(backup))

    asyncio.run(api.simulation(cfg, task=task, on_event=copy))
    assert digests(backup) == before
    wanted = digests(run)
    assert len(wanted) == len(before) + 3
    shutil.rmtree(run)
    shutil.move(backup, run)
    asyncio.run(api.simulation(cfg, task=task))
    assert digests(run) == wanted
    events = [*log.read(run)]
    assert sorted(Board.of(events).history) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_file_with_two_names_is_written_under_one_of_them(tmp_path, name):
    path, other = tmp_path / "first", tmp_path / "second"
    path.write_bytes(b"before")
    os.link(path, other)
    write_over(tmp_path / name, b"behind")
    assert {path.read_bytes(), other.read_bytes()} == {b"before", b"behind"}
    assert (tmp_path / name).read_bytes() == b"behind"
