"""Robust rules: worked examples, laws that each must keep, and the same result from files as from memory."""

import math
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain import aggregation
from fedtrain.aggregation import BEFORE, RULES, Mean, Rule, aggregate, base, build
from fedtrain.arena import Arena, ArenaFile
from fedtrain.errors import ConfigError, RoundError
from fedtrain.messages import Update
from fedtrain.schema import Schema, TensorSpec

from .test_aggregation import SCHEMA, in_files, some_updates

OF_ROWS = [kind for kind, rule in RULES.items() if rule.of_rows]  # fltrust is in test_fltrust.py
ROBUST = sorted({*OF_ROWS} - {"mean"})
BY_COORDINATE = {"mean", "median", "trimmed_mean"}
X = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def vectors(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def drawn(seed, n, d):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


seeds = st.integers(0, 2**32)
counts = st.integers(5, 12)


# --- what each rule is


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", [4, 5, 6]),
        ("median", [4, 5, 6]),
        ("trimmed_mean", [4, 5, 6]),
        ("krum", [1, 2, 3]),
        ("multi_krum", [2.5, 3.5, 4.5]),
        ("geometric_median", [4, 5, 6]),
        ("centered_clip", [4, 5, 6]),
    ],
)
def test_three_rows_by_hand(kind, expected):
    assert build(kind, {}).of_vectors(vectors(*X)).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("rows", "middle"), [([5, 1, 9], 5), ([5, 1, 9, 6], 5.5), ([3], 3), ([3, 4], 3.5)])
def test_the_median_of_an_even_number_is_between_the_middle_two(rows, middle):
    assert build("median", {}).of_vectors(vectors(*([r] for r in rows))).tolist() == [middle]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"f": 0}, 111 / 5), ({"f": 1}, 10 / 3), ({"f": 2}, 3), ({"f": 9}, 3), ({"fraction": 0.2}, 10 / 3),
     ({"fraction": 0.21}, 3), ({"fraction": 0.4}, 3), ({"fraction": 0.01}, 10 / 3)],
)  # fmt: skip
def test_trimming_leaves_out_as_many_at_each_end(options, expected):
    rows = vectors([1], [2], [100], [3], [5])  # sorted 1 2 3 5 100: 111 together
    result = build("trimmed_mean", options).of_vectors(rows)
    assert result.item() == pytest.approx(expected, rel=1e-15)


def test_krum_by_hand():
    # n = 5, f = 1, so two nearest each. 0: 1 + 9, 1: 1 + 4, 3: 4 + 9, 7: 16 + 36, 50: 43² + 47²
    rows = vectors([7], [0], [50], [1], [3])
    assert build("krum", {"f": 1}).of_vectors(rows).tolist() == [1]
    assert build("multi_krum", {"f": 1, "m": 3}).of_vectors(rows).item() == pytest.approx(4 / 3, rel=1e-15)
    assert build("multi_krum", {"f": 1}).of_vectors(rows).item() == pytest.approx(11 / 4, rel=1e-15)


def test_krums_ties_go_to_the_first():
    rows = vectors([0, 0], [1, 0], [10, 0], [11, 0], [100, 0])
    krum = build("krum", {"f": 2})  # one nearest each, and two pairs are equally near
    assert krum.of_vectors(rows).tolist() == [0, 0]
    assert krum.of_vectors(rows.flip(0)).tolist() == [11, 0]


def test_the_distances_of_krum_are_those_between_all_pairs():
    rows, f = drawn(3, 9, 40), 2
    squares = (rows[:, None] - rows[None]).square().sum(2)
    scores = [
        sum(sorted(s for j, s in enumerate(row) if j != i)[: 9 - f - 2]) for i, row in enumerate(squares)
    ]
    assert torch.equal(build("krum", {"f": f}).of_vectors(rows), rows[torch.stack(scores).argmin()])


@settings(max_examples=12, deadline=None)
@given(seed=seeds, n=counts)
def test_the_geometric_median_has_the_least_sum_of_distances(seed, n):
    rows = drawn(seed, n, 6)

    def cost(point):
        return (rows - point).norm(dim=1).sum().item()

    best = rows.mean(0)
    for _ in range(500):  # Weiszfeld from the mean, unsmoothed
        inverse = 1 / (rows - best).norm(dim=1).clamp(min=1e-12)
        best = (inverse[:, None] * rows).sum(0) / inverse.sum()
    few, many = (
        cost(build("geometric_median", {"iterations": i}).of_vectors(rows)) / cost(best) - 1 for i in (8, 200)
    )
    assert few < 0.01
    assert many < 1e-4


