"""A site's vector in the ring, and the sum read back."""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fedtrain import compression
from fedtrain.aggregation import WeightedMean
from fedtrain.arena import Arena, ArenaFile, Slab
from fedtrain.errors import RoundError, SecAggError
from fedtrain.messages import Update
from fedtrain.runtime.threads import ThreadPool
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.encoding import Encoding, norm_of, rounding_seed
from fedtrain.secagg.fixedpoint import PER_BLOCK, FixedPoint

SITES = 4
MODEL = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
SCHEMA = Schema.of(MODEL)
NAMES = ("accuracy", "loss")


def update(i, schema=SCHEMA, size=0.1):
    arena = Arena.zeros(schema)
    for view in arena.views().values():
        if view.is_floating_point():
            view.copy_(size * torch.randn(view.shape, generator=torch.Generator().manual_seed(i)))
        else:
            view.fill_(10 + i)
    return Update(delta=arena, num_examples=10.0 * (i + 1), metrics={"loss": (1.5 * i, 10.0 * (i + 1))})


def encoding(**terms):
    point = FixedPoint(**{"sites": SITES, "ring_bits": 32, "clip": 1.0, "max_weight": 100.0} | terms)
    return Encoding(point, SCHEMA)


def encoded(how, update, names, seed, **options):
    vector = np.empty(how.numel(names), how.point.dtype)
    if isinstance(update, Update):
        how.encode(update, names, seed, vector, **options)
    else:
        how.encode_metrics(update, names, vector)
    return vector


def total_of(how, updates):
    vectors = [encoded(how, u, NAMES, rounding_seed(7, 0, i)) for i, u in enumerate(updates)]
    return sum(vectors[1:], start=vectors[0]), len(updates)


@pytest.mark.parametrize("ring_bits", [16, 32, 64])
def test_the_sum_is_the_weighted_mean_to_a_step_and_exact_in_buffers_and_metrics(ring_bits):
    updates, how = [update(i) for i in range(SITES)], encoding(ring_bits=ring_bits)
    vector, sites = total_of(how, updates)
    total = how.decode(vector, sites, NAMES)
    plain = WeightedMean(SCHEMA)
    for each in updates:
        plain.add(each)
    mean, weight = plain.result(), sum(u.num_examples for u in updates)
    off = how.point.step * how.point.max_weight * SITES / weight + 1e-7
    for name, view in total.delta.views().items():
        want = mean.views()[name]
        if "running" in name:
            assert torch.allclose(view, want, atol=1e-5), name
        elif not view.is_floating_point():
            assert torch.equal(view, want), name
        else:
            assert (view - want).abs().max() <= off, name
    assert total.weight == weight
    assert total.clipped == 0
    assert total.metrics == {"accuracy": (0.0, 0.0), "loss": (9.0, weight)}


@pytest.mark.parametrize("terms", [(16, 0), (32, 12), (32, 0), (64, 12), (64, 0)])
def test_with_checksums_each_integer_is_as_much_above_0_as_it_may_be_below_and_the_sum_says_the_same(terms):
    how, above = (
        encoding(ring_bits=terms[0], value_bits=terms[1], unsigned=unsigned) for unsigned in (False, True)
    )
    updates = [update(i, size=30.0 if i == 2 else 0.1) for i in range(SITES - 1)]
    updates.append(replace(update(SITES - 1), weight=0.0))  # weighs nothing
    (plain, n), (total, _) = total_of(how, updates), total_of(above, updates)
    assert np.array_equal(plain + plain.dtype.type(n * how.point.q_max), total)
    one, lifted = (encoded(e, updates[2], NAMES, rounding_seed(1)) for e in (how, above))
    assert np.array_equal(one + one.dtype.type(how.point.q_max), lifted)
    assert lifted.max() <= 2 * how.point.q_max
    mean, same = how.decode(plain, n, NAMES), above.decode(total, n, NAMES)
    assert torch.equal(mean.delta.data, same.delta.data)
    assert (mean.weight, mean.clipped, mean.metrics) == (same.weight, same.clipped, same.metrics)
    rows = Slab(SCHEMA, torch.stack([each.delta.data for each in updates])).arenas()
    stacked = [above.row(replace(u, delta=row), rounding_seed(7, 0, i)) for i, (u, row) in
               enumerate(zip(updates, rows, strict=True))]  # fmt: skip
    summed = np.zeros(above.length, above.point.dtype)
    above.add_rows(stacked, summed)
    assert np.array_equal(summed, total[: above.length])


