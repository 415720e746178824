"""What a task's loss may ask of its model in a pipeline, where no rank has all of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedtrain.config import ParallelConfig
from fedtrain.errors import TaskError
from fedtrain.training.mesh import Sizes
from fedtrain.training.parallel.outside import Replay, inputs_of
from fedtrain.training.parallel.pipeline import stages_of
from fedtrain.training.parallel.plan import Plan

BATCH = torch.ones(3, 4), torch.tensor([0, 1, 0])


def built() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


ASKS = {
    "parameters()": lambda m, b: sum(p.pow(2).sum() for p in m.parameters()),
    "named_parameters()": lambda m, b: sum(p.sum() for _, p in m.named_parameters()),
    "buffers()": lambda m, b: sum(t.sum() for t in m.buffers()),
    "state_dict()": lambda m, b: m.state_dict()["0.weight"].sum(),
    "children()": lambda m, b: len([*m.children()]),
    "[0]": lambda m, b: m[0].weight.sum(),
    "extra": lambda m, b: m.extra.sum(),
}


@pytest.mark.parametrize("asked", ASKS)
@pytest.mark.parametrize("first", [True, False])
def test_a_loss_that_asks_for_a_part_of_its_model_is_told_what_to_do(asked, first):
    model = built()
    model.extra = nn.Parameter(torch.ones(1))
    has = frozenset(dir(model))

    def loss(model, batch):
        if first:
            return ASKS[asked](model, batch) + of(model, batch)
        return of(model, batch) + ASKS[asked](model, batch)

    def both_stages():
        inputs_of(loss, BATCH, has)
        loss(Replay(torch.ones(3, 2), has), BATCH)

    with pytest.raises(TaskError) as told:
        both_stages()
    assert f"ask their model for {asked}, " in str(told.value)
    assert "use parallel.zero = 2 in place of pp" in str(told.value)


def test_what_a_model_lacks_is_missing_in_a_pipeline_alike():
    has = frozenset(dir(built()))
    for model in (built(), Replay(torch.ones(3, 2), has)):
        assert not hasattr(model, "module")
        with pytest.raises(AttributeError):
            _ = model.config


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_sees_whether_its_model_is_trained_or_evaluated(training):
    seen = []

    def call(model, batch):
        seen.append(model.training)
        return of(model, batch)

    inputs_of(call, BATCH, training=training)
    call(Replay(torch.ones(3, 2), training=training), BATCH)
    assert seen == [training, training]
    assert Replay(None).eval().training is False


def test_a_loss_that_calls_its_model_twice_is_refused_and_an_evaluation_may_ask_for_the_same_twice():
    x, _ = BATCH
    trained, evaluated = (Replay(torch.ones(3, 2), training=training) for training in (True, False))
    assert evaluated(x) is evaluated(x.clone())
    for model, other in ((trained, x), (evaluated, -x)):
        model(x)
        with pytest.raises(TaskError, match="calls its model more than once"):
            model(other)


def test_a_layer_that_a_sequential_has_twice_is_in_its_stages_twice():
    torch.manual_seed(0)
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    wanted, out = model(BATCH[0]), BATCH[0]
    for rank in range(2):
        mesh = SimpleNamespace(sizes=Sizes(pp=2), at={"pp": rank})
        (stage,) = stages_of(model, Plan(), ParallelConfig(pp=2), mesh, None).values()
        out = stage(out)
    assert torch.equal(out, wanted)
    assert len(Plan().units(nn.Sequential(model[0], act, model[0]))) == 1
