"""A population of a million sites: a few of them are looked at, or a clear word says what to do."""

import random

import pytest

from fedtrain.errors import ConfigError
from fedtrain.population import Population, Present
from fedtrain.runtime.evaluation import evaluate
from fedtrain.runtime.simulations import simulated_masks
from fedtrain.runtime.simulations.clock import LOOKED_AT
from fedtrain.runtime.simulations.simulation import DRAWN_SITES, draw_partition
from fedtrain.runtime.simulations.site_models import SiteModels
from fedtrain.runtime.statistics import stats
from fedtrain.training import partition
from tests.test_population_runs import FEW, configured, run

TIMED = {
    "strategy": {"kind": "fedavg", "fraction": 0.0001, "round_deadline": "1h"},
    "simulate": {"availability": "daily:0.3,3"},
    "evaluate": {"every": 0},
}


@pytest.fixture
def made(monkeypatch):
    """The sites whose models were made."""
    sites, model = [], SiteModels._model
    monkeypatch.setattr(SiteModels, "_model", lambda self, site: (sites.append(site), model(self, site))[1])
    return sites


def test_a_round_of_a_population_that_comes_and_goes_looks_at_a_few_of_it_and_asks_who_is_there(
    tmp_path, made
):
    config = configured(tmp_path, **TIMED)
    events, digest, _ = run(config)
    started = [event.sites for event in events if event.kind == "round_started"]
    everybody = Population(1_000_000)
    models, some = SiteModels(config, everybody), random.Random(1).sample(everybody, 3000)
    part = [models[site].there.comes(0.0) == 0.0 for site in some]
    assert [len(sites) for sites in started] == pytest.approx([100 * sum(part) / 3000] * 3, rel=0.15)
    assert all(models[site].there.comes(0.0) == 0.0 for site in started[0])
    assert len(set(made)) < LOOKED_AT + 3000 + 3 * 100 / 0.2
    first, _, _ = run(configured(tmp_path / "b", **TIMED, run={"rounds": 1}))
    rest, again, _ = run(configured(tmp_path / "b", **TIMED))
    assert [e.sites for e in [*first, *rest] if e.kind == "round_started"] == started
    assert again == digest


def test_the_clock_of_a_population_goes_on_until_enough_sites_are_there(tmp_path):
    sections = {**TIMED, "simulate": {"trace": "trace"}, "run": {"rounds": 1}}
    tmp_path.joinpath("trace").write_text("available\n3600-7200\n")
    events, _, _ = run(configured(tmp_path, **sections))
    (committed,) = [event for event in events if event.kind == "round_committed"]
    assert committed.clock_s == 3601
    assert committed.sites == 100


def test_those_that_are_there_are_drawn_each_once_and_without_those_left_out():
    names = Population(50)
    there = Present(names, 25, lambda site: int(site[-2:]) % 2 == 0)
    assert len(there) == 25
    assert len(set(there.draw(random.Random(1), 20))) == 20
    assert sorted(there.draw(random.Random(1), 99)) == list(there)
    fewer = there.without(["site-02"]).without(["site-04"])
    assert len(fewer) == 23
    assert {*there} - {*fewer.draw(random.Random(1), 99)} == {"site-02", "site-04"}
    assert "site-03" not in there


def test_a_finished_model_of_a_population_is_evaluated_at_sites_that_are_drawn_or_named(tmp_path):
    config = configured(tmp_path, **FEW, evaluate={"every": 0})
    run(config)
    with pytest.raises(ConfigError, match=r"all 1,000,000 sites would evaluate\. Draw some with --set"):
        evaluate(config, config.simulate_dir)
    config = configured(tmp_path, **FEW, evaluate={"sites": 7})
    found = [evaluate(config, config.simulate_dir).by_site for _ in range(2)]
    assert len(found[0]) == 7
    assert found[0] == found[1]
    assert evaluate(config, config.simulate_dir, site="user-0000009").by_site.keys() == {"user-0000009"}


def test_statistics_of_a_population_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"stats: all 1,000,000 sites would count .* --site"):
        stats(configured(tmp_path, **FEW))


def test_the_picture_of_a_population_has_some_of_its_sites(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(partition, "draw", lambda labels, parts, path, of: drawn.append(([*parts], of)))
    draw_partition(configured(tmp_path), tmp_path / "p.png")
    ((names, of),) = drawn
    assert of == 1_000_000
    assert len(names) == DRAWN_SITES
    assert names[:2] == ["site-0000001", "site-0001001"]


def test_sites_under_masks_are_held_for_a_round_and_not_for_ever(tmp_path, monkeypatch):
    held, made = [], simulated_masks.MaskedCohort._site
    monkeypatch.setattr(simulated_masks, "HELD_SITES", 15)

    def noted(self, site):
        found = made(self, site)
        held.append((len(self._sites), len(self._keys._keys)))
        return found

    monkeypatch.setattr(simulated_masks.MaskedCohort, "_site", noted)
    sections = {
        **FEW,
        "run": {**FEW["run"], "rounds": 3},
        "secagg": {"enabled": True},
        "evaluate": {"every": 0},
    }
    config = configured(tmp_path, **sections | {"simulate": {**FEW["simulate"], "masks": True}})
    _, digest, counted = run(config)
    assert len(counted) == 30
    assert max(held) <= (15, 15)
    assert run(configured(tmp_path / "plain", **sections))[1] == digest
