"""Distributed differential privacy: noise that sites share, in the integers that they mask."""

import asyncio
import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.errors import ConfigError, TooFewSites
from fedtrain.events import silent
from fedtrain.messages import Update
from fedtrain.privacy import Gaussian, Release, epsilon
from fedtrain.runtime.simulations import plain_sums
from fedtrain.runtime.simulations.simulated_masks import MaskedCohort, SimulatedKeys, SimulatedMasks
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.sites.privacy import check_config, noised
from fedtrain.runtime.sites.secure_site import SecureSite
from fedtrain.runtime.sites.spent import Spent, SumKeys
from fedtrain.runtime.star import secure_terms
from fedtrain.runtime.threads import ThreadPool
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.messages import Mask
from fedtrain.secagg.noise import BLOCK, DiscreteGaussian
from fedtrain.store import RoundPlan, RunStore
from fedtrain.transport.memory import LocalCohort

from .test_gossip_peers import Log
from .test_privacy import private

KEY = bytes(range(16))
SCHEMA = Schema((TensorSpec("w", (40_000,), "float32", True),))
TEN = [f"site-{i}" for i in range(10)]
SUM = {"where": "sum", "noise_multiplier": 2.0, "clip": 0.5}


def config(root, sites=TEN, **keys):
    table = {
        "run": {"name": "r", "seed": 3},
        "strategy": {"min_sites": len(sites)},
        "privacy": SUM | keys.pop("privacy", {}),
        "evaluate": {"every": 0},
    }
    for name, own in keys.items():
        table[name] = table.get(name, {}) | own
    return Config.of(table, root)


def update(site, size=0.001, schema=SCHEMA):
    arena, generator = Arena.zeros(schema), torch.Generator().manual_seed(int(site[-1]))
    for vector in arena.trained().values():
        vector.copy_(size * torch.randn(vector.shape, generator=generator, dtype=vector.dtype))
    return Update(delta=arena, num_examples=5.0 + int(site[-1]), metrics={"loss": (1.0, 2.0)})


def prepared(cfg, site, **about):
    """As a trainer gives it."""
    given = update(site, **about)
    return noised(cfg, given, site, 0, given.delta, True)


def cohort(cfg, sites=TEN, loses=lambda site, request: False, **about):
    return LocalCohort({site: lambda r, s=site: prepared(cfg, s, **about) for site in sites}, loses)


def train(answers, sites=TEN, schema=SCHEMA, number=0):
    return asyncio.run(answers.train(RoundPlan(number, 0, list(sites)), Arena.zeros(schema)))


def openly(cfg, sites=TEN, **about):
    return train(plain_sums.FixedPointSums(cfg, cohort(cfg, sites, **about), silent), sites)


def values(arena):
    return torch.cat([v.double().flatten() for v in arena.views().values()])


# --- the noise


@pytest.mark.parametrize("std", [0.6, 1.0, 2.7, 4.0, 11.3])
def test_numbers_have_the_probabilities_of_the_discrete_gaussian(std):
    drawn, count = DiscreteGaussian(std, 0).draw(KEY * 2, 400_000), 400_000
    x = np.arange(-100, 101)
    p = np.exp(-(x**2) / (2 * std**2))
    p /= p.sum()
    likely = p * count > 10
    seen = np.array([(drawn == value).sum() for value in x[likely]])
    chi2, freedom = ((seen - p[likely] * count) ** 2 / (p[likely] * count)).sum(), likely.sum() - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("std", [300.0, 123_456.7, 2.0**41])
