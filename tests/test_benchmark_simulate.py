"""benchmarks/simulate.py: what peers are given is what our own simulation does, and how they take turns."""

import importlib
import sys
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from torch.nn.utils import parameters_to_vector

import fedtrain
from fedtrain.config import Config

ROOT = Path(__file__).parents[1]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize("spread", [None, 1.0])
def test_a_plain_loop_over_what_peers_are_given_learns_what_our_simulation_learns(module, tmp_path, spread):
    """Over two rounds, so the draws of sites are the same; unequal sites shuffle and take more steps."""
    cases, plain = module("simulation_cases"), module("peers.plain_torch")
    case = cases.Case("small", "mlp5k", sites=12, engine="loop", spread=spread, drawn=5)
    work = cases.work_of(case, tmp_path)
    assert work.sizes.shape == (cases.GIVEN_ROUNDS, 5)
    assert (work.sizes.max() > 32) == (spread is not None)

    settings = case.settings(tmp_path, workers=0)
    settings["run"]["rounds"] = 2
    config = Config.of(settings, ROOT / "benchmarks")
    ours = fedtrain.simulate(config, fresh=True, data_dir=tmp_path, progress=False)

    given = module("peers.work").Work.load(work.path)
    after = plain.averaged(given)
    for number in (1, 2):
        theirs = np.concatenate([w.numpy().ravel() for w in next(after)])
        found = parameters_to_vector(ours.model(number).parameters()).detach().numpy()
        np.testing.assert_allclose(theirs, found, rtol=0, atol=1e-6)
    assert np.abs(found - np.concatenate([w.ravel() for w in given.weights])).max() > 1e-3


def test_sites_of_a_population_draw_from_a_pool_for_those_of_one_round(module, tmp_path):
    cases = module("simulation_cases")
    case = cases.Case("small", "mlp5k", sites=1_000_000, drawn=5, draw=True)
    assert len(case.pictures()["y"]) == 5 * case.examples
    work = cases.work_of(case, tmp_path)
    assert work.sizes.shape == (cases.GIVEN_ROUNDS, 5)
    assert work.sizes.mean() == case.examples


def test_a_turn_over_ranks_is_done_by_rank_0_and_the_others_only_train(module, monkeypatch):
    by_turns, trained = module("simulation_by_turns"), []
    settings = '{"simulate": {"on": "torchrun"}, "train": {"device": "cpu"}}'
    monkeypatch.setattr(sys, "argv", ["by_turns", "torchrun", "work.npz", settings])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(by_turns.on_ranks, "work", trained.append)
    by_turns.main()
    assert [config.train.device for config in trained] == ["cpu"]


def test_the_operations_of_an_update_are_its_products(module, tmp_path):
    """By hand, of 18 examples: 2 · 64 · 64 and 2 · 64 · 10 forward, twice that backward, but for the gradient
    of the input."""
    cases = module("simulation_cases")
    work = cases.work_of(cases.MLP5K, tmp_path)
    assert cases.flops(work) == 18 * (3 * 2 * (64 * 64 + 64 * 10) - 2 * 64 * 64)


ANSWERS = "from peers.work import turns\nfor number in turns(): print('round', number)"


def test_a_participant_does_one_round_first_and_then_rounds_for_a_time(module):
    participants = module("peers.participants")
    with closing(participants.Participant([sys.executable, "-uc", ANSWERS], beside=2)) as both:
        assert both.first_round() > 0
        assert both.turn(0.05) > 20


def test_a_participant_that_fails_is_absent_with_its_last_line(module):
    participants = module("peers.participants")
    fails = [sys.executable, "-c", "raise ValueError('no such model')"]
    with (
        closing(participants.Participant(fails)) as one,
        pytest.raises(participants.Absent, match=r"it ended: ValueError: no such model"),
    ):
        one.first_round()


def test_a_peer_that_can_not_be_installed_is_absent_with_the_reason(module, tmp_path, monkeypatch):
    participants = module("peers.participants")

    def run(step, **_):
        return CompletedProcess(step, int("pip" in step), "", "what follows\nERROR: no such version\n")

    monkeypatch.setattr(participants.subprocess, "run", run)
    with pytest.raises(participants.Absent, match=r"^other==1: ERROR: no such version$"):
        participants.environment(tmp_path, ("other==1",), "other")
    assert not list(tmp_path.rglob("installed"))
