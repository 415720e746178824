"""A fault at one site, of whatever kind, ends in a committed round: the aggregator goes on for all others,
and the model is that of a run without it. Sites' trainers are of one process here."""

import pytest

from tests.faults import faults
from tests.forked import fork_trainers
from tests.limits import bounded

pytestmark = [pytest.mark.slow(8), pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Processes need not load torch, and a stopped one is looked at often."""
    fork_trainers(monkeypatch)
    monkeypatch.setattr("fedtrain.runtime.trainers.trainer.POLL_S", 0.1)


def test_two_faults_at_once_in_each_of_three_rounds_cost_no_round(tmp_path):
    """An attempt may fail at two sites, and a second attempt at the same site: there is a third."""
    both = [
        (faults.Fault("a", "train", "exception"), faults.Fault("b", "train", "cuda", 2)),
        (faults.Fault("b", "evaluate", "memory"), faults.Fault("c", "train", "kill", 1)),
        (faults.Fault("c", "evaluate", "kill"), faults.Fault("a", "evaluate", "exception")),
    ]
    outcome = bounded(faults.run(tmp_path, both))
    faults.check(outcome, both)


@pytest.mark.parametrize("secagg", [False, True], ids=["open", "masks"])
def test_each_fault_in_training_or_evaluation_ends_in_a_committed_round(tmp_path, secagg):
    """Each kind of fault, in a training and in an evaluation, is the next round's, at a seeded site."""

    async def main():
        outcome = await faults.run(tmp_path, happen, secagg=secagg)
        return outcome, await faults.undisturbed(outcome)

    happen = faults.drawn(10 + secagg)
    outcome, whole = bounded(main())
    faults.check(outcome, happen)
    assert outcome.weights == whole.weights
    found, expected = ([e["metrics"] for e in run.of("evaluated")] for run in (outcome, whole))
    if secagg:  # a simulation knows what is worked out over sites, masks or not
        expected = [{name: e[name] for name in f} for e, f in zip(expected, found, strict=True)]
        assert all({"loss", "accuracy"} <= e.keys() for e in expected)
    assert found == expected, "every site is in every evaluation"
