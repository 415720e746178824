"""A simulation tells all that the federation it stands for tells: the same events, whatever goes wrong."""

import asyncio
import math
import re
from contextlib import suppress

import pytest
import torch
from msgspec.structs import replace

from fedtrain.arena import Slab
from fedtrain.errors import FedtrainError, RoundError
from fedtrain.messages import Evaluate, Evaluation, Failure, Update
from fedtrain.runtime.simulations import gossip_simulation, plain_sums
from fedtrain.runtime.simulations.simulated_masks import SimulatedMasks
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.store import RoundPlan
from fedtrain.transport.memory import LocalCohort
from tests.test_gossip_peers import Log
from tests.test_gossip_peers import config as gossip_config
from tests.test_privacy import private
from tests.test_secure import SITES, Events, config, found, zeros

NINE = [f"site-{c}" for c in "abcdefghi"]


def large(site):
    return replace(found(site), delta=found(site, size=1e5).delta)


def not_a_number(site):
    update = found(site)
    update.delta.views()["w"][7] = math.nan
    return update


def too_many(site):
    return Update(delta=found(site).delta, num_examples=10_001.0)


def fails(site):
    return Failure(reason="ValueError in task.py:3, in loss")


def metrics(site):
    return Evaluation(metrics={"loss": (1.0, 2.0)})


# what goes wrong: (sites, settings, how some of them answer Train, how some answer Evaluate)
TROUBLES = {
    "nothing": (SITES, {}, {}, {}),
    "clipped": (SITES, {}, dict.fromkeys(SITES, large), {}),
    "clipped at one": (SITES, {}, {"b": large}, {}),
    "not a number": (SITES, {}, {"b": not_a_number}, {}),
    "too many examples": (SITES, {}, {"b": too_many}, {}),
    "a failure": (SITES, {}, {"b": fails}, {"c": fails}),
    "too few": (SITES, {}, {"b": fails, "c": fails}, {"b": fails, "c": fails}),
    "everybody fails": (SITES, {}, dict.fromkeys(SITES, fails), dict.fromkeys(SITES, fails)),
    "a group fails": (NINE, {"secagg": {"groups": 3}, "strategy": {"min_sites": 9},
                             "aggregation": {"rule": "median"}}, {"site-a": fails}, {}),
    "clipped in groups": (NINE, {"secagg": {"groups": 3}, "strategy": {"min_sites": 9},
                                 "aggregation": {"rule": "median"}}, dict.fromkeys(NINE, large), {}),
}  # fmt: skip


VARIES = re.compile(r"(, attempt \d+)?: (secure sum|evaluation failed).*")  # at which step, in which attempt


def told(answers_of, cfg, sites, train, evaluate):
    """What people hear, less what only one of the two knows: how far a protocol came, and attempts at it."""

    def handler(site):
        def answer(request):
            if isinstance(request, Evaluate):
                return evaluate.get(site, metrics)(site)
            return train.get(site, found)(site)

        return answer

    events = Events()
    answers = answers_of(cfg, LocalCohort({site: handler(site) for site in sites}), events)
    for work in (
        lambda: answers.train(RoundPlan(0, 0, sites), zeros()),
        lambda: answers.evaluate(1, sites, zeros()),
    ):
        try:
            asyncio.run(work())
        except FedtrainError as e:
            events.append(("ended", {"text": "too few" if isinstance(e, RoundError) else type(e).__name__}))
    heard = {
        (kind, fields.get("round"), fields.get("site"), VARIES.sub("", fields.get("text", "")))
        for kind, fields in events
        if kind != "update_received"  # a simulation hears of each before it knows whether there is a sum
    }
    if any(text == "TaskError" for *_, text in heard):  # which says it all
        heard.discard(("notice", None, None, "round 1, evaluation"))
    return heard


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_simulation_without_masks_tells_what_masks_tell(tmp_path, trouble):
    sites, settings, train, evaluate = TROUBLES[trouble]
    cfg = config(tmp_path, **settings)
    openly = told(plain_sums.FixedPointSums, cfg, sites, train, evaluate)
    assert openly == told(SimulatedMasks, cfg, sites, train, evaluate)
    assert any("values were clipped" in text for *_, text in openly) == ("clipped" in trouble)


def test_clipped_values_of_updates_in_slabs_are_counted_too(tmp_path):
    """As a simulation's trainers give them, many in one block of memory."""
    cfg, events, updates = config(tmp_path), Events(), {site: large(site) for site in SITES}
    rows = torch.stack([updates[site].delta.data.view(torch.uint8).flatten() for site in SITES])
    slab = dict(zip(SITES, Slab(zeros().schema, rows).arenas(), strict=True))
    cohort = LocalCohort({site: lambda r, s=site: replace(updates[s], delta=slab[s]) for site in SITES})
    asyncio.run(plain_sums.FixedPointSums(cfg, cohort, events).train(RoundPlan(0, 0, SITES), zeros()))
    alone = Events()
    openly = LocalCohort({site: lambda r, s=site: updates[s] for site in SITES})
    asyncio.run(plain_sums.FixedPointSums(cfg, openly, alone).train(RoundPlan(0, 0, SITES), zeros()))
    assert events.of("notice") == alone.of("notice")
    assert "values were clipped to secagg.clip" in events.of("notice")[0]["text"]


@pytest.mark.slow(4)
def test_a_simulation_tells_the_epsilon_that_its_sites_spend(tmp_path):
    """One line a round: of the site that has spent most."""
    log = Log()
    with suppress(RoundError):
        asyncio.run(simulate(private(tmp_path), emit=log))
    assert [(e["round"], e["releases"]) for e in log.of("privacy_spent")] == [
        (n, n) for n in range(1, len(log.of("round_committed")) + 1)
    ]
    assert log.of("round_committed")


def test_simulated_peers_tell_how_much_masks_clipped(tmp_path):
    log = Log()
    cfg = gossip_config(tmp_path, masks=True, clip=0.001, topology="complete")
    asyncio.run(gossip_simulation.simulate(cfg, emit=log))
    assert all(e["metrics"]["clipped"] > 0 for e in log.of("round_committed"))
