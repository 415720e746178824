"""Central DP-FedAvg: Algorithm 1 written out naively, its noise by statistics, the aggregator's ledger."""

import asyncio
import math
from contextlib import closing

import numpy as np
import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.errors import ConfigError, Damaged
from fedtrain.keystream import Keystream
from fedtrain.learning import RoundSums
from fedtrain.privacy import Release, epsilon
from fedtrain.runtime.plan import round_plan
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.star.answers import Aggregate
from fedtrain.runtime.star.central_noise import CentralNoise
from fedtrain.runtime.star.combinations import check_strategy
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import RunStore
from fedtrain.strategies import build

from .test_gossip_peers import Log
from .test_gossip_peers import config as gossip_config

F64 = torch.float64
SCHEMA = Schema((TensorSpec("w", (50,), "float64", True), TensorSpec("mean", (2,), "float64", False)))
ADAPTIVE = {"noise_multiplier": 0.8, "clip": 0.3, "quantile": 0.6, "clip_lr": 0.5, "count_noise": 1.5}


def config(root, **keys):
    plain = gossip_config(root, "run", task="task:Linear").table()
    own = {
        "strategy": {"kind": "dp_fedavg", "min_sites": 3, **keys.pop("strategy", {})},
        "simulate": {"sites": 6, "workers": 0},
        "run": plain["run"] | {"rounds": 4},
    }
    return Config.of({**plain, **own, **keys}, root)


def naive(deltas_of, weights, options, seeds, lr=1.0, beta=0.9):
    """Andrew et al. 2021, Algorithm 1, for all sites in each round; deltas_of(weights, round) are theirs."""
    o = {"clip_lr": 0.2, "count_noise": 5.0, "quantile": 0.5} | options
    z, sigma_b, clip, v = o["noise_multiplier"], o["count_noise"], o["clip"], torch.zeros_like(weights)
    clips = []
    for number, seed in enumerate(seeds):
        stream, deltas = Keystream(seed.to_bytes(16, "little")), deltas_of(weights, number)
        z_delta = (z**-2 - (2 * sigma_b) ** -2) ** -0.5 if o["clip_lr"] else z
        total, below = torch.zeros_like(weights), 0
        for delta in deltas:
            total = total + delta * min(1.0, clip / float(delta.norm()))
            below += float(delta.norm()) <= clip
        total = total + torch.from_numpy(stream.normals(len(weights))) * z_delta * clip
        v = beta * v + total / len(deltas)
        weights = weights + lr * v
        if o["clip_lr"]:
            b = (below + sigma_b * stream.normals(1)[0]) / len(deltas)
            clip = clip * math.exp(-o["clip_lr"] * (b - o["quantile"]))
        clips.append(clip)
    return weights, clips


class Given:
    """What a site has in a round (learning.Local), where its delta is known already."""

    def __init__(self, clip):
        self.down = {"clip": torch.tensor([clip], dtype=F64)}


@pytest.mark.parametrize("options", [ADAPTIVE, ADAPTIVE | {"clip_lr": 0.0}], ids=["adaptive", "fixed"])
def test_dp_fedavg_is_algorithm_1_of_andrew_et_al(options):
    strategy, seeds = build("dp_fedavg", options), list(range(5, 15))

    def deltas_of(weights, number):
        generator = torch.Generator().manual_seed(number)
        return [0.1 * torch.randn(50, dtype=F64, generator=generator) - 0.05 * weights for _ in range(7)]

    weights = start = torch.randn(50, dtype=F64, generator=torch.Generator().manual_seed(1))
    state, clips = strategy.init(weights), []
    for number, seed in enumerate(seeds):
        local = Given(float(state["clip"]))
        found = [strategy.finish(type("Found", (), {"delta": d}), local) for d in deltas_of(weights, number)]
        assert all(c.weight == 1.0 and float(c.delta.norm()) <= local.down["clip"] + 1e-12 for c in found)
        scalars = {"below": sum(c.scalars["below"] for c in found)} if strategy.clip_lr else {}
        assert scalars or not found[0].scalars
        mean = sum(c.delta for c in found) / len(found)
        sums = RoundSums(mean, number, weight=float(len(found)), scalars=scalars, seed=seed)
        weights, state = strategy.step(weights.clone(), state, sums)
        clips.append(float(state["clip"]))
    expected, expected_clips = naive(deltas_of, start, options, seeds)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
    assert clips == pytest.approx(expected_clips, abs=1e-10)


