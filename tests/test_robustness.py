"""The attacks of benchmarks/attacks.py, and the bar of benchmarks/robustness.py: 40 % are withstood."""

from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
BEFORE = ["clip:0.5", "nnm:6"]


@pytest.fixture
def robustness(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import robustness

    return robustness


@pytest.fixture
def attacks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from attacks import ATTACKS

    return ATTACKS


HONEST = np.array([[1.0, 2.0], [3.0, 2.0]])  # mean 2 2, standard deviation 1 0
OWN = np.array([[1.0, 0.0], [0.0, -1.0]])


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("none", OWN),
        ("sign", -5 * OWN),
        ("ipm 0.6", [[-1.2, -1.2]] * 2),
        ("ipm 10", [[-20.0, -20.0]] * 2),
        ("alie", [[0.8, 2.0]] * 2),
        ("label flip", OWN),
        ("scaling", 10 * OWN),
    ],
)
def test_what_an_attack_sends_by_hand(attacks, name, sent):
    found = attacks[name].forge(HONEST, OWN, np.random.default_rng(0))
    np.testing.assert_allclose(found, sent, rtol=1e-12)
    assert attacks[name].flips == (name in ("label flip", "scaling"))


def test_noise_is_ten_times_as_long_as_an_honest_update(attacks):
    sent = attacks["gaussian"].forge(HONEST, OWN, np.random.default_rng(0))
    assert np.linalg.norm(sent, axis=1) == pytest.approx([5 * (5**0.5 + 13**0.5)] * 2)


def test_one_hostile_site_in_five_ruins_the_mean(robustness, attacks):
    digits = robustness.Digits.load()
    clean = robustness.accuracy(digits, {"rule": "mean"}, attacks["none"], 0, seed=0, rounds=10)
    ruined = robustness.accuracy(digits, {"rule": "mean"}, attacks["sign"], 3, seed=0, rounds=10)
    assert clean > 90
    assert ruined < 30


@pytest.mark.slow(8)
def test_clipping_and_mixing_keep_six_hostile_sites_of_fifteen_within_five_points(robustness, attacks):
    digits = robustness.Digits.load()
    clean = robustness.accuracy(digits, {"rule": "mean"}, attacks["none"], 0, seed=0, rounds=30)
    assert clean > 94
    keys = {"rule": "geometric_median", "before": BEFORE}
    for name, attack in attacks.items():
        hostile = 0 if name == "none" else 6
        found = robustness.accuracy(digits, keys, attack, hostile, seed=0, rounds=30)
        assert found > clean - 5, name
