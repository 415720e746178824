"""Sites that draw their examples from the pool, each for itself, where the pool is too small to be dealt."""

import time

import numpy as np
import pytest
import torch

from fedtrain import Task
from fedtrain.config import SimulateConfig
from fedtrain.errors import ConfigError
from fedtrain.population import Population
from fedtrain.training.drawn import Drawn
from fedtrain.training.partition import SimulatedSites, partition

LABELS = np.repeat(np.arange(10), 300)[np.random.RandomState(0).permutation(3000)]
NONE = np.zeros(3000, np.int64)
SPECS = {"iid": 0.0, "dirichlet": 0.3, "shards": 2.0, "quantity": 0.5}
SITES = Population(3000)


def drawn(kind, value=None, examples=20, seed=5):
    labels = LABELS if kind in ("dirichlet", "shards") else NONE
    return Drawn(labels, kind, SPECS[kind] if value is None else value, examples, seed)


@pytest.mark.parametrize("kind", SPECS)
def test_a_sites_examples_depend_on_the_seed_and_its_name_alone(kind):
    sites, again, other = drawn(kind), drawn(kind), drawn(kind, seed=6)
    first = [sites.part(site) for site in SITES[:50]]
    assert all((again.part(SITES[i]) == first[i]).all() for i in reversed(range(50)))
    assert any(len(a := other.part(SITES[i])) != len(first[i]) or (a != first[i]).any() for i in range(50))
    for part in first:
        assert len(part) >= 1
        assert (np.diff(part) > 0).all(), "no example is twice at a site"
        assert part.min() >= 0
        assert part.max() < 3000


@pytest.mark.parametrize(
    ("kind", "value"),
    [("dirichlet", 0.3), ("dirichlet", 5.0), ("quantity", 0.5), ("shards", 2.0), ("iid", 0)],
)
def test_drawn_sites_have_the_law_of_dealt_ones(kind, value):
    labels = np.tile(LABELS, 20)  # so many that 20 for each of 3,000 sites can be dealt
    spec = kind if kind == "iid" else f"{kind}:{value:g}"
    dealt = partition(labels, spec, 3000, 1)
    sites = Drawn(labels if kind in ("dirichlet", "shards") else np.tile(NONE, 20), kind, value, 20, 5)
    found = [sites.part(site) for site in SITES]

    def law(parts):
        sizes = np.array([len(part) for part in parts])
        most = [np.bincount(labels[part]).max() / len(part) for part in parts]  # of the commonest label
        return sizes.mean(), sizes.std(), np.quantile(sizes, [0.1, 0.5, 0.9]), np.mean(most)

    mean, spread, quantiles, skew = law(found)
    expected = law(dealt)
    assert mean == pytest.approx(expected[0], rel=0.05)
    assert spread == pytest.approx(expected[1], rel=0.1, abs=0.2)
    assert quantiles == pytest.approx(expected[2], rel=0.1, abs=1)
    assert skew == pytest.approx(expected[3], rel=0.05)
    used = np.bincount(np.concatenate(found), minlength=len(labels))
    assert (used > 0).mean() > 0.5, "all of the pool is drawn from"


def test_a_site_of_a_small_dirichlet_number_still_has_an_example():
    sites = drawn("dirichlet", 0.001)
    sizes = [len(sites.part(site)) for site in SITES]
    assert min(sizes) == 1
    assert max(sizes) <= 3000
    alone = [LABELS[sites.part(site)[0]] for site, size in zip(SITES, sizes, strict=True) if size == 1]
    assert np.bincount(alone, minlength=10).min() > len(alone) / 20, "no label is preferred"


@pytest.mark.parametrize("kind", SPECS)
def test_other_examples_are_drawn_as_the_sites_own_are(kind):
    sites = drawn(kind, examples=300)
    others = np.arange(1100) % 11 if kind in ("dirichlet", "shards") else np.zeros(1100, np.int64)
    for site in SITES[:20]:
        part, found = sites.part(site), sites.alike(site, others)
        assert (np.diff(found) > 0).all()
        for label in range(others.max() + 1):
            have = np.count_nonzero(sites.labels[part] == label) / max(
                1, np.count_nonzero(sites.labels == label)
            )
            have = len(part) / 3000 if label == 10 else have
            wanted = have * np.count_nonzero(others == label)
            assert abs(np.count_nonzero(others[found] == label) - wanted) <= 1
        assert (sites.alike(site, others) == found).all()


@pytest.mark.parametrize(("kind", "examples"), [("iid", 3001), ("shards", 1)])
def test_examples_that_cannot_be_drawn_are_refused_with_how_many_can(kind, examples):
    with pytest.raises(ConfigError, match=r"simulate\.examples: .* use [12] to 3000"):
        drawn(kind, examples=examples)


class Pool(Task):
    def data(self, site):
        return torch.arange(3000), torch.from_numpy(LABELS)

    def eval_data(self, site):
        return torch.arange(550), torch.arange(550) % 11 + 5


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.3", "shards:2", "quantity:0.5"])
def test_a_million_sites_draw_from_a_pool_that_is_loaded_once(spec):
    sites = SimulatedSites(Pool(), SimulateConfig(sites=1_000_000, partition=spec, examples=20), 3)
    x, y = sites.data("site-0777777")
    assert (torch.from_numpy(LABELS)[x] == y).all()
    assert sites.part("site-0777777").tolist() == x.tolist()
    xs, ys = sites.eval_set("site-0777777")
    assert (xs % 11 + 5 == ys).all()
    assert len(xs) >= 1
    with pytest.raises(ConfigError, match=r"have each site draw its own with simulate\.examples"):
        SimulatedSites(Pool(), SimulateConfig(sites=1_000_000, partition=spec), 3).data("site-0777777")


def test_labels_of_other_examples_are_matched_with_those_of_the_pool():
    sites = SimulatedSites(Pool(), SimulateConfig(sites=10, partition="dirichlet:0.1", examples=600), 3)
    for site in sites.names:
        labels = torch.from_numpy(LABELS)[torch.from_numpy(sites.part(site))]
        (_, y) = sites.eval_set(site)
        had = {*labels.tolist()}
        assert {label for label in y.tolist() if label < 10} <= had


def test_drawing_a_site_takes_as_long_from_a_larger_pool():
    def seconds(copies):
        sites = Drawn(np.tile(LABELS, copies), "dirichlet", 0.3, 20, 5)
        sites.part(SITES[0])
        times = []
        for site in SITES[:200]:
            began = time.perf_counter()
            sites.part(site)
            times.append(time.perf_counter() - began)
        return min(times)

    assert seconds(100) < 5 * seconds(1)
