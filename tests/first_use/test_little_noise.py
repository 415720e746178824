"""What almost no noise costs: an upper bound in a moment, for any multiplier."""

from __future__ import annotations

import math

import pytest

import fedtrain
from fedtrain.privacy.accountant import NOTHING, Release, epsilon
from tests.first_use.crossed import Crossed

pytest.importorskip("dp_accounting")
DELTA, SIGMAS = 1e-5, (2.0, 1.0, 0.5, 0.25, 0.1, 0.07, 0.05, 0.03, 0.01, 1e-3, 1e-6, 1e-9, 1e-100)


def of_one_gaussian(mu: float, delta: float) -> float:
    """ε of a Gaussian release, by bisection of its δ in logarithms, for a moderate μ."""

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = 0.0, mu * mu / 2 + 20 * mu
    for _ in range(200):
        at = (low + high) / 2
        tail = phi(-mu / 2 - at / mu)
        found = phi(mu / 2 - at / mu) - (math.exp(at + math.log(tail)) if tail else 0.0)
        low, high = (at, high) if found > delta else (low, at)
    return high


def of_one_step(sigma: float, q: float) -> float:
    """The exact ε of one step on a Poisson sample: ln(1 + q(e^ε' − 1)), where the Gaussian release has δ/q
    at ε'."""
    inner = of_one_gaussian(1 / sigma, DELTA / q)
    return inner + math.log(q) + math.log1p((1 / q - 1) * math.exp(-inner))


@pytest.mark.parametrize(("q", "steps"), [(0.01, 40), (1.0, 1)])
def test_less_noise_costs_more_for_any_multiplier(q, steps):
    found = [epsilon([Release("gaussian", sigma, q, steps)], DELTA) for sigma in SIGMAS]
    assert found == sorted(found)
    assert all(map(math.isfinite, found))


@pytest.mark.slow
@pytest.mark.parametrize("q", [0.3])
def test_the_price_of_a_step_is_never_below_the_true_one(q):
    for sigma in SIGMAS[1:8]:
        found, true = epsilon([Release("gaussian", sigma, q)], DELTA), of_one_step(sigma, q)
        assert true * (1 - 1e-9) <= found
        assert found > NOTHING or found <= true * 1.01 + 1e-3


@pytest.mark.slow
def test_more_steps_cost_more_up_to_the_bound_and_beyond():
    found = [epsilon([Release("gaussian", 0.2, 0.05, steps)], DELTA) for steps in (1, 10, 100, 1000, 10_000)]
    assert found == sorted(found)
    assert found[1] < NOTHING < found[-1]


@pytest.mark.slow
def test_several_kinds_of_steps_cost_more_than_each():
    some = [Release("gaussian", sigma, 0.1, 10) for sigma in (1.0, 0.3, 1e-4)]
    assert epsilon(some, DELTA) >= max(epsilon([each], DELTA) for each in some)
    assert epsilon(some[:2], DELTA) >= max(epsilon([each], DELTA) for each in some[:2])


@pytest.mark.parametrize("sigma", [1e-200, 1e-300])
def test_noise_that_is_none_has_an_infinite_price(sigma):
    for mechanism in ("gaussian", "discrete_gaussian"):
        assert epsilon([Release(mechanism, sigma)], DELTA) == math.inf
    assert epsilon([Release("gaussian", sigma, 0.5)], DELTA) == math.inf


def test_a_simulation_with_noise_of_a_millionth_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    noise = {"noise_multiplier": 1e-6, "unit": "example", "clip": 1.0}
    run = fedtrain.simulate(
        Crossed("tensors", "group"),
        {"simulate.workers": 0, "run.rounds": 2, "train.batch_size": 4}
        | {f"privacy.{key}": value for key, value in noise.items()},
    )
    text = (run.path / "model" / "MODEL_CARD.md").read_text()
    assert "It cost epsilon = " in text