def test_wide_noise_is_a_gaussian(std):
    drawn = DiscreteGaussian(std, 0).draw(KEY * 2, 200_000) / std
    assert abs(drawn.mean()) < 5 / math.sqrt(len(drawn))
    assert drawn.std() == pytest.approx(1, abs=5 / math.sqrt(2 * len(drawn)))
    assert (np.abs(drawn) < 1).mean() == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.006)
    assert np.mean(drawn**4) == pytest.approx(3, abs=0.15)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / math.sqrt(len(drawn))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_noise_is_added_modulo_the_ring_to_the_coordinates_alone_whichever_threads_work(dtype):
    noise, size = DiscreteGaussian(1000.0, 2 * BLOCK + 17), 2 * BLOCK + 40
    vectors = [np.full(size, np.iinfo(dtype).max - 3, dtype) for _ in range(2)]
    noise.add_to(vectors[0], KEY)
    noise.add_to(vectors[1], KEY, ThreadPool(3))
    assert np.array_equal(*vectors)
    assert (vectors[0][-23:] == np.iinfo(dtype).max - 3).all()
    moved = (vectors[0] - np.array(np.iinfo(dtype).max - 3, dtype)).view(f"i{vectors[0].itemsize}")[:-23]
    assert moved.std() == pytest.approx(1000, rel=0.02)
    assert len(np.unique(moved[:BLOCK] == moved[BLOCK : 2 * BLOCK])) == 2  # blocks have noises of their own


# --- what a sum has


def noise_in_the_mean(cfg, sites=TEN, lost=()):
    """The noise of a round's mean: what is there beside the mean of shortened updates."""
    inside = [site for site in sites if site not in lost]
    answers = plain_sums.FixedPointSums(cfg, cohort(cfg, sites, lambda site, r: site in lost), silent)
    mean = values(train(answers, sites).delta)
    shortened = [d * min(1.0, 0.5 / float(d.norm())) for d in (values(update(s).delta) for s in inside)]
    return mean - sum(shortened) / len(inside)


def test_the_sum_has_the_noise_that_is_paid_for(tmp_path):
    """All ten must be in the sum, so that each brings a tenth of the variance."""
    noise = noise_in_the_mean(config(tmp_path))
    expected = 2.0 * 0.5 / 10
    assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * 40_000) + 1e-4)
    assert abs(float(noise.mean())) < 5 * expected / math.sqrt(40_000)


def test_shared_among_ten_sites_noise_is_smaller_by_the_root_of_ten_than_local_noise_at_equal_epsilon(
    tmp_path,
):
    """Both hide any change of all of a site's data: local noise from whoever sees its update, shared noise
    from whoever sees the sum."""
    together = noise_in_the_mean(config(tmp_path))
    alone = []
    for i, site in enumerate(TEN):
        given, before = update(site).delta, values(update(site).delta)
        Gaussian(clip=0.5, multiplier=2.0).apply(given, bytes([i]) * 16)
        alone.append(values(given) - before * min(1.0, 0.5 / float(before.norm())))
    local = sum(alone) / len(TEN)
    tolerance = 5 / math.sqrt(40_000)  # of the ratio of two standard deviations
    assert float(local.std() / together.std()) == pytest.approx(math.sqrt(10), rel=tolerance)
    local_price, price = (
        Spent(private(tmp_path, privacy=SUM | {"where": where}), tmp_path / where, silent)
        for where in ("site", "sum")
    )
    for folder in ("site", "sum"):
        (tmp_path / folder).mkdir()
    local_price.trained("a", 0, 8.0)
    price.give("a", 0, Release("discrete_gaussian", 1.0))
    assert local_price.epsilon == epsilon([Release("gaussian", 1.0)], 1e-5)
    assert price.epsilon == epsilon([Release("discrete_gaussian", 1.0)], 1e-5)
    assert local_price.epsilon <= price.epsilon < 1.09 * local_price.epsilon  # by a bound that is less tight


def test_with_as_many_dropouts_as_may_be_what_remains_suffices(tmp_path):
    """Seven of ten are the fewest of a sum: their noise alone is what is paid for."""
    cfg = config(tmp_path, strategy={"min_sites": 3})
    full, least = (noise_in_the_mean(cfg, lost=lost) for lost in ((), TEN[7:]))
    assert float(least.std()) == pytest.approx(2.0 * 0.5 / 7, rel=0.02)
    assert float(full.std()) == pytest.approx(2.0 * 0.5 / 10 * math.sqrt(10 / 7), rel=0.02)


