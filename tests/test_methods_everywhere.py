"""Strategies with a half of their own at the sites in every way of running: over mutual TLS as in a
simulation, and many sites at once as one by one."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.digest import digest_of
from fedtrain.errors import ConfigError
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store.database import Database
from fedtrain.store.memories import INDEX, STATES
from fedtrain.store.memory import NEVER
from fedtrain.transport.endpoints import RemoteCohort
from tests import toy
from tests.inprocess import certify, federation, final, simulated, with_port

SITES = toy.SITES[:4]
METHODS = {
    "scaffold": {"clip": 4.0},
    "feddyn": {},
    "fednova": {"max_examples": 64.0, "max_steps": 16.0},
    "ditto": {},
    "fedbn": {},
    "fedrep": {"local": ["head.*"], "head_epochs": 2},
    "ifca": {"spread": 0.5},
    "qfedavg": {"max_loss": 4.0, "max_h": 64.0},
    "mimelite": {},
    "per_fedavg": {"alpha": 0.2},
    "adaptive_fedprox": {"mu": 0.3, "patience": 1, "max_loss": 16.0, "max_examples": 64.0},
    "inexact_fedprox": {"stragglers": 0.9},
    "fedsgd": {},
    "cyclic": {"min_sites": 1},
}
REMEMBER = ("scaffold", "feddyn", "ditto", "fedbn", "fedrep", "ifca")
# Those that send one more vector, several, and a number beside the update.
MASKED_SIMULATED = ("scaffold", "ifca", "qfedavg")
OPEN, MASKED = {"secagg": {"enabled": False}}, {"secagg": {"enabled": True}}
CASES = [(kind, sums) for kind in METHODS for sums in (OPEN, MASKED) if sums is OPEN or kind != "cyclic"]


@pytest.fixture(autouse=True)
def all_have_joined(monkeypatch):
    """No round begins before all sites are there, though fewer are asked; and torch has one thread."""
    monkeypatch.setattr(toy, "SITES", SITES)
    members = RemoteCohort.members
    monkeypatch.setattr(RemoteCohort, "members", lambda cohort, at_least: members(cohort, len(SITES)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(folder, kind, *sections, **more):
    strategy = {"min_sites": 3, "fraction": 0.75, "attempts": 1, "round_deadline": "60s", **METHODS[kind]}
    passes = 2 if kind == "inexact_fedprox" else 1
    found = toy.config(
        folder, kind, strategy, run={"rounds": 3, "name": "r"}, evaluate={"every": 1},
        train={"batch_size": 0 if kind == "fedsgd" else 8, "local_epochs": passes},
    ).table()  # fmt: skip
    for section in (*sections, more):
        for name, keys in section.items():
            found[name] = {**found.get(name, {}), **keys}
    return Config.of(with_port(found), folder)


def remembered(folder, site):
    """The states that a site has in a run's folder, by round and content, as its own files are named."""
    memory = folder / "memory"
    if not (folder / "run.db").exists():
        return {path.name for path in (memory / site).glob("*")}
    if not memory.exists():
        return set()
    db = Database(memory / INDEX, read_only=True, remedy="", shared=True)
    rows = db.all("SELECT round, place, nbytes FROM states WHERE site = ? AND round > ?", (site, NEVER))
    db.close()
    data = (memory / STATES).read_bytes()
    return {f"{number}-{digest_of(data[at : at + nbytes])}" for number, at, nbytes in rows}


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certified")
    certify(toy.config(folder, "fedavg"), SITES)
    return folder / "certs"


@pytest.mark.parametrize(("kind", "sums"), CASES)
def test_over_mutual_tls_as_in_a_simulation(tmp_path, certs, kind, sums):
    cfg = config(tmp_path, kind, sums)
    (tmp_path / "certs").symlink_to(certs)
    events = federation(cfg, SITES)
    for masks in (True, False) if sums is MASKED and kind in MASKED_SIMULATED else (False,):
        cfg = config(tmp_path, kind, sums, simulate={"masks": masks})
        shutil.rmtree(cfg.simulate_dir, ignore_errors=True)
        alike = simulated(cfg, pytest.MonkeyPatch())
        assert final(cfg.run_dir).digest == final(cfg.simulate_dir).digest
        for site in SITES:
            found = remembered(cfg.site_dir(site), site)
            assert found == remembered(cfg.simulate_dir, site)
            assert bool(found) == (kind in REMEMBER)
        evaluated = [e["metrics"] for e in events.of("evaluated")]
        assert len(evaluated) == 3
        for one, other in zip(evaluated, alike.of("evaluated"), strict=True):
            assert one.items() <= other["metrics"].items()  # which tells of single sites, too


