"""Finding B: an aggregator that chooses the first model of a run gets single patients out of one sum.

"Robbing the Fed" (Fowl et al. 2022): all neurons of the first layer look along one direction, each from a
threshold of its own, so that the sums of two neighbours differ by the patients between their thresholds.
"""

import numpy as np
import pytest
import torch

from fedtrain.config import Config
from fedtrain.runtime.star.secure_terms import hash_of
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import RunStore
from tests.allowed import allowed
from tests.inprocess import Events, begin, certify, federation, with_port

SITES = ["a", "b", "c", "d", "e"]
PATIENTS = {"a": 64, "b": 78, "c": 92, "d": 106, "e": 120}  # 460
FEATURES, BINS, SCALE = 20, 1024, 0.3  # of both layers, so that float32 holds one patient's part

TABLE_TASK = f"""
import fedtrain
import torch

class Patients(fedtrain.Task):
    def sites(self):
        return list({PATIENTS})
    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear({FEATURES}, {BINS}), torch.nn.ReLU(), torch.nn.Linear({BINS}, 2)
        )
    def data(self, site):
        draw = torch.Generator().manual_seed(ord(site))
        x = torch.randn({PATIENTS}[site], {FEATURES}, generator=draw)
        return x, (x[:, 0] > 0).long()
    def eval_data(self, site):
        return self.data(site)
    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    def evaluate(self, model, batch):
        return {{"loss": (self.loss(model, batch) * len(batch[0]), len(batch[0]))}}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patients_task.py").write_text(TABLE_TASK)
    table = {
        "run": {"name": "r", "rounds": 1, "task": "patients_task:Patients"},
        "strategy": {"min_sites": 5, "attempts": 1},
        "evaluate": {"every": 0},
        "simulate": {"workers": 0},
    }
    config = Config.of(with_port(table), tmp_path)
    certify(config, SITES)
    return config


def crafted(config):
    """A first model whose one update tells of single patients."""
    model = Workbench(config, simulated=False).initial()
    weight, bias, out, _ = model.views().values()
    places = (torch.arange(BINS) + 0.5) / BINS
    weight[:] = SCALE * FEATURES**-0.5
    bias[:] = -SCALE * torch.distributions.Normal(0.0, 1.0).icdf(places)
    signs = SCALE * (1.0 - 2.0 * (torch.arange(BINS) % 2))
    out[0], out[1] = signs, -signs
    model.changed()
    return model


def rebuilt(before, after):
    """Patients, from two models [at most BINS - 1, FEATURES]."""
    weight, bias, _, _ = ((after.views()[name] - old).numpy() for name, old in before.views().items())
    signs = np.sign(before.views()["2.weight"][0].numpy())
    rows, heights = weight * signs[:, None], bias * signs
    rows, heights = rows[:-1] - rows[1:], heights[:-1] - heights[1:]
    seen = np.abs(heights) > 3e-7
    return rows[seen] / heights[seen, None]


def recovered(found, within):
    """How many patients of all sites are among what was found, to so much of their norm."""
    task = {}
    exec(TABLE_TASK, task)
    patients = torch.cat([task["Patients"](None).data(site)[0] for site in SITES]).numpy()
    return sum(
        np.linalg.norm(found - patient, axis=1).min() < within * np.linalg.norm(patient)
        for patient in patients
    )


def last_model(config):
    store = RunStore(config.run_dir, read_only=True)
    try:
        return store.latest().weights.load()
    finally:
        store.close()


def set_rules(config, **rules):
    for site in SITES:
        allowed(config, site, **rules)


def test_b_one_sum_over_a_chosen_model_gives_patients_to_the_aggregator(config):
    """Without the policy: what the rule `policy.initial` is there for."""
    model = crafted(config)
    set_rules(config, initial="any")
    begin(config, chosen=model)
    federation(config, SITES)
    found = rebuilt(model, last_model(config))
    assert recovered(found, 0.05) >= 46  # of 460; with verify; this test's seeds give 67


def test_b_each_site_rejects_a_chosen_first_model_and_says_how_to_accept_one(config):
    model = crafted(config)
    set_rules(config)
    begin(config, chosen=model)
    logs, expected = {site: Events() for site in SITES}, of(Workbench(config, simulated=False).initial())
    with pytest.raises(ExceptionGroup) as error:
        federation(config, SITES, logs=logs)
    told = str(error.value.exceptions)
    assert f"fedtrain policy set initial={of(model)} (its own policy.initial)" in told
    for site in SITES:
        (denied,) = logs[site].of("denied")
        assert denied["rule"] == "policy.initial"
        assert of(model) in denied["reason"]
        assert expected in denied["reason"]
        assert not [event for event in logs[site].of("site_state") if event["state"] == "training"]


def test_b_a_site_takes_the_first_model_that_its_policy_names(config):
    model = crafted(config)
    set_rules(config, initial=of(model))
    begin(config, chosen=model)
    assert len(federation(config, SITES).of("round_committed")) == 1


def of(model):
    return hash_of(model).hex()
