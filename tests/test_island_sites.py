"""One island of one rank, in this process: what it tells, refuses and begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedtrain import strategies
from fedtrain.config import Config
from fedtrain.errors import ConfigError, RoundError
from fedtrain.learning import Contribution
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.datacenters.datacenter import Datacenter
from fedtrain.runtime.personal import personal
from fedtrain.strategies.fedavg import FedAvg
from fedtrain.training.mesh import Mesh, Sizes
from tests import toy
from tests.inprocess import Events, final


def config(folder, kind, rounds=1, train=(), **options) -> Config:
    parallel = {"sync": "local", "carry": False}
    run, train = {"rounds": rounds, "name": kind}, {"lr": 0.1, **dict(train)}
    return toy.config(folder, kind, options, run=run, train=train, parallel=parallel)


def alone(folder, kind, task=toy.Toy, emit=lambda event: None, **options) -> Datacenter:
    mesh = Mesh(Sizes(), torch.device("cpu"), islands=True)
    return Datacenter(config(folder, kind, **options), task(), mesh, None, emit)


def test_what_was_clipped_is_told_by_island(tmp_path):
    events = Events()
    alone(tmp_path, "mimelite", emit=events, clip=1e-6).run(None)
    said = [event["text"] for event in events.of("notice")]
    assert "round 1: 18 values of site0 were clipped to the strategy's bounds (gradient: 1e-06)" in said


def test_values_that_are_no_numbers_end_the_run_by_name(tmp_path):
    class Wrong(toy.Toy):
        def loss(self, model, batch):
            model.body.weight.data.fill_(float("inf"))
            return super().loss(model, batch)

    with pytest.raises(RoundError, match=r"island site0: body.weight has 12 NaN or Inf .*Lower train\.lr"):
        alone(tmp_path, "fedper", Wrong, local=["head.*"]).run(None)


def test_patterns_that_match_nothing_and_an_optimizer_that_is_not_trains_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"strategy.local: no tensor of the model is named like 'tail"):
        alone(tmp_path, "fedavg", local=["tail.*"])

    class Own(toy.Toy):
        def optimizer(self, parameters):
            return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(ConfigError, match=r"fednova's formula holds for the optimizer of \[train\]"):
        alone(tmp_path, "fednova", Own)


@dataclass(frozen=True)
class Growing(FedAvg):
    """A site remembers more than it said at first."""

    def site_init(self, start: Any) -> Any:
        return {"a": start.new_zeros(1)}

    def finish(self, found: Any, local: Any) -> Contribution:
        return Contribution(found.delta, memory={**local.memory, "b": found.delta})


def test_a_memory_that_changes_its_form_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(strategies.STRATEGIES, "growing", Growing)
    with pytest.raises(ConfigError, match=r"memory at an island changed its names, .* site_init give all"):
        alone(tmp_path, "growing").run(None)


def test_islands_begin_with_another_runs_model_and_their_memories_with_them(tmp_path):
    datacenter.run(config(tmp_path, "scaffold", rounds=2), emit=Events())
    first = final(tmp_path / "runs" / "scaffold+datacenter").load()
    still = config(tmp_path, "ditto", train={"lr": 1e-15})
    datacenter.run(still, emit=Events(), start=tmp_path / "runs" / "scaffold+datacenter")
    after = final(tmp_path / "runs" / "ditto+datacenter").load()
    tensors, _ = personal(still, still.datacenter_dir, "site0")
    for name, view in first.views().items():
        torch.testing.assert_close(after.views()[name], view, rtol=0, atol=1e-12)
        torch.testing.assert_close(tensors[name], view, rtol=0, atol=1e-12)
