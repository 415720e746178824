"""A vector beyond its bound: the site clips it, remembers what was summed, and the clipping is told."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.config import LimitsConfig
from fedtrain.errors import BadUpdate
from fedtrain.learning import Bounded, Extras, clipped_to
from fedtrain.messages import Train, Update
from fedtrain.runtime.star import checks
from fedtrain.schema import Schema, TensorSpec
from tests import references, toy
from tests.inprocess import federation
from tests.test_methods import MASKED, SUMS, close, run
from tests.test_methods_everywhere import OPEN, all_have_joined, certs, config  # noqa: F401  # fixtures

# kind -> (its options, those of [secagg], the bound, the reference, how many sites it divides by)
SMALL = 0.02
REFERENCES = {
    "scaffold": ({"clip": SMALL}, {}, lambda c, told: references.scaffold(c, len(toy.SITES), SMALL, told)),
    "mimelite": ({"clip": SMALL}, {}, lambda c, told: references.mimelite(c, 0.9, SMALL, told)),
    "feddyn": (
        {},
        {"clip": SMALL},
        lambda c, told: references.feddyn(c, len(toy.SITES), 0.01, SMALL, told),
    ),
}
SAYS = re.compile(r"round (\d+): (\d+) values( of (\w+))? were clipped to (.*)")


def told(events):
    """(round, site or None) -> how many values, of the rounds that were committed."""
    found = defaultdict(int)
    for text in (e["text"] for e in events.of("notice")):
        if said := SAYS.match(text):
            found[int(said[1]), said[4]] += int(said[2])
    return found


@pytest.mark.parametrize(
    ("kind", "sums"),
    [(kind, sums) for kind in REFERENCES for sums in SUMS if (kind, sums) != ("feddyn", "open")],
)
def test_sites_remember_what_was_summed_and_the_clipping_is_told(tmp_path, kind, sums):
    """In the open by site, under masks by the number of values alone; FedDyn's deltas have no bound in the
    open."""
    options, secagg, reference = REFERENCES[kind]
    terms = SUMS[sums][0] if sums == "open" else {"secagg": {**MASKED["secagg"], **secagg}}
    toys = run(tmp_path, kind, {**options, "min_sites": 3}, sums=terms, share=0.0)
    expected: references.Told = {}
    found = reference(toys.counted, expected)
    close(toys.weights, found[0], 100 * SUMS[sums][1])
    assert len(expected) > 10
    by_site = defaultdict(int)
    for (round, site), count in expected.items():
        by_site[round + 1, site if sums == "open" else None] += count
    assert told(toys.events) == by_site


@pytest.mark.parametrize("sums", SUMS)
def test_scaffolds_c_is_the_mean_of_what_sites_remember_where_it_was_clipped(tmp_path, sums):
    toys = run(tmp_path, "scaffold", {"clip": SMALL}, sums=SUMS[sums][0])
    assert told(toys.events)
    total = sum(toys.memory(site).get("c", np.zeros(18)) for site in toy.SITES)
    assert np.array_equal(toys.last.state["sum"].numpy(), total)
    assert not toys.events.of("update_refused")


def test_over_mutual_tls_the_aggregator_names_the_site_whose_values_were_clipped(tmp_path, certs):  # noqa: F811
    cfg = config(
        tmp_path, "mimelite", OPEN, strategy={"options": {"clip": SMALL}, "fraction": 1.0}, run={"rounds": 1}
    )
    (tmp_path / "certs").symlink_to(certs)
    events = federation(cfg, toy.SITES)
    texts = [e["text"] for e in events.of("notice") if "clipped" in e["text"]]
    assert len(texts) == 4
    assert all(text.endswith(f"were clipped to the strategy's bounds (gradient: {SMALL})") for text in texts)
    assert {SAYS.match(text)[4] for text in texts} == {*toy.SITES}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_site_clips_to_a_bound_that_no_float_is_passes_the_aggregators_check(dtype):
    schema = Schema((TensorSpec("w", (3,), dtype, True),))
    extras, limits = Extras(up=(Bounded("g", 0.1),), max_weight=1.0), LimitsConfig()
    update = Update(delta=Arena.zeros(extras.update(schema)), num_examples=1.0, weight=1.0, clipped=1)
    vector, clipped = clipped_to(torch.tensor([0.05, 7.0, -0.1], dtype=getattr(torch, dtype)), 0.1)
    assert clipped == 1
    update.delta.extras()["g"].copy_(vector)
    checks.inspect(update, limits, extras)
    update.delta.extras()["g"].mul_(1.001)
    with pytest.raises(BadUpdate, match=r"a value of its g is beyond the strategy's bound of 0.1"):
        checks.inspect(update, limits, extras)


def test_nan_is_not_clipped_and_not_hidden():
    vector, clipped = clipped_to(torch.tensor([float("nan"), 2.0]), 1.0)
    assert clipped == 1
    assert vector[0].isnan()


@pytest.mark.parametrize(
    ("extras", "clipped"), [(Extras(), 1), (Extras(exact=True), 4), (Extras(exact=True), -1)]
)
def test_a_site_that_says_it_clipped_what_has_no_bound_is_refused(extras, clipped):
    schema = Schema((TensorSpec("w", (3,), "float32", True),))
    request = Train(id="x", round=0, weights=Arena.zeros(schema))
    update = Update(delta=Arena.zeros(schema), num_examples=1.0, clipped=clipped)
    with pytest.raises(BadUpdate, match=f"says that it clipped {clipped} values"):
        checks.answers(request, update, LimitsConfig(), extras)
