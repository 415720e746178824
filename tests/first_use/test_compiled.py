"""Models that are compiled by torch.compile(), as a whole or in part, have the names of plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedtrain
from fedtrain.arena import Arena
from fedtrain.schema import Schema, named_state, unique_tensors
from fedtrain.tracking.export import export
from tests.first_use.crossed import Crossed, Net

HERE = {"simulate.workers": 0, "run.rounds": 2, "train.lr": 0.05, "train.batch_size": 4}


class Compiled(Crossed):
    """The same model, compiled as a whole ("all"), in two layers ("parts") or both, one in the other."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how

    def model(self) -> nn.Module:
        return compiled(Net(self.norm), self.how)


def compiled(net: Net, how: str) -> nn.Module:
    if how in ("parts", "both"):
        net.mix, net.head = fast(net.mix), fast(net.head)
    return fast(net) if how in ("all", "both") else net


def fast(module: Any) -> Any:
    return torch.compile(module, backend="eager")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["all", "parts", "both"])
def test_a_compiled_model_has_the_schema_of_a_plain_one(how):
    plain, fast = Net("batch"), compiled(Net("batch"), how)
    for frozen in (False, True):
        assert Schema.of(fast, frozen=frozen).digest == Schema.of(plain, frozen=frozen).digest
    assert [*unique_tensors(fast)] == [*unique_tensors(plain)]
    assert any("_orig_mod" in name for name in fast.state_dict())


def test_a_module_that_a_user_named_orig_mod_keeps_its_name():
    net = nn.Module()
    net._orig_mod = nn.Linear(2, 1)
    assert [name for name, _ in named_state(net)] == ["_orig_mod.weight", "_orig_mod.bias"]
    assert [name for name, _ in named_state(fast(net))] == ["_orig_mod.weight", "_orig_mod.bias"]


def test_an_arena_of_a_plain_model_is_bound_to_a_compiled_one():
    plain, net = Net("batch"), compiled(Net("batch"), "both")
    Arena.of(plain).bind(net)
    assert torch.equal(dict(named_state(net))["head.bias"], plain.head.bias)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "fedbn", "per_fedavg"])
def test_a_compiled_model_trains_to_the_model_of_a_plain_one(tmp_path, strategy):
    plain, *others = (
        fedtrain.simulate(Compiled(how), HERE | {"run.name": f"run{how}", "strategy.kind": strategy})
        for how in ("", "all", "both")
    )
    wanted = load_file(export(plain.path, tmp_path / "plain") / "model.safetensors")
    for run in others:
        found = load_file(export(run.path, tmp_path / run.path.name) / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)
        own = dict(named_state(run.model()))
        assert all(torch.equal(own[name], tensor) for name, tensor in found.items())
    after = (
        fedtrain.simulate(Compiled("all"), HERE | {"run.name": "after"}, start=tmp_path / "plain")
        if strategy != "fedbn"
        else plain
    )
    assert after.metrics