def test_the_clip_follows_the_quantile_of_the_norms():
    options = {"clip": 100.0, "clip_lr": 0.3, "quantile": 0.7, "noise_multiplier": 1e-3, "count_noise": 1e-2}
    strategy = build("dp_fedavg", options)
    norms, state = np.linspace(0.1, 1.0, 50), strategy.init(torch.zeros(3))
    for number in range(200):
        below = float((norms <= float(state["clip"])).sum())
        sums = RoundSums(torch.zeros(3), number, weight=50.0, scalars={"below": below}, seed=number)
        _, state = strategy.step(torch.zeros(3), state, sums)
    assert float(state["clip"]) == pytest.approx(np.quantile(norms, 0.7), rel=0.05)


def test_noise_has_the_standard_deviation_that_is_paid_for_and_the_counts_noise_its_part():
    strategy = build("dp_fedavg", ADAPTIVE | {"momentum": 0.0})
    size, sums = 40_000, {"weight": 10.0, "scalars": {"below": 6.0}}
    weights = torch.zeros(size, dtype=F64)
    noise, _ = strategy.step(
        weights, strategy.init(weights), RoundSums(torch.zeros(size, dtype=F64), seed=3, **sums)
    )
    z_delta = (0.8**-2 - 3.0**-2) ** -0.5
    assert float(noise.std()) == pytest.approx(z_delta * 0.3 / 10, rel=5 / math.sqrt(2 * size))
    clips = []
    for seed in range(2000):
        one = torch.zeros(1, dtype=F64)
        _, state = strategy.step(one, strategy.init(one), RoundSums(one.clone(), seed=seed, **sums))
        clips.append(-math.log(float(state["clip"]) / 0.3) / 0.5 + 0.6)  # b
    assert np.std(clips) == pytest.approx(1.5 / 10, rel=5 / math.sqrt(4000))
    assert np.mean(clips) == pytest.approx(0.6, abs=5 * 0.15 / math.sqrt(2000))


def test_both_noises_together_hide_what_the_multiplier_says():
    """A site's whole data change the sum by 2C at most and its count by one: in units of the noises that is a
    distance of 2/z, as without the count."""
    strategy = build("dp_fedavg", ADAPTIVE)
    distance = math.hypot(2 / strategy.sum_noise, 1 / strategy.count_noise)
    assert distance == pytest.approx(1 / strategy.sigma)


def run(cfg, **about):
    log = Log()
    asyncio.run(simulate(cfg, emit=log, **about))
    with closing(RunStore(cfg.simulate_dir, read_only=True)) as store:
        return log, store.latest().weights.digest


@pytest.mark.parametrize("masks", [False, True])
def test_a_run_tells_what_its_models_cost_and_repeats_itself(tmp_path, masks):
    secagg = {"secagg": {"enabled": masks, "clip": 1.0}}
    found = []
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        found.append(run(config(tmp_path / name, strategy=ADAPTIVE, **secagg)))
    (log, first), (_, second) = found
    assert first == second
    told = log.of("privacy_spent")
    assert [(e["site"], e["round"], e["releases"]) for e in told] == [
        ("aggregator", n, n) for n in range(1, 5)
    ]
    assert told[-1]["epsilon"] == epsilon([Release("gaussian", 0.4, steps=4)], 1e-5)
    plan = round_plan(config(tmp_path / "1", strategy=ADAPTIVE, **secagg)).privacy
    assert (plan.epsilon, plan.where, plan.updates) == (told[-1]["epsilon"], "aggregator", 4)


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_interrupted(tmp_path):
    cfg = config(tmp_path, strategy=ADAPTIVE)
    _, whole = run(cfg)
    short = Config.of(
        {**cfg.table(), "run": cfg.table()["run"] | {"rounds": 2}, "strategy": cfg.table()["strategy"]},
        tmp_path,
    )
    run(short, fresh=True)
    log, resumed = run(cfg)
    assert resumed == whole
    assert [e["releases"] for e in log.of("privacy_spent")] == [3, 4]


