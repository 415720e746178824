"""kill -9 of anything, the same command again: the run goes on, to the same model bit for bit (S31, S32)."""

import os
import signal
from contextlib import suppress

import pytest

from tests.processes import Project, kill_at_seeded_moments

pytestmark = [pytest.mark.slow(30), pytest.mark.timeout(600)]
KILLS = 10
KILLS_UNDER_MASKS = 4


def project(folder, *, slow=0.005, secagg=False):
    strategy = 'kind = "fedadam"'
    made = Project(folder, rounds=60, slow=slow, strategy=strategy, secagg=secagg, task="Held")
    made.let_train(0)
    return made


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """What an uninterrupted run gives; no process of it is ever disturbed."""
    with project(tmp_path_factory.mktemp("whole"), slow=0) as p:
        p.let_train(60)
        return p.simulate()


@pytest.fixture(scope="session")
def masked(tmp_path_factory):
    """The same under secure aggregation."""
    with project(tmp_path_factory.mktemp("masked"), slow=0, secagg=True) as p:
        p.let_train(60)
        return p.simulate()


def test_s31_the_aggregator_killed_at_ten_seeded_moments_ends_with_the_same_model(tmp_path, whole):
    with project(tmp_path) as p:
        aggregator = p.start_all()
        kill_at_seeded_moments(
            p, lambda: p.start("aggregator"), aggregator, KILLS, 1, lambda: p.count("update_received")
        )
        p.wait_for(lambda: p.count("run_finished"))
        assert p.final() == whole


def test_s31_under_masks_the_aggregator_killed_at_seeded_moments_ends_with_the_same_model(tmp_path, masked):
    with project(tmp_path, secagg=True) as p:
        aggregator, kills = p.start_all(), KILLS_UNDER_MASKS
        kill_at_seeded_moments(
            p, lambda: p.start("aggregator"), aggregator, kills, 3, lambda: p.count("update_received")
        )
        p.wait_for(lambda: p.count("run_finished"))
        assert p.final() == masked


def test_s32_under_masks_a_site_killed_at_seeded_moments_changes_no_bit(tmp_path, masked):
    with project(tmp_path, secagg=True) as p:
        aggregator = p.start("aggregator")
        p.start("site", "a")
        p.start("site", "c")
        kill_at_seeded_moments(
            p, lambda: p.start("site", "b"), p.start("site", "b"), KILLS_UNDER_MASKS, 4,
            lambda: p.count("site_state", "r@b"),
        )  # fmt: skip
        assert aggregator.wait(240) == 0, p.log("aggregator")
        assert p.final() == masked


def test_s32_a_site_killed_at_ten_seeded_moments_changes_no_bit_and_trains_no_round_twice_over(
    tmp_path, whole
):
    with project(tmp_path) as p:
        aggregator = p.start("aggregator")
        p.start("site", "a")
        p.start("site", "c")
        kill_at_seeded_moments(
            p, lambda: p.start("site", "b"), p.start("site", "b"), KILLS, 2,
            lambda: p.count("site_state", "r@b"),
        )  # fmt: skip
        assert aggregator.wait(240) == 0, p.log("aggregator")
        assert p.final() == whole


def test_a_trainer_killed_in_the_middle_is_replaced_by_its_site(tmp_path, whole):
    import psutil

    def kill_trainer():
        """Whether there was one."""
        for child in psutil.Process(site.pid).children():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(child.pid) == child.pid:  # a trainer, which has a session of its own
                    child.send_signal(signal.SIGKILL)
                    return True
        return False

    with project(tmp_path) as p:
        aggregator = p.start_all()
        site = p.processes[-1]
        for number in range(3):
            before = p.count("round_committed")
            p.let_train(5 * (number + 1))
            p.wait_for(lambda before=before: p.count("round_committed") > before)
            p.wait_for(kill_trainer)
        p.let_train(60)
        assert aggregator.wait(240) == 0, p.log("aggregator")
        assert site.wait(30) == 0
        assert p.final() == whole


def test_a_site_that_is_away_when_the_run_ends_hears_it_when_it_or_the_aggregator_is_back(tmp_path):
    """The idle time is longer than any wait here: it ends by being told, and by SIGTERM."""
    with Project(tmp_path, rounds=2) as p:
        toml = p.root / "fedtrain.toml"
        toml.write_text(
            toml.read_text().replace("min_sites = 3", "min_sites = 2").replace('idle = "60s"', 'idle = "1h"')
        )
        aggregator, c = p.start("aggregator"), p.start("site", "c")
        p.wait_for(lambda: p.count("site_joined"))
        c.kill()
        p.wait_for(lambda: p.count("site_lost"))
        there = [p.start("site", name) for name in "ab"]
        assert [site.wait(120) for site in there] == [0, 0], p.log("aggregator")
        assert "c may come back" in [e for e in p.events() if e["kind"] == "notice"][-1]["text"]
        assert aggregator.poll() is None
        assert p.start("site", "c").wait(120) == 0, p.log("site-c")
        assert aggregator.wait(60) == 0, p.log("aggregator")

        again = p.start("aggregator")  # on the finished run
        assert p.start("site", "a").wait(120) == 0, p.log("site-a")
        assert again.poll() is None
        again.terminate()
        assert again.wait(60) == 143
        assert p.count("round_committed") == 2


def test_s32_with_fewer_sites_needed_a_round_completes_without_the_killed_one_and_it_rejoins(tmp_path):
    with Project(tmp_path, rounds=5000, slow=0.005) as p:
        toml = p.root / "fedtrain.toml"
        toml.write_text(
            toml.read_text().replace("min_sites = 3", "min_sites = 2").replace('idle = "60s"', 'idle = "1s"')
        )
        p.start_all()
        victim = p.processes[-1]

        def sizes():
            return [e["sites"] for e in p.events() if e["kind"] == "round_committed"]

        p.wait_for(lambda: 3 in sizes())
        victim.kill()
        p.wait_for(lambda: sizes()[-3:] == [2, 2, 2])
        p.start("site", "c")
        p.wait_for(lambda: sizes()[-3:] == [3, 3, 3])


def test_s30_a_finished_update_is_not_trained_again_after_a_restart(tmp_path):
    """The aggregator dies while a site trains; when both are back, the reply comes from the ledger."""
    with Project(tmp_path, rounds=3, task="Held") as p:
        p.let_train(0)
        aggregator = p.start_all()
        p.wait_for(lambda: p.events("r@a") and p.events("r@a")[-1].get("state") == "training")
        aggregator.kill()
        aggregator.wait(30)
        p.let_train(3)
        p.wait_for(lambda: any(e.get("state") == "uploading" for e in p.events("r@a")))  # it is in the ledger
        p.processes[1].kill()
        p.processes[1].wait(30)
        trained = sum(e.get("state") == "training" and e.get("round") == 1 for e in p.events("r@a"))
        p.start("site", "a")
        assert p.start("aggregator").wait(120) == 0, p.log("aggregator")
        again = sum(e.get("state") == "training" and e.get("round") == 1 for e in p.events("r@a"))
        assert again == trained == 1
