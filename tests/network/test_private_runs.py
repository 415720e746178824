"""[privacy] where nobody waits for rounds and where nobody aggregates, with the users' own commands."""

import pytest
import torch

from fedtrain.privacy import Gaussian, Release, epsilon
from fedtrain.store import RunStore
from tests.ports import free_port
from tests.processes import Project

pytestmark = pytest.mark.slow(20)  # two or three processes with a trainer each
MULTIPLIER, CLIP, DELTA = 50.0, 0.2, 1e-5  # noise of 10 a coordinate, on models of numbers below 1
PRIVACY = ("--set", f"privacy.noise_multiplier={MULTIPLIER}", "--set", f"privacy.clip={CLIP}")
TWO = ("--set", "strategy.min_sites=2", "--set", "evaluate.every=0")


@pytest.fixture
def project(tmp_path):
    with Project(tmp_path, rounds=3) as p:
        task = p.root / "task.py"  # whose model has no statistics that noise would spoil
        task.write_text(task.read_text().replace("BatchNorm1d", "LayerNorm"))
        yield p


def spent(project, run):
    """The rounds in which a site gave an update away; what it says of their price is what they cost."""
    told = [e for e in project.events(run) if e["kind"] == "privacy_spent"]
    sigma = Gaussian(CLIP, MULTIPLIER).sigma
    assert [e["releases"] for e in told] == [*range(1, len(told) + 1)]
    for e in told:
        cost = epsilon([Release("gaussian", sigma, steps=e["releases"])], DELTA)
        assert e["epsilon"] == pytest.approx(cost, rel=1e-12)  # a sum by releases, or one product
    return [e["round"] for e in told]


def spread(project, run):
    """The standard deviation of a run's last weights: of the model, or of one peer's."""
    store = RunStore(project.root / "runs" / run, read_only=True)
    try:
        return float(torch.cat([v.flatten() for v in store.latest().weights.views().values()]).std())
    finally:
        store.close()


def losses(project, run):
    """What events say of losses: under noise none of the data's leaves a site."""
    found = [
        e.get("loss") for e in project.events(run) if e["kind"] in ("update_received", "round_committed")
    ]
    assert found
    return [loss for loss in found if loss is not None]


def test_without_rounds_each_update_is_noised_and_paid_for(project):
    sets = ("--set", "asynchronous.enabled=true", "--set", "asynchronous.buffer=2")
    aggregator = project.start("aggregator", *sets, *TWO)
    sites = {name: project.start("site", name, *sets, *PRIVACY) for name in "ab"}
    assert aggregator.wait(120) == 0, project.log("aggregator")
    received = [e["site"] for e in project.events() if e["kind"] == "update_received"]
    assert project.count("round_committed") == 3
    assert len(received) >= 6
    for name, site in sites.items():
        assert site.wait(60) == 0, project.log(f"site-{name}")
        turns = spent(project, f"r@{name}")
        assert turns == list(range(1, len(turns) + 1))
        assert len(turns) >= received.count(name)
    assert losses(project, "r") == []
    assert spread(project, "r") > 1


def test_peers_tell_their_neighbours_noised_models_and_no_loss(project):
    peers = {
        name: project.start("peer", name, "--set", f"network.listen=127.0.0.1:{free_port()}", *PRIVACY, *TWO)
        for name in "ab"
    }
    for name, peer in peers.items():
        assert peer.wait(120) == 0, project.log(f"peer-{name}")
    for name in peers:
        run = f"r+gossip@{name}"
        assert spent(project, run) == [1, 2, 3]
        assert losses(project, run) == []
        assert not any("mean_loss" in e.get("metrics", {}) for e in project.events(run))
        assert spread(project, run) > 1
