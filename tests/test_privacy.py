"""Local differential privacy: the noise is what it says, and so is its price."""

import asyncio
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config
from fedtrain.errors import BadUpdate, ConfigError
from fedtrain.messages import Train, Update
from fedtrain.privacy import Gaussian, epsilon
from fedtrain.privacy.gaussian import normals
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.sites.privacy import Spent, noised
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Ledger

from .test_gossip_peers import PLAIN, Log, arena, config, simulated

WIDE = Schema((TensorSpec("w", (400_000,), "float32", True), TensorSpec("b", (1000,), "float64", True)))
BUFFERED = Schema((TensorSpec("w", (5,), "float32", True), TensorSpec("mean", (3,), "float32", False)))
KEY = bytes(range(16))


def private(root, name="run", **keys):
    plain = config(root, name, task=keys.pop("task", "task:Linear"))
    privacy = {"noise_multiplier": 0.5, "clip": 0.2} | keys.pop("privacy", {})
    return Config.of({**plain.table(), "privacy": privacy, **keys}, root)


# --- the accountant


def exact_delta(sigma, eps):
    """Of one release (Balle and Wang 2018, Theorem 8); n releases are one with sigma/√n."""

    def phi(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    return phi(1 / (2 * sigma) - eps * sigma) - math.exp(eps) * phi(-1 / (2 * sigma) - eps * sigma)


@settings(max_examples=60, deadline=None)
@given(sigma=st.floats(0.5, 50), releases=st.integers(1, 500), log_delta=st.floats(-25, -7))
def test_epsilon_bounds_the_exact_gaussian_and_beats_mironovs_conversion(sigma, releases, log_delta):
    delta, rho = math.exp(log_delta), releases / (2 * sigma**2)
    if not 1e-4 < rho < 50:
        return
    found = epsilon(sigma, releases, delta)
    assert exact_delta(sigma / math.sqrt(releases), found) <= delta
    assert found <= rho + 2 * math.sqrt(rho * -log_delta)  # Mironov 2017, Proposition 3, at its best order


@pytest.mark.parametrize(("sigma", "releases", "delta"), [(1.0, 1, 1e-5), (5.0, 10, 1e-6), (10.0, 300, 1e-5)])
def test_epsilon_is_within_a_tenth_of_the_exact_one(sigma, releases, delta):
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exact_delta(sigma / releases**0.5, middle) > delta else (low, middle)
    assert low <= epsilon(sigma, releases, delta) <= 1.1 * low


def test_epsilon_is_the_census_bureaus_for_the_persons_of_2020():
    """rho = 2.56 (rounded), delta = 1e-10: they published epsilon = 17.14."""
    low, high = (epsilon(1 / math.sqrt(2 * rho), 1, 1e-10) for rho in (2.555, 2.565))
    assert low <= 17.14 <= high


def test_nothing_given_away_costs_nothing_and_each_release_costs():
    costs = [epsilon(3.0, n, 1e-5) for n in range(6)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))


def test_the_table_on_the_page_is_what_the_accountant_says():
    page = (Path(__file__).parents[1] / "docs" / "privacy.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 3
    for multiplier, rounds, eps in rows:
        sigma = Gaussian(1.0, float(multiplier)).sigma
        assert epsilon(sigma, int(rounds), 1e-5) == pytest.approx(float(eps), abs=0.005)


# --- the noise


def test_noise_is_standard_normal_and_its_pieces_are_independent():
    (a, b) = normals(KEY, [200_000, 200_001])
    for x in (a, b):
        assert abs(x.mean()) < 5 / math.sqrt(len(x))
        assert x.std() == pytest.approx(1, abs=5 / math.sqrt(2 * len(x)))
        assert (np.abs(x) < 1).mean() == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.005)
        assert np.mean(x**4) == pytest.approx(3, abs=0.1)
    assert abs(np.corrcoef(a, b[:-1])[0, 1]) < 0.012
    assert abs(np.corrcoef(a[:100_000], a[100_000:])[0, 1]) < 0.016  # cosines and sines of the same angles


def test_an_update_is_shortened_and_its_noise_has_the_standard_deviation_that_was_asked_for():
    delta = Arena.zeros(WIDE)
    for view in delta.views().values():
        view.fill_(0.5)
    before = torch.cat([v.double().flatten() for v in delta.views().values()])
    norm = Gaussian(clip=3.0, multiplier=2.0).apply(delta, KEY)
    assert norm == pytest.approx(float(before.norm()))
    after = torch.cat([v.double().flatten() for v in delta.views().values()])
    noise = after - before * 3.0 / norm
    assert float(noise.std()) == pytest.approx(6.0, rel=0.01)
    assert abs(float(noise.mean())) < 0.05
    assert float(noise[-1000:].std()) == pytest.approx(6.0, rel=0.1)  # every section gets its own


def test_a_short_update_keeps_its_length():
    delta = Arena.zeros(BUFFERED)
    delta.views()["w"].fill_(0.01)
    Gaussian(clip=1.0, multiplier=1e-9).apply(delta, KEY)
    torch.testing.assert_close(delta.views()["w"], torch.full((5,), 0.01))


