"""The promise of the project: a simulation of a federation and the real federation give the same model."""

import pytest

from tests.processes import Project

pytestmark = pytest.mark.slow(15)


@pytest.mark.parametrize(
    ("strategy", "secagg"),
    [
        ('kind = "fedavg"', False),
        ('kind = "fedprox"\nmu = 0.1', False),
        ('kind = "fedadam"\nserver_lr = 0.05', False),
        ('kind = "fedavg"', True),
        ('kind = "fedadam"\nserver_lr = 0.05', True),
    ],
    ids=["fedavg", "fedprox", "fedadam", "fedavg under masks", "fedadam under masks"],
)
def test_simulation_equals_aggregator_and_sites_over_mtls_bit_for_bit(tmp_path, strategy, secagg):
    with Project(tmp_path, rounds=4, strategy=strategy, secagg=secagg) as project:
        simulated = project.simulate()
        aggregator = project.start_all()
        assert aggregator.wait(120) == 0, project.log("aggregator")
        assert [p.wait(30) for p in project.processes] == [0] * 5
        assert project.final() == simulated
        assert project.count("round_committed") == 4
