"""What sites, peers, aggregators and simulations keep is for nobody else there, whatever the umask."""

import os
import stat

import pytest

from fedtrain.events import Notice
from fedtrain.store import Spool
from fedtrain.tracking.log import EventLog
from tests.test_modes import ALLOWED, NOISE, OPEN, RUNS, SMALL, configured, inline

MEMORY = {"strategy": {"kind": "scaffold"}, "secagg": {"ring_bits": 64}}


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder):
    """What lies in a folder and others may look at, or into."""
    found = [folder, *folder.rglob("*")]
    return [path for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077]


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("site", OPEN | NOISE),
        ("site", MEMORY),
        ("site", OPEN | SMALL),
        ("statistics", ALLOWED),
        ("peer", NOISE),
        ("simulate", MEMORY),
        ("gossip", NOISE),
        ("stats", {}),
        ("datacenter", {}),
    ],
)
def test_what_a_run_keeps_is_for_nobody_else_on_the_machine(tmp_path, monkeypatch, no_umask, mode, changes):
    plain = configured(tmp_path, changes)
    before = plain.site_dir("a")
    before.mkdir(parents=True)  # by an earlier version, which others may look into
    before.chmod(0o755)
    with inline(monkeypatch):
        RUNS[mode](tmp_path, plain, plain)
    folders = [
        folder for folder in (tmp_path / "runs").iterdir() if folder != before or any(folder.iterdir())
    ]
    assert folders
    assert [folder.name for folder in folders if stat.S_IMODE(folder.stat().st_mode) != 0o700] == []
    of_sites = [folder for folder in folders if "@" in folder.name]
    shut = {*(folder / "model" for folder in of_sites)}  # for export, in a folder that nobody can look into
    found = [path for folder in of_sites for path in open_to_others(folder)]
    assert [str(path) for path in found if not shut & {path, *path.parents}] == []


def test_events_and_bytes_that_arrive_are_for_nobody_else(tmp_path, no_umask):
    with EventLog(tmp_path / "r@a") as log:
        log.emit(Notice(text="x"))
    Spool(tmp_path / "r@a" / "inbox").put("0" * 32, memoryview(b"x"), durable=False)
    assert open_to_others(tmp_path / "r@a") == []
