"""Each site evaluates the personal model that it has after the last round that it counted in."""

from __future__ import annotations

import numpy as np
import pytest

from fedtrain.errors import ConfigError
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import RunStore
from fedtrain.store.memories import Memories
from tests import toy
from tests.inprocess import final, simulated
from tests.references import BODY, HEAD, NORM, loss_and_gradient

METHODS = {
    "fedbn": ({}, NORM),
    "fedper": ({"local": ["head.*"]}, HEAD),
    "fedrep": ({"local": ["head.*"], "head_epochs": 2}, HEAD),
    "fedavg": ({"local": ["body.*"]}, BODY),
    "ditto": ({}, None),
    "ifca": ({"spread": 0.5}, None),
    "per_fedavg": ({"alpha": 0.3, "personal_steps": 2}, None),
}


class Pooled(toy.Toy):
    """The examples of all sites in one pool; every third is for evaluation."""

    def sites(self):
        return None

    def whole(self):
        found = [toy.data_of(site) for site in toy.SITES]
        return tuple(np.concatenate(each) for each in zip(*found, strict=True))

    def data(self, site):
        return tuple(toy.torch.from_numpy(each[np.arange(len(each)) % 3 > 0]) for each in self.whole())

    def eval_data(self, site):
        return tuple(toy.torch.from_numpy(each[::3].copy()) for each in self.whole())


def personal(cfg, kind, site, counted, trained_on):
    """The 18 coordinates of a site's model, from what is kept of it, or from its training data."""
    weights, own = final(cfg.simulate_dir).load(), METHODS[kind][1]
    shared = np.concatenate([view.numpy().ravel() for view in weights.views().values()])
    if kind == "per_fedavg":
        for _ in range(2):
            shared = shared - 0.3 * loss_and_gradient(shared, *trained_on)[1]
        return shared
    memory = {}
    if site in counted:
        kept = Memories(cfg.simulate_dir / "memory", read_only=True).of(site).load(counted[site])
        memory = {name: view.numpy() for name, view in kept.views().items()}
    if kind == "ditto":
        return memory.get("v", shared)
    if kind == "ifca":
        models = [shared, *(view.numpy() for view in weights.extras().values())]
        return models[int(memory["chosen"][0]) if memory else 0]
    found = toy.initial()
    found[~own] = shared
    if memory:
        found[own] = np.concatenate(
            [view.ravel() for name, view in memory.items() if name.startswith("local/")]
        )
    return found


def evaluated(folder, kind, pooled, **sections):
    cfg = toy.config(
        folder, kind, {**METHODS[kind][0], "fraction": 0.4}, **{"evaluate": {"every": 1}, **sections}
    )
    if pooled:
        (folder / "toy_task.py").write_text("from tests.test_personal import Pooled as Toy\n")
    events = simulated(cfg, pytest.MonkeyPatch())
    store = RunStore(cfg.simulate_dir, read_only=True)
    counted = store.counted()
    store.close()
    return cfg, events.of("evaluated")[-1], counted


@pytest.mark.parametrize("pooled", [False, True], ids=["natural", "pooled"])
@pytest.mark.parametrize("kind", METHODS)
def test_each_site_evaluates_its_personal_model(tmp_path, kind, pooled):
    """Two rounds of two sites: some have a model of their own, and others have none yet."""
    cfg, found, counted = evaluated(
        tmp_path,
        kind,
        pooled,
        run={"rounds": 2},
        simulate={"sites": 5, "partition": "quantity:2"} if pooled else {},
    )
    bench = Workbench(cfg, simulated=True)
    sites = bench.description.sites
    assert 0 < len(counted) < len(sites) == len(found["by_site"])
    losses, sizes = [], []
    for site in sites:
        x, y = bench._load("eval_data", site)
        trained_on = [column.numpy() for column in bench._load("data", site)]
        weights = personal(cfg, kind, site, counted, trained_on)
        losses.append(loss_and_gradient(weights, x.numpy(), y.numpy())[0])
        sizes.append(len(y))
        assert found["by_site"][site]["loss"] == pytest.approx(losses[-1], abs=1e-12)
    assert found["metrics"]["loss"] == pytest.approx(np.average(losses, weights=sizes), abs=1e-12)
    assert sum(sizes) == (len(Pooled().eval_data("")[1]) if pooled else sum(map(toy.examples_of, toy.SITES)))


def test_data_of_no_site_is_evaluated_with_the_tasks_own_tensors(tmp_path, monkeypatch):
    """The server's data, after a trainer had the tensors of several sites."""
    monkeypatch.setattr(
        toy.Toy, "eval_data", lambda task, site: task.data("site0" if site == "server" else site)
    )
    cfg, found, _ = evaluated(tmp_path, "fedbn", False, evaluate={"every": 1, "server": True})
    weights = personal(cfg, "fedbn", "server", {}, None)
    assert found["metrics"]["server/loss"] == pytest.approx(
        loss_and_gradient(weights, *toy.data_of("site0"))[0]
    )


def test_data_of_the_server_is_refused_beside_one_pool(tmp_path):
    with pytest.raises(ConfigError, match="the simulated sites share one pool of data"):
        evaluated(tmp_path, "fedbn", True, evaluate={"every": 1, "server": True})
