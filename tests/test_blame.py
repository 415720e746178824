"""H7: whoever spoils the sums under masks is found over a few rounds, and left out."""

import asyncio
import random
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from fedtrain.errors import SecAggError
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.simulations.simulated_masks import MaskedCohort, SimulatedMasks
from fedtrain.runtime.sites.secure_site import SecureSite
from fedtrain.runtime.star import federated
from fedtrain.runtime.star.blame import Suspects, nudged
from fedtrain.store import Ledger
from fedtrain.strategies import build

from .test_secure import Events, RunStoreOf, config, found, openly, zeros

SITES = [f"s{i:02}" for i in range(16)]


class Spoils:
    """What a hostile site gives into a sum."""

    def __init__(self, own, how):
        self.own, self.names, self._how = own, own.names, how

    def write(self, names, out):
        self.own.write(names, out)
        draw = np.random.default_rng(len(out))
        if self._how == "noise":
            out[:] = draw.integers(0, 1 << 32, len(out), np.uint32)
        else:  # a weight that is absurd
            out[312] = 1 << 20  # the highest limb of the first scalar


class Hostile(MaskedCohort):
    """Sites with ledgers and guards of their own, some hostile; `asked`: over whom each sum was."""

    def __init__(self, cfg, sites, keys, spoilers, how="noise"):
        super().__init__(cfg, openly(sites, **{s: self._trains(s) for s in sites}), keys)
        self.folder, self.spoilers, self.how, self.asked = cfg.root, spoilers, how, []

    @staticmethod
    def _trains(site):
        return lambda request: found(site[-1] + site, request.round)

    def _site(self, site):
        if site not in self._sites:
            ledger = Ledger(self.folder / f"r@{site}")
            made = SecureSite(
                self._config, site, "simulation", self._keys.signer(site), self._keys, sums=ledger
            )
            self._sites[site] = made
            if site in self.spoilers:
                for client in made._clients.values():
                    begin = client.begin
                    client.begin = lambda request, model, own, *rest, begin=begin: begin(
                        request, model, Spoils(own, self.how), *rest
                    )
            made.ledger = ledger
        return self._sites[site]

    async def exchange(self, requests, deadline_s):
        terms = getattr(next(iter(requests.values())), "terms", None)
        if terms is not None:
            self.asked.append((terms.round, tuple(terms.cohort)))
        async for pair in super().exchange(requests, deadline_s):
            yield pair

    def close(self):
        for site in self._sites.values():
            site.ledger.close()


def runs(folder, sites, spoilers, rounds, how="noise", stops=()):
    """A run over these sites, whose aggregator and sites were started again after each of `stops` rounds."""
    events, asked = Events(), []
    for until in (*stops, rounds):
        cfg = config(folder, run={"rounds": until}, secagg={"verify": False})
        answers = SimulatedMasks(cfg, openly(sites), events)
        answers.cohort = Hostile(cfg, sites, answers._callers, spoilers, how)
        with RunStoreOf(cfg) as store:
            try:
                asyncio.run(federated.run(Journal(cfg, store, events), answers, build("fedavg", {})))
            finally:
                answers.cohort.close()
                asked += answers.cohort.asked
            suspects, model = store.suspects(Suspects), store.latest()
    return events, asked, suspects, model


@pytest.mark.parametrize("how", ["noise", "weight"])
def test_h7_one_of_16_that_sends_noise_is_named_and_left_out_within_five_rounds(tmp_path, how):
    events, asked, suspects, model = runs(tmp_path, SITES, {"s11"}, 7, how)
    assert suspects == Suspects([], ["s11"])
    named = [e for e in events.of("update_refused") if e["site"] == "s11"]
    assert [e["round"] for e in named] == [5]
    assert [e["site"] for e in events.of("update_refused")] == ["s11"]
    assert {number: len(cohort) for number, cohort in asked}[6] == 15
    assert all(len(cohort) >= 3 for _, cohort in asked)
    by_round = [[cohort for at, cohort in asked if at == number] for number in range(7)]
    for cohorts in by_round:  # nobody gives one round's update into two sums
        assert len({*chain(*cohorts)}) == sum(map(len, cohorts))
    assert by_round[0] == [tuple(SITES)]
    assert model.round == 7
    assert events.of("round_committed")[0]["sites"] == 0
    assert all(r["sites"] >= 8 for r in events.of("round_committed")[1:])  # the good ones train on


