"""A fault in one of the two ranks that train at a site ends in a committed round of all sites."""

import pytest

from tests.faults import faults
from tests.forked import fork_trainers
from tests.limits import bounded

HOWS = ("kill", "stop", "memory", "exception")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Processes need not load torch. A stopped rank 0 is looked at often; rank 1 is looked at by rank 0,
    which is patient."""
    fork_trainers(monkeypatch)
    monkeypatch.setattr("fedtrain.runtime.trainers.trainer.POLL_S", 0.1)


@pytest.mark.slow(15)  # up to eight teams of two processes, one after the other
@pytest.mark.timeout(400)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_fault_of_a_rank_in_training_or_evaluation_ends_in_a_committed_round(tmp_path, zero):
    happen = faults.drawn(20 + zero, HOWS, ranks=2, site="c")
    ranks = {"parallel": {"ranks": 2, "zero": zero, "timeout": "30s"}}
    outcome = bounded(faults.run(tmp_path, happen, secagg=zero == 3, at={"c": ranks}))
    faults.check(outcome, happen)


@pytest.mark.slow(20)
@pytest.mark.timeout(400)
def test_under_masks_ranks_killed_and_stopped_in_the_middle_of_a_round_change_no_bit(tmp_path):
    """Over mutual TLS, beside two sites of one process: the model is that of the same run without a fault."""
    ranks = {"parallel": {"ranks": 2, "zero": 3, "timeout": "30s"}}
    happen = [faults.Fault("c", "train", "kill", 2, rank=1), faults.Fault("c", "train", "stop", 1, rank=0)]
    never = [faults.Fault("c", "train", "kill", 1000)] * len(happen)
    whole = bounded(faults.run(tmp_path / "whole", never, secagg=True, at={"c": ranks}))
    outcome = bounded(faults.run(tmp_path / "faulty", happen, secagg=True, at={"c": ranks}))
    faults.check(outcome, happen)
    assert outcome.weights == whole.weights