def test_the_noise_is_larger_by_what_rounding_adds_to_a_norm(tmp_path):
    cfg = config(tmp_path, secagg={"ring_bits": 16}, privacy={"clip": 50.0})
    point, noise = (
        secure_terms.fixed_point(cfg, 10),
        secure_terms.noise_of(cfg, Schema((SCHEMA.tensors[0],)), 10) if False else None,
    )
    small = Schema((TensorSpec("w", (100,), "float32", True),))
    noise = secure_terms.noise_of(cfg, small, 10)
    integers = 50.0 / point.step + math.sqrt(100)
    assert noise.std == pytest.approx(2.0 * integers / math.sqrt(10), rel=1e-3)
    assert noise.std >= 2.0 * integers / math.sqrt(10)
    assert noise.coordinates == 100


def test_no_update_is_longer_than_the_clip_and_all_count_alike(tmp_path):
    """One of them is a hundred thousand times as large, and claims more examples."""
    cfg = config(tmp_path, privacy={"noise_multiplier": 1e-4})
    loud = prepared(cfg, "site-3", size=100.0)
    sites = {site: lambda r, s=site: prepared(cfg, s, size=0.0) for site in TEN}
    sites["site-3"] = lambda r: loud
    found = train(plain_sums.FixedPointSums(cfg, LocalCohort(sites), silent))
    assert float(values(found.delta).norm()) == pytest.approx(0.05, rel=0.02)
    assert found.metrics == {}
    assert prepared(cfg, "site-3").num_examples == 1.0


@pytest.mark.parametrize("ring_bits", [32, 64])
def test_under_masks_the_sum_is_that_of_the_simulation_bit_for_bit(tmp_path, ring_bits):
    sites = TEN[:4]
    cfg = config(tmp_path, sites, secagg={"ring_bits": ring_bits})
    masked = train(SimulatedMasks(cfg, cohort(cfg, sites), silent), sites)
    assert masked.delta.digest == openly(cfg, sites).delta.digest
    assert masked.metrics == {}


def test_small_models_in_slabs_have_the_same_noise(tmp_path):
    """As a simulation gives them, many in one block of memory."""
    own = {"secagg": {"enabled": True}, "simulate": {"sites": 4, "workers": 0}, "strategy": {"min_sites": 4}}
    cfg = private(tmp_path, "r", privacy=SUM, **own)
    digests, weights = [], []
    for engine, masks in (("loop", False), ("stacked", False), ("loop", True)):
        log = Log()
        settings = replace(cfg, simulate=replace(cfg.simulate, engine=engine, masks=masks))
        result = asyncio.run(simulate(settings, emit=log, fresh=True))
        with closing(RunStore(settings.simulate_dir, read_only=True)) as store:
            digests.append(store.latest().weights.digest)
            weights.append(values(store.latest().weights))
        told = log.of("privacy_spent")
        assert [e["releases"] for e in told] == list(range(1, result.rounds + 1))
    assert digests[0] == digests[2]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)  # as far as both engines are alike


# --- at a site


def site_of(cfg, folder, keys, name="site-0"):
    spent = Spent(cfg, folder, log := Log())
    keys_of_noise = SumKeys(cfg, name, folder, spent)
    secure = SecureSite(
        cfg, name, SimulatedKeys.FEDERATION, keys.signer(name), keys, noise_key=keys_of_noise.key
    )
    return secure, spent, log


class RealNoise(MaskedCohort):
    """One of the sites draws its noise as a real one does."""

    def __init__(self, cfg, others, keys, real):
        super().__init__(cfg, others, keys)
        self._sites["site-0"] = real


def sums(cfg, real, keys, times=1, sites=TEN[:4]):
    """The same round's sum, again and again, as after an aggregator's restarts."""
    answers = SimulatedMasks(cfg, cohort(cfg, sites), silent)
    answers.cohort = RealNoise(cfg, cohort(cfg, sites), keys, real)
    answers._callers = answers._verifier = keys
    return [train(answers, sites).delta.digest for _ in range(times)]


