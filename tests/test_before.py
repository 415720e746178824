"""Pre-aggregations: each equals its paper's algorithm in numpy, from memory and from files."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fedtrain.aggregation import BEFORE, Known, WeightedMean, aggregate, base, build, parse
from fedtrain.aggregation.base import Updates, Vectors
from fedtrain.arena import Arena
from fedtrain.digest import seed_of
from fedtrain.errors import ConfigError
from fedtrain.messages import Update
from fedtrain.schema import Schema, TensorSpec
from fedtrain.transport.memory import LocalCohort

from .test_aggregation import SCHEMA, in_files, some_updates
from .test_federated import Shuffled, config, handlers, run
from .test_rules import BY_COORDINATE, OF_ROWS, drawn

SEED = 7
seeds = st.integers(0, 2**32)
counts = st.integers(5, 12)


# --- the papers' algorithms


def bucketed(rows, s):
    """Karimireddy et al. 2022, Algorithm 1."""
    order = list(range(len(rows)))
    random.Random(seed_of(SEED, "bucketing")).shuffle(order)
    return np.array([rows[order[i : i + s]].mean(axis=0) for i in range(0, len(rows), s)])


def nearest_mixed(rows, f):
    """Allouah et al. 2023, Algorithm 2."""
    mixed = []
    for row in rows:
        order = np.argsort(((rows - row) ** 2).sum(axis=1), kind="stable")
        mixed.append(rows[order[: len(rows) - f]].mean(axis=0))
    return np.array(mixed)


def clipped(rows, norm):
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, norm / lengths)


REFERENCES = {
    "bucketing:2": lambda rows: bucketed(rows, 2),
    "bucketing:s=3": lambda rows: bucketed(rows, 3),
    "nnm": lambda rows: nearest_mixed(rows, 1),
    "nnm:f=2": lambda rows: nearest_mixed(rows, 2),
    "clip:2.5": lambda rows: clipped(rows, 2.5),
}


def stacked(rows):
    stack = Vectors(torch.as_tensor(rows))
    stack.known = Known(SEED)
    return stack


def read(stack):
    """All rows of a stack."""
    return torch.cat([rows.clone() for rows in stack.trained()], dim=1).numpy()


@settings(max_examples=40, deadline=None)
@given(seed=seeds, n=counts, d=st.integers(1, 60))
@pytest.mark.parametrize("text", REFERENCES)
def test_each_is_what_its_paper_says(text, seed, n, d):
    rows = drawn(seed, n, d)
    found = parse(text).over(stacked(rows))
    expected = REFERENCES[text](rows.numpy())
    assert found.count == len(expected)
    np.testing.assert_allclose(read(found), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, n=counts)
@pytest.mark.parametrize("kind", sorted({*OF_ROWS} - {"krum", "multi_krum"}))
def test_a_rule_reads_what_pre_aggregations_make_one_after_the_other(kind, seed, n):
    rows, before = drawn(seed, n, 9), ["clip:2.5", "bucketing:2", "nnm:1"]
    mixed = nearest_mixed(bucketed(clipped(rows.numpy(), 2.5), 2), 1)
    expected = build(kind, {}).of_vectors(torch.from_numpy(mixed))
    found = build(kind, {}, before=before).of(stacked(rows))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["krum", "multi_krum"])
def test_so_do_rules_that_choose(kind, seed):
    """Of twelve: of very few, two that are each other's nearest have the same score but for rounding."""
    rows = drawn(seed, 12, 9)
    mixed = torch.from_numpy(nearest_mixed(clipped(rows.numpy(), 2.5), 3))
    found = build(kind, {"f": 3}, before=["clip:2.5", "nnm:3"]).of(stacked(rows))
    torch.testing.assert_close(found, build(kind, {"f": 3}).of_vectors(mixed), rtol=1e-9, atol=1e-9)


def test_nearest_neighbour_mixing_by_hand():
    # f = 2 of 5, so three nearest each: 0 1 3, 1 0 3, 3 1 0 (7 is further than 0), 7 3 1, 50 7 3
    rows = torch.tensor([[0.0], [1], [3], [7], [50]], dtype=torch.float64)
    found = read(parse("nnm:2").over(stacked(rows)))[:, 0].tolist()
    assert found == pytest.approx([4 / 3, 4 / 3, 4 / 3, 11 / 3, 20])


