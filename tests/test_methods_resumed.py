"""What sites remember for a strategy: after kill -9 around a commit, and when it is lost or damaged."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import psutil
import pytest

from fedtrain.runtime.journal import Journal
from fedtrain.store import RunStore, memories
from fedtrain.store.database import Database
from fedtrain.store.memories import Memories
from fedtrain.store.memory import SiteMemory
from tests import processes, toy
from tests.inprocess import federation, simulated
from tests.processes import Project
from tests.test_methods_everywhere import (  # noqa: F401  # fixtures
    MASKED,
    OPEN,
    SITES,
    all_have_joined,
    certs,
    config,
)

LOST = SITES[3]
MOMENTS = {
    "as a site's memory is written": (Memories, "keep", 9, True),
    "when a site's memory is written": (Memories, "keep", 9, False),
    "as a place for it is chosen": (Memories, "_place", 9, False),
    "as it is on the disk and not in the index": (memories, "_digest", 13, False),
    "before the commit": (Journal, "commit", 3, True),
    "after the commit": (Journal, "commit", 3, False),
}


def dies(run, owner, name, time, before):
    """Run in a process that gets SIGKILL at the `time`-th call of a method, before or after its work."""

    def victim():
        real, calls = getattr(owner, name), iter(range(1, 1000))

        def method(*given, **named):
            now = next(calls) == time
            if now and before:
                os.kill(os.getpid(), signal.SIGKILL)
            found = real(*given, **named)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        setattr(owner, name, method)
        run()

    process = multiprocessing.get_context("fork").Process(target=victim)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def sum_of_what_sites_remember(toys):
    return sum(toys.memory(site).get("c", np.zeros(18)) for site in toy.SITES)


@pytest.mark.parametrize("sums", [OPEN, MASKED], ids=["open", "masked"])
def test_killed_around_a_commit_a_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path, sums):
    def toys_in(folder):
        return toy.Toys(toy.config(tmp_path / folder, "scaffold", {"clip": 4.0, "min_sites": 3}, **sums))

    whole, killed = toys_in("whole").run((4,)), {moment: toys_in(moment) for moment in MOMENTS}
    gc.collect()  # gRPC's of tests before, whose end waits for a thread, and that would be none in a fork
    for moment, toys in killed.items():
        dies(lambda toys=toys: toys.run((4,)), *MOMENTS[moment])
        toys.run((4,))
        assert toys.last.weights.digest == whole.last.weights.digest, moment
    for toys in (whole, *killed.values()):
        total = sum_of_what_sites_remember(toys)
        assert np.array_equal(toys.last.state["sum"].numpy(), total)
        c = toys.last.weights.load().extras()["c"].numpy()
        assert np.array_equal(c, total / len(toy.SITES))


# --- Memory that is lost


def lose(folder, how):
    """What LOST remembers, in its own folder or in a simulation's."""
    if (index := folder.parent / memories.INDEX).exists():
        db = Database(index, remedy="", shared=True)
        if how == "removed":
            db.delete("states", "site = ?", (LOST,))
        with (folder.parent / memories.STATES).open("r+b") as f:
            for place, nbytes in db.all("SELECT place, nbytes FROM states WHERE site = ?", (LOST,)):
                f.seek(place + nbytes - 1)
                f.write(b"?")
        db.close()
        return
    if how == "removed":
        shutil.rmtree(folder)
    for path in folder.glob("*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")


def longer(cfg, rounds):
    return replace(cfg, run=replace(cfg.run, rounds=rounds))


ADVICE = "Without it this site can only join as a new one, under another name, or in another run"


@pytest.mark.parametrize(
    ("kind", "sums", "how", "says"),
    [
        ("scaffold", MASKED, "removed", "has no state after round 2"),
        ("ditto", OPEN, "damaged", "is damaged"),
    ],
)
@pytest.mark.parametrize("simulation", [True, False], ids=["simulated", "sites"])
def test_a_site_that_lost_its_memory_is_refused_with_what_to_do_and_the_round_goes_on(
    tmp_path, certs, kind, sums, how, says, simulation  # noqa: F811
):  # fmt: skip
    cfg = config(tmp_path, kind, sums, run={"rounds": 2}, strategy={"fraction": 1.0})
    (tmp_path / "certs").symlink_to(certs)

    def run(cfg):
        return simulated(cfg, pytest.MonkeyPatch()) if simulation else federation(cfg, SITES)

    run(cfg)
    folder = cfg.simulate_dir if simulation else cfg.site_dir(LOST)
    lose(folder / "memory" / LOST, how)
    events = run(longer(cfg, 4))
    assert [e["sites"] for e in events.of("round_committed")] == [3, 3]
    refused = [(e["site"], e["reason"]) for e in events.of("update_refused")]
    assert {site for site, _ in refused} == {LOST}
    assert all(says in reason and ADVICE in reason for _, reason in refused)
    assert str(tmp_path) not in str(refused), "a site's paths are its own affair"
    assert len(events.of("evaluated")) == 2


# --- Over processes


def remembered_sums(project):
    store = RunStore(project.root / "runs" / "r", read_only=True)
    last, counted = store.latest(), store.counted()
    store.close()
    found = [
        SiteMemory(project.root / "runs" / f"r@{site}" / "memory" / site, durable=True).load(counted[site])
        for site in processes.SITES
    ]
    return last.state["sum"].numpy(), sum(each.views()["c"].numpy() for each in found)


@pytest.mark.slow(20)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("secagg", [False, True], ids=["open", "masked"])
def test_kill_9_of_the_aggregator_a_site_and_a_trainer_leaves_c_the_mean_of_what_sites_remember(
    tmp_path, secagg
):
    def project(name):
        strategy = 'kind = "scaffold"\nclip = 4.0'
        p = Project(tmp_path / name, rounds=12, strategy=strategy, secagg=secagg, task="Held")
        toml = p.root / "fedtrain.toml"
        toml.write_text(toml.read_text().replace("momentum = 0.9\n", ""))
        return p

    with project("whole") as p:
        whole = p.simulate()
    with project("killed") as p:
        p.let_train(2)
        aggregator, sites = p.start("aggregator"), {name: p.start("site", name) for name in processes.SITES}
        p.wait_for(lambda: p.count("round_committed") >= 2)
        sites["b"].send_signal(signal.SIGKILL)
        sites["b"].wait(30)
        p.start("site", "b")
        p.let_train(4)
        p.wait_for(lambda: p.count("round_committed") >= 4)
        aggregator.send_signal(signal.SIGKILL)
        aggregator.wait(30)
        aggregator = p.start("aggregator")
        p.let_train(7)
        p.wait_for(lambda: p.count("round_committed") >= 7)
        children = psutil.Process(sites["c"].pid).children()
        (trainer,) = (c for c in children if os.getsid(c.pid) == c.pid)  # it has a session of its own
        trainer.send_signal(signal.SIGKILL)
        p.let_train(12)
        assert aggregator.wait(120) == 0, p.log("aggregator")
        assert p.final() == whole
        total, remembered = remembered_sums(p)
        assert np.array_equal(total, remembered)
