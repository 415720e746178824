"""fp16's loss scale: torch's GradScaler, but for a step that is taken again."""

import random

import pytest
import torch
from torch import nn

from fedtrain.training import precision
from fedtrain.training.checkpoint import Checkpoints
from fedtrain.training.parallel.data import Dealt
from fedtrain.training.parallel.state import State
from fedtrain.training.precision import FIRST, LossScale
from tests.test_parallel import Rows, engine


@pytest.fixture(autouse=True)
def grows_after_three_steps(monkeypatch):
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)


def test_it_moves_as_torchs_grad_scaler_does():
    draw = random.Random(5)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScale("fp16")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = set()
    for _ in range(200):
        finite = draw.random() < 0.8
        (theirs.scale(weight.sum()) * (1.0 if finite else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.again(finite, lambda: True) is not finite
        assert ours.value == theirs.get_scale()
        seen.add(ours.value)
    assert len(seen) > 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_fp16_it_is_one(precision):
    scale = LossScale(precision)
    assert not scale.again(False, lambda: True)
    assert (scale.value, scale.state_dict()) == (1.0, {})


def test_a_batch_that_no_scale_helps_counts_as_one_overflow_and_the_scale_grows_again():
    task = Rows()
    found = engine(task, precision="fp16")
    calls = []
    measure = task.loss
    task.loss = lambda model, batch: calls.append(1) or measure(model, batch)
    shares = [(task.data(""), 32)]
    assert found.steps.take(shares, "step 1").taken
    task.poison, calls[:] = True, []
    assert not found.steps.take(shares, "step 2").taken
    assert len(calls) == 1, "the loss itself is not finite: it is not computed again"
    assert found.steps.scale.value == FIRST / 2
    task.poison = False
    for step in range(3, 6):
        assert found.steps.take(shares, f"step {step}").taken
    assert found.steps.scale.value == FIRST


def test_a_gradient_that_is_not_finite_without_a_scale_either_counts_as_one_overflow():
    scale = LossScale("fp16")
    tries = 0
    while scale.again(False, lambda: True):
        tries += 1
    assert tries == 16
    assert scale.value == FIRST / 2


def test_it_stands_in_the_checkpoint_and_begins_anew_with_a_round_that_does(tmp_path):
    task = Rows()
    found = engine(task, precision="fp16")
    state = State(
        found.parts, found.optimizer, Dealt(task.data(""), found.config, 0, "a"),
        loss_scale=found.steps.scale,
    )  # fmt: skip
    found.steps.scale.again(False, lambda: True)
    found.steps.scale.again(True, lambda: True)
    kept = found.steps.scale.state_dict()
    with_checkpoints = Checkpoints(tmp_path, every=1, keep=1, background=False)
    with_checkpoints.save(1, state)
    found.begin_round(0, afresh=True)
    assert found.steps.scale.value == FIRST
    assert with_checkpoints.restore(state)
    assert found.steps.scale.state_dict() == kept == {"value": FIRST / 2, "steps": 1}