def test_a_step_of_centred_clipping_by_hand():
    # from zero with radius 5: (3, 4) stays, (30, 40) becomes (3, 4), (0, -10) becomes (0, -5)
    rows = vectors([3, 4], [30, 40], [0, -10])
    one = build("centered_clip", {"radius": 5.0, "iterations": 1, "start": "zero"}).of_vectors(rows)
    assert one.tolist() == pytest.approx([2, 1], rel=1e-14)


# --- laws


@settings(max_examples=40, deadline=None)
@given(seed=seeds, n=counts, data=st.data())
@pytest.mark.parametrize("kind", OF_ROWS)
def test_the_order_of_the_rows_does_not_matter(kind, seed, n, data):
    rows, rule = drawn(seed, n, 7), build(kind, {})
    order = data.draw(st.permutations(range(n)))
    torch.testing.assert_close(
        rule.of_vectors(rows[list(order)]), rule.of_vectors(rows), rtol=1e-10, atol=1e-10
    )


@settings(max_examples=40, deadline=None)
@given(seed=seeds, n=counts, shift=st.floats(-1e3, 1e3), scale=st.floats(1e-2, 1e2))
@pytest.mark.parametrize("kind", OF_ROWS)
def test_shifting_and_scaling_the_rows_shifts_and_scales_the_result(kind, seed, n, shift, scale):
    rows, rule = drawn(seed, n, 7), build(kind, {})
    by = shift * torch.linspace(-1, 2, 7, dtype=torch.float64)
    expected = rule.of_vectors(rows) * scale + by
    torch.testing.assert_close(rule.of_vectors(rows * scale + by), expected, rtol=1e-6, atol=1e-6)


hostile_values = st.floats(-1e30, 1e30) | st.sampled_from([1e30, -1e30])


@settings(max_examples=40, deadline=None)
@given(seed=seeds, f=st.integers(1, 3), more=st.integers(0, 3), data=st.data())
@pytest.mark.parametrize("kind", ROBUST)
def test_s19_f_hostile_rows_cannot_move_the_result_past_a_bound(kind, seed, f, more, data):
    n = 2 * f + 3 + more
    rows = drawn(seed, n, 5)
    honest = rows[f:]
    for i in range(f):
        rows[i] = vectors(*data.draw(st.lists(hostile_values, min_size=5, max_size=5)))
    rule = build(kind, {"f": f} if "f" in {x.name for x in fields(RULES[kind])} else {})
    result = rule.of_vectors(rows[torch.randperm(n, generator=torch.Generator().manual_seed(seed))])
    middle = honest.mean(0)
    spread = (honest - middle).norm(dim=1).max()
    assert (result - middle).norm() <= 5 * spread
    if kind in {"median", "trimmed_mean"}:
        assert bool((honest.amin(0) <= result).all() and (result <= honest.amax(0)).all())
    if kind in {"krum", "multi_krum"} and all(row.norm() > 1e3 * spread for row in rows[:f]):
        kept = build(kind, {"f": 0}).of_vectors(honest) if kind == "multi_krum" else None
        near = [kept] if kept is not None else list(honest)
        assert min((result - row).norm() for row in near) <= 1e-12


def test_one_hostile_row_moves_the_mean_as_far_as_it_likes():
    assert Mean().of_vectors(vectors(*[[0.0]] * 4, [1e30])).item() > 1e29


def test_hostile_rows_of_one_hundred_sites_leave_krum_the_precision_to_tell_the_others_apart():
    rows = drawn(0, 100, 50) * 1e-6
    alone = build("krum", {"f": 20}).of_vectors(rows[20:])
    rows[:20] = 1e30 * drawn(1, 20, 50)
    assert any(torch.equal(build("krum", {"f": 20}).of_vectors(rows), row) for row in rows[20:])
    assert any(torch.equal(alone, row) for row in rows[20:])