# --- Many sites at once


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("scaffold", {"clip": 4.0}),
        ("fednova", METHODS["fednova"]),
        ("feddyn", {}),
        ("fedprox", {"mu": 0.5}),
        ("adaptive_fedprox", METHODS["adaptive_fedprox"]),
        ("qfedavg", METHODS["qfedavg"]),
        ("mimelite", {}),
    ],
)
def test_stacked_sites_train_as_one_by_one(tmp_path, kind, options):
    looped, stacked = (
        toy.Toys(toy.config(tmp_path / engine, kind, options, simulate={"engine": engine})).run((3, 8))
        for engine in ("loop", "stacked")
    )
    assert looped.counted == stacked.counted
    np.testing.assert_allclose(stacked.weights, looped.weights, rtol=0, atol=1e-10)
    for site in toy.SITES if kind in REMEMBER else ():
        one, other = looped.memory(site), stacked.memory(site)
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_allclose(other[name], values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["ditto", "fedrep", "ifca", "fedsgd", "per_fedavg", "fedbn"])
def test_a_stack_refuses_a_strategy_whose_sites_it_would_train_otherwise(tmp_path, kind):
    options = METHODS.get(kind, {})
    cfg = toy.config(tmp_path, kind, options, simulate={"engine": "stacked"}, train={"batch_size": 0})
    why = "leaves tensors at their sites" if kind in ("fedbn", "fedrep") else "trains in a way of its own"
    with pytest.raises(ConfigError, match=rf'"stacked" can\'t train this: the strategy {why}.*"loop"'):
        Workbench(cfg, simulated=True)


# --- Workers


def bits(cfg):
    """The model, and the names of what sites remember, which say what is in it."""
    return final(cfg.simulate_dir).digest, {site: remembered(cfg.simulate_dir, site) for site in SITES}


@pytest.mark.parametrize("kind", ["scaffold", "ditto", "fedbn", "per_fedavg", "inexact_fedprox"])
def test_any_number_of_workers_gives_the_same_bits(tmp_path, kind):
    found = []
    for workers in (1, 3, 8):
        cfg = config(tmp_path / str(workers), kind, OPEN)
        simulated(cfg, pytest.MonkeyPatch(), workers)
        found.append(bits(cfg))
    assert found[0] == found[1] == found[2]


TASK = "from tests.toy import Normed as Toy\n"


@pytest.mark.parametrize(("variant", "gradients"), [("FO", 2), ("HF", 4)])
def test_batchnorm_goes_on_through_all_gradients_of_all_steps_at_a_site(tmp_path, variant, gradients):
    cfg = toy.config(
        tmp_path, "per_fedavg", {"variant": variant}, train={"batch_size": 16, "local_epochs": 2}
    )
    (tmp_path / "toy_task.py").write_text(TASK)
    bench = Workbench(cfg, simulated=True)
    weights = bench.initial()
    update = bench.train("site0", 0, weights, Arena.zeros(weights.schema))
    passes = gradients * 6  # of 40 examples in batches of 16, twice
    assert int(update.delta.views()["1.num_batches_tracked"]) == passes
    assert update.num_examples == 40
    assert update.metrics["loss"][1] == 40 * 2 * gradients


@pytest.mark.slow(8)
@pytest.mark.parametrize("kind", ["scaffold", "ditto", "fedbn"])
def test_three_worker_processes_give_the_bits_of_none(tmp_path, monkeypatch, kind):
    found = []
    for workers in (0, 3):
        cfg = config(tmp_path / str(workers), kind, OPEN)
        (cfg.root / "toy_task.py").write_text(TASK)
        monkeypatch.chdir(cfg.root)
        asyncio.run(simulate(cfg, emit=lambda event: None, workers=workers))
        found.append(bits(cfg))
    assert found[0] == found[1]