def test_of_neighbours_equally_near_the_first_in_site_order_counts():
    rows = torch.tensor([[0.0], [1], [-1], [0.0]], dtype=torch.float64)
    assert read(parse("nnm:1").over(stacked(rows)))[0].item() == pytest.approx(1 / 3)  # 0, 0 and 1


def test_one_bucket_of_all_is_the_mean_and_buckets_of_one_leave_the_median_as_it_is():
    rows = drawn(0, 7, 5)
    assert torch.allclose(build("median", {}, before=["bucketing:7"]).of_vectors(rows), rows.mean(0))
    median = build("median", {}).of_vectors(rows)
    assert torch.equal(build("median", {}, before=["bucketing:1"]).of_vectors(rows), median)


def test_buckets_are_dealt_anew_with_another_seed():
    updates, rule = some_updates(), build("median", {}, before=["bucketing:2"])
    digests = {aggregate(rule, SCHEMA, updates, Known(seed)).digest for seed in (1, 1, 2, 3)}
    assert len(digests) == 3


def test_clipping_in_front_of_the_mean_leaves_it_weighted_by_examples():
    updates = some_updates()
    mean = WeightedMean.combine(SCHEMA, updates)
    assert build("mean", {}, before=["clip:1e30"]).combine(SCHEMA, updates).digest == mean.digest
    halved = build("mean", {}, before=["clip:1.0"]).combine(SCHEMA, updates[2:3])
    length = math.sqrt(
        sum(float(v.double().square().sum()) for v in halved.views().values() if v.is_floating_point())
    )
    assert length == pytest.approx(1.0, rel=1e-2)  # one of its dtypes has 16 bits


def test_clipping_leaves_an_update_the_weight_that_its_strategy_gave_it():
    updates = [structs.replace(update, weight=1.0 + i) for i, update in enumerate(some_updates())]
    mean = WeightedMean.combine(SCHEMA, updates)
    assert build("mean", {}, before=["clip:1e30"]).combine(SCHEMA, updates).digest == mean.digest
    assert mean.digest != WeightedMean.combine(SCHEMA, some_updates()).digest


def test_an_update_too_long_for_float64_counts_for_nothing():
    rows = torch.full((3, 2), 1e200, dtype=torch.float64)
    rows[1:] = 1.0
    assert build("mean", {}, before=["clip:9"]).of_vectors(rows).tolist() == pytest.approx([2 / 3] * 2)


# --- where it lies and how it is cut


@pytest.mark.parametrize("values", [47, 700, 1 << 20])
@pytest.mark.parametrize("kind", ["median", "mean", "krum", "geometric_median"])
def test_files_read_chunk_by_chunk_give_what_memory_gives(kind, values, tmp_path, monkeypatch):
    updates, rule = some_updates(9), build(kind, {}, before=["clip:5", "bucketing:2", "nnm:1"])
    whole = aggregate(rule, SCHEMA, updates, Known(SEED))
    monkeypatch.setattr(base, "VALUES", values)
    filed = aggregate(rule, SCHEMA, in_files(updates, tmp_path), Known(SEED))
    for name, view in filed.views().items():
        torch.testing.assert_close(view, whole.views()[name])


@pytest.mark.parametrize("kind", sorted(BY_COORDINATE))
@pytest.mark.parametrize("step", ["bucketing:2", "nnm:1"])
def test_where_a_chunk_ends_changes_no_bit_of_a_mixture(step, kind, monkeypatch):
    updates, rule = some_updates(9), build(kind, {}, before=[step])
    whole = aggregate(rule, SCHEMA, updates)
    monkeypatch.setattr(base, "VALUES", 70)
    assert aggregate(rule, SCHEMA, updates).digest == whole.digest


@pytest.mark.parametrize("step", ["bucketing:2", "nnm:1", "clip:3"])
def test_each_holds_as_much_as_it_reads_however_many_updates_there_are(step, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "VALUES", 300)
    stack = parse(step).over(Updates(SCHEMA, in_files(some_updates(30), tmp_path)))
    assert max(rows.numel() for rows in stack.trained()) <= 300


@pytest.mark.parametrize("before", [["bucketing:2"], ["nnm:1"], ["clip:3"], ["clip:3", "bucketing:2"]])
def test_the_order_of_arrival_changes_no_bit(tmp_path, before):
    digests = set()
    for seed in range(3):
        cfg = config(tmp_path / str(seed), aggregation={"rule": "median", "before": before},
                     strategy={"min_sites": 5})  # fmt: skip
        digests.add(run(cfg, Shuffled(handlers(), seed))[1].weights.digest)
    assert len(digests) == 1


