"""`fedtrain datacenter` under torchrun, with what goes wrong in datacenters.

The final model is that of a run that nothing happened to: so each step that counts took the examples whose
turn it was, each once.
"""

import contextlib
import os
import random
import signal
import subprocess
import threading

import pytest
import torch

from fedtrain.config import Config
from fedtrain.events import silent
from fedtrain.runtime.datacenters import datacenter
from fedtrain.training.elastic import LEFT
from tests.bucket import bucket
from tests.torchrun import Cluster, kill
from tests.waves import STEPS, Waves, undisturbed

pytestmark = [pytest.mark.slow(40), pytest.mark.timeout(900)]


class Run(Waves):
    """A project in a folder, and the machines that train it; `with` ends them."""

    def __init__(self, folder, *, slow=0.05, checkpoints="", dropout=True, **machines):
        super().__init__(folder, pace=slow, checkpoints=checkpoints, dropout=dropout)
        self.cluster = Cluster(folder, "-m", "fedtrain", "datacenter", "--json", **machines)

    def __enter__(self):
        self.cluster.__enter__()
        return self

    def __exit__(self, *error):
        self.cluster.__exit__(*error)

    def start(self, *also):
        return self.cluster.add(*also)

    def at_step(self, step):
        self.cluster.wait_for(lambda: self.step() >= step)

    def kill(self, rank, number=signal.SIGKILL):
        kill(self.cluster.wait_for(lambda: self.cluster.rank(rank)), number)

    def finished(self, agent):
        assert agent.wait(300) == 0, self.cluster.log()


@pytest.fixture(scope="session")
def calm(tmp_path_factory):
    """The run of two ranks that nothing happens to."""
    return undisturbed(tmp_path_factory.mktemp("whole") / "p")


@pytest.fixture(scope="session")
def whole(calm):
    """The digest of its model."""
    return calm.model().digest


def test_each_rank_killed_at_seeded_steps_changes_no_bit(tmp_path, whole):
    with Run(tmp_path / "p", ranks=2) as run:
        agent = run.start()
        for rank, at in enumerate(sorted(random.Random(3).sample(range(3, STEPS - 3), 2))):
            run.at_step(at)
            run.kill(rank)
        run.finished(agent)
        assert run.model().digest == whole


def test_killed_with_its_newest_checkpoint_damaged_it_goes_on_from_the_one_before(tmp_path, whole):
    with Run(tmp_path / "p", ranks=2, restarts=0) as run:
        agent = run.start()
        run.at_step(9)
        run.cluster.lose(agent)
        newest = [c for c in run.checkpoints() if (c / "manifest.json").exists()][-1]
        file = sorted(newest.glob("*.safetensors"))[-1]
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
        run.finished(run.start())
        (line,) = [text for text in run.notices() if "damaged" in text]
        assert f"{newest.name}/{file.name}" in line
        assert run.model().digest == whole


def test_sigterm_to_one_rank_or_to_all_checkpoints_that_step_and_none_is_taken_twice(tmp_path, whole, calm):
    with Run(tmp_path / "p", ranks=2, restarts=1) as run:
        agent = run.start()
        run.at_step(5)
        run.kill(1, signal.SIGTERM)  # one is enough for both to leave, and torchrun starts both again
        run.cluster.wait_for(lambda: len(run.events("run_started")) == 2)
        assert f"exitcode: {LEFT}" in run.cluster.log()
        run.at_step(run.step() + 3)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(120) != 0
        reached = run.step()
        assert reached < STEPS
        assert f"Told to leave (SIGTERM) after step {reached}" in run.notices()[-1]
        assert run.checkpoints()[-1].name == f"step-{reached:09d}"
        run.finished(run.start())
        assert [e["step"] for e in run.events("step")] == list(range(1, STEPS + 1))
        assert run.model().digest == whole
        assert run.losses() == calm.losses(), "of all of a round's steps"