@pytest.mark.parametrize("ring_bits", [16, 32, 64])
def test_updates_in_a_slab_are_summed_as_one_by_one(ring_bits):
    """Some of them, too: others of a slab may be in another sum, or in none."""
    how = encoding(ring_bits=ring_bits)
    updates = [update(i, size=30.0 if i == 2 else 0.1) for i in range(SITES)]
    rows = Slab(SCHEMA, torch.stack([each.delta.data for each in updates])).arenas()
    for chosen in (range(SITES), (0, 2)):
        expected = sum(encoded(how, updates[i], (), rounding_seed(i), scale=0.5) for i in chosen)
        total = np.zeros(how.length, how.point.dtype)
        stacked = [replace(updates[i], delta=rows[i]) for i in chosen]
        assert all(how.stacks(each.delta) for each in stacked)
        how.add_rows(
            [how.row(each, rounding_seed(i), 0.5) for i, each in zip(chosen, stacked, strict=True)], total
        )
        mean, same = how.decode(total, len(chosen), ()), how.decode(expected, len(chosen), ())
        assert torch.equal(mean.delta.data, same.delta.data)
        assert (mean.weight, mean.clipped) == (same.weight, same.clipped)
        assert mean.clipped > 0
        assert np.array_equal(total, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_examples": 101.0}, "more examples"),
        ({"num_examples": 0.0}, "more examples"),
    ],
)
def test_an_update_in_a_slab_that_cannot_travel_is_refused_by_itself(change, said):
    row = Slab(SCHEMA, update(1).delta.data[None]).arenas()[0]
    with pytest.raises(SecAggError, match=said):
        encoding().row(replace(update(1), delta=row, **change), rounding_seed(0))


def test_only_a_small_finite_model_of_usual_floats_is_summed_with_its_neighbours():
    def stacks(schema, value=1.0, **options):
        arena = Arena.zeros(schema)
        arena.flat(schema.sections[0])[0] = value
        point = FixedPoint(sites=3, ring_bits=32, clip=1.0, max_weight=20.0)
        return Encoding(point, schema, **options).stacks(Slab(schema, arena.data[None]).arenas()[0])

    small, large = (Schema((TensorSpec("w", (n,), "float32", True),)) for n in (10, 1 << 20))
    assert stacks(small)
    assert not stacks(small, math.nan)
    assert not stacks(small, 3e38)  # finite, and its norm is not
    assert not stacks(large)
    assert not stacks(small, compressor=compression.parse("randomk:0.5"))
    assert not stacks(Schema((TensorSpec("w", (10,), "bfloat16", True),)))
    assert not encoding().stacks(update(0).delta)  # not in a slab


