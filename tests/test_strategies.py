"""Strategies against their papers' formulas, written out naively here."""

import math
from functools import partial

import pytest
import torch

from fedtrain import strategies
from fedtrain.arena import Arena
from fedtrain.config import TrainConfig
from fedtrain.errors import ConfigError
from fedtrain.learning import Context, RoundSums
from fedtrain.schema import Schema, TensorSpec
from fedtrain.strategies import STRATEGIES, beginning, build, corrects, server_step

MIXED = Schema(
    (
        TensorSpec("w", (5,), "float32", True),
        TensorSpec("running_mean", (2,), "float32", False),
        TensorSpec("half", (3,), "bfloat16", True),
        TensorSpec("count", (), "int64", False),
        TensorSpec("mask", (4,), "bool", False),
    )
)


def arena(seed, schema=MIXED, scale=1.0):
    made = Arena.zeros(schema)
    generator = torch.Generator().manual_seed(seed)
    for spec, view in zip(schema.tensors, made.views().values(), strict=True):
        if spec.dtype == "bool":
            view.copy_(torch.rand(view.shape, generator=generator) < 0.5)
        elif spec.dtype == "int64":
            view.fill_(3 + seed)
        else:
            view.copy_(torch.randn(view.shape, generator=generator) * scale)
    return made


def vector_steps(strategy, weights, deltas):
    state = strategy.init(weights)
    for delta in deltas:
        weights, state = strategy.step(weights.clone(), state, RoundSums(delta))
    return weights


def naive_adaptive(kind, weights, deltas, lr, b1, b2, tau):
    """Reddi et al. 2021, Algorithm 2, one coordinate at a time."""
    result = []
    for i, w in enumerate(weights.tolist()):
        m, v = 0.0, tau**2
        for delta in deltas:
            d = delta[i].item()
            m = b1 * m + (1 - b1) * d
            if kind == "fedadagrad":
                v = v + d * d
            elif kind == "fedyogi":
                v = v - (1 - b2) * d * d * (0 if v == d * d else math.copysign(1, v - d * d))
            else:
                v = b2 * v + (1 - b2) * d * d
            w = w + lr * m / (math.sqrt(v) + tau)
        result.append(w)
    return torch.tensor(result, dtype=torch.float64)


def test_fedavg_moves_by_the_mean_delta():
    new = vector_steps(build("fedavg", {}), torch.tensor([1.0, 2.0]), [torch.tensor([0.5, -1.0])])
    assert new.tolist() == [1.5, 1.0]


@pytest.mark.parametrize("kind", ["fedadam", "fedyogi", "fedadagrad"])
def test_the_adaptive_strategies_are_algorithm_2_of_reddi_et_al(kind):
    strategy = build(kind, {"server_lr": 0.3, "b1": 0.7, "tau": 0.01})
    generator = torch.Generator().manual_seed(1)
    weights, *deltas = torch.randn(7, 20, dtype=torch.float64, generator=generator)
    expected = naive_adaptive(kind, weights, deltas, 0.3, 0.7, 0.99, 0.01)
    torch.testing.assert_close(vector_steps(strategy, weights, deltas), expected, rtol=1e-12, atol=1e-12)


def test_the_first_fedadam_step_by_hand():
    # m = 0.1·0.2 = 0.02; v = 0.99·10⁻⁶ + 0.01·0.04 = 0.00040099; 1 + 0.1·0.02 / (0.020024734… + 0.001)
    new = vector_steps(
        build("fedadam", {}), torch.ones(1).double(), [torch.full((1,), 0.2, dtype=torch.float64)]
    )
    assert new.item() == pytest.approx(1 + 0.002 / (math.sqrt(0.00040099) + 0.001), rel=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_is_torchs_sgd_with_the_negative_delta_for_a_gradient(nesterov):
    strategy = build("fedavgm", {"server_lr": 0.7, "momentum": 0.9, "nesterov": nesterov})
    weights, *deltas = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parameter = weights.clone().requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=nesterov)
    for delta in deltas:
        parameter.grad = -delta
        optimizer.step()
    torch.testing.assert_close(
        vector_steps(strategy, weights, deltas), parameter.detach(), rtol=1e-12, atol=0
    )


def test_fedprox_adds_the_gradient_of_its_proximal_term():
    strategy = build("fedprox", {"mu": 0.3})
    weights = torch.tensor([1.0, 5.0], requires_grad=True)
    start = torch.tensor([0.5, 7.0])
    (0.3 / 2 * (weights - start).square().sum()).backward()
    gradient = torch.tensor([10.0, 20.0])
    strategy.correct(gradient, weights.detach(), Context(start))
    assert torch.equal(gradient, torch.tensor([10.0, 20.0]) + weights.grad)


def test_only_a_strategy_with_a_site_half_corrects():
    assert {kind for kind in STRATEGIES if corrects(build(kind, {}))} == {
        "adaptive_fedprox", "feddyn", "fedprox", "inexact_fedprox", "mimelite", "scaffold",
    }  # fmt: skip


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_server_step_leaves_its_arguments_as_they_were(kind):
    strategy, mean = build(kind, {}), arena(1)
    weights, state = beginning(strategy, arena(0))
    sums = {each.name: torch.ones(8, dtype=torch.float64) for each in strategy.up}
    sums["delta"], scalars = torch.ones(8, dtype=torch.float64), {each.name: 2.0 for each in strategy.scalars}
    step = partial(server_step, strategy, weights, mean=mean, sums=sums, scalars=scalars, registered=3)
    _, state = step(state)
    before = [weights.digest, mean.digest, {k: t.clone() for k, t in state.items()}]
    step(state)
    weights._digest = mean._digest = None
    assert [weights.digest, mean.digest] == before[:2]
    assert all(torch.equal(state[k], t) for k, t in before[2].items())