@settings(max_examples=20, deadline=None)
@given(seed=seeds, n=st.integers(1, 9))
@pytest.mark.parametrize(
    ("kind", "options"),
    [("trimmed_mean", {"f": 0}), ("multi_krum", {"f": 0}), ("centered_clip", {"radius": math.inf})],
)
def test_a_rule_that_fears_no_one_is_the_mean(kind, options, seed, n):
    rows = drawn(seed, n, 7)
    expected = Mean().of_vectors(rows)
    torch.testing.assert_close(build(kind, options).of_vectors(rows), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(value=st.floats(-1e30, 1e30), n=st.integers(1, 9))
@pytest.mark.parametrize("kind", OF_ROWS)
def test_equal_rows_agree(kind, value, n):
    result = build(kind, {}).of_vectors(vectors(*[[value, 1.0, -value]] * n))
    assert result.tolist() == pytest.approx([value, 1.0, -value], rel=1e-12, abs=1e-300)


# --- where it lies and how it is cut


@pytest.mark.parametrize("values", [11, 700, 1 << 20])
@pytest.mark.parametrize("kind", OF_ROWS)
def test_files_read_chunk_by_chunk_give_what_memory_gives(kind, values, tmp_path, monkeypatch):
    updates, rule = some_updates(), build(kind, {})
    whole = aggregate(rule, SCHEMA, updates)
    monkeypatch.setattr(base, "VALUES", values)
    filed = aggregate(rule, SCHEMA, in_files(updates, tmp_path))
    if kind in BY_COORDINATE | {"krum"}:
        assert filed.digest == whole.digest
    for name, view in filed.views().items():
        torch.testing.assert_close(view, whole.views()[name])


@settings(max_examples=20, deadline=None)
@given(seed=seeds, n=counts, d=st.integers(0, 200), values=st.integers(1, 3000))
@pytest.mark.parametrize("kind", ROBUST)
def test_vectors_and_updates_of_the_same_numbers_agree_whatever_the_chunks(kind, seed, n, d, values):
    schema = Schema(
        (TensorSpec("a", (d // 2,), "float32", True), TensorSpec("b", (d - d // 2,), "float32", True))
    )
    rows, rule, before = drawn(seed, n, d).float(), build(kind, {}), base.VALUES
    updates = []
    for row in rows:
        delta = Arena.zeros(schema)
        delta.flat(schema.sections[0]).copy_(row)
        updates.append(Update(delta=delta, num_examples=1.0))
    kept = rows.clone()
    whole = rule.of_vectors(rows)
    try:
        base.VALUES = values
        cut, folded = rule.of_vectors(rows), rule.combine(schema, updates).flat(schema.sections[0])
    finally:
        base.VALUES = before
    assert torch.equal(folded, cut)
    torch.testing.assert_close(cut, whole)
    assert torch.equal(rows, kept)
    assert whole.dtype == torch.float32


@dataclass(frozen=True)
class Widest(Rule):
    """A rule of one's own: the largest value, and how much was seen at once."""

    def of(self, stack):
        self.seen.append(max((rows.numel() for rows in stack.trained()), default=0))
        return stack.reduce(lambda rows: rows.amax(0))

    seen = []  # noqa: RUF012 - a note for the test


def test_a_rule_of_ones_own_holds_a_chunk_however_many_updates_lie_in_files(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "VALUES", 300)
    updates = some_updates(60)
    result = aggregate(Widest(), SCHEMA, in_files(updates, tmp_path))
    assert Widest.seen == [300]
    expected = torch.stack([u.delta.views()["w"] for u in updates]).amax(0)
    assert torch.equal(result.views()["w"], expected)


@pytest.mark.parametrize("kind", ROBUST)
def test_what_is_not_trained_moves_by_the_median_so_that_a_mimic_cannot_move_it_either(kind):
    """A hostile site sends the honest weights, and statistics from hell."""
    schema = Schema(
        (TensorSpec("w", (3,), "float32", True), TensorSpec("running_var", (2,), "float32", False),
         TensorSpec("seen", (1,), "int64", False), TensorSpec("mask", (1,), "bool", False))
    )  # fmt: skip
    updates = []
    for i in range(5):
        delta = Arena.zeros(schema)
        views = delta.views()
        views["w"].copy_(torch.tensor([1.0, 2.0, 3.0]) + 0.01 * (i - 2))
        views["running_var"].fill_(1e30 if i == 2 else i)
        views["seen"].fill_(2**60 if i == 2 else i)
        views["mask"].fill_(True)
        updates.append(Update(delta=delta, num_examples=1e9 if i == 2 else 1.0))
    result = build(kind, {}).combine(schema, updates).views()
    assert torch.allclose(result["w"], torch.tensor([1.0, 2.0, 3.0]), atol=0.03)
    assert bool((result["running_var"] <= 4).all())
    assert result["seen"].item() in (2, 3)  # of 0 1 3 4 and the mimic's the middle is 3
    assert not result["mask"].any()


@pytest.mark.parametrize("kind", ROBUST)
def test_the_claimed_number_of_examples_counts_for_nothing(kind):
    updates = some_updates()
    same = [Update(delta=u.delta, num_examples=1.0) for u in updates]
    rule = build(kind, {})
    assert rule.combine(SCHEMA, updates).digest == rule.combine(SCHEMA, same).digest


@pytest.mark.parametrize("kind", ROBUST)
def test_the_mean_alone_is_linear(kind):
    assert Mean.linear
    assert not RULES[kind].linear


def test_no_updates_have_no_aggregate():
    with pytest.raises(RoundError, match="no updates"):
        build("median", {}).combine(SCHEMA, [])
    with pytest.raises(RoundError, match=r"not \[0, 3\]"):
        build("median", {}).of_vectors(torch.empty(0, 3))


def test_a_truncated_file_is_named(tmp_path):
    from fedtrain.errors import BadUpdate

    filed = in_files(some_updates(3), tmp_path)
    (tmp_path / "1").write_bytes(b"short")
    assert isinstance(filed[1].delta, ArenaFile)
    with pytest.raises(BadUpdate, match="1: 5 bytes at coordinate 0"):
        build("median", {}).combine(SCHEMA, filed)


# --- configuration


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("medain", {}, "aggregation.rule: 'medain' is not one of .* Did you mean 'median'"),
        ("krum", {"ff": 1}, r"aggregation\.ff: krum has no such option. Did you mean f\?"),
        ("median", {"radius": 1}, 'aggregation.rule = "centered_clip" has it'),
        ("krum", {"f": -1}, "aggregation.f: -1 must be 0 or more"),
        ("krum", {"f": 1.5}, r"aggregation\.f must be a whole number, got 1\.5"),
        ("multi_krum", {"m": -1}, "aggregation.m"),
        ("trimmed_mean", {"fraction": 0.5}, "aggregation.fraction: 0.5 must be in"),
        ("trimmed_mean", {"f": -1}, "aggregation.f"),
        ("geometric_median", {"iterations": 0}, "aggregation.iterations"),
        ("centered_clip", {"radius": -1.0}, "aggregation.radius"),
        ("centered_clip", {"iterations": 0}, "aggregation.iterations"),
        ("centered_clip", {"start": "mean"}, "aggregation.start: 'mean' is not one of"),
    ],
)
def test_a_mistake_is_a_config_error_that_says_what_to_change(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        build(kind, options)


@pytest.mark.parametrize(
    ("kind", "options", "needs"),
    [("mean", {}, 1), ("median", {}, 3), ("trimmed_mean", {"f": 2}, 5),
     ("trimmed_mean", {"fraction": 0.1}, 3), ("krum", {"f": 2}, 7),
     ("multi_krum", {"f": 2}, 7), ("multi_krum", {"f": 2, "m": 6}, 8),
     ("geometric_median", {}, 3), ("centered_clip", {}, 3)],
)  # fmt: skip
def test_a_rule_refuses_to_start_with_fewer_updates_than_its_promise_needs(kind, options, needs):
    assert build(kind, options, needs).needs == needs
    if needs > 1:
        with pytest.raises(ConfigError, match=rf"needs {needs} updates a round, but {needs - 1} may be all"):
            build(kind, options, needs - 1)


def test_the_tables_name_every_file_of_a_rule_or_a_pre_aggregation():
    files = {f.stem for f in Path(aggregation.__file__).parent.glob("*.py")}
    assert files - {"__init__", "base", "before", "last"} == {*RULES, *BEFORE}