def test_an_update_that_is_not_finite_is_refused():
    delta = Arena.zeros(BUFFERED)
    delta.views()["w"][2] = math.inf
    with pytest.raises(BadUpdate, match="NaN or infinite"):
        Gaussian(clip=1.0, multiplier=1.0).apply(delta, KEY)


def test_a_model_whose_buffers_move_is_refused():
    delta = Arena.zeros(BUFFERED)
    delta.views()["mean"][1] = 0.1
    with pytest.raises(ConfigError, match="GroupNorm"):
        Gaussian(clip=1.0, multiplier=1.0).apply(delta, KEY)


# --- at a site


def given_away(settings, simulated, times=2):
    weights = Arena.zeros(WIDE)
    found = []
    for _ in range(times):
        update = Update(delta=Arena.zeros(WIDE), num_examples=3.0, metrics={"loss": (1.0, 1.0)})
        update = noised(settings, update, "a", 4, weights, simulated)
        assert (update.num_examples, update.metrics) == (3.0, {})
        found.append(update.delta.data.clone())
    return found


def test_a_real_site_draws_new_noise_each_time_and_a_simulated_one_the_same(tmp_path):
    settings = private(tmp_path)
    assert not torch.equal(*given_away(settings, simulated=False))
    assert torch.equal(*given_away(settings, simulated=True))


def test_a_trainer_gives_out_noised_updates_without_metrics(tmp_path):
    settings = private(tmp_path)
    bench = Workbench(settings, simulated=True)
    weights, out = bench.initial(), Arena.zeros(bench.description.schema)
    update = bench.train("site-1", 0, weights, out)
    plain = Workbench(config(tmp_path), simulated=True).train("site-1", 0, weights, Arena.zeros(out.schema))
    assert update.metrics == {}
    assert "loss" in plain.metrics
    a, b = (torch.cat([v.flatten() for v in u.delta.views().values()]) for u in (update, plain))
    shortened = b * min(1.0, 0.2 / float(b.norm()))
    assert 0.1 * math.sqrt(len(a)) / 2 < float((a - shortened).norm()) < 0.1 * math.sqrt(len(a)) * 2


def test_what_was_spent_is_on_disk_before_anything_leaves_and_survives_a_restart(tmp_path):
    log, keys = Log(), private(tmp_path).privacy
    for n in (1, 2, 3):
        Spent(keys, tmp_path, log).one_more("a", n - 1)
    assert [e["releases"] for e in log.of("privacy_spent")] == [1, 2, 3]
    assert log.of("privacy_spent")[-1]["epsilon"] == epsilon(0.25, 3, 1e-5)
    Spent(config(tmp_path).privacy, tmp_path / "none", log).one_more("a", 0)
    assert len(log.of("privacy_spent")) == 3


class Trainer:
    """Stands for a site's trainer process: every update is zero."""

    async def train(self, site, round, weights, out, counted):
        out.write_bytes(Arena.zeros(PLAIN).payload)
        return Update(delta=ArenaFile(PLAIN, out, Arena.zeros(PLAIN).digest), num_examples=1.0, metrics={})


def test_a_site_pays_for_each_update_once_however_often_it_is_asked(tmp_path):
    log, ledger = Log(), Ledger(tmp_path / "site")
    spent = Spent(private(tmp_path).privacy, ledger.folder, log)
    site = Site("a", PLAIN, ledger, Trainer(), spent=spent)

    async def ask():
        for attempt, round in ((0, 0), (1, 0), (0, 1)):
            weights = tmp_path / f"weights-{round}"
            weights.write_bytes(arena(PLAIN, round).payload)
            given = ArenaFile(PLAIN, weights, arena(PLAIN, round).digest)
            await site.answer(Train(id=f"r/{round}/{attempt}/train", round=round, weights=given))

    asyncio.run(ask())
    ledger.close()
    assert [(e["round"], e["releases"]) for e in log.of("privacy_spent")] == [(1, 1), (2, 2)]


def test_a_run_of_gossip_tells_its_epsilon_and_no_loss(tmp_path):
    result, log = simulated(private(tmp_path))
    assert result.rounds == 6
    spent = log.of("privacy_spent")
    assert [e["round"] for e in spent] == [1, 2, 3, 4, 5, 6]
    assert spent[-1]["epsilon"] == epsilon(0.25, 6, 1e-5)
    assert all("loss" not in e["metrics"] for e in log.of("round_committed"))


def test_what_adds_no_noise_refuses_to_run_with_privacy(tmp_path):
    with pytest.raises(ConfigError, match="vmap"):
        Workbench(private(tmp_path, simulate={"engine": "vmap"}), simulated=True)
    with pytest.raises(ConfigError, match="a datacenter adds no noise"):
        datacenter.run(private(tmp_path), emit=Log())


@pytest.mark.parametrize("keys", [{"clip": 0.0}, {"noise_multiplier": -1.0}, {"delta": 1.0}])
def test_numbers_that_make_no_sense_are_refused(tmp_path, keys):
    with pytest.raises(ConfigError, match=r"privacy\."):
        private(tmp_path, privacy=keys)
