"""Whole federations that are killed, cut off and without power at drawn moments: see tests/vsim."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soaking import taken
from tests.vsim.clock import VirtualLoop
from tests.vsim.disk import HOWS, Disk
from tests.vsim.hunt import hunt
from tests.vsim.village import SlowVillage, Village

ROOT = Path(__file__).parents[1]
OWN = re.compile(r"vsim-\w+(/run-\w+)?")  # a process's folder
HAPPEN = (
    "kill",
    "power",
    "stop",
    "trainer",
    "twice",
    "broken",
    "blocked",
    "halved",
    "opened",
    "released",
    "restarts",
)


@pytest.mark.parametrize(("old", "new"), [("log", "aside/log"), ("log.new", "log")])
def test_no_power_cut_takes_the_synced_bytes_of_a_file_that_is_renamed_or_replaced(tmp_path, old, new):
    """In seed 8458 of tests.vsim a redo log on its way to the quarantine lost sectors that were synced."""
    cut, hows = random.Random(0), set()
    for number in range(60):
        disk = Disk(tmp_path / str(number))
        (disk.folder / "aside").mkdir(parents=True)
        for name in ("log", "log.new"):
            (disk.folder / name).write_bytes(name.encode() * 200)
            synced(disk, disk.folder / name)
        synced(disk, disk.folder)
        os.replace(disk.folder / old, disk.folder / new)
        disk.dies(cut)
        hows.add(disk.restart())
        left = {path.name: path.read_bytes() for path in disk.folder.rglob("log*")}
        assert {*left.values()} <= {b"log" * 200, b"log.new" * 200}, left
        assert left.keys() >= {"log"}
    assert hows == {*HOWS}


def synced(disk, path):
    fd = os.open(path, os.O_RDONLY)
    disk.synced(fd)
    os.close(fd)


def pieces(first, last, of):
    return [range(at, min(at + of, last)) for at in range(first, last, of)]


def test_who_is_woken_on_the_virtual_clock_finds_that_it_is_time():
    """Timers that a rounding error parts come together; who finds it too early would wait again for ever."""
    loop, woken = VirtualLoop(lambda: 0.0), []
    due = 0.1 + 0.2
    loop.call_at(0.3, lambda: None)
    loop.call_at(due, lambda: (woken.append(loop.time()), loop.stop()))
    loop.run_forever()
    loop.close()
    assert woken == [due]
    assert due > 0.3


@pytest.mark.parametrize(
    "seeds",
    [range(40), *(pytest.param(piece, marks=pytest.mark.slow(8)) for piece in pieces(40, 2000, 98))],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
def test_rounds_are_committed_once_with_the_accepted_sets_mean_whatever_goes_wrong(seeds):
    found = hunt(seeds)
    assert not found.failed, [
        f"python -m tests.vsim {seed} --trace: {why}" for seed, why in found.failed.items()
    ]
    assert found.counts["commits"] >= 3 * len(seeds)
    assert all(found.counts[what] > len(seeds) // 25 for what in HAPPEN), found.counts  # it did happen


GOSSIP = ("kill", "power", "stop", "trainer", "broken", "agreed", "released", "weighed")


@pytest.mark.slow(8)
@pytest.mark.parametrize(
    "seeds",
    # 1028: agreed without a round of its own; 1264: the first word is lost with its call; 1363: agreed early,
    # and started again; 1511: killed in the last round; 1536: a power cut between what a start removes;
    # 15157: a kill before a sync, and a power cut after others had acted on what was read
    [[*range(60), 1028, 1264, 1363, 1511, 1536, 15157]],
    ids=["0-59"],
)
def test_peers_conserve_mass_and_agree_on_one_model_whatever_goes_wrong(seeds):
    found = hunt(seeds, world=Village)
    assert not found.failed, [
        f"python -m tests.vsim {seed} --gossip --trace: {why}" for seed, why in found.failed.items()
    ]
    assert found.counts["commits"] >= 6 * len(seeds)
    assert all(found.counts[what] > len(seeds) // 6 for what in GOSSIP), found.counts


@pytest.mark.slow(5)
def test_peers_beside_a_slow_one_conserve_mass_and_agree_on_one_model():
    found = hunt(range(30), world=SlowVillage)
    assert not found.failed, [
        f"python -m tests.vsim {seed} --slow --trace: {why}" for seed, why in found.failed.items()
    ]
    assert found.counts["agreed"] > 30


@pytest.mark.soak(part=0.18)  # all of them: 9 minutes of a core
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [2000, 12_000])
def test_rounds_are_committed_once_in_thousands_of_seeds(first, request):
    for piece in taken(pieces(first, first + 10_000, 250), request):
        test_rounds_are_committed_once_with_the_accepted_sets_mean_whatever_goes_wrong(piece)


@pytest.mark.soak(part=0.03)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [60, 1560])
def test_peers_agree_in_thousands_of_seeds(first, request):
    for piece in taken(pieces(first, first + 1500, 100), request):
        test_peers_conserve_mass_and_agree_on_one_model_whatever_goes_wrong(piece)


@pytest.mark.slow(8)
@pytest.mark.parametrize(
    ("seeds", "least"), [(["28", "44"], 1000), (["518"], 400), (["58", "--gossip"], 100)]
)
def test_a_seed_is_the_same_run_in_every_process(seeds, least):
    """Event for event and byte for byte, also where sets have another order, and at another time. 518 was
    not: an audit log had real times, with 16 to 18 digits, and a power cut tore a sector more or less."""
    told = []
    for order in ("1", "2"):
        command = [sys.executable, "-m", "tests.vsim", *seeds, "--trace"]
        env = os.environ | {"PYTHONHASHSEED": order}
        run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
        told.append(OWN.sub("", run.stdout).splitlines())
    assert len(told[0]) > least
    for i, (line, same) in enumerate(zip(*told, strict=True)):
        assert line == same, (i, line, same)
