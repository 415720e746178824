"""Rounds that close when enough of their sites have answered, in memory, under masks and over mutual TLS."""

import asyncio
from contextlib import suppress

import pytest
import torch

from fedtrain.config import Config
from fedtrain.errors import ConfigError, TooFewSites
from fedtrain.messages import Failure, Train, Update
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.star import federated
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.runtime.star.enough import ClosesEarly, closing_early, needed
from fedtrain.secagg.messages import Advertise, Unmask
from fedtrain.store import Checkpoint, RunStore
from fedtrain.strategies import build
from fedtrain.transport.memory import LocalCohort
from tests.federation import aggregator, certificates, link, random_arena, sites
from tests.limits import bounded
from tests.test_clock import config
from tests.test_federated import SITES, Events, arena, handlers, pull
from tests.test_secure import MaskedLosing, RunStoreOf, fixed, mean_of, openly
from tests.test_secure import config as secure_config


@pytest.mark.parametrize(
    ("enough", "asked", "quorum", "expected"),
    [(1.0, 10, 0, 10), (0.77, 130, 0, 100), (0.1, 10, 0, 2), (0.5, 10, 7, 7), (0.5, 1, 0, 1), (0.6, 5, 0, 3)],
)
def test_how_many_answers_are_enough(tmp_path, enough, asked, quorum, expected):
    assert needed(config(tmp_path, strategy={"enough": enough}), asked, quorum) == expected


def exchange(cfg, cohort, kind=Train):
    weights = arena()
    requests = {site: kind(id="t/0/0/train", round=0, weights=weights) for site in SITES}

    async def heard():
        return [site async for site, _ in closing_early(cfg, cohort).exchange(requests, 5)]

    return asyncio.run(heard())


def test_a_round_closes_with_the_last_answer_that_it_needs_and_the_others_are_not_waited_for(tmp_path):
    asked = []
    cohort = LocalCohort({site: pull(site, asked) for site in SITES})
    assert exchange(config(tmp_path, strategy={"enough": 0.6}), cohort) == ["a", "b", "c"]
    assert [site for _, site in asked] == ["a", "b", "c"]
    assert exchange(config(tmp_path), LocalCohort(handlers())) == SITES


def test_a_failure_is_no_answer_and_a_site_that_the_rule_must_have_is_waited_for(tmp_path):
    def fails(request):
        return Failure(reason="disk full")

    cfg = config(tmp_path, strategy={"enough": 0.6})
    assert exchange(cfg, LocalCohort(handlers(b=fails))) == ["a", "b", "c", "d"]
    cfg = config(tmp_path, strategy={"enough": 0.4}, aggregation={"rule": "fltrust", "root": "d"})
    assert exchange(cfg, LocalCohort(handlers())) == ["a", "b", "c", "d"]


def test_without_rounds_nothing_closes(tmp_path):
    cohort = LocalCohort({})
    cfg = config(tmp_path, strategy={"enough": 0.5}, asynchronous={"enabled": True})
    assert closing_early(cfg, cohort) is cohort
    assert closing_early(config(tmp_path), cohort) is cohort


@pytest.mark.parametrize(("enough", "inside"), [(0.75, "abc"), (0.3, "abc"), (1.0, "abcd")])
def test_under_masks_the_sum_is_over_those_who_answered_first_and_never_below_the_quorum(
    tmp_path, enough, inside
):
    cfg = secure_config(tmp_path, strategy={"enough": enough, "min_sites": 3})
    masked = MaskedLosing(cfg, lambda site, request: False)
    answers = masked.answers(Events())
    answers.cohort = ClosesEarly(cfg, answers.cohort)
    mean = mean_of(answers)
    assert sorted(mean.sites) == [*inside]
    expected = fixed(cfg, cohort=openly(loses=lambda site, request: site not in inside))
    assert mean.delta.digest == expected.delta.digest


def test_under_masks_a_sum_that_may_have_been_opened_waits_for_each_of_its_sites(tmp_path):
    """Found by seed 440 of tests.vsim: a to d were summed and gave shares; over the first three of them
    that answer again they refuse for ever."""
    sites = [*"abcde"]
    cfg = secure_config(tmp_path, run={"rounds": 1}, strategy={"enough": 0.6, "min_sites": 3, "attempts": 2})

    def loses(site, request):
        return isinstance(request, {"e": Advertise, "a": Unmask, "b": Unmask}.get(site, ()))

    with RunStoreOf(cfg) as store:
        for lost in (loses, lambda site, request: site == "e"):
            answers = MaskedLosing(cfg, lost, sites).answers(Events(), store)
            answers.cohort = ClosesEarly(cfg, answers.cohort)
            journal = Journal(cfg, store, Events())
            with suppress(TooFewSites):
                asyncio.run(federated.run(journal, answers, build("fedavg", {})))
            assert store.opened(0) == [("a", "b", "c", "d")]
        weights = store.latest().weights
    expected = fixed(cfg, cohort=openly(sites, loses=lambda site, request: site == "e"))
    assert torch.equal(weights.views()["w"], expected.delta.views()["w"])


def test_several_sums_in_a_round_and_an_early_close_are_refused(tmp_path):
    cfg = Config.of({"strategy": {"enough": 0.8, "min_sites": 6}, "secagg": {"groups": 2}}, tmp_path)
    with pytest.raises(ConfigError, match=r"strategy.enough: with secagg.groups = 2 .* Set strategy.enough"):
        closing_early(cfg, LocalCohort({}))


def test_over_mutual_tls_a_slow_site_is_told_to_stop_and_asked_again_in_the_next_round(tmp_path):
    certs, weights, events = certificates(tmp_path / "certs", *"abc"), random_arena(50_000, 1), Events()
    cfg = config(tmp_path, run={"rounds": 2}, strategy={"enough": 0.67})
    store, begun, stopped = RunStore(cfg.run_dir, durable=False), [], []
    store.begin(weights.schema, cfg.agreed(), task_digest="t")
    store.commit(Checkpoint(0, weights, {}), {})

    async def main():
        at_work = [asyncio.Event(), asyncio.Event()]  # c, in each round

        def answer(name):
            async def handle(request):
                if name == "c":
                    begun.append(request.round)
                    at_work[request.round].set()
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        stopped.append(request.round)
                        raise
                await at_work[request.round].wait()
                return Update(delta=random_arena(50_000, request.round), num_examples=1.0)

            return handle

        async with aggregator(certs, store.folder, weights.schema) as agg:
            links = {name: link(certs, name, agg.cohort.port, tmp_path) for name in "abc"}
            async with sites(links, weights.schema, answer):
                await agg.cohort.members(3)
                answers = InTheOpen(cfg, closing_early(cfg, agg.cohort), events)
                await federated.run(Journal(cfg, store, events), answers, build("fedavg", {}))

    bounded(main())
    rounds = events.of("round_committed")
    assert [r["sites"] for r in rounds] == [2, 2]
    assert begun == [0, 1]
    assert stopped[0] == 0
    assert {e["site"] for e in events.of("update_received")} == {"a", "b"}
    store.close()