def test_a_file_is_encoded_as_the_same_arena_in_memory(tmp_path):
    each, how = update(1), encoding()
    (tmp_path / "delta").write_bytes(each.delta.payload)
    spooled = Update(delta=ArenaFile(SCHEMA, tmp_path / "delta"), num_examples=20.0, metrics=each.metrics)
    seed = rounding_seed(1)
    assert np.array_equal(encoded(how, each, NAMES, seed), encoded(how, spooled, NAMES, seed))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_all_cores_read_a_file_and_make_of_it_what_one_makes_of_memory(tmp_path, dtype):
    schema = Schema(
        (TensorSpec("w", (2 * PER_BLOCK + 7,), dtype, True), TensorSpec("n", (3,), "int64", False))
    )
    how, one = Encoding(FixedPoint(3, 32, clip=1.0, max_weight=20.0), schema), update(1, schema)
    (tmp_path / "delta").write_bytes(one.delta.payload)
    spooled = Update(delta=ArenaFile(schema, tmp_path / "delta"), num_examples=one.num_examples)
    found = encoded(how, spooled, (), rounding_seed(0), parallel=ThreadPool(3))
    assert np.array_equal(found, encoded(how, one, (), rounding_seed(0)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_every_kind_of_float_travels(dtype):
    schema = Schema((TensorSpec("w", (1000,), dtype, True), TensorSpec("n", (), "int64", False)))
    how = Encoding(FixedPoint(sites=3, ring_bits=32, clip=1.0, max_weight=20.0), schema)
    one = update(1, schema)
    total = how.decode(encoded(how, one, (), rounding_seed(0)), 1, ())
    assert torch.equal(total.delta.views()["n"], one.delta.views()["n"])
    atol = how.point.step + {"bfloat16": 0.002, "float16": 2e-4}.get(dtype, 1e-7)
    assert torch.allclose(total.delta.views()["w"], one.delta.views()["w"], atol=atol, rtol=0)


def test_what_a_sum_does_not_say_is_zero_in_the_mean(monkeypatch):
    """Bytes and booleans have no differences; and no memory of somebody else shows in the mean."""
    kinds = ("float32", "bool", "uint8", "int64")
    schema = Schema(tuple(TensorSpec(kind, (7,), kind, kind == "float32") for kind in kinds))
    how = Encoding(FixedPoint(sites=3, ring_bits=32, clip=1.0, max_weight=20.0), schema)
    vector, empty = encoded(how, update(1, schema), (), rounding_seed(0)), torch.empty
    # fresh memory is mostly zero by itself
    monkeypatch.setattr(torch, "empty", lambda *shape, **kw: empty(*shape, **kw).fill_(0xAB))
    mean = how.decode(vector, 1, ()).delta
    monkeypatch.undo()
    clean = how.decode(vector, 1, ()).delta
    assert not mean.views()["bool"].any()
    assert not mean.views()["uint8"].any()
    assert torch.equal(mean.data, clean.data)


def test_what_is_out_of_range_is_clipped_and_counted():
    one, how = update(1, size=100.0), encoding()
    total = how.decode(encoded(how, one, (), rounding_seed(0)), 1, ())
    trained = torch.cat(
        [p.flatten() for n, p in one.delta.views().items() if "run" not in n and "num" not in n]
    )
    assert total.clipped == int((trained.abs() * 20 / 100 > 1).sum()) > 0


def test_a_shortened_delta_is_the_delta_shortened():
    one, how = update(1), encoding()
    norm = norm_of(one.delta)
    total = how.decode(encoded(how, one, (), rounding_seed(0), scale=0.5 / norm), 1, ())
    assert norm_of(total.delta) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_examples": 101.0}, "more examples than secagg.max_examples = 100. Raise it"),
        ({"metrics": {"loss": (math.nan, 1.0)}}, "the sum of loss is not finite"),
    ],
)
def test_what_cannot_travel_is_named(change, said):
    one = update(1)
    changed = Update(**{"delta": one.delta, "num_examples": 20.0, "metrics": {}} | change)
    with pytest.raises(SecAggError, match=said):
        encoded(encoding(), changed, ("loss",), rounding_seed(0))


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_nan_never_leaves_a_site(name):
    one = update(1)
    one.delta.views()[name].view(-1)[1] = math.nan
    with pytest.raises(SecAggError, match=r"nan|not finite"):
        encoded(encoding(), one, (), rounding_seed(0))
    assert math.isnan(norm_of(one.delta))


def test_sites_that_weigh_nothing_have_no_mean():
    how = encoding()
    with pytest.raises(RoundError, match="weigh 0 examples"):
        how.decode(np.zeros(how.numel(()), how.point.dtype), 2, ())


def test_an_evaluation_is_metrics_alone():
    how = Encoding(FixedPoint(sites=3, ring_bits=16, clip=1.0, max_weight=10.0), None)
    vectors = [encoded(how, {"accuracy": (i + 0.5, 10.0)}, ("accuracy",), b"") for i in range(3)]
    total = how.decode(sum(vectors[1:], start=vectors[0]), 3, ("accuracy",))
    assert total.metrics == {"accuracy": (4.5, 30.0)}
    assert total.delta is None
