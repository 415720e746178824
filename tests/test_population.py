"""Populations of sites: a name is made when it is asked for, and a round costs what its sites cost."""

import random
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.errors import ConfigError, some
from fedtrain.population import Population, Without
from fedtrain.runtime.star import federated
from fedtrain.runtime.trainers.trainer_messages import Description, framed, outcomes
from fedtrain.schema import Schema
from fedtrain.strategies import build

MILLION = Population(1_000_000)


def names(count):
    """As they were when they were a list."""
    return [f"site-{i:0{len(str(count))}d}" for i in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 9, 10, 99, 100, 1234])
def test_a_population_is_the_sorted_list_of_its_names(count):
    population, listed = Population(count), names(count)
    assert population == listed == sorted(population)
    assert len(population) == count
    assert [population[i] for i in range(count)] == listed
    assert population[-1] == listed[-1]
    assert population[2:7] == listed[2:7]
    assert population[::-3] == listed[::-3]
    assert all(population.index(name) == i for i, name in enumerate(listed))
    with pytest.raises(IndexError):
        population[count]


@pytest.mark.parametrize("other", ["site-0", "site-101", "site-1", "site-٠٠١", "user-001", "site-+01", 1, ""])
def test_a_name_is_in_a_population_only_as_it_is_written_there(other):
    population = Population(100)
    assert "site-001" in population
    assert other not in population
    with pytest.raises(ValueError, match="is none of Population"):
        population.index(other)


def test_a_million_names_take_no_memory_and_are_never_printed():
    assert sys.getsizeof(MILLION) < 200
    assert repr(MILLION) == "Population(size=1000000, prefix='site-')"
    assert some(MILLION).endswith("site-0000005 and 999,995 more")
    assert "site-1000000" in MILLION
    with pytest.raises(ConfigError, match="a site at least"):
        Population(0)


@given(st.integers(1, 60), st.sets(st.integers(0, 70)))
def test_names_without_a_few_are_the_list_without_them(count, left_out):
    out = {f"site-{i:02d}" for i in left_out}
    for whole in (Population(count, "site-"), names(count)):
        stay = Without(whole, out)
        assert stay == [name for name in whole if name not in out]
        assert all((name in stay) == (name in whole and name not in out) for name in {*whole, *out})


@pytest.mark.parametrize("sites", [MILLION, Population(3, "user-"), ["a", "b"]])
def test_a_trainer_says_in_a_few_bytes_which_sites_there_are(sites):
    said = framed(Description(Schema(()), "t", sites=sites, evaluators=sites))
    assert len(said) < 200
    found = outcomes.decode(said[4:])
    assert found.sites == found.evaluators == sites
    assert type(found.sites) is type(sites)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(MILLION), type=Population).size == 1_000_000


# --- Who takes part


def config(root, **strategy):
    return Config.of({"strategy": {"min_sites": 1, **strategy}, "run": {"seed": 7}}, root)


def old_sample(cfg, number, attempt, members, always=()):
    """As sites were drawn from a list of all of them."""
    members = sorted(members)
    count = max(cfg.strategy.min_sites, round(cfg.strategy.fraction * len(members)))
    if count >= len(members):
        return members
    draw = random.Random(seed_of(cfg.run.seed, "cohort", number, attempt))
    others = [site for site in members if site not in always]
    here = [site for site in members if site in always]
    return sorted([*here, *draw.sample(others, count - len(here))])


@pytest.mark.parametrize("count", [1, 2, 10, 21, 22, 100, 3000])
@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 1.0])
def test_a_round_draws_the_sites_that_a_list_of_all_gave(tmp_path, count, fraction):
    cfg = config(tmp_path, fraction=fraction)
    for number in range(3):
        expected = old_sample(cfg, number, 0, names(count))
        assert federated.sample(cfg, number, 0, Population(count)) == expected
        assert federated.sample(cfg, number, 0, names(count)) == expected
        left_out = names(count)[1:2]
        rest = Without(Population(count), left_out)
        assert federated.sample(cfg, number, 1, rest) == old_sample(
            cfg, number, 1, [n for n in names(count) if n not in left_out]
        )


def test_the_draws_of_small_populations_are_frozen(tmp_path):
    cfg = config(tmp_path, fraction=0.3)
    assert federated.sample(cfg, 0, 0, Population(10)) == ["site-01", "site-07", "site-10"]
    found = federated.sample(cfg, 1, 2, Population(1000))
    assert found[:4] == ["site-0001", "site-0005", "site-0006", "site-0007"]


def test_the_trusted_site_is_in_every_draw_of_a_population(tmp_path):
    cfg = Config.of(
        {
            "strategy": {"min_sites": 3, "fraction": 0.000005},
            "aggregation": {"rule": "fltrust", "root": "site-0000400"},
            "secagg": {"enabled": False},
        },
        tmp_path,
    )
    for number in range(5):
        drawn = federated.sample(cfg, number, 0, MILLION)
        assert len({*drawn}) == 5
        assert "site-0000400" in drawn


class Store:
    """Knows who counted."""

    def __init__(self, counted):
        self.counted = lambda: counted


class Asked(Population):
    """Counts the names that it was asked for."""

    made = 0

    def name(self, at):
        type(self).made += 1
        return super().name(at)


def test_drawing_a_thousand_of_a_million_makes_a_few_thousand_names(tmp_path):
    cfg, Asked.made = config(tmp_path, fraction=0.001), 0
    drawn = federated.asked(cfg, build("fedavg", {}), 3, 0, Asked(1_000_000), Store({}))
    assert len({*drawn}) == 1000
    assert Asked.made < 3000


def test_sites_one_by_one_are_asked_in_the_order_that_sorting_all_of_them_gave(tmp_path):
    cfg, strategy = config(tmp_path), build("cyclic", {})
    counted = {"site-01": 4, "site-03": 0, "site-10": 9}
    for members in (Population(12), ["site-01", "site-03", "site-10"]):
        order = sorted(members, key=lambda site: (counted.get(site, -1), site))
        found = [federated.asked(cfg, strategy, 9, i, members, Store(counted)) for i in range(2 * len(order))]
        assert found == [[site] for site in order * 2]
    Asked.made = 0
    store = Store({"site-0000001": 2})
    assert federated.asked(cfg, strategy, 3, 0, Asked(1_000_000), store) == ["site-0000002"]
    assert Asked.made < 10
