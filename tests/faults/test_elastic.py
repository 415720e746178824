"""The datacenter's parts under torchrun: ranks killed, machines that come and go, SIGTERM in between.

Every example of an epoch is taken once by the steps that count, and the model is that of a run that nothing
happened to.
"""

import random
import signal
from itertools import chain

import pytest
import torch

from fedtrain.training.elastic import LEFT
from fedtrain.training.sampler import Sampler
from tests import elastic_worker
from tests.torchrun import Cluster, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 30
WORKER = str(elastic_worker.__file__)


def cluster(folder, *, seconds=0.03, **kwargs):
    pace(folder, seconds)
    return Cluster(folder, WORKER, str(folder), str(STEPS), **kwargs)


def pace(folder, seconds):
    (folder / "pace.new").write_text(str(seconds))
    (folder / "pace.new").replace(folder / "pace")


def model(folder):
    return torch.load(folder / "model.pt", weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The model of an undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    with cluster(folder, ranks=2, seconds=0.0) as c:
        assert c.add().wait(200) == 0, c.log()
    return model(folder)


def assert_every_step_took_its_batch(lines):
    """Whatever the world was when a step was taken, and taken again: its batch was that of one process."""
    alone = Sampler(elastic_worker.EXAMPLES, elastic_worker.BATCH, seed=3)
    takings = {}  # (step, world, attempt) -> examples
    attempts = {}
    for line in lines:
        key = line["step"], line["ranks"], line["rank"]
        attempts[key] = attempts.get(key, 0) + 1
        takings.setdefault((line["step"], line["ranks"], attempts[key]), []).append(line["took"])
    for step in range(1, STEPS + 1):
        (share,) = alone.take()
        whole = [list(chain(*t)) for (s, ranks, _), t in takings.items() if s == step and len(t) == ranks]
        assert whole, f"step {step} was never taken by all ranks"
        assert all(batch == share.mine.tolist() for batch in whole)


def test_each_rank_killed_at_a_seeded_step_changes_no_bit(tmp_path, whole):
    with cluster(tmp_path, ranks=2) as c:
        agent = c.add()
        for victim, at in enumerate(sorted(random.Random(1).sample(range(3, STEPS - 3), 2))):
            c.wait_for(lambda at=at: c.step() >= at)
            kill(c.wait_for(lambda victim=victim: c.rank(victim)))
        assert agent.wait(300) == 0, c.log()
        assert_every_step_took_its_batch(c.lines())
    assert all(torch.equal(t, whole[name]) for name, t in model(tmp_path).items())


def test_a_world_of_two_then_three_then_one_takes_each_example_once(tmp_path, whole):
    with cluster(tmp_path, nodes="1:3", seconds=0.1) as c:
        first, second = c.add(), c.add()
        c.wait_for(lambda: any(line["ranks"] == 2 and line["step"] >= 3 for line in c.lines()))
        pace(tmp_path, 5)  # a machine may take long to come
        third = c.add()
        c.wait_for(lambda: any(line["ranks"] == 3 for line in c.lines()))
        pace(tmp_path, 0.2)
        reached = c.step()
        c.wait_for(lambda: c.step() >= reached + 3)
        c.lose(second)
        c.lose(third)
        assert first.wait(300) == 0, c.log()
        lines = c.lines()
    assert {line["ranks"] for line in lines} == {1, 2, 3}
    assert_every_step_took_its_batch(lines)
    for name, tensor in model(tmp_path).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-12, atol=1e-12)


def test_sigterm_checkpoints_the_present_step_and_leaves_with_its_own_code(tmp_path, whole):
    with cluster(tmp_path, ranks=2, restarts=0) as c:
        agent = c.add()
        c.wait_for(lambda: c.step() >= 5)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(200) != 0
        reached = c.step()
        (newest, *_) = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
        assert newest.name == f"step-{reached:09d}"
        assert reached < STEPS
        again = c.add()
        assert again.wait(200) == 0, c.log()
        taken = [line["step"] for line in c.lines() if line["rank"] == 0]
        assert sorted(taken) == list(range(1, STEPS + 1)), "no step was taken twice"
    assert all(torch.equal(t, whole[name]) for name, t in model(tmp_path).items())


def test_one_rank_told_to_leave_is_enough_and_torchrun_starts_them_again(tmp_path, whole):
    with cluster(tmp_path, ranks=2) as c:
        agent = c.add()
        c.wait_for(lambda: c.step() >= 5)
        kill(c.wait_for(lambda: c.rank(1)), signal.SIGTERM)
        assert agent.wait(300) == 0, c.log()
        assert f"exitcode: {LEFT}" in c.log()
        taken = [line["step"] for line in c.lines() if line["rank"] == 0]
        assert sorted(taken) == list(range(1, STEPS + 1)), "no step was taken twice"
    assert all(torch.equal(t, whole[name]) for name, t in model(tmp_path).items())
