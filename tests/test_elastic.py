"""Leaving together: what ranks answer each other, and how they leave."""

import functools
import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist

from fedtrain.runtime.meeting import shares_store
from fedtrain.training.elastic import LEFT, MAX_STEPS, Leave, Left, failed_first
from tests.worlds import world


def test_a_process_alone_leaves_when_it_was_told():
    with Leave() as leave:
        assert not leave.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert leave.asked()
        assert leave.told_at is not None


def test_afterwards_sigterm_means_what_it_did_before():
    before = signal.getsignal(signal.SIGTERM)
    with Leave():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_who_left_has_an_exit_code_of_its_own():
    with pytest.raises(SystemExit) as e:
        raise Left
    assert e.value.code == LEFT == 75


def test_torchruns_shared_store_is_noticed(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert not shares_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert shares_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert not shares_store()


def leave_when_one_is_told(rank, ranks, folder):
    """Steps that become slow and fast again, rank 1 told in the middle of them; where each rank left."""
    for told_at in (1, 2, 30, 75, 120):
        now = [0.0]
        leave = Leave(clock=functools.partial(now.__getitem__, 0))
        for step in range(1, 400):
            now[0] += 0.01 if step < 50 or step > 100 else 0.3
            if rank == 1 and step == told_at:
                leave.told_at = now[0]
            if leave.asked():
                break
        with (folder / f"left-{rank}").open("a") as f:
            f.write(f"{told_at} {step}\n")


@pytest.mark.slow
def test_all_ranks_leave_after_the_same_step_soon_after_one_was_told(tmp_path):
    world(2, leave_when_one_is_told, tmp_path)
    first, second = ((tmp_path / f"left-{rank}").read_text() for rank in (0, 1))
    assert first == second
    for line in first.splitlines():
        told, left = map(int, line.split())
        assert told < left <= told + 2 * MAX_STEPS + 2


def wait_for_the_other(rank, ranks, folder):
    """Rank 0 takes 2 steps and waits, rank 1 takes 9; where each was when it left, if it did."""
    for told_at in (0, 3):
        leave = Leave(clock=itertools.count().__next__)  # as if each step took long
        left = 0
        for step in range(1, (2, 9)[rank] + 1):
            if rank == 1 and step == told_at:
                leave.told_at = 0.0
            if leave.asked():
                left = step
                break
        else:
            left = -1 if leave.asked_while_waiting() else 0
        (folder / f"{told_at}-{rank}").write_text(str(left))


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_leaves_when_one_of_them_is_told(tmp_path):
    world(2, wait_for_the_other, tmp_path)
    left = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert (left["0-0"], left["0-1"]) == (0, 0), "nobody was told: they met"
    assert left["3-0"] == -1, "while it waited"
    assert 3 <= left["3-1"] < 9, "in the middle of its steps"


def fail_in_turn(rank, ranks, folder):
    """Rank 1 first; what each is told."""
    if rank == 0:
        dist.recv(torch.zeros(1), 1)
    first = failed_first()
    if rank == 1:
        dist.send(torch.zeros(1), 0)
    (folder / f"{rank}").write_text(str(first))


@pytest.mark.slow
def test_one_rank_is_the_first_to_fail(tmp_path):
    assert failed_first(), "alone"
    world(2, fail_in_turn, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["False", "True"]