def test_only_trained_floats_are_stepped_and_the_rest_moves_by_the_plain_mean():
    strategy, weights, mean = build("fedadam", {}), arena(0), arena(1)
    new, _ = server_step(strategy, weights, beginning(strategy, weights)[1], mean)
    w, d, n = weights.views(), mean.views(), new.views()
    assert torch.equal(n["running_mean"], w["running_mean"] + d["running_mean"])
    assert n["count"].item() == w["count"].item() + d["count"].item()
    assert torch.equal(n["mask"], w["mask"])
    expected, _ = strategy.step(w["w"].clone(), strategy.init(w["w"]), RoundSums(d["w"]))
    assert torch.equal(n["w"], expected)


def test_16_bit_weights_are_stepped_in_float32_and_rounded_once():
    strategy, weights, mean = build("fedavgm", {"server_lr": 0.3}), arena(0), arena(1, scale=0.01)
    state = beginning(strategy, weights)[1]
    assert state["momentum"].dtype == torch.float32
    new, _ = server_step(strategy, weights, state, mean)
    wide, _ = strategy.step(
        weights.views()["half"].float(), {"momentum": torch.zeros(3)}, RoundSums(mean.views()["half"].float())
    )
    assert torch.equal(new.views()["half"], wide.bfloat16())


def test_the_state_survives_being_packed_and_unpacked():
    strategy, weights, mean = build("fedyogi", {}), arena(0), arena(1)
    _, state = server_step(strategy, weights, beginning(strategy, weights)[1], mean)
    packed = Arena.pack(state).views()
    assert packed.keys() == state.keys()
    assert all(torch.equal(packed[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("fedadm", {}, "'fedadm' is not one of .* Did you mean 'fedadam'"),
        ("fedprox", {"muu": 1}, r"strategy\.muu: fedprox has no such option. Did you mean mu\?"),
        ("fedavg", {"min_site": 3}, r"Did you mean min_sites\?"),
        ("fedavg", {"mu": 1}, 'strategy.kind = "fedprox" has it'),
        ("fedprox", {"mu": -1.0}, "strategy.mu: -1.0 must be 0 or more"),
        ("fedprox", {"mu": "x"}, r"strategy\.mu must be a number, got 'x'"),
        ("fedadam", {"b2": 1.0}, "strategy.b2"),
        ("fedadam", {"server_lr": math.inf}, "strategy.server_lr"),
        ("fedyogi", {"tau": 0}, "strategy.tau"),
        ("fedavgm", {"momentum": 1.0}, "strategy.momentum"),
        ("nowhere:Mine", {}, "there is no module 'nowhere'"),
        ("math:pi", {}, "'math:pi' is not a strategy"),
    ],
)
def test_a_mistake_is_a_config_error_that_says_what_to_change(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        build(kind, options)


@pytest.mark.parametrize("kind", ["fedsgd", "per_fedavg"])
@pytest.mark.parametrize(
    ("options", "train", "key"),
    [
        ({}, {"clip_norm": 1.0}, "train.clip_norm"),
        ({}, {"momentum": 0.9}, "train.optimizer"),
        ({"local": ("*bn*",)}, {}, "strategy.local"),
    ],
)
def test_a_strategy_that_takes_its_own_steps_refuses_what_it_would_leave_out(kind, options, train, key):
    with pytest.raises(ConfigError, match=key):
        build(kind, options).check(TrainConfig(batch_size=0, **train))


@pytest.mark.parametrize(
    ("train", "key"),
    [({}, "train.local_epochs"), ({"local_epochs": 3, "local_steps": 5}, "train.local_epochs"),
     ({"local_epochs": 3, "decay": "cosine"}, "train.decay")],
)  # fmt: skip
def test_inexact_fedprox_refuses_a_training_of_which_nobody_can_do_a_part(train, key):
    with pytest.raises(ConfigError, match=key):
        build("inexact_fedprox", {}).check(TrainConfig(**train))


def test_a_strategy_of_ones_own_lies_beside_the_task(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "halved_strategy.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedtrain.strategies import Strategy\n"
        "@dataclass(frozen=True)\n"
        "class Halved(Strategy):\n"
        "    factor: float = 0.5\n"
        "    def step(self, weights, state, round):\n"
        "        return weights + self.factor * round.mean, state\n"
    )
    strategy = build("halved_strategy:Halved", {"factor": 0.25}, tmp_path)
    weights, mean = arena(0), arena(1)
    new, state = server_step(strategy, weights, beginning(strategy, weights)[1], mean)
    assert torch.equal(new.views()["w"], weights.views()["w"] + 0.25 * mean.views()["w"])
    assert state == {}


def test_the_table_names_every_strategy_file():
    from pathlib import Path

    files = {f.stem for f in Path(strategies.__file__).parent.glob("*.py")}
    assert files - {"__init__", "base", "adaptive"} == set(STRATEGIES)
