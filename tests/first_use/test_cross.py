"""Every strategy over every form of data, and then all that a user does with the trained run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedtrain
from fedtrain import strategies
from fedtrain.errors import ConfigError, StoreError
from fedtrain.results import Run
from fedtrain.runtime import personal
from fedtrain.strategies import STRATEGIES, Strategy
from fedtrain.tracking.export import export
from fedtrain.training.building import build_model
from tests.first_use.crossed import EXAMPLES, FORMS, Crossed, FedSAM, Net, Twice

HERE = {"simulate.workers": 0, "run.rounds": 2, "train.lr": 0.05, "train.batch_size": 4}
NEEDS: dict[str, dict[str, Any]] = {  # what a strategy asks for beside its kind
    "fedper": {"strategy.local": ["head.*"]},
    "fedrep": {"strategy.local": ["head.*"]},
    "cyclic": {"strategy.min_sites": 1, "secagg.enabled": False},
    "inexact_fedprox": {"train.local_epochs": 2},
    "fedsgd": {"train.batch_size": 0},
    "dp_fedavg": {"run.task": "group"},
}
MORE: dict[str, tuple[str | type[Strategy], dict[str, Any]]] = {
    "fedavg, two local layers": ("fedavg", {"strategy.local": ["norm.*", "head.*"]}),
    "fedavg, a fixed layer": ("fedavg", {"strategy.fixed": ["head.*"]}),
    "own steps": (FedSAM, {}),
    "a vector of up": (Twice, {}),
}
ALL = {kind: (kind, NEEDS.get(kind, {})) for kind in STRATEGIES} | MORE
CROSS = [
    pytest.param(name, form, id=f"{name}-{form}", marks=[] if i % len(FORMS) == j else pytest.mark.slow)
    for i, name in enumerate(ALL)
    for j, form in enumerate(FORMS)
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "form"), CROSS)
def test_a_trained_run_can_be_used_in_every_way(tmp_path, name, form):
    kind, needs = ALL[name]
    settings = HERE | {"run.name": "first", "strategy.kind": kind} | needs
    task = Crossed(form, settings.pop("run.task", "batch"))
    run = fedtrain.simulate(task, settings)
    of = run.config.strategy
    own = strategies.has_personal(strategies.build(of.kind, of.options, run.config.root))
    first = build_model(task, run.config.run.seed, torch.device("cpu")).state_dict()
    whole_model(run, task, first)
    exported = export(run.path, tmp_path / "exported")
    again = fedtrain.load_model(exported, task).state_dict()
    assert all(torch.equal(again[n], t) for n, t in run.model().state_dict().items())
    found = fedtrain.evaluate(run)
    assert found.by_site.keys() == EXAMPLES.keys()
    assert found.own_models is own
    assert all(0 <= each["accuracy"] <= 1 for each in found.by_site.values())
    assert fedtrain.evaluate(exported, task).by_site.keys() == EXAMPLES.keys()
    own_model(run, tmp_path, own)
    after = fedtrain.simulate(task, settings | {"run.name": "second", "run.rounds": 1}, start=run)
    assert {"loss", "accuracy"} <= after.metrics.keys()
    assert fedtrain.stats(task, {"run.name": "first"}).examples == sum(EXAMPLES.values())


def whole_model(run: Run, task: Crossed, first: dict[str, torch.Tensor]) -> None:
    """The model is the exported one, with the task's own values for what stays at the sites."""
    model, exported = run.model(), load_file(run.path / "model" / "model.safetensors")
    assert isinstance(model, Net)
    assert model.again.weight is model.mix.weight
    for name, tensor in model.state_dict().items():
        same = {"again.weight": "mix.weight"}.get(name, name)
        assert torch.equal(tensor, exported.get(same, first[name])), name
    for name in ("lift.weight", "lift.bias"):
        assert torch.equal(exported[name], first[name])
    if run.config.strategy.kind != "ifca":  # its first model, which no site may have chosen
        assert not torch.equal(exported["mix.weight"], first["mix.weight"])


def own_model(run: Run, out: Any, own: bool) -> None:
    """A site's own model, where the strategy gives each site one; else an error that says so."""
    site = "a"
    if not own:
        with pytest.raises(ConfigError, match="all sites have the global model"):
            run.model(site=site)
        return
    model = run.model(site=site).state_dict()
    folder = personal.export(run.config, run.path, site, out / "own")
    exported = load_file(folder / "model.safetensors")
    assert all(torch.equal(model[name], tensor) for name, tensor in exported.items())
    assert fedtrain.evaluate(run, site=site).own_models


def test_a_start_that_lacks_what_stays_at_sites_says_so_and_what_to_do(tmp_path):
    run = fedtrain.simulate(Crossed(), HERE | {"run.name": "first", "strategy.kind": "fedbn"})
    settings = HERE | {"run.name": "second"}
    for source in (run, export(run.path, tmp_path / "exported")):
        with pytest.raises(
            StoreError, match=r"does not have norm\.weight.*they stay at the sites.* --site NAME"
        ):
            fedtrain.simulate(Crossed(), settings, start=source)
    own = personal.export(run.config, run.path, "a", tmp_path / "own")
    assert fedtrain.simulate(Crossed(), settings, start=own).metrics
