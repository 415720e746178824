"""What a strategy can't be combined with is refused before anything is trained, with what to change."""

from types import SimpleNamespace

import pytest

from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.runtime.datacenters.datacenter import Datacenter
from fedtrain.runtime.peers.gossip_setup import algorithm_of
from fedtrain.runtime.star.combinations import check_noise, check_strategy
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.strategies import build
from tests import toy

ASYNCHRONOUS = {"asynchronous": {"enabled": True, "buffer": 3}, "strategy": {"fraction": 1.0}}
MASKED = {"secagg": {"enabled": True}, "strategy": {"min_sites": 3}}
SAYS = {
    "scaffold": "keeps a memory at its sites",
    "ditto": "keeps a memory at its sites",
    "fedbn": "keeps a memory at its sites",
    "ifca": "keeps a memory at its sites",
    "fednova": "trains in a way of its own",
    "fedsgd": "trains in a way of its own",
    "cyclic": "asks one site a round",
}


def config(folder, kind, *sections, **options):
    table = toy.config(folder, kind, options, train={"batch_size": 0 if kind == "fedsgd" else 8}).table()
    for section in sections:
        for name, keys in section.items():
            table[name] = {**table.get(name, {}), **keys}
    return Config.of(table, folder)


def check(cfg):
    check_strategy(cfg, build(cfg.strategy.kind, cfg.strategy.options, cfg.root))


@pytest.mark.parametrize(("kind", "says"), SAYS.items())
def test_buffered_asynchrony_gossip_and_noise_take_plain_strategies_alone(tmp_path, kind, says):
    with pytest.raises(ConfigError, match=f"asynchronous.enabled: {kind} {says}.*enabled = false"):
        check(config(tmp_path, kind, ASYNCHRONOUS))
    private = config(tmp_path, kind, {"privacy": {"clip": 1.0, "noise_multiplier": 1.0}})
    with pytest.raises(ConfigError, match=f"privacy.noise_multiplier: {kind} {says}.*Use another strategy"):
        check_noise(private, build(kind, private.strategy.options))
    with pytest.raises(ConfigError, match=f"strategy.kind: {kind} {says}, and peers exchange whole models"):
        algorithm_of(config(tmp_path, kind))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"local": ["head.*"]}, "keeps a memory at its sites"),
        ({"fixed": ["head.*"]}, "leaves tensors out of the training"),
    ],
)
def test_gossip_exchanges_whole_models_alone(tmp_path, options, says):
    with pytest.raises(ConfigError, match=f"strategy: fedavg {says}, and peers exchange whole models alone"):
        algorithm_of(config(tmp_path, "fedavg", **options))


@pytest.mark.parametrize("kind", ["scaffold", "fednova", "fedsgd", "fedbn"])
def test_the_ranks_of_a_site_exchange_deltas_alone(tmp_path, kind):
    ranks = config(tmp_path, kind, {"parallel": {"ranks": 2}})
    with pytest.raises(ConfigError, match=f"parallel.ranks: {kind} .*Set it to 1"):
        Workbench(ranks, simulated=False)


ISLANDS = {"sync": "local", "carry": False}
MESH = SimpleNamespace(from_first=None)


@pytest.mark.parametrize(
    ("kind", "parallel", "says"),
    [
        ("scaffold", {"carry": True}, r"carry: scaffold keeps a memory.*Set parallel.carry = false"),
        ("fednova", {"fragments": 2}, r"fragments: fednova .*whole models after whole rounds\. Leave it out"),
        ("mimelite", {"overlap": 1}, r"overlap: mimelite .*Leave it out"),
        ("fedbn", {"mix": 0.5}, r"mix: fedbn .*Leave it out"),
        ("scaffold", {"zero": 3}, r"zero: .*needs the whole model\. Set parallel.zero = 0 or 1, or use a"),
        (
            "qfedavg",
            {"tp": 2},
            r"tp: .*needs the whole model\. Set parallel.tp = 1, .*such as fedavg, fedprox",
        ),
        ("cyclic", {}, r"sync: cyclic asks one site a round, .*islands would wait\. Use a federation"),
    ],
)
def test_islands_that_are_sites_have_whole_models_and_whole_rounds(tmp_path, kind, parallel, says):
    islands = config(tmp_path, kind, {"parallel": ISLANDS | parallel})
    with pytest.raises(ConfigError, match=f"parallel.{says}"):
        Datacenter(islands, toy.Toy(), MESH, None, lambda event: None)


