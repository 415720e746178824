"""Rounds on the clock whose updates are summed where they are trained: the bits of single updates."""

import pytest

from fedtrain.aggregation.mean import BLOCK, blocks_of
from fedtrain.config import Config
from fedtrain.errors import BadUpdate
from fedtrain.exchange import Folds
from fedtrain.runtime.journal import Clock
from fedtrain.runtime.simulations import shares
from fedtrain.runtime.simulations.clock import on_clock
from fedtrain.runtime.trainers.workbench import Workbench
from tests.test_folding import SITES, Singly, config, trained

HARD = {"speeds": "lognormal:1", "dropout": 0.2, "up_mbit": 1.0, "latency": 0.01}
FAILING = ("site003", "site017", "site040")


def clocked(folder, **keys):
    cfg = config(folder, min_sites=3, **keys)
    return Config.of(cfg.table() | {"simulate": cfg.table()["simulate"] | HARD}, folder)


def told(cfg, workers, wrap=lambda pool: pool):
    """What tests.test_folding.trained gives, and what the clock says in the end. Updates of sites that take
    the place of others are told of after these, or in the order of the plan."""
    clock = Clock()

    def on_it(pool):
        return on_clock(cfg, clock, pool.description, wrap(pool), pool.examples)

    digest, events, rounds = trained(cfg, workers, on_it)
    return digest, sorted(events, key=repr), rounds, clock.now_s, clock.late, clock.away


def failing(monkeypatch):
    train = Workbench.train

    def fails(self, site, *args):
        if site in FAILING:
            raise BadUpdate("the disk of this site is full")
        return train(self, site, *args)

    monkeypatch.setattr(Workbench, "train", fails)


CASES = {
    "all that answer": {},
    "over-selection": {"enough": 0.6},
    "over-selection, a refused site": {"enough": 0.6, "task": "Many(bad='site020')"},
    "over-selection, sites that fail": {"enough": 0.6},
    "sites that fail": {},
    "a sample": {"enough": 0.6, "fraction": 0.7},
    "scaffold": {"enough": 0.6, "kind": "scaffold"},
    "masks' arithmetic": {"enough": 0.6, "secagg": True},
    "masks' arithmetic, sites that fail": {"enough": 0.6, "secagg": True},
}


@pytest.mark.parametrize("case", CASES)
def test_updates_folded_on_the_clock_give_what_single_ones_give(case, tmp_path, monkeypatch):
    """The model, events with bytes and refusals, counted sites, the clock: all, to the last bit."""
    if "fail" in case:
        failing(monkeypatch)
    expected = told(clocked(tmp_path / "singly", **CASES[case]), 1, Singly)
    _, _, rounds, _, late, away = expected
    assert late or away
    assert len(rounds) == 2
    if "sites that fail" in case:
        assert not set(FAILING) & set(rounds[0][0])
    for workers, share_s in (2, 1e-9), (3, 60.0):
        monkeypatch.setattr(shares, "SHARE_S", share_s)
        assert told(clocked(tmp_path / f"{workers} {share_s}", **CASES[case]), workers) == expected


def test_stacked_sites_on_the_clock_train_to_one_model_whatever_the_workers(tmp_path, monkeypatch):
    found = []
    for workers, share_s in (1, 60.0), (2, 1e-9), (3, 60.0):
        monkeypatch.setattr(shares, "SHARE_S", share_s)
        cfg = clocked(tmp_path / f"{workers} {share_s}", enough=0.6, task="Plain", engine="stacked")
        found.append(told(cfg, workers))
    assert found[0] == found[1] == found[2]


def test_a_round_on_the_clock_asks_for_sums_where_it_can(tmp_path, monkeypatch):
    asked, answer = [], Workbench.answer

    def noted(self, command):
        asked.append(type(command).__name__)
        return answer(self, command)

    monkeypatch.setattr(Workbench, "answer", noted)
    told(clocked(tmp_path, engine="stacked", task="Plain"), 2)
    assert "FoldMany" in asked
    assert "TrainMany" not in asked


def test_places_with_gaps_are_cut_into_their_blocks():
    assert blocks_of(range(2 * BLOCK + 1)) == [(0, 0, 16), (1, 16, 32), (2, 32, 33)]
    assert blocks_of([1, 15, 16, 50, 51, 63, 64]) == [(0, 0, 2), (1, 2, 3), (3, 3, 6), (4, 6, 7)]
    assert blocks_of([]) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_shares_of_some_of_a_plan_begin_where_those_of_all_do(workers):
    whole = shares.folded(SITES, workers, 16, 1000, 2000, 1e-5, stacked=False)
    asked = set(SITES[5:20] + SITES[47:])
    left = shares.asked_of(whole, asked)
    assert [site for share in left for site in share.sites] == sorted(asked)
    first = {share.sites[0]: share for share in whole}
    for share in left:
        begin = SITES[SITES.index(share.sites[0]) - share.places[0]]
        assert share.span == len(first[begin].sites)
        assert share.sites == [first[begin].sites[place] for place in share.places]
    assert shares.asked_of(whole, set(SITES)) == whole


def test_a_cohort_that_does_not_fold_is_not_asked_to_on_the_clock(tmp_path):
    cfg = clocked(tmp_path)
    about = Workbench(cfg, simulated=True).description
    assert not isinstance(on_clock(cfg, Clock(), about, Singly(None), None), Folds)
