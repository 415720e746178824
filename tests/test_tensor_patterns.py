"""strategy.local and strategy.fixed name tensors of the model; a pattern that would do nothing is refused."""

import pytest
import torch
from torch import nn

from fedtrain.errors import ConfigError
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.strategies import build
from fedtrain.training.local import Engine
from tests.toy import Toy, config


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.body(x.float()))).squeeze(1)


@pytest.fixture
def normed(monkeypatch):
    monkeypatch.setattr(Toy, "model", lambda task: Normed())


def bench(folder, kind="fedavg", **options):
    return Workbench(config(folder, kind, options), simulated=True)


@pytest.mark.parametrize("kind", ["fedavg", "fedadam", "fedbn", "fedper", "fedrep", "ditto", "scaffold"])
@pytest.mark.parametrize("key", ["local", "fixed"])
def test_a_pattern_that_matches_nothing_is_refused_with_a_near_name(tmp_path, normed, kind, key):
    needs = {"local": ["head.weight"]} if kind in ("fedper", "fedrep") else {}
    with pytest.raises(ConfigError, match=rf"strategy.{key}: no tensor .* 'heads.\*'. Did you mean head\?"):
        bench(tmp_path, kind, **needs | {key: ["heads.*"]})


def test_a_pattern_without_its_wildcards_is_told_the_whole_name(tmp_path, normed):
    with pytest.raises(ConfigError, match=r"'running'. Did you mean norm.running_mean\? A pattern is"):
        bench(tmp_path, local=["norm.*", "running"])


def test_a_pattern_near_nothing_is_told_what_there_is(tmp_path, normed):
    with pytest.raises(ConfigError, match=r"Found here: bias, body, body.bias, body.weight"):
        bench(tmp_path, fixed=["zzz"])


@pytest.mark.parametrize(
    "options", [{"local": ["*"]}, {"fixed": ["body*", "norm*"], "local": ["head.weight"]}]
)
def test_what_leaves_nothing_to_exchange_is_refused(tmp_path, normed, options):
    with pytest.raises(ConfigError, match=r"nothing is left that sites would train together"):
        bench(tmp_path, **options)


def test_fedbn_of_a_model_without_normalisation_layers_is_refused_as_it_would_be_fedavg(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Toy, "model", lambda task: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
    for options in ({}, {"local": ["1.*"]}):
        with pytest.raises(
            ConfigError, match=r"FedBN keeps normalisation layers .*its modules are Linear\. Use"
        ):
            bench(tmp_path, "fedbn", **options)
    bench(tmp_path, "fedavg", local=["1.*"])


def test_fedrep_whose_head_has_nothing_to_train_is_refused(tmp_path, normed):
    with pytest.raises(
        ConfigError, match=r"strategy\.local: FedRep trains them first, .* none of them is a parameter"
    ):
        bench(tmp_path, "fedrep", local=["norm.running_*"])
    bench(tmp_path, "fedper", local=["norm.running_*"])


def test_a_pattern_of_fixed_for_buffers_alone_is_refused(tmp_path, normed):
    with pytest.raises(ConfigError, match=r"strategy.fixed: 'norm.running_\*' matches only buffers, which"):
        bench(tmp_path, fixed=["norm.running_*"])


def test_buffers_among_what_is_fixed_are_averaged_as_ever(tmp_path, normed):
    fixed = bench(tmp_path, fixed=["norm.*"])._engine
    assert {s.name: s.trained for s in fixed.schema.tensors if s.name.startswith("norm")} == {
        "norm.running_mean": False, "norm.running_var": False, "norm.num_batches_tracked": False,
    }  # fmt: skip
    assert {s.name for s in fixed.frozen.schema.tensors} == {"norm.weight", "norm.bias", "head.bias"}


def test_a_pattern_of_local_for_frozen_parameters_alone_is_refused(tmp_path, normed):
    with pytest.raises(ConfigError, match=r"strategy.local: 'head.bias' matches only frozen parameters"):
        bench(tmp_path, local=["head.bias"])


def test_a_frozen_parameter_among_local_tensors_stays_with_the_frozen_ones(tmp_path, normed):
    engine = bench(tmp_path, local=["head.*"])._engine
    assert {s.name for s in engine.own.schema.tensors} == {"head.weight"}
    assert {s.name for s in engine.frozen.schema.tensors} == {"head.bias"}


def test_frozen_normalisation_does_not_stay_at_a_site_under_fedbn(tmp_path, normed, monkeypatch):
    def model(task):
        model = Normed()
        model.norm.weight.requires_grad_(False)
        return model

    monkeypatch.setattr(Toy, "model", model)
    engine = Engine(Toy(), config(tmp_path, "fedbn").train, 1, shares=build("fedbn", {}).shares)
    assert "norm.weight" in {s.name for s in engine.frozen.schema.tensors}
    assert "norm.weight" not in {s.name for s in engine.own.schema.tensors}
    assert torch.equal(engine.model.norm.weight, torch.ones(3))