def test_a_world_of_two_then_three_then_one_ends_with_the_same_model(tmp_path):
    alone = Waves(tmp_path / "alone", pace=0.0, dropout=False)
    with contextlib.chdir(alone.folder):
        datacenter.run(Config.load("fedtrain.toml"), emit=silent)
    with Run(tmp_path / "p", slow=0.1, dropout=False, nodes="1:3") as run:
        first, second = run.start(), run.start()
        run.cluster.wait_for(lambda: any(text.startswith("ranks 2") for text in run.notices()))
        run.at_step(3)
        run.set_pace(2.5)  # a machine may take long to come
        third = run.start()
        run.cluster.wait_for(lambda: any(text.startswith("ranks 3") for text in run.notices()))
        run.set_pace(0.2)
        reached = run.step()
        run.at_step(reached + 3)
        run.cluster.lose(second)
        run.cluster.lose(third)
        run.set_pace(0)
        run.finished(first)
        assert [text for text in run.notices() if text.startswith("ranks ")][-1].startswith("ranks 1")
        expected = alone.model().views()
        for name, tensor in run.model().views().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)
        assert run.losses() == pytest.approx(alone.losses(), rel=1e-9)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_a_notice_and_training_goes_on_with_the_checkpoint_before(tmp_path, whole, small_disk):
    with Run(tmp_path / "p", checkpoints=small_disk, ranks=2) as run:
        agent = run.start()
        run.at_step(5)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as f:
            while f.write(b"x" * 512):
                pass
        run.cluster.wait_for(lambda: [text for text in run.notices() if "was not written" in text])
        line = next(text for text in run.notices() if "was not written" in text)
        assert "No space left on device" in line
        assert "Training goes on; the last good one is of step" in line
        filler.unlink()
        run.finished(agent)
        assert run.model().digest == whole


def test_a_disk_that_stays_full_is_an_error_at_the_end(tmp_path, small_disk):
    (small_disk / "filler").write_bytes(b"x" * (250 << 10))
    with Run(tmp_path / "p", slow=0.0, checkpoints=small_disk, ranks=2, restarts=0) as run:
        assert run.start().wait(200) != 0
        assert f"The checkpoint of step {STEPS} was not written" in run.cluster.log()
        assert run.model().schema.numel > 0, "and the rounds are in the run's store all the same"


def test_a_bucket_away_for_ten_seconds_and_a_kill_change_no_bit(tmp_path, whole, monkeypatch):
    with bucket(monkeypatch) as (url, wire), Run(tmp_path / "p", checkpoints=f"{url}/r", ranks=2) as run:
        agent = run.start()
        run.at_step(5)
        wire.cut()
        threading.Timer(10, wire.mend).start()
        run.at_step(9)  # the save of step 8 waited for the bucket
        run.kill(1)
        run.finished(agent)
        assert not [text for text in run.notices() if "was not written" in text]
        assert run.model().digest == whole


STUCK = """
import ctypes, os

class Waves(Waves):
    def loss(self, model, batch):
        for what in ("stick", "raise"):
            file = Path(f"{what}-{os.environ['RANK']}")
            if file.exists():
                file.rename(f"{file}.done")
                if what == "raise":
                    raise KeyError("no such column: age")
                mutex = ctypes.create_string_buffer(64)
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
                ctypes.CDLL(None).pthread_mutex_lock(mutex)  # never returns, also when there is a signal
        return super().loss(model, batch)
"""


def test_a_rank_in_a_call_that_does_not_return_ends_with_the_others_and_the_first_error_is_told_last(
    tmp_path, whole
):
    with Run(tmp_path / "p", ranks=2, restarts=1) as run:
        with (run.folder / "task.py").open("a") as f:
            f.write(STUCK)
        agent = run.start()
        run.at_step(4)
        (run.folder / "stick-0").touch()
        run.cluster.wait_for((run.folder / "stick-0.done").exists)
        run.kill(1)
        run.cluster.wait_for(lambda: len(run.events("run_started")) == 2)
        log = run.cluster.log()
        assert "fedtrain: rank 0 was told to leave (SIGTERM), but its step of" in log
        assert "forcefully exiting" not in log, "torchrun did not have to wait for its 30 seconds"

        (run.folder / "raise-1").touch()
        assert agent.wait(120) != 0
        log = run.cluster.log()
        told = log.index("KeyError: 'no such column: age'")
        line = "rank 1: loss(), step "
        assert f"fedtrain: {line}" in log[told:]
        last = log.rstrip().splitlines()
        assert line in last[-2], "only torchrun's rule is below it"
        story = log[log.rindex("Traceback", 0, told) : told]
        assert story.count("File") == 1, "from where the task's code begins"

        run.finished(run.start())
        assert run.model().digest == whole