def test_a_run_that_was_stopped_deals_the_same_buckets_again(tmp_path):
    class Stop(BaseException):
        pass

    def dies(site, request):
        if "/3/" in request.id and request.id.endswith("train") and site == "d":
            raise Stop
        return False

    keys = {"aggregation": {"rule": "median", "before": ["bucketing:2"]}, "strategy": {"min_sites": 5}}
    whole = run(config(tmp_path / "whole", **keys), LocalCohort(handlers()))[1].weights.digest
    cfg = config(tmp_path / "stopped", **keys)
    with pytest.raises(Stop):
        run(cfg, LocalCohort(handlers(), loses=dies))
    assert run(cfg, LocalCohort(handlers()))[1].weights.digest == whole


@pytest.mark.parametrize("before", [["bucketing:2"], ["nnm:2"], ["nnm:1", "bucketing:2"]])
def test_what_is_not_trained_is_no_way_around_them(before):
    """A hostile site sends the honest weights, and statistics from hell."""
    schema = Schema(
        (TensorSpec("w", (3,), "float32", True), TensorSpec("running_var", (2,), "float32", False),
         TensorSpec("seen", (1,), "int64", False))
    )  # fmt: skip
    updates = []
    for i in range(9):
        delta = Arena.zeros(schema)
        views = delta.views()
        views["w"].copy_(torch.tensor([1.0, 2.0, 3.0]) + 0.01 * i)
        views["running_var"].fill_(1e30 if i == 4 else i)
        views["seen"].fill_(2**60 if i == 4 else i)
        updates.append(Update(delta=delta, num_examples=1.0))
    result = build("median", {}, before=before).combine(schema, updates).views()
    assert bool((result["running_var"] <= 8).all())
    assert result["seen"].item() <= 8


# --- configuration


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            ["buckets:2"],
            "aggregation.before: 'buckets' is not one of bucketing, clip, nnm. Did you mean 'bucketing'",
        ),
        (["nnm:g=1"], r"aggregation.g: nnm has no such option. It has f\."),
        (["nnm:1,2"], r"aggregation.before: 'nnm:1,2' has more options than nnm, which has f\."),
        (["nnm:-1"], "aggregation.before.f: -1 must be 0 or more"),
        (["nnm:1.5"], "aggregation.before.f must be a whole number, got 1.5"),
        (["bucketing:0"], "aggregation.before.s: 0 must be 1 or more"),
        (["clip"], "aggregation.before.norm: is required"),
        (["clip:0"], "aggregation.before.norm: 0.0 must be positive"),
    ],
)
def test_a_wrong_one_is_refused_and_the_message_says_what_to_write(before, message):
    with pytest.raises(ConfigError, match=message):
        build("median", {}, before=before)


def test_the_key_is_a_list(tmp_path):
    with pytest.raises(ConfigError, match=r"aggregation\.before must be a list in \[ \], got 'nnm:1'"):
        config(tmp_path, aggregation={"before": "nnm:1"})
    config(tmp_path, aggregation={"before": ["nnm:1"]})


@pytest.mark.parametrize(
    ("kind", "options", "before", "needs"),
    [("median", {}, ["bucketing:2"], 5), ("krum", {"f": 2}, ["bucketing:3"], 19), ("mean", {}, ["nnm:2"], 5),
     ("median", {}, ["nnm:6", "bucketing:2"], 13), ("median", {}, ["bucketing:2", "nnm:2"], 9),
     ("median", {}, ["clip:1"], 3)],
)  # fmt: skip
def test_a_run_refuses_to_start_with_fewer_updates_than_leave_the_rule_enough(kind, options, before, needs):
    assert build(kind, options, needs, before).needs == needs
    with pytest.raises(
        ConfigError, match=rf"after {before[0]}.*needs {needs} updates a round, but {needs - 1}"
    ):
        build(kind, options, needs - 1, before)


def test_nothing_is_linear_after_a_pre_aggregation_so_masks_of_one_group_refuse_it():
    assert not any(build(kind, {}, before=["clip:1"]).linear for kind in OF_ROWS)


def test_the_page_names_every_one_with_its_options():
    from dataclasses import fields

    from .test_config import PAGE

    for kind, cls in BEFORE.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |"))
        assert all(f"`{f.name}" in row for f in fields(cls)), row
