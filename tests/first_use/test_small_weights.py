"""Weights far below their bound under masks: a notice, an error, and near exact where the bound fits."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedtrain
from fedtrain.errors import ConfigError
from fedtrain.secagg.fixedpoint import FixedPoint
from fedtrain.tracking import log

COUNTS = {"a": 24, "b": 48, "c": 72}


class Weighed(fedtrain.Task):
    """A line through points, each of which weighs `scale`."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def sites(self):
        return [*COUNTS]

    def model(self):
        torch.manual_seed(1)
        return nn.Linear(3, 1, dtype=torch.float64)

    def data(self, site):
        draw = torch.Generator().manual_seed(ord(site))
        x = torch.randn(COUNTS[site], 3, generator=draw, dtype=torch.float64)
        return x, (x.sum(1, keepdim=True) + 0.3 * (ord(site) - 98)).tanh()

    def loss(self, model, batch):
        weights = torch.full_like(batch[1], self.scale)
        return ((model(batch[0]) - batch[1]).square() * weights).sum(), weights.sum()


def train(scale, **more):
    """(weights after ten rounds, notices of the run)."""
    run = fedtrain.simulate(Weighed(scale), {
        "run.rounds": 10, "train.lr": 0.05, "train.batch_size": 0, "evaluate.every": 0, "simulate.workers": 0,
        "run.name": f"r{scale:g}" + "-".join(f"{v:g}" for v in more.values()),
    } | more)  # fmt: skip
    views = run.model().state_dict().values()
    told = [event.text for event in log.read(run.path) if event.kind == "notice"]
    return torch.cat([view.flatten() for view in views]), [text for text in told if "bits" in text]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def right(here):
    return train(1.0, **{"secagg.enabled": False})[0]


def test_weights_of_usual_size_are_near_exact_without_a_notice(right):
    found, told = train(1.0)
    assert torch.allclose(found, right, atol=1e-4)
    assert not told


def test_weights_that_keep_fewer_than_12_bits_are_told_once(right):
    found, (told,) = train(1e-4)
    assert "keeps 8 bits" in told
    assert "secagg.max_examples" in told
    assert "10000" in told
    assert torch.allclose(found, right, atol=0.05)


@pytest.mark.parametrize("scale", [1e-5, 1e-6])
def test_weights_that_keep_fewer_than_8_bits_end_the_run(scale):
    with pytest.raises(ConfigError, match=r"^secagg.max_examples: .*keeps [14] bits.* 8 bits are the least"):
        train(scale)


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_small_weights_are_near_exact_where_their_bound_fits(right, scale):
    found, told = train(scale, **{"secagg.max_examples": 80 * scale})
    assert torch.allclose(found, right, atol=1e-6)
    assert not told


@pytest.mark.parametrize("key", ["strategy.max_examples", "strategy.max_loss"])
def test_the_key_is_that_of_the_bound_which_counts(key):
    kind, value = ("fednova", 1e9) if "examples" in key else ("qfedavg", 1e9)
    more = {"strategy.kind": kind, key: value}
    with pytest.raises(ConfigError, match=f"^{key}: .*Lower {key}"):
        fedtrain.simulate(Weighed(), {"run.name": kind, "simulate.workers": 0, "evaluate.every": 0} | more)


def test_many_sites_even_out_what_each_of_them_rounds():
    """1,000 sites of 20 examples, of 10,000 at most: fewer bits at each, and as good a mean."""
    n = 1000
    point, read = FixedPoint(n, 32, 1.0, 10_000.0), np.random.default_rng(0).normal(size=(n, 50)) * 0.1
    ring = np.zeros(50, point.dtype)
    seeds = [i.to_bytes(16, "big") for i in range(n)]
    point.add_rows(read, np.full(n, 20.0), seeds, ring)
    off = np.abs(point.decode(ring, n, 20.0 * n) - read.mean(0)).max()
    assert off < 2 ** (1 - point.bits(20.0) - math.log2(n / 3) / 2)