def test_islands_check_what_a_formula_assumes(tmp_path):
    islands = config(tmp_path, "scaffold", {"parallel": ISLANDS, "train": {"momentum": 0.9}})
    with pytest.raises(ConfigError, match="Scaffold's formula holds for plain SGD"):
        Datacenter(islands, toy.Toy(), MESH, None, lambda event: None)


def test_a_round_of_one_site_is_neither_a_larger_one_nor_masked(tmp_path):
    check(config(tmp_path, "cyclic", min_sites=1))
    for section in ({}, {"secagg": {"enabled": True}, "strategy": {"min_sites": 1}}):
        with pytest.raises(
            ConfigError, match=r"cyclic asks one site a round\. Set strategy.min_sites = 1 and"
        ):
            check(config(tmp_path, "cyclic", section))


@pytest.mark.parametrize(
    ("kind", "names"), [("scaffold", "dc"), ("mimelite", "gradient"), ("fednova", "weighted_steps")]
)
def test_a_robust_rule_does_not_guard_what_comes_beside_a_delta(tmp_path, kind, names):
    robust = {"aggregation": {"rule": "median"}, "strategy": {"min_sites": 3}}
    with pytest.raises(ConfigError, match=f'deltas of {kind}, and not its {names}, .*rule = "mean"'):
        check(config(tmp_path, kind, robust))
    check(config(tmp_path, "fedbn", robust))


@pytest.mark.parametrize("kind", ["scaffold", "feddyn", "mimelite", "ifca"])
def test_what_sites_send_as_it_was_summed_is_not_compressed(tmp_path, kind):
    with pytest.raises(ConfigError, match=f"compression.up: {kind} needs what its sites send as it was"):
        check(config(tmp_path, kind, {"compression": {"up": "topk:0.1"}}))
    check(config(tmp_path, "ditto", {"compression": {"up": "topk:0.1"}}))


@pytest.mark.parametrize(("kind", "names"), [("scaffold", "c"), ("mimelite", "m"), ("ifca", "model1")])
def test_state_that_goes_out_with_the_weights_comes_in_no_patch(tmp_path, kind, names):
    with pytest.raises(ConfigError, match=f"compression.down: {kind} sends {names} with the weights"):
        check(config(tmp_path, kind, {"compression": {"down": "quantize:8"}}))
    check(config(tmp_path, "ditto", {"compression": {"down": "quantize:8"}}))


def test_masks_shorten_no_delta_that_its_site_remembers(tmp_path):
    limits = {"limits": {"max_norm": 1.0}}
    for kind in ("scaffold", "feddyn"):
        with pytest.raises(ConfigError, match=f"limits.max_norm: .* after {kind} has remembered it"):
            check(config(tmp_path, kind, MASKED, limits))
        check(config(tmp_path, kind, limits))
    check(config(tmp_path, "ditto", MASKED, limits))


def test_a_formula_for_plain_sgd_refuses_another_optimizer(tmp_path):
    for kind in ("scaffold", "fednova", "qfedavg", "mimelite", "fedsgd"):
        for train in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"optimizer": "adam"}):
            with pytest.raises(
                ConfigError, match=f"(?i)train.optimizer: {kind}'s formula holds for plain SGD"
            ):
                Workbench(config(tmp_path, kind, {"train": train}), simulated=True)
        with pytest.raises(ConfigError, match=f"(?i)train.decay: {kind}'s formula holds for a constant rate"):
            Workbench(config(tmp_path, kind, {"train": {"decay": "cosine"}}), simulated=True)
