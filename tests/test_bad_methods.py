"""What a site sends for a strategy is held to the strategy's bounds: at the aggregator in the open, at the
site under masks; and no site makes the aggregator fail."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.config import LimitsConfig
from fedtrain.errors import BadUpdate, RoundError
from fedtrain.learning import RoundSums
from fedtrain.messages import Train, Update
from fedtrain.runtime.star import checks
from fedtrain.runtime.trainers.learner import Learner
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.strategies import build
from tests.inprocess import federation, simulated
from tests.test_methods_everywhere import (  # noqa: F401  # fixtures
    MASKED,
    OPEN,
    SITES,
    all_have_joined,
    certs,
    config,
)  # fmt: skip

LIAR = SITES[3]


def number(**scalars):
    return lambda update: msgspec.structs.replace(update, scalars=scalars)


def weight(value):
    return lambda update: msgspec.structs.replace(update, weight=value)


def vector(name, value):
    def lie(update):
        update.delta.extras()[name][5] = value
        update.delta.changed()
        return update

    return lie


def coordinate(value):
    def lie(update):
        next(iter(update.delta.trained().values()))[5] = value
        update.delta.changed()
        return update

    return lie


BOUND = "its weighted_steps is beyond the strategy's bound of 1024"
NAMES = "the strategy has sites send weighted_steps beside the delta, and other names came"
LIES = {
    "a number beyond its bound": ("fednova", number(weighted_steps=1e9), BOUND),
    "NaN for a number": ("fednova", number(weighted_steps=math.nan), BOUND),
    "infinity for a number": ("fednova", number(weighted_steps=-math.inf), BOUND),
    "another name": ("fednova", number(steps=1.0), NAMES),
    "a further name": ("fednova", number(weighted_steps=1.0, more=1.0), NAMES),
    "no number": ("fednova", number(), NAMES),
    "a weight beyond its bound": (
        "fednova",
        weight(65.0),
        "its weight is not in the strategy's bounds, 0 to 64",
    ),
    "a weight below 0": ("scaffold", weight(-1.0), "its weight is not in the strategy's bounds, 0 to 1"),
    "NaN for a weight": ("scaffold", weight(math.nan), "its weight is not in the strategy's bounds, 0 to 1"),
    "no weight": ("scaffold", weight(None), "the strategy has updates with a weight of their own"),
    "a weight that is not asked for": ("ditto", weight(1.0), "the strategy has updates without a weight"),
    "a vector beyond its bound": (
        "scaffold",
        vector("dc", 4.5),
        "a value of its dc is beyond the strategy's bound of 4",
    ),
    "NaN in a vector": (
        "scaffold",
        vector("dc", math.nan),
        "a value of its dc is beyond the strategy's bound of 4",
    ),
    "infinity in a vector": ("mimelite", vector("gradient", math.inf), "a value of its gradient is beyond"),
    "NaN in a delta": ("feddyn", coordinate(math.nan), "NaN or Inf"),
}


def lying(monkeypatch, lie):
    honest = Learner.finished

    def finished(learner, update, site, *rest):
        update = honest(learner, update, site, *rest)
        return lie(update) if site == LIAR else update

    monkeypatch.setattr(Learner, "finished", finished)


def refusals(events):
    return [(e["site"], e["reason"]) for e in events.of("update_refused")]


def everyone(tmp_path, kind, sums):
    return config(tmp_path, kind, sums, run={"rounds": 2}, strategy={"fraction": 1.0}, evaluate={"every": 0})


@pytest.mark.parametrize("what", LIES)
@pytest.mark.parametrize("sums", [OPEN, MASKED], ids=["open", "masked"])
def test_a_lie_is_refused_by_name_and_the_round_goes_on(tmp_path, monkeypatch, what, sums):
    kind, lie, why = LIES[what]
    cfg = everyone(tmp_path, kind, sums)
    lying(monkeypatch, lie)
    events = simulated(cfg, pytest.MonkeyPatch())
    clipped = sums is MASKED and what == "a vector beyond its bound"
    if sums is MASKED and why.startswith(("a value of its", "NaN or Inf")):
        why = "not finite"
    assert bool(refusals(events)) != clipped
    assert all(site == LIAR and why in told for site, told in refusals(events))
    assert [e["sites"] for e in events.of("round_committed")] == [4 if clipped else 3] * 2


@pytest.mark.parametrize("what", ["another name", "a weight beyond its bound", "a vector beyond its bound"])
def test_a_lie_over_the_wire_is_refused_by_name_and_the_round_goes_on(tmp_path, monkeypatch, certs, what):  # noqa: F811
    kind, lie, why = LIES[what]
    cfg = everyone(tmp_path, kind, OPEN)
    (tmp_path / "certs").symlink_to(certs)
    lying(monkeypatch, lie)
    events = federation(cfg, SITES)
    assert [site for site, _ in refusals(events)] == [LIAR, LIAR]
    assert why in refusals(events)[0][1]
    assert [e["sites"] for e in events.of("round_committed")] == [3, 3]


def test_an_update_of_another_schema_is_refused(tmp_path):
    bench = Workbench(everyone(tmp_path, "scaffold", OPEN), simulated=True)
    about, weights = bench.description, Arena.zeros(bench.description.schema)
    request = Train(id="x", round=0, weights=weights)
    plain = Update(delta=Arena.zeros(about.schema.model), num_examples=1.0, weight=1.0)
    with pytest.raises(BadUpdate, match="the update does not fit the model"):
        checks.answers(request, plain, LimitsConfig(), about.extras)
    whole = Update(delta=Arena.zeros(about.update), num_examples=1.0, weight=1.0)
    checks.answers(request, whole, LimitsConfig(), about.extras)


def test_numbers_within_their_bounds_that_make_a_step_divide_by_zero_fail_the_round_alone(
    tmp_path, monkeypatch
):
    """One site cancels the numbers of the others, or all say that they weigh nothing."""
    cfg = everyone(tmp_path, "fednova", OPEN)
    honest = Learner.finished
    monkeypatch.setattr(
        Learner, "finished", lambda *given: msgspec.structs.replace(honest(*given), weight=0.0)
    )
    with pytest.raises(RoundError, match=r"the strategy's step: .*division by zero"):
        simulated(cfg, pytest.MonkeyPatch())


def test_qfedavg_stands_still_where_sites_say_that_there_is_nothing_to_learn(tmp_path):
    weights = torch.ones(3)
    for h in (0.0, -1.0):
        round = RoundSums(torch.ones(3), scalars={"h": h})
        assert torch.equal(build("qfedavg", {}).step(weights.clone(), {}, round)[0], weights)
