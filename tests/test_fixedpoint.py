"""Fixed point: right in expectation, near the plain mean, and no sum that wraps."""

import math
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.errors import ConfigError, SecAggError
from fedtrain.runtime.threads import ThreadPool
from fedtrain.secagg.fixedpoint import MAX_VALUE_BITS, ONE, PER_BLOCK, SCALAR_LIMIT, FixedPoint, held
from fedtrain.secagg.masking import RINGS, TAG_BYTES, keystream

SEED = b"a seed for tests"


def encoded(point, values, weight=None, seed=SEED, **options):
    out = np.empty(len(values), point.dtype)
    clipped = point.encode_into(held(values), weight or point.max_weight, seed, out, **options)
    return out, clipped


def as_integers(vector):
    return vector.view(f"i{vector.itemsize}").astype(np.int64)


def seed_of(*parts):
    return sha256(repr(parts).encode()).digest()[:16]


def some_values(count, dtype=np.float32, size=0.1, seed=0):
    return (np.random.default_rng(seed).standard_normal(count) * size).astype(dtype)


# --- The proof that no sum wraps


@given(sites=st.integers(1, 10**6), ring_bits=st.sampled_from(sorted(RINGS)))
def test_as_many_bits_are_used_as_fit_and_no_more(sites, ring_bits):
    most = 2 ** (ring_bits - 1) - 1
    if sites * (2**3 - 1) > most:
        with pytest.raises(ConfigError, match=f"{sites} sites in a ring of {ring_bits} bits leave"):
            FixedPoint(sites, ring_bits, clip=1.0, max_weight=1.0)
        return
    point = FixedPoint(sites, ring_bits, clip=1.0, max_weight=1.0)
    assert sites * point.q_max <= most
    assert sites * (2 * point.q_max + 1) > most or point.value_bits == MAX_VALUE_BITS


@pytest.mark.parametrize(
    ("ring_bits", "sites", "bits"), [(16, 3, 14), (16, 100, 9), (32, 10, 28), (32, 100, 25), (64, 100, 43)]
)
def test_the_bits_that_usual_cohorts_have(ring_bits, sites, bits):
    assert FixedPoint(sites, ring_bits, 1.0, 1.0).value_bits == bits


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"ring_bits": 24}, "ring_bits = 24 must be one of 16, 32, 64"),
        ({"sites": 0}, "a sum over 0 sites"),
        ({"clip": 0.0}, "clip = 0 must be positive"),
        ({"clip": math.inf}, "clip = inf must be positive and finite"),
        ({"clip": math.nan}, "clip = nan"),
        ({"max_weight": 0.0}, "max_weight = 0 must be in"),
        ({"max_weight": math.nan}, "max_weight = nan must be in"),
        ({"max_weight": 5e12}, "max_weight = 5e.12 must be in"),
        ({"value_bits": 3}, "leave 3 bits a value"),
        ({"value_bits": 44, "ring_bits": 64}, "44 is more than float64 can round: 43 is the most"),
        ({"value_bits": 29}, "could sum to 2684354550, and 32 bits hold 2147483647"),
        ({"value_bits": 29}, r"Lower value_bits to 28"),
        ({"ring_bits": 16, "sites": 5000}, "Raise ring_bits above 16, or sum fewer sites"),
    ],
)  # fmt: skip
def test_terms_that_cannot_hold_are_refused_with_what_to_change(terms, message):
    with pytest.raises(ConfigError, match=message):
        FixedPoint(**{"sites": 10, "ring_bits": 32, "clip": 1.0, "max_weight": 1.0} | terms)


@settings(max_examples=40, deadline=None)
@given(
    sites=st.sampled_from([1, 2, 3, 7, 50, 129]),
    ring_bits=st.sampled_from(sorted(RINGS)),
    clip=st.floats(1e-6, 1e6),
    data=st.data(),
)
def test_sums_of_extremes_neither_wrap_nor_leave_the_clip(sites, ring_bits, clip, data):
    point = FixedPoint(sites, ring_bits, clip, max_weight=100.0)
    big = data.draw(st.sampled_from([clip, 2 * clip, 1e30, float(np.nextafter(np.float64(clip), 0))]))
    values = np.array([big, -big, big / 2, -big / 2, 0.0])
    total, exact = np.zeros(5, point.dtype), np.zeros(5, object)
    for i in range(sites):
        vector, clipped = encoded(point, values, seed=seed_of(i))
        assert clipped == (0 if big <= clip else 4 if big == 1e30 else 2)
        assert np.abs(as_integers(vector)).max() <= point.q_max
        total += vector
        exact += as_integers(vector).astype(object)
    assert (as_integers(total).astype(object) == exact).all()
    mean = point.decode(total, sites, 100.0 * sites)
    assert mean == pytest.approx(np.clip(values, -clip, clip), abs=point.step, rel=1e-12)