def test_h7_the_search_goes_on_after_every_restart_of_the_aggregator_and_of_the_sites(tmp_path):
    events, _, suspects, model = runs(tmp_path, SITES, {"s04"}, 6, stops=(1, 2, 3, 4))
    assert suspects == Suspects([], ["s04"])
    assert [e["round"] for e in events.of("update_refused")] == [5]
    assert model.round == 6


def test_h7_two_that_send_noise_are_both_named(tmp_path):
    _, asked, suspects, model = runs(tmp_path, SITES, {"s00", "s15"}, 8)
    assert suspects == Suspects([], ["s00", "s15"])
    assert model.round == 8
    assert [len(cohort) for at, cohort in asked if at == 7] == [14]


def test_six_sites_are_enough_to_find_one_and_fewer_are_told_so(tmp_path):
    _, _, suspects, _ = runs(tmp_path, SITES[:6], {"s02"}, 5)
    assert suspects.named == ["s02"]
    with pytest.raises(SecAggError, match="one of them sent what no update gives"):
        runs(tmp_path / "five", SITES[:5], {"s02"}, 5)


@pytest.mark.parametrize("seed", range(40))
def test_whoever_spoils_whichever_sums_is_named_and_nobody_else(seed):
    draw = random.Random(seed)
    least = draw.randint(3, 5)
    sites = [f"s{i:02}" for i in range(draw.randint(2 * least, 40))]
    culprits = set(draw.sample(sites, draw.randint(1, 2)))
    suspects = Suspects().after([sites], [])
    for number in range(20):
        if not suspects.parts:
            break
        left = sorted({*sites} - {*suspects.named})
        groups = suspects.groups(left, least, number)
        assert all(len(group) >= least for group in groups)
        assert sum(map(len, groups)) == len({*chain(*groups)}) <= len(left)
        spoiled = [group for group in groups if culprits & {*group}]
        suspects = suspects.after(spoiled, [group for group in groups if not culprits & {*group}])
        assert {*suspects.named} <= culprits
        if not groups:
            break
    assert {*suspects.named} & culprits or len(sites) < 3 * least


@pytest.mark.parametrize("seed", range(40))
def test_a_third_of_a_suspected_group_checked_the_model_and_one_culprit_is_found(seed):
    """Where sites check sums, the largest good group's sum is the step, and its sites alone check it."""
    draw = random.Random(seed)
    sites = [f"s{i:02}" for i in range(draw.randint(6, 40))]
    culprit = draw.choice(sites)
    suspects = Suspects().after([sites], [], sites)
    for number in range(8):
        if not suspects.parts:
            break
        groups, (part,) = suspects.groups(sites, 3, number), suspects.parts
        for group in groups:
            if {*part} & {*group}:
                assert 3 * len({*group} & {*suspects.checkers}) >= len(group)
        spoiled = [group for group in groups if culprit in group]
        good = [group for group in groups if culprit not in group]
        suspects = suspects.after(spoiled, good, max(good, key=len))
    assert suspects.named == [culprit]


def test_a_site_that_stops_spoiling_is_not_named():
    suspects = Suspects().after([SITES], [])
    groups = suspects.groups(SITES, 3, 0)
    assert suspects.after([], groups) == Suspects()


def test_a_model_that_is_nudged_is_another_one_each_time_and_hardly_moves():
    weights = zeros()
    weights.views()["w"].copy_(torch.randn(300))
    models = [weights]
    for number in range(5):
        models.append(nudged(models[-1], number))
    assert len({model.digest for model in models}) == 6
    for before, after in pairwise(models):
        assert torch.allclose(before.views()["w"], after.views()["w"], rtol=1e-6, atol=0)
        assert (before.views()["w"] != after.views()["w"]).sum() == 1
