"""A site of a dealt pool has simulate.min_examples at least, and the log says what that changed."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtrain.config import Config, SimulateConfig
from fedtrain.digest import seed_of
from fedtrain.errors import ConfigError
from fedtrain.runtime.simulations import gossip_simulation
from fedtrain.runtime.simulations.simulation import agreed, simulate
from fedtrain.runtime.trained import as_trained
from fedtrain.training.drawn import Drawn
from fedtrain.training.partition import KINDS, SimulatedSites, partition
from fedtrain.training.task import load_task

TASK = """
import torch
from torch import nn

import fedtrain


class Pool(fedtrain.Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def data(self, site):
        x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(1))
        return x, (x[:, 0] > 0).long()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
LABELS = np.random.RandomState(0).randint(0, 5, 300)
SPECS = ["iid", "dirichlet:0.05", "dirichlet:0.5", "shards:1", "shards:2", "quantity:0.1"]


def project(root, **sections):
    (root / "pool_task.py").write_text(TASK)
    table = {
        "run": {"name": "r", "task": "pool_task:Pool", "rounds": 1},
        "train": {"batch_size": 16, "drop_last": True},
        "simulate": {"sites": 50, "partition": "dirichlet:0.1", "workers": 0},
    }
    for name, keys in sections.items():
        table[name] = table.get(name, {}) | keys
    return Config.of(table, root)


def told(run, config):
    notices = []
    asyncio.run(run(config, emit=lambda e: notices.append(e.text) if e.kind == "notice" else None))
    return [text for text in notices if "min_examples" in text]


@given(st.sampled_from(SPECS), st.integers(1, 60), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_each_site_has_the_least_and_each_example_one_site(spec, sites, seed, least):
    parts = partition(LABELS, spec, sites, seed, least)
    assert min(map(len, parts)) >= least
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    assert all((np.diff(part) > 0).all() for part in parts)
    assert all(
        (a == b).all() for a, b in zip(parts, partition(LABELS, spec, sites, seed, least), strict=True)
    )


@given(st.sampled_from(SPECS), st.integers(1, 60), st.integers(0, 1000))
def test_a_partition_with_enough_at_each_site_stays_as_it_is(spec, sites, seed):
    before = partition(LABELS, spec, sites, seed)
    after = partition(LABELS, spec, sites, seed, min(map(len, before)))
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_the_examples_that_a_site_lacks_come_from_the_largest():
    before = partition(LABELS, "dirichlet:0.05", 20, 3)
    after = partition(LABELS, "dirichlet:0.05", 20, 3, 4)
    small = [i for i, part in enumerate(before) if len(part) < 4]
    assert small
    for i, (was, now) in enumerate(zip(before, after, strict=True)):
        if i in small:
            assert len(now) == 4
        else:
            assert {*now} <= {*was}
    gave = [len(now) for was, now in zip(before, after, strict=True) if len(now) < len(was)]
    kept = [len(now) for i, now in enumerate(after) if i not in small]
    assert max(kept) - max(gave) <= 1  # none that was larger was spared


def test_a_pool_that_is_too_small_for_all_sites_names_both_keys(tmp_path):
    with pytest.raises(ConfigError) as error:
        partition(10, "iid", 6, 0, 2)
    assert str(error.value) == (
        "simulate.partition: 10 examples can't be dealt to 6 sites as 'iid', at least 12 are needed. Lower "
        "simulate.sites = 6 or simulate.min_examples = 2, or have each site draw its own with "
        "simulate.examples."
    )
    with pytest.raises(ConfigError, match=r"simulate\.min_examples = 40"):
        told(simulate, project(tmp_path, simulate={"min_examples": 40}))


@pytest.mark.parametrize("run", [simulate, gossip_simulation.simulate], ids=["star", "gossip"])
def test_sites_with_batchnorm_train_on_a_skewed_pool_and_a_line_says_why(tmp_path, run):
    """The case dirichlet-batchnorm: a site that is dealt one example can't train with BatchNorm."""
    config = project(tmp_path)
    sizes = [len(part) for part in partition(labels(config), "dirichlet:0.1", 50, seed_of_pool(config))]
    few = sizes.count(1) + sizes.count(0)
    assert few
    (line,) = told(run, config)
    assert line.startswith(
        f"simulate.min_examples: dirichlet:0.1 gave {few} sites fewer than 2 examples (site-"
    )
    assert "examples moved to them from the largest sites" in line
    assert told(run, config) == []  # the run is over


def labels(config):
    return load_task(config.run.task, config.root).data("")[1].numpy()


def seed_of_pool(config):
    return seed_of(config.run.seed, "partition")


def test_where_nothing_is_moved_nothing_is_said(tmp_path):
    assert told(simulate, project(tmp_path, simulate={"partition": "iid"})) == []


def test_plan_and_pictures_deal_the_pool_as_the_run_does(tmp_path):
    config = project(tmp_path)
    sites = SimulatedSites(load_task(config.run.task, config.root), config.simulate, config.run.seed)
    dealt = [len(sites.data(name)[0]) for name in sites.names]
    assert (sum(dealt), min(dealt)) == (1000, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_that_draws_its_examples_has_the_least(kind):
    value, names = {"shards": 2.0, "iid": 0.0}.get(kind, 0.05), [f"site-{i:03}" for i in range(200)]
    codes = LABELS if kind in ("dirichlet", "shards") else np.zeros_like(LABELS)
    one = Drawn(codes, kind, value, 6, 7)
    more = Drawn(codes, kind, value, 6, 7, 3)
    for name in names:
        few, enough = one.part(name), more.part(name)
        assert len(enough) >= 3
        assert len({*enough}) == len(enough)
        if len(few) >= 3:
            assert (few == enough).all()


def test_fewer_drawn_examples_than_the_least_are_refused():
    with pytest.raises(ConfigError, match=r"simulate.examples: 2 .* simulate.min_examples = 3"):
        Drawn(LABELS, "iid", 0.0, 2, 0, 3)


def test_a_run_goes_on_with_its_own_least(tmp_path):
    """One from before there was the key goes on, and who evaluates a run deals the pool as the run did."""
    config = project(tmp_path)
    assert "simulate.min_examples" not in agreed(config)
    other = project(tmp_path, simulate={"min_examples": 3})
    assert agreed(other)["simulate.min_examples"] == "3"
    asyncio.run(simulate(other, emit=lambda _: None))
    assert as_trained(config, other.simulate_dir).simulate.min_examples == 3
    asyncio.run(simulate(config, emit=lambda _: None, fresh=True))
    assert as_trained(other, config.simulate_dir).simulate.min_examples == SimulateConfig().min_examples