# --- Rounding


@pytest.mark.parametrize(("ring_bits", "value_bits"), [(16, 0), (16, 14), (32, 15), (32, 0), (64, 0)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_value_is_off_by_less_than_a_step(ring_bits, value_bits, dtype):
    point = FixedPoint(2, ring_bits, clip=1.0, max_weight=8.0, value_bits=value_bits)
    values = some_values(3000, dtype)
    vector, clipped = encoded(point, values, weight=4.0)
    assert clipped == 0
    exact = values.astype(np.float64) * 0.5 / point.step
    off = as_integers(vector) - exact
    assert np.abs(off).max() < 1.001
    assert off.min() < -0.5 < 0.5 < off.max()


@pytest.mark.parametrize(
    ("ring_bits", "value_bits", "bits"), [(16, 8, 16), (16, 14, 10), (32, 15, 16), (32, 31, 16), (64, 43, 10)]
)
def test_rounding_is_right_in_expectation(ring_bits, value_bits, bits):
    """Over all values of u, which is a multiple of 2^-bits: so the expectation is off by 2^-bits at most."""
    point = FixedPoint(1, ring_bits, clip=1.0, max_weight=1.0, value_bits=value_bits)
    q = point.q_max // 3
    for fraction in (0.0, 0.25, 0.5, 2.0**-8, 1 - 2.0**-8):
        value = np.float64((q + fraction) * point.step)
        out, scratch = np.empty(2**16, point.dtype), np.empty(PER_BLOCK * 8, np.uint8)
        for start in range(0, 2**16, 2**14):
            draws = np.arange(start, start + 2**14, dtype=np.uint16).view(np.int16)
            integers, _ = point._round(np.full((1, 2**14), value), np.ones(1), draws[None], scratch)
            out[start : start + 2**14] = integers[0].astype(point.dtype)
        found = as_integers(out)
        assert set(found.tolist()) <= {q, q + 1} if fraction else {q}
        assert found.mean() - q == pytest.approx(fraction, abs=2.0**-bits)


@pytest.mark.parametrize(
    ("ring_bits", "value_bits"), [(16, 8), (16, 13), (32, 12), (32, 26), (64, 10), (64, 43)]
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(("n", "offset"), [(1, 0), (300, 7), (PER_BLOCK // 3, 0), (1000, PER_BLOCK - 1000)])
def test_rows_together_are_the_sum_of_one_by_one(ring_bits, value_bits, dtype, n, offset):
    point = FixedPoint(7, ring_bits, clip=1.0, max_weight=10.0, value_bits=value_bits)
    rows = some_values(7 * n, dtype, size=0.4).reshape(7, n)  # some of the second row are clipped
    rows[1] *= 5
    weights, seeds = np.linspace(0.5, 10.0, 7), [seed_of(i) for i in range(7)]
    weights[1] = 10.0
    expected, clipped = np.zeros(n, point.dtype), []
    for row, weight, seed in zip(rows, weights, seeds, strict=True):
        vector = np.empty(n, point.dtype)
        clipped.append(point.encode_into(held(row), float(weight), seed, vector, offset))
        expected += vector
    total = np.ones(n, point.dtype)
    assert point.add_rows(rows, weights, seeds, total, offset).tolist() == clipped
    assert np.array_equal(total, expected + total.dtype.type(1))
    assert n == 1 or clipped[1] > 0


def test_rows_of_which_one_is_not_finite_are_refused():
    point, rows = FixedPoint(3, 32, clip=1.0, max_weight=1.0), some_values(30).reshape(3, 10)
    rows[1, 4] = np.nan
    with pytest.raises(SecAggError, match="not finite"):
        point.add_rows(rows, np.ones(3), [SEED] * 3, np.zeros(10, point.dtype))


def test_scalars_of_rows_are_those_of_each():
    point, draw = FixedPoint(9, 32, clip=1.0, max_weight=1.0), np.random.default_rng(0)
    values = draw.standard_normal((5, 4)) * 10.0 ** draw.integers(-5, 12, (5, 4))
    together = point.encode_scalars(values)
    assert np.array_equal(together, np.stack([point.encode_scalars(row) for row in values]))
    values[3, 2] = np.inf
    with pytest.raises(SecAggError, match="scalar 2 is not finite"):
        point.encode_scalars(values)


def test_the_mean_of_sites_is_off_by_what_was_promised():
    """Standard deviation at most step/(2√n) for equal weights; and no bias beside it."""
    n = 25
    point = FixedPoint(n, 32, clip=1.0, max_weight=10.0, value_bits=12)
    total, plain = np.zeros(20_000, point.dtype), np.zeros(20_000)
    for i in range(n):
        values = some_values(20_000, np.float64, seed=i)
        vector, _ = encoded(point, values, 10.0, seed_of(i))
        total += vector
        plain += values / n
    off = point.decode(total, n, 10.0 * n) - plain
    promised = point.step / (2 * math.sqrt(n))
    assert off.std() <= promised
    assert (
        off.std() >= 0.7 * promised
    )  # √(2/3) of it where fractions are spread evenly: the bound isn't a loose one
    assert abs(off.mean()) <= 4 * promised / math.sqrt(20_000)


def test_sites_of_different_weights_have_their_weighted_mean():
    point = FixedPoint(3, 32, clip=2.0, max_weight=1000.0)
    weights, total, exact = [1000.0, 1.0, 37.5], np.zeros(500, point.dtype), np.zeros(500)
    for i, weight in enumerate(weights):
        values = some_values(500, np.float64, seed=i)
        total += encoded(point, values, weight, seed_of(i))[0]
        exact += weight * values / sum(weights)
    off = 3 * point.step * point.max_weight / sum(weights)
    assert np.abs(point.decode(total, 3, sum(weights)) - exact).max() < off


def test_what_is_beyond_the_clip_is_counted_and_cut():
    point = FixedPoint(4, 32, clip=0.5, max_weight=1.0)
    vector, clipped = encoded(point, np.array([0.4, 0.5, 0.6, -0.5, -3.0, 1e300], np.float64))
    assert clipped == 3
    assert as_integers(vector)[1:].tolist() == [point.q_max * s for s in (1, 1, -1, -1, 1)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(dtype, value):
    for ring_bits in RINGS:
        values = np.zeros(100, dtype)
        values[77] = value
        with pytest.raises(SecAggError, match="not finite"):
            encoded(FixedPoint(4, ring_bits, 1.0, 1.0), values)


@pytest.mark.parametrize("weight", [-1.0, 10.5, math.nan, math.inf])
def test_weights_out_of_the_terms_are_refused(weight):
    point = FixedPoint(4, 32, 1.0, max_weight=10.0)
    for use in (lambda: encoded(point, np.zeros(3), weight), lambda: point.weight(weight)):
        with pytest.raises(SecAggError, match=r"it must be in \(0, 10\]"):
            use()


def test_a_weight_counts_as_its_scalar_says_it():
    point = FixedPoint(4, 32, 1.0, max_weight=10.0)
    for weight in (10.0, 0.1, 1e-3, 1e-9):
        said = point.weight(weight)
        assert point.decode_scalars(point.encode_scalars(np.array([said])), 1)[0] == said
        assert said == pytest.approx(weight, abs=1 / ONE)
        assert said > 0


# --- Chunks, workers, seeds


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 2 * PER_BLOCK + 999), max_size=5), ring_bits=st.sampled_from(sorted(RINGS))
)
def test_chunks_make_the_integers_of_the_whole(cuts, ring_bits):
    point, values = FixedPoint(5, ring_bits, 0.25, 1.0), some_values(2 * PER_BLOCK + 999)
    whole, clipped = encoded(point, values)
    ends = [0, *sorted(cuts), len(values)]
    parts = [encoded(point, values[a:b], offset=a) for a, b in pairwise(ends)]
    assert np.array_equal(np.concatenate([p for p, _ in parts]), whole)
    assert sum(c for _, c in parts) == clipped > 0


@pytest.mark.parametrize("ring_bits", RINGS)
def test_workers_make_the_integers_of_one(ring_bits):
    point, values = FixedPoint(5, ring_bits, 0.25, 1.0), some_values(3 * PER_BLOCK + 7)
    pool, mean = ThreadPool(3), np.zeros(len(values), np.float32)
    many, clipped = encoded(point, values, parallel=pool)
    point.decode_into(many, 1, 1.0, mean, pool)
    alone, expected = encoded(point, values)
    assert np.array_equal(many, alone)
    assert clipped == expected
    assert np.array_equal(mean, point.decode(alone, 1, 1.0).astype(np.float32))


def test_u_is_the_keystream_of_the_seed():
    """The definition, in fractions: floor(x·q_max/c + u), u − ½ the stream's integers over 2^16, made odd."""
    point = FixedPoint(5, 32, 1.0, 1.0, value_bits=16)
    values, stream = some_values(200, np.float64), np.empty(400 + TAG_BYTES, np.uint8)
    keystream(SEED, 0, stream, 400)
    scale = Fraction(1.0 / point.step * 2.0**16)
    expected = [
        (Fraction(float(x)) * scale + (int(i) | 1) + 2**15) // 2**16
        for x, i in zip(values, stream[:400].view("<i2"), strict=True)
    ]
    assert as_integers(encoded(point, values)[0]).tolist() == expected


def test_another_seed_rounds_otherwise():
    point, values = FixedPoint(5, 32, 1.0, 1.0), some_values(100)
    assert np.array_equal(encoded(point, values)[0], encoded(point, values)[0])
    assert not np.array_equal(encoded(point, values)[0], encoded(point, values, seed=bytes(16))[0])


def test_no_values_are_encoded_and_decoded_too():
    point = FixedPoint(5, 32, 1.0, 1.0)
    assert encoded(point, some_values(0), offset=3)[1] == 0
    assert len(point.decode(np.zeros(0, point.dtype), 2, 1.0)) == 0


# --- Scalars


@settings(max_examples=80, deadline=None)
@given(
    ring_bits=st.sampled_from(sorted(RINGS)),
    columns=st.lists(
        st.lists(st.floats(-SCALAR_LIMIT, SCALAR_LIMIT), min_size=3, max_size=3), min_size=1, max_size=40
    ),
)
def test_sums_of_scalars_are_exact(ring_bits, columns):
    point = FixedPoint(len(columns), ring_bits, 1.0, 1.0)
    total = np.zeros(3 * point.limbs, point.dtype)
    for values in columns:
        limbs = point.encode_scalars(np.array(values))
        assert np.abs(as_integers(limbs)).max() <= point.q_max
        total += limbs
    exact = [sum(round(Fraction(v) * ONE) for v in row) / ONE for row in zip(*columns, strict=True)]
    assert point.decode_scalars(total, len(columns)).tolist() == exact


def test_whole_numbers_and_millionths_come_back_as_they_went():
    point = FixedPoint(100, 16, 1.0, 1.0)
    values = np.array([0.0, 1.0, -1.0, 2.0**-20, -(2.0**-20), 123456789.0, 2.0**42 - 1, -(2.0**42)])
    assert point.decode_scalars(point.encode_scalars(values), 1).tolist() == values.tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 4.5e12, -4.5e12])
def test_scalars_out_of_range_are_named(value):
    with pytest.raises(SecAggError, match="the sum of loss is not finite, or too large: sums are kept"):
        FixedPoint(5, 32, 1.0, 1.0).encode_scalars(
            np.array([1.0, value]), lambda i: ("the weight", "the sum of loss")[i]
        )


# --- Sums that cannot be


@pytest.mark.parametrize("ring_bits", RINGS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_so_many_sites_cannot_make_is_refused(ring_bits, sign):
    point = FixedPoint(5, ring_bits, 1.0, 1.0)
    most = np.array([0, sign * 3 * point.q_max])
    point.decode(most.astype(point.dtype), 3, 3.0)
    point.decode_scalars(most.repeat(point.limbs).astype(point.dtype), 3)
    beyond = most + sign
    for use in (
        lambda: point.decode(beyond.astype(point.dtype), 3, 3.0),
        lambda: point.decode_scalars(beyond.repeat(point.limbs).astype(point.dtype), 3),
    ):
        with pytest.raises(SecAggError, match=r"a sum has values from .*, and its 3 sites can reach"):
            use()


@pytest.mark.parametrize("weights", [0.0, -1.0, math.nan])
def test_sites_that_weigh_nothing_have_no_mean(weights):
    point = FixedPoint(5, 32, 1.0, 1.0)
    with pytest.raises(SecAggError, match="the weights of 2 sites sum to"):
        point.decode(np.zeros(3, point.dtype), 2, weights)


FROZEN = {
    16: "03fba44ca0df2ad38f2225c30c6061e7",
    32: "d91a25ce0c27f9edfe7c83d35ebac687",
    64: "98b8d7b79105e5d98deff5b670fec62e",
}


@pytest.mark.parametrize("ring_bits", RINGS)
def test_integers_are_what_they_were(ring_bits):
    """Frozen: a simulation of another version rounds the same updates to the same integers."""
    point = FixedPoint(10, ring_bits, 0.5, 64.0)
    values = np.linspace(-0.6, 0.6, 32773, dtype=np.float32)
    vector, clipped = encoded(point, values, 48.0)
    scalars = point.encode_scalars(np.array([48.0, clipped, -1e6 / 3]))
    both = np.concatenate([vector, scalars])
    found = sha256(both.astype(both.dtype.newbyteorder("<")).tobytes()).hexdigest()[:32]
    assert found == FROZEN[ring_bits]
