"""Dealing one pool of examples to many sites."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedtrain import Task
from fedtrain.config import SimulateConfig
from fedtrain.errors import ConfigError, TaskError
from fedtrain.population import Population
from fedtrain.training.partition import SimulatedSites, alike, draw, labels_of, partition

SPECS = ("iid", "dirichlet:0.3", "dirichlet:0.001", "shards:2", "quantity:0.5", "quantity:0.01")
LABELS = np.arange(1000) % 10


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SPECS),
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.integers(1, 40),
    st.integers(0, 2**63 - 1),
)
def test_every_example_goes_to_exactly_one_site_and_no_site_is_empty(spec, labels, sites, seed):
    if len(labels) < sites * (2 if spec == "shards:2" else 1):
        with pytest.raises(ConfigError, match=r"Lower simulate\.sites"):
            partition(labels, spec, sites, seed)
        return
    parts = partition(labels, spec, sites, seed)
    assert len(parts) == sites
    assert min(map(len, parts)) >= 1
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


@pytest.mark.parametrize("spec", SPECS)
def test_other_examples_are_dealt_as_those_that_a_partition_dealt(spec):
    parts, others = partition(LABELS, spec, 20, 7), np.arange(3000) % 11  # one label is new
    by_label = spec.startswith(("dirichlet", "shards"))
    labels, known = (LABELS, others) if by_label else (np.zeros(1000, int), np.zeros(3000, int))
    found = alike(parts, labels, known, 3)
    assert sorted(np.concatenate(found)) == list(range(3000))
    for label in np.unique(labels):
        ratio = np.count_nonzero(known == label) / np.count_nonzero(labels == label)
        for part, other in zip(parts, found, strict=True):
            wanted = ratio * np.count_nonzero(labels[part] == label)
            assert abs(np.count_nonzero(known[other] == label) - wanted) <= 2
    with pytest.raises(ConfigError, match=r"eval_data\(\) has 19 examples.*Lower simulate.sites"):
        alike(parts, labels, known[:19], 3)


@pytest.mark.parametrize("spec", SPECS)
def test_a_partition_depends_on_its_seed_alone(spec):
    np.random.seed(1)
    first = partition(LABELS, spec, 20, 7)
    np.random.seed(2)
    state = np.random.get_state()[1].copy()
    again, other = partition(LABELS, spec, 20, 7), partition(LABELS, spec, 20, 8)
    assert (np.random.get_state()[1] == state).all()
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, other, strict=True))


def test_iid_shares_differ_by_one_at_most_and_need_no_labels():
    assert {len(p) for p in partition(1003, "iid", 10, 0)} == {100, 101}


def test_a_smaller_dirichlet_number_leaves_fewer_classes_at_a_site():
    def mean_classes(spec):
        return np.mean([len(set(LABELS[p])) for p in partition(LABELS, spec, 20, 0)])

    assert mean_classes("dirichlet:100") > 9.5 > 6 > mean_classes("dirichlet:0.1")


def test_shards_give_a_site_few_classes_in_equal_shares():
    parts = partition(LABELS, "shards:2", 50, 0)
    assert {len(p) for p in parts} == {20}
    assert max(len(set(LABELS[p])) for p in parts) <= 2


def test_quantity_skews_the_sizes_and_not_the_classes():
    parts = partition(LABELS, "quantity:0.5", 5, 0)
    assert max(map(len, parts)) > 3 * min(map(len, parts))
    assert len(set(LABELS[max(parts, key=len)])) == 10


@pytest.mark.parametrize(
    ("labels", "spec", "says"),
    [
        (LABELS, "dirichlett:0.3", "Did you mean 'dirichlet'"),
        (LABELS, "dirichlet", 'as in "dirichlet:0.3"'),
        (LABELS, "dirichlet:-1", "positive number"),
        (LABELS, "shards:1.5", "positive whole number"),
        (LABELS, "iid:3", "takes no number"),
        (1000, "shards:2", "needs the labels"),
        (LABELS / 3, "dirichlet:1", "are not classes"),
        (10, "iid", "Lower simulate.sites"),
    ],
)
def test_a_partition_that_cannot_be_is_refused_with_what_to_change(labels, spec, says):
    with pytest.raises(ConfigError, match=says):
        partition(labels, spec, 20, 0)


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


def test_labels_are_found_wherever_a_dataset_keeps_them():
    x, y = torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    with_targets = Pairs(x, None)
    with_targets.targets = y.tolist()
    whole = TensorDataset(x, y)
    for data in ((x, y), whole, {"x": x, "y": y}, Pairs(x, y), with_targets):
        assert labels_of(data).tolist() == y.tolist()
    assert labels_of(Subset(whole, [5, 0])).tolist() == [2, 0]
    with pytest.raises(ConfigError, match=r"Give it \.targets"):
        labels_of(x)


class Pool(Task):
    asked = 0

    def data(self, site):
        self.asked += 1
        return torch.arange(20.0), torch.arange(20) % 4


class Natural(Pool):
    def sites(self):
        return ["b", "a"]

    def data(self, site):
        return torch.full((3,), ord(site))


def test_a_pool_is_loaded_once_and_all_of_it_is_dealt_out():
    task = Pool()
    sites = SimulatedSites(task, SimulateConfig(sites=4, partition="dirichlet:0.5"), 3)
    assert sites.names == ["site-1", "site-2", "site-3", "site-4"]
    x = torch.cat([sites.data(site)[0] for site in sites.names])
    assert x.sort().values.tolist() == list(range(20))
    assert list(sites.eval_data()) == ["central"]
    assert len(sites.eval_data()["central"][0]) == 20
    assert task.asked == 1


def test_natural_sites_keep_their_own_data():
    sites = SimulatedSites(Natural(), SimulateConfig(sites=4), 3)
    assert sites.names == ["a", "b"]
    assert sites.data("b").tolist() == [ord("b")] * 3
    assert set(sites.eval_data()) == {"a", "b"}


def test_sites_with_the_same_name_are_refused():
    class Twice(Natural):
        def sites(self):
            return ["a", "a"]

    with pytest.raises(TaskError, match="each name once"):
        SimulatedSites(Twice(), SimulateConfig(), 0)


def test_a_partition_can_be_drawn(tmp_path: Path):
    parts = partition(LABELS, "dirichlet:0.3", 10, 0)
    draw(LABELS, dict(zip(Population(10), parts, strict=True)), tmp_path / "parts.png")
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_without_matplotlib_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install fedtrain\[report\]"):
        draw(LABELS, {}, tmp_path / "parts.png")


class Twice:
    """Batches that can be read again."""

    def __iter__(self):
        return iter([(torch.zeros(4, 1), torch.zeros(4, 1))] * 5)


@pytest.mark.parametrize("kind", ["a loader", "batches"])
def test_a_stream_where_a_pool_is_to_be_dealt_is_told_as_that(kind):
    class Streams(Task):
        def model(self):
            return torch.nn.Linear(1, 1)

        def data(self, site):
            return DataLoader(TensorDataset(torch.zeros(20, 1))) if kind == "a loader" else Twice()

    with pytest.raises(
        TaskError, match=r"a stream \(\w+\), which can't be dealt to 3 sites. Return a Dataset"
    ):
        SimulatedSites(Streams(), SimulateConfig(sites=3), 1).data("site-1")
