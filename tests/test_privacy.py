"""Local differential privacy: the noise is what it says, and so is its price."""

import asyncio
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config
from fedtrain.errors import BadUpdate, ConfigError, Damaged
from fedtrain.keystream import Keystream
from fedtrain.messages import Train, Update
from fedtrain.privacy import Gaussian, Release, epsilon
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.sites.privacy import noised
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.sites.spent import Spent
from fedtrain.runtime.trainers import ranks
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Ledger
from fedtrain.store.disk import Kept
from fedtrain.training.engine import steps_in_round
from fedtrain.training.examples import examples_of
from fedtrain.training.local import Engine

from .test_gossip_peers import PLAIN, Log, arena, config, simulated

WIDE = Schema((TensorSpec("w", (400_000,), "float32", True), TensorSpec("b", (1000,), "float64", True)))
BUFFERED = Schema((TensorSpec("w", (5,), "float32", True), TensorSpec("mean", (3,), "float32", False)))
KEY = bytes(range(16))


def private(root, name="run", **keys):
    plain = config(root, name, task=keys.pop("task", "task:Linear"))
    privacy = {"noise_multiplier": 0.5, "clip": 0.2} | keys.pop("privacy", {})
    return Config.of({**plain.table(), "privacy": privacy, **keys}, root)


def local(sigma, releases):
    return epsilon([Release("gaussian", sigma, steps=releases)], 1e-5)


