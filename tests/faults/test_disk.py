"""Damaged files, and a full disk, under real commands, over mutual TLS."""

import shutil
import subprocess

import pytest

from fedtrain.store import RunStore
from fedtrain.store.disk import read_sealed
from fedtrain.store.ledger import Newest
from tests.damage import flip
from tests.processes import SITES, Project, fedtrain
from tests.worlds import Command

pytestmark = [pytest.mark.slow(12), pytest.mark.timeout(300)]


def asked_about(p, site):
    """How many rounds the newest model has that a site was asked about."""
    path = p.root / f"runs/r@{site}/newest.json"
    return read_sealed(path, Newest).round if path.exists() else None


@pytest.mark.parametrize("secagg", [False, True], ids=["open", "masks"])
def test_a_bit_of_the_newest_model_changed_the_same_model_comes_out(tmp_path, secagg):
    """All processes were killed in a round; its sites have the model that the aggregator's disk lost."""
    with Project(tmp_path, rounds=8, secagg=secagg, strategy='kind = "fedadam"', task="Held") as p:
        p.let_train(5)
        p.start_all()
        p.wait_for(lambda: [asked_about(p, site) for site in SITES] == [5, 5, 5])
        for process in p.processes:
            process.kill()
        for process in p.processes:
            process.wait(30)
        store = RunStore(p.root / "runs/r", read_only=True)
        newest, digest = store.rounds()[-1].round, store.rounds()[-1].weights
        store.close()
        assert newest == 5
        flip(store.blobs / digest, b"")
        told = len(p.events())
        p.let_train(8)
        assert p.start_all().wait(120) == 0, p.log("aggregator")
        lines = [e["text"] for e in p.events()[told:] if e["kind"] == "notice"]
        assert any(f"{digest} is damaged" in line and "after round 4" in line for line in lines)
        assert any("the model of round 5 came from" in line for line in lines)
        assert p.final() == p.simulate()


def fill(disk):
    """To the last byte, beside whoever writes."""
    with (disk / "ballast").open("ab", buffering=0) as f:
        while free := shutil.disk_usage(disk).free:
            f.write(bytes(min(free, 4096)))


def test_an_aggregators_full_disk_is_told_at_once_in_one_line_and_with_space_it_goes_on(tmp_path):
    with Project(tmp_path, rounds=6, task="Held") as p:
        p.let_train(2)
        disk = p.root / "runs/r"
        disk.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a disk")
        try:
            log = p.root / "plainly.log"  # as a user sees it, without FEDTRAIN_DEBUG
            aggregator = Command(fedtrain, ["aggregator"], folder=p.root, log=log, env={})
            p.processes.append(aggregator)
            sites = [p.start("site", site) for site in SITES]
            p.wait_for(lambda: p.count("round_committed") >= 2)
            fill(disk)
            p.let_train(6)
            assert aggregator.wait(60) == 1, log.read_text()
            errors = [line for line in log.read_text().splitlines() if line.startswith("fedtrain: ")]
            assert len(errors) == 1, log.read_text()
            assert str(disk) in errors[0]
            assert "Traceback" not in log.read_text()
            assert "damaged" not in errors[0]
            fill(disk)  # what it left
            again = p.start("aggregator")
            assert again.wait(60) == 1
            assert "damaged" not in p.log("aggregator")
            (disk / "ballast").unlink()
            assert p.start("aggregator").wait(120) == 0, p.log("aggregator")
            assert [site.wait(60) for site in sites] == [0, 0, 0], p.log("site-a")
            final = p.final()
        finally:
            for process in p.processes:
                process.kill()
                process.wait(30)
            subprocess.run(["umount", "-l", str(disk)], check=True)
        assert final == p.simulate()