def test_models_that_the_ledger_does_not_know_stop_the_run(tmp_path):
    cfg = config(tmp_path, strategy=ADAPTIVE)
    run(cfg)
    for path in cfg.simulate_dir.glob("releases*"):
        path.unlink()
    with pytest.raises(Damaged, match=r"knows of the models of 0 rounds, and this run has had 4"):
        run(cfg)


# --- an aggregator's seeds


def summed(value, weight=4.0, buffers=0.0):
    delta = Arena.zeros(SCHEMA)
    delta.views()["w"].fill_(value)
    delta.views()["mean"].fill_(buffers)
    return Aggregate(delta, {}, ["a"], weight=weight, scalars={"below": 2.0})


def test_the_same_sums_have_the_same_noise_and_others_another_also_after_a_restart(tmp_path):
    """Two models of one sum with two noises are two releases; two sums with one have a difference without."""
    cfg, seeds, counts = config(tmp_path, strategy=ADAPTIVE), [], []
    for _ in range(2):
        with closing(RunStore(tmp_path / "run")) as store:
            log = Log()
            noise = CentralNoise(cfg, store, log, 0.4, 1e-5)
            sums = [(0, summed(1.0)), (0, summed(2.0)), (1, summed(1.0)), (0, summed(1.0, 5.0))]
            found = [noise.seed(number, each) for number, each in sums]
            for (number, _), seed in zip(sums, found, strict=True):
                noise.releases(number, seed)
            seeds.append(found)
            counts.append(len(log.of("privacy_spent")))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4
    assert counts == [4, 0]
    with closing(RunStore(tmp_path / "other")) as store:  # a run of its own has a secret of its own
        assert CentralNoise(cfg, store, Log(), 0.4, 1e-5).seed(0, summed(1.0)) not in seeds[0]


def test_models_whose_buffers_move_are_refused(tmp_path):
    with closing(RunStore(tmp_path / "run")) as store:
        noise = CentralNoise(config(tmp_path), store, Log(), 0.4, 1e-5)
        with pytest.raises(ConfigError, match="GroupNorm"):
            noise.seed(0, summed(1.0, buffers=0.1))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"secagg": {"enabled": False}, "aggregation": {"rule": "median"}}, "strategy.kind|aggregation.rule"),
        ({"secagg": {"enabled": True, "groups": 3}, "aggregation": {"rule": "median"}}, "rule"),
        ({"asynchronous": {"enabled": True}, "secagg": {"enabled": False}}, "asynchronous"),
        ({"compression": {"down": "sign"}, "secagg": {"enabled": False}}, "compression.down"),
    ],
)
def test_settings_under_which_noise_would_hide_less_are_refused(tmp_path, keys, text):
    cfg = config(tmp_path, **keys)
    for options in (ADAPTIVE, ADAPTIVE | {"clip_lr": 0.0}):
        with pytest.raises(ConfigError, match=text):
            check_strategy(cfg, build("dp_fedavg", options))


def test_a_count_with_too_little_noise_is_refused():
    with pytest.raises(ConfigError, match=r"strategy.count_noise: 1.0 must be more than half"):
        build("dp_fedavg", {"noise_multiplier": 2.0, "count_noise": 1.0})
    build("dp_fedavg", {"noise_multiplier": 2.0, "count_noise": 1.0, "clip_lr": 0.0})