def test_the_table_on_the_page_is_what_the_accountant_says():
    page = (Path(__file__).parents[1] / "docs" / "privacy.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 3
    for multiplier, rounds, eps in rows:
        sigma = Gaussian(1.0, float(multiplier)).sigma
        assert local(sigma, int(rounds)) == pytest.approx(float(eps), abs=0.005)


# --- the noise


def test_noise_is_standard_normal_and_its_pieces_are_independent():
    draws = Keystream(KEY)
    a, b = draws.normals(200_000), draws.normals(200_001)
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


def test_a_model_whose_buffers_move_is_refused(tmp_path):
    delta = Arena.zeros(BUFFERED)
    delta.views()["mean"][1] = 0.1
    with pytest.raises(ConfigError, match="GroupNorm"):
        noised(private(tmp_path), Update(delta=delta, num_examples=1.0), "a", 0, delta, True)


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


class Ranks:
    """Stands for the ranks of a site, which give an update and know nothing of noise."""

    def __init__(self, engine, load):
        self._engine, self._load = engine, load
        self.schema, self.frozen, self.initial = engine.schema, engine.frozen, engine.initial

    def train(self, site, round, weights, out):
        return self._engine.train(site, self._load("data", site), round, weights, out)


@pytest.mark.parametrize("up", ["", "topk:0.5"])
def test_updates_of_several_ranks_leave_with_noise_and_compressed(tmp_path, monkeypatch, up):
    settings = private(tmp_path, parallel={"ranks": 2}, compression={"up": up}, secagg={"enabled": False})

    def start(config, task, load, *rest):
        return Ranks(Engine(task, config.train, config.run.seed), load)

    monkeypatch.setattr(ranks, "start_ranks", start)
    bench = Workbench(settings, simulated=False)
    found = []
    for _ in range(2):
        out = Arena.zeros(bench.description.update)
        assert bench.train("a", 0, bench.initial(), out).metrics == {}
        found.append(out.data.clone())
    assert not torch.equal(*found)  # a real site's noise is another one each time
    assert (bench.description.update.nbytes < bench.description.schema.nbytes) == bool(up)


def test_what_was_spent_is_on_disk_before_anything_leaves_and_survives_a_restart(tmp_path):
    log, settings = Log(), private(tmp_path)
    for n in (1, 2, 3):
        Spent(settings, tmp_path, log).trained("a", n - 1, 8.0)
    assert [e["releases"] for e in log.of("privacy_spent")] == [1, 2, 3]
    assert log.of("privacy_spent")[-1]["epsilon"] == local(0.25, 3)
    Spent(config(tmp_path), tmp_path / "none", log).trained("a", 0, 8.0)
    assert len(log.of("privacy_spent")) == 3


class Trainer:
    """Stands for a site's trainer process: every update is zero."""

    async def train(self, site, round, weights, out, counted):
        out.write_bytes(Arena.zeros(PLAIN).payload)
        return Update(delta=ArenaFile(PLAIN, out, Arena.zeros(PLAIN).digest), num_examples=1.0, metrics={})


def test_the_price_of_an_update_is_that_of_the_settings_it_was_made_with(tmp_path):
    """A changed file changes what comes, not what was given away; a larger delta makes nothing cheaper."""
    log = Log()
    Spent(private(tmp_path, privacy={"noise_multiplier": 2.0}), tmp_path, log).trained("a", 0, 8.0)
    later = private(tmp_path, privacy={"noise_multiplier": 8.0, "delta": 1e-3})
    Spent(later, tmp_path, log).trained("a", 1, 8.0)
    told = log.of("privacy_spent")
    assert told[-1]["epsilon"] == epsilon([Release("gaussian", 1.0), Release("gaussian", 4.0)], 1e-5)
    assert told[-1]["delta"] == 1e-5
    Spent(config(tmp_path), tmp_path, log).trained("a", 2, 8.0)  # without noise
    assert Spent(later, tmp_path, log).epsilon == told[-1]["epsilon"] > told[0]["epsilon"]


def test_a_count_of_releases_is_read_on(tmp_path):
    Kept(tmp_path / "releases", int, "").write(3)
    log, settings = Log(), private(tmp_path)
    Spent(settings, tmp_path, log).trained("a", 9, 8.0)
    assert sorted(p.name for p in tmp_path.glob("releases*")) == ["releases.jsonl", "releases.jsonl.copy"]
    found = Spent(settings, tmp_path, log)
    assert (found.releases, found.epsilon) == (4, local(0.25, 4))


def test_a_ledger_without_what_counted_stops_the_site(tmp_path):
    spent = Spent(private(tmp_path), tmp_path, Log())
    spent.check(-1)
    with pytest.raises(
        Damaged, match=r"releases.jsonl is empty, and an update of this site for round 1 is in"
    ):
        spent.check(0)
    spent.trained("a", 3, 8.0)
    spent.check(3)
    with pytest.raises(Damaged, match=r"ends at round 4, and an update of this site for round 6"):
        spent.check(5)


def test_releases_that_protect_examples_protect_no_site(tmp_path):
    cfg = private(tmp_path, privacy={"unit": "example"}, train={"batch_size": 32})
    spent = Spent(cfg, tmp_path, Log())
    spent.trained("a", 0, 80.0)
    assert spent.epsilon == epsilon([Release("gaussian", 0.5, 32 / 80, 3)], 1e-5)
    with pytest.raises(ConfigError, match="1 releases of this run protect single examples only"):
        Spent(private(tmp_path), tmp_path, Log())


@pytest.mark.parametrize(
    "keys", [{}, {"local_steps": 7}, {"batch_size": 0}, {"batch_size": 500}, {"drop_last": True}]
)
@pytest.mark.parametrize("count", [1, 31, 32, 80])
def test_the_steps_that_are_paid_for_are_those_that_are_taken(tmp_path, keys, count):
    settings = private(tmp_path, train={"local_epochs": 3} | keys)
    examples = examples_of((torch.zeros(count, 2),))
    assert settings.train.steps_in_round(count) == steps_in_round(settings.train, examples)


def test_a_site_pays_for_each_update_once_however_often_it_is_asked(tmp_path):
    log, ledger = Log(), Ledger(tmp_path / "site")
    spent = Spent(private(tmp_path), ledger.folder, log)
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
    assert spent[-1]["epsilon"] == local(0.25, 6)
    assert all("loss" not in e["metrics"] for e in log.of("round_committed"))


def test_what_adds_no_noise_refuses_to_run_with_privacy(tmp_path):
    with pytest.raises(ConfigError, match="stacked"):
        Workbench(private(tmp_path, simulate={"engine": "stacked"}), simulated=True)
    with pytest.raises(ConfigError, match="a datacenter adds no noise"):
        datacenter.run(private(tmp_path), emit=Log())


@pytest.mark.parametrize(
    "keys",
    [
        {"clip": 0.0}, {"noise_multiplier": -1.0}, {"delta": 1.0}, {"unit": "person"}, {"where": "server"},
        {"unit": "example", "where": "sum"},
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(tmp_path, keys):
    with pytest.raises(ConfigError, match=r"privacy\."):
        private(tmp_path, privacy=keys)
