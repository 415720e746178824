"""Whoever tells a site to stop stops it: whatever its task does, and whatever hangs."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from fedtrain.cli.arguments import STOP_S
from fedtrain.config import Config
from fedtrain.tracking import audit
from tests.processes import TASK, Project
from tests.signals import IN_TERMINAL

DEAF = """
import os, signal, subprocess

class Deaf(Blobs):  # hears no signal, and neither does what it started
    def optimizer(self, parameters, round):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        Path(f"deaf-{os.getpid()}").touch()
        Path(f"deaf-{child.pid}").touch()
        while True:
            pass
"""
HUNG = """
import asyncio, sys, threading, time
from fedtrain.cli.arguments import drive

async def work():
    print("working", flush=True)
    try:
        await asyncio.to_thread(time.sleep, 600)  # as on a disk that is dead
    finally:
        print("told", flush=True)
        await asyncio.sleep(600)

drive(work(), within_s=0.2)
"""


def test_s40_a_site_has_less_than_five_seconds():
    assert STOP_S < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_s40_a_process_of_which_a_thread_hangs_ends_when_it_is_told_to(number):
    child = subprocess.Popen(
        [*IN_TERMINAL, sys.executable, "-c", textwrap.dedent(HUNG)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "working\n"
        child.send_signal(number)
        assert child.communicate(timeout=60)[0] == "told\n"  # it would have taken ten minutes
        assert child.returncode == 128 + number
    finally:
        child.kill()


@pytest.mark.slow(12)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_s40_told_to_stop_a_site_leaves_at_once_and_ends_its_task_which_hears_nothing(tmp_path, number):
    with Project(tmp_path, task="Deaf") as p:
        (p.root / "task.py").write_text(TASK + DEAF)
        p.start_all()
        site = p.processes[-1]
        p.wait_for(lambda: len(deaf(p.root)) == 6)
        mine = {each.pid for each in psutil.Process(site.pid).children(recursive=True)} & deaf(p.root)
        assert len(mine) == 2
        site.send_signal(number)
        assert site.wait(120) == 128 + number
        p.wait_for(lambda: p.count("site_lost") == 1)
        p.wait_for(lambda: not any(map(alive, mine)))
        assert not p.count("update_received")
        log = audit.audit_file(Config.load(p.root / "fedtrain.toml"), "c")
        assert "reply_sent" not in log.read_text()


def deaf(root: Path) -> set[int]:
    """Processes that hear nothing."""
    return {int(path.name.removeprefix("deaf-")) for path in root.glob("deaf-*")}


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