def test_a_sum_that_is_had_again_has_the_same_noise_and_is_paid_for_once(tmp_path):
    """Else the noise could be averaged out; also when the site was restarted between them."""
    cfg, keys = config(tmp_path, TEN[:4]), SimulatedKeys()
    secure, _, log = site_of(cfg, tmp_path, keys)
    first = sums(cfg, secure, keys, times=2)
    assert len(set(first)) == 1
    assert first[0] != openly(cfg, TEN[:4]).delta.digest  # one site's noise is a real one's
    secure, spent, again = site_of(cfg, tmp_path, keys)
    assert sums(cfg, secure, keys) == first[:1]
    assert len(log.of("privacy_spent")) == 1
    assert again.of("privacy_spent") == []
    assert spent.releases == 1


def test_another_model_or_another_cohort_is_another_release(tmp_path):
    cfg, keys = config(tmp_path, TEN[:4]), SimulatedKeys()
    secure, spent, _ = site_of(cfg, tmp_path, keys)
    sums(cfg, secure, keys)
    sums(config(tmp_path, TEN[:4]), secure, keys, sites=TEN[:5])
    assert spent.releases == 2


def test_noise_whose_keys_were_lost_is_paid_for_again(tmp_path):
    spent = Spent(config(tmp_path), tmp_path, silent)
    keys = SumKeys(config(tmp_path), "a", tmp_path, spent)
    first = keys.key(0, "x")
    assert (keys.key(0, "x"), spent.releases) == (first, 1)
    for path in tmp_path.glob("noise.json*"):
        path.unlink()
    assert keys.key(0, "x") != first
    assert spent.releases == 2


def test_keys_of_old_noise_are_forgotten(tmp_path):
    keys = SumKeys(config(tmp_path), "a", tmp_path, Spent(config(tmp_path), tmp_path, silent))
    for round in range(9):
        keys.key(round, "x")
    kept, _ = SumKeys(config(tmp_path), "a", tmp_path, keys._spent)._kept.read()
    assert set(kept) == {f"{n}/x" for n in (5, 6, 7, 8)}


def test_a_site_refuses_sums_with_less_noise_than_its_own_file_says(tmp_path):
    cfg, keys = config(tmp_path, TEN[:4]), SimulatedKeys()
    secure, spent, _ = site_of(config(tmp_path, TEN[:4], privacy={"noise_multiplier": 3.0}), tmp_path, keys)
    asked = []

    def loses(site, request):
        asked.append(type(request))
        return False

    answers = SimulatedMasks(cfg, cohort(cfg, TEN[:4]), silent)
    answers.cohort = RealNoise(cfg, cohort(cfg, TEN[:4], loses), keys, secure)
    answers._callers = answers._verifier = keys
    with pytest.raises(
        TooFewSites,
        match=r"site-0 refuses: privacy = 'noise 2.0 of 0.5' is asked for, and this site has 'noise 3.0 of",
    ):
        train(answers, TEN[:4])
    assert Mask not in asked
    assert spent.releases == 0


# --- what is refused


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"secagg": {"enabled": False}}, "needs secagg.enabled = true"),
        ({"asynchronous": {"enabled": True}}, "needs secagg.enabled = true"),
        ({"compression": {"up": "randomk:0.1"}}, "compression.up: randomk:0.1 stretches"),
    ],
)
def test_what_noise_in_sums_can_not_protect_is_refused(tmp_path, keys, text):
    with pytest.raises(ConfigError, match=text):
        check_config(config(tmp_path, **keys))


def test_a_ring_that_is_too_small_for_the_noise_is_refused(tmp_path):
    cfg = config(tmp_path, secagg={"ring_bits": 16})
    with pytest.raises(ConfigError, match=r"leaves each of 1000 sites 6 bits.*Set secagg.ring_bits = 32"):
        secure_terms.noise_of(cfg, SCHEMA, 1000)


def test_models_whose_buffers_move_are_refused(tmp_path):
    schema = Schema((TensorSpec("w", (5,), "float32", True), TensorSpec("mean", (3,), "float32", False)))
    delta = Arena.zeros(schema)
    delta.views()["mean"][1] = 0.5
    with pytest.raises(ConfigError, match="GroupNorm"):
        noised(config(tmp_path), Update(delta=delta, num_examples=1.0), "a", 0, delta, True)
