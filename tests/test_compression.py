"""Compressors: what they promise about size, error and sums, and what they refuse."""

import contextlib
import hashlib
import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedtrain import compression
from fedtrain.compression import COMPRESSORS, build, parse, topk
from fedtrain.compression.base import Keystream
from fedtrain.errors import BadUpdate, ConfigError

TEXTS = [
    "float16", "bfloat16", "quantize:8", "quantize:4,block=64", "quantize:2,block=8",
    "quantize:8,unbiased=false",
    "sign", "sign:64", "topk:0.01", "topk:0.3", "randomk:0.1", "randomk:0.3,unbiased=false", "lowrank:2",
    "lowrank:2,unbiased=false", "powersgd:1", "topk:0.02,values=bfloat16",
    "error_feedback:topk:0.1", "error_feedback:quantize:4",
    "error_feedback:powersgd:2",
]  # fmt: skip
LINEAR = ["float16", "bfloat16", "randomk:0.1", "randomk:0.37", "lowrank:2", "lowrank:3"]
SIZES = [0, 1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097, 70001]
SHAPES = ((16, 9), (16,), (3, 4, 5), (), (7, 1), (2, 40))  # 308 values


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small vectors: a second thread would only spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(n, seed=0, dtype=torch.float32):
    return torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def there_and_back(compressor, vector, seed=1, state=None):
    state = compressor.init(len(vector)) if state is None else state
    payload, state = compressor.encode(vector, seed, state)
    return compressor.decode(payload, seed, len(vector)), payload, state


sensible = st.floats(-1e4, 1e4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-4)
vectors = st.lists(sensible, min_size=1, max_size=200).map(lambda xs: torch.tensor(xs, dtype=torch.float32))
seeds = st.integers(0, 2**63 - 1)


# --- of all


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_payload_is_as_long_as_was_said_and_a_vector_comes_back_as_long_as_it_was(text, n):
    compressor = parse(text)
    decoded, payload, _ = there_and_back(compressor, drawn(n))
    assert (payload.dtype, payload.shape) == (torch.uint8, (compressor.bytes_for(n),))
    assert (decoded.dtype, decoded.shape) == (torch.float32, (n,))
    assert bool(torch.isfinite(decoded).all())


@pytest.mark.parametrize(
    ("text", "n", "nbytes"),
    [
        ("float16", 1000, 2000),
        ("bfloat16", 1000, 2000),
        ("quantize:8", 1_000_000, 1_000_000 + 4 * 977),
        ("quantize:4,block=64", 1001, 501 + 4 * 16),
        ("quantize:2", 1000, 250 + 4),
        ("sign", 1_000_000, 125_000 + 4 * 245),
        (
            "topk:0.01",
            1_000_000,
            4 * 10_000 + 6 * 1250 + (10_000 + 999_999 // 64 + 7) // 8,
        ),  # 8.6 bits a place
        ("topk:0.01,values=bfloat16", 1_000_000, 2 * 10_000 + 6 * 1250 + (10_000 + 999_999 // 64 + 7) // 8),
        ("topk:0.6", 1000, 4 * 600 + 200),  # a bit for each value, and one for each that is kept
        ("randomk:0.1", 1_000_000, 4 * 100_000),
        ("lowrank:4", 1_000_000, 4 * 4 * 1000),
        ("powersgd:4", 1_000_000, 4 * 4 * 2000),
        ("error_feedback:topk:0.01", 1_000_000, parse("topk:0.01").bytes_for(1_000_000)),
    ],
)
def test_sizes_by_hand(text, n, nbytes):
    assert parse(text).bytes_for(n) == nbytes


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_seed_gives_the_same_bytes_and_nothing_given_is_changed(text):
    compressor, vector = parse(text), drawn(5000)
    state = compressor.encode(vector, 1, compressor.init(5000))[1]
    before, kept = vector.clone(), {name: t.clone() for name, t in state.items()}
    first, after = compressor.encode(vector, 7, state)
    again, _ = compressor.encode(vector, 7, state)
    assert torch.equal(first, again)
    assert torch.equal(vector, before)
    assert kept.keys() == state.keys() == after.keys()
    assert all(torch.equal(kept[name], state[name]) for name in kept)
    room, payload = torch.full((5000,), math.nan), first.clone()
    assert compressor.decode(first, 7, 5000, room) is room
    assert torch.equal(room, compressor.decode(first, 7, 5000))
    assert torch.equal(first, payload)


@pytest.mark.parametrize("text", ["quantize:8", "randomk:0.1", "lowrank:2"])
def test_another_seed_draws_otherwise(text):
    compressor, vector = parse(text), drawn(5000)
    assert not torch.equal(there_and_back(compressor, vector, 1)[0], there_and_back(compressor, vector, 2)[0])


def test_what_is_drawn_for_a_seed_is_frozen():
    """Sites with other versions of everything must draw the same."""
    stream, out = Keystream(7, "test"), np.empty(100_000, dtype=np.uint8)
    stream.fill(out[:65_537])
    stream.fill(out[65_537:])
    assert hashlib.sha256(out).hexdigest()[:16] == "c6f155790d639de9"
    ramp = torch.arange(24, dtype=torch.float32)
    assert parse("randomk:0.25").project(ramp.numpy(), 7).tolist() == [2, 7, 11, 14, 16, 20]
    assert parse("lowrank:2").project(ramp.numpy(), 7).tolist() == [6, -9, 12, -27, 18, -45, 24, -63]
    assert there_and_back(parse("quantize:2,block=8"), ramp)[1].tolist() == [
        0,
        0,
        224,
        64,
        0,
        0,
        112,
        65,
        0,
        0,
        184,
        65,
        0,
        80,
        69,
        84,
        85,
        85,
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", TEXTS)
def test_nan_and_inf_are_refused_and_counted(text, bad):
    compressor, vector = parse(text), drawn(100)
    vector[[3, 50]] = bad
    with pytest.raises(BadUpdate, match="2 of 100 values are NaN or Inf"):
        compressor.encode(vector, 1, compressor.init(100))


@pytest.mark.parametrize("text", ["float16", "bfloat16", "quantize:8", "quantize:2", "sign", "topk:0.1"])
def test_large_finite_values_are_not_refused_and_stay_finite(text):
    vector = torch.full((100,), 3e38)
    vector[::2] = -3e38
    assert bool(torch.isfinite(there_and_back(parse(text), vector)[0][:1]).all())


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_becomes_nothing(text):
    assert not there_and_back(parse(text), torch.zeros(500))[0].any()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_another_length_are_refused(text):
    compressor, (_, payload, _) = parse(text), there_and_back(parse(text), drawn(1000))
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload[:0]):
        with pytest.raises(
            BadUpdate, match=rf"{len(wrong)} bytes for 1000 values by .*, expected {len(payload)}"
        ):
            compressor.decode(wrong, 1, 1000)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), n=st.integers(0, 300))
@pytest.mark.parametrize("text", TEXTS)
def test_any_bytes_of_the_right_length_are_a_vector_or_are_refused(text, data, n):
    compressor = parse(text)
    size = compressor.bytes_for(n)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    try:
        decoded = compressor.decode(torch.tensor(list(raw), dtype=torch.uint8), 1, n)
    except BadUpdate:
        assert "topk" in text
    else:
        assert decoded.shape == (n,)


# --- how far off


@settings(max_examples=60, deadline=None)
@given(vector=vectors, seed=seeds)
@example(vector=torch.tensor([1e-30, 1.0, -1e-30]), seed=0)
@pytest.mark.parametrize(
    "text",
    ["float16", "bfloat16", "quantize:8", "quantize:4", "quantize:2", "sign", "topk:0.1", "randomk:0.2",
     "lowrank:2", "powersgd:1"],
)  # fmt: skip
def test_a_contraction_is_never_further_off_than_zero_is(text, vector, seed):
    compressor = parse(text).contraction()
    decoded = there_and_back(compressor, vector, seed)[0]
    assert (decoded - vector).double().norm() <= vector.double().norm() * (1 + 1e-6)
    assert compressor.contraction() == compressor


@settings(max_examples=40, deadline=None)
@given(vector=vectors, seed=seeds)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantized_values_are_within_a_step_and_to_the_nearest_within_half_a_step(bits, vector, seed):
    compressor = build("quantize", {"bits": bits, "block": 16})
    for part, start in ((vector[at : at + 16], at) for at in range(0, len(vector), 16)):
        step = part.abs().max() / (2 ** (bits - 1) - 1)
        for variant, within in ((compressor, step), (compressor.contraction(), step / 2)):
            off = (there_and_back(variant, vector, seed)[0] - vector)[start : start + 16].abs().max()
            assert off <= within * 1.0001


@settings(max_examples=40, deadline=None)
@given(vector=vectors)
@pytest.mark.parametrize(("text", "relative"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_16_bit_floats_keep_the_relative_error(text, relative, vector):
    off = (there_and_back(parse(text), vector)[0] - vector).abs()
    assert bool((off <= vector.abs() * relative).all())


def test_half_precision_saturates():
    decoded = there_and_back(parse("float16"), torch.tensor([1e9, -7e4, 65504.0]))[0]
    assert decoded.tolist() == [65504.0, -65504.0, 65504.0]


def test_integers_up_to_the_scale_are_sent_exactly():
    ramp = torch.arange(-127, 128, dtype=torch.float32)
    for text in ("quantize:8,block=256", "quantize:8,block=256,unbiased=false"):
        assert torch.equal(there_and_back(parse(text), ramp, seed=3)[0], ramp)
    sevens = torch.tensor([-7.0, 7, 3, -1, 0, 5, -6, 2, 1, -2, 4])
    assert torch.equal(there_and_back(parse("quantize:4,block=16"), sevens)[0], sevens)
    signs = torch.tensor([1.0, -1, 0, 0, 1, 1, -1, 0, -1])
    assert torch.equal(there_and_back(parse("quantize:2,block=16"), signs)[0], signs)


def test_scaled_signs_by_hand():
    decoded = there_and_back(parse("sign:8"), torch.tensor([1.0, -3, 0, 4, 0, 0, 0, 0, -2, 6]))[0]
    assert decoded.tolist() == [1, -1, 1, 1, 1, 1, 1, 1, -4, 4]


# E‖x̂ − x‖² ≤ variance · ‖x‖² for this vector of 60 normal values, with its n/k, columns/rank and step
@pytest.mark.parametrize(
    ("text", "variance"),
    [("randomk:0.2", 4), ("randomk:0.17", 5), ("lowrank:2", 3), ("lowrank:3", 2),
     ("quantize:2,block=64", None), ("quantize:4,block=8", None), ("quantize:8,block=8", None)],
)  # fmt: skip
def test_the_mean_over_seeds_is_the_vector_and_the_variance_what_was_said(text, variance):
    compressor, vector, trials = parse(text), drawn(60, seed=5), 1500
    off = torch.stack(
        [there_and_back(compressor, vector, seed)[0] - vector for seed in range(trials)]
    ).double()
    square = vector.double().square().sum()
    if variance is None:
        blocks = torch.cat([vector.abs(), torch.zeros(4)]).view(-1, min(64, compressor.block)).amax(1)
        step = blocks / (2 ** (compressor.bits - 1) - 1)
        variance = float((step**2 / 4 * min(60, compressor.block)).sum() / square)
    measured = float(off.square().sum(1).mean() / square)
    assert measured <= variance * 1.1
    standard_error = off.std(0) / math.sqrt(trials) + 1e-9
    assert float((off.mean(0) / standard_error).abs().max()) < 5


def test_the_variance_of_a_random_k_and_of_a_random_basis_is_what_theory_gives():
    """n/k − 1 = 9 and columns/rank − 1 = 4, of the same order as for k drawn at random and for Haar bases."""
    vector, trials = drawn(100, seed=1), 1500
    for text, expected in (("randomk:0.1", 9.0), ("lowrank:2", 4.0)):
        off = [there_and_back(parse(text), vector, seed)[0] - vector for seed in range(trials)]
        measured = sum(float(x.square().sum()) for x in off) / trials / float(vector.square().sum())
        assert measured == pytest.approx(expected, rel=0.1)


# --- sums, for secure aggregation


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 400), senders=st.integers(1, 6), seed=seeds, values=seeds)
@pytest.mark.parametrize("text", LINEAR)
def test_the_mean_of_projections_lifted_is_the_mean_of_the_lifted(text, n, senders, seed, values):
    compressor, rows = parse(text), np.random.default_rng(values).standard_normal((senders, n))
    assert compressor.linear
    projected = [compressor.project(row, seed) for row in rows]
    assert all(p.shape == (compressor.length(n),) and p.dtype == np.float64 for p in projected)
    once = compressor.lift(np.mean(projected, axis=0), seed, n)
    each = np.mean([compressor.lift(p, seed, n) for p in projected], axis=0)
    np.testing.assert_allclose(once, each, rtol=1e-12, atol=1e-12)
    assert once.shape == (n,)


@pytest.mark.parametrize("text", ["randomk:0.1", "randomk:0.3,unbiased=false", "lowrank:2"])
def test_what_is_encoded_is_the_projection_and_what_is_decoded_is_it_lifted(text):
    compressor, vector = parse(text), drawn(777)
    decoded, payload, _ = there_and_back(compressor, vector, 9)
    projected = compressor.project(vector.numpy(), 9)
    assert payload.numpy().tobytes() == projected.tobytes()
    assert np.array_equal(decoded.numpy(), compressor.lift(projected, 9, 777))


@pytest.mark.parametrize("text", [t for t in TEXTS if t.split(":")[0] not in ("randomk", "lowrank")])
def test_under_masks_16_bit_floats_are_the_identity_and_the_others_do_not_go(text):
    compressor, vector = parse(text), drawn(10).numpy()
    assert compressor.linear == (text in ("float16", "bfloat16"))
    if compressor.linear:
        assert compressor.project(vector, 1) is vector
        assert compressor.lift(vector, 1, 10) is vector


def test_projecting_loads_no_torch():
    code = """
import sys, numpy as np
from fedtrain.compression import parse
for text in ("float16", "randomk:0.1", "lowrank:4"):
    c = parse(text).shaped([(10, 9), (10,)])
    c.lift(c.project(np.ones(100, dtype=np.float32), 3), 3, 100)
print("torch" in sys.modules)
"""
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 5000), fraction=st.floats(0.001, 1), seed=seeds)
def test_random_coordinates_are_distinct_one_of_each_run(n, fraction, seed):
    compressor = build("randomk", {"fraction": fraction})
    places = compressor.project(np.arange(n, dtype=np.float64), seed)
    k = compressor.length(n)
    assert k == max(1, math.ceil(fraction * n - 1e-9))
    runs = [(i * n // k, (i + 1) * n // k) for i in range(k)]
    assert all(low <= place < high for place, (low, high) in zip(places, runs, strict=True))


# --- tensors' shapes


def test_a_low_rank_projection_is_each_matrix_times_its_basis_and_vectors_go_whole():
    compressor = parse("lowrank:3").shaped(SHAPES)
    vector = drawn(308)
    projected = compressor.project(vector.numpy(), 4)
    widths = [16 * 3, 16, 3 * 3, 1, 7, 2 * 3]
    assert compressor.length(308) == len(projected) == sum(widths)
    assert np.array_equal(projected[48:64], vector[144:160].numpy())  # the bias
    first = vector[:144].view(16, 9).double().numpy()
    basis = np.linalg.lstsq(first, projected[:48].reshape(16, 3).astype(np.float64), rcond=None)[0]
    signs = np.round(basis)
    np.testing.assert_allclose(basis, signs, atol=1e-3)
    assert np.array_equal(np.abs(signs), np.eye(3)[np.arange(9) % 3])  # one entry in each row, ±1
    lifted = compressor.lift(projected, 4, 308)
    assert np.array_equal(lifted[144:160], vector[144:160].numpy())
    np.testing.assert_allclose(lifted[:144].reshape(16, 9), (first @ signs) @ signs.T, rtol=1e-5, atol=1e-5)


def test_shapes_that_are_not_the_vectors_are_our_own_mistake():
    with pytest.raises(AssertionError, match="the shapes hold 308 values, the vector 309"):
        parse("lowrank:2").shaped(SHAPES).length(309)


def test_powersgd_finds_the_best_low_rank_approximation_by_warm_starts():
    matrix = drawn(60 * 40, seed=3).view(60, 40) @ torch.diag(0.8 ** torch.arange(40.0))
    compressor = parse("powersgd:4").shaped([(60, 40)])
    state, errors = compressor.init(2400), []
    for _ in range(25):
        decoded, payload, state = there_and_back(compressor, matrix.view(-1), state=state)
        errors.append(float((decoded - matrix.view(-1)).norm()))
    assert payload.numel() == 4 * 4 * (60 + 40)
    best = float(torch.linalg.svdvals(matrix)[4:].square().sum().sqrt())
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=0.01)
    assert all(later <= earlier * (1 + 1e-5) for earlier, later in itertools.pairwise(errors))


def test_powersgd_sends_a_matrix_of_the_rank_exactly_and_small_tensors_whole():
    compressor = parse("powersgd:2").shaped([(20, 10), (20,), (2, 2)])
    vector = torch.cat([(drawn(40).view(20, 2) @ drawn(20, 1).view(2, 10)).view(-1), drawn(24, 2)])
    decoded, payload, _ = there_and_back(compressor, vector)
    torch.testing.assert_close(decoded, vector, rtol=1e-4, atol=1e-5)
    assert torch.equal(decoded[200:], vector[200:])
    assert payload.numel() == 4 * (2 * 30 + 24)


def test_powersgd_recovers_from_a_vector_of_zeros():
    compressor, state = parse("powersgd:2").shaped([(20, 10)]), None
    for vector in (torch.zeros(200), drawn(200), drawn(200)):
        decoded, _, state = there_and_back(compressor, vector, state=state)
    assert (decoded - vector).norm() < 0.9 * vector.norm()


# --- the k largest


def naive(values, k):
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    return sorted(order[:k])


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.integers(-4, 4) | st.floats(-9, 9, width=32), max_size=60), data=st.data())
def test_the_k_largest_are_those_of_a_sort_and_of_equal_ones_the_first(values, data):
    k = data.draw(st.integers(0, len(values)))
    assert topk.largest(np.array(values, dtype=np.float32), k).tolist() == naive(values, k)


def shapes_of_values():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(300_000).astype(np.float32)
    hidden = np.zeros(300_000, dtype=np.float32)
    hidden[1::2] = normal[1::2]  # every second one, where a sample that strides by two sees nothing
    sparse = np.where(rng.random(300_000) < 1e-3, normal, np.float32(0))
    return {
        "normal": normal, "heavy": (1 / normal).astype(np.float32), "hidden": hidden, "sparse": sparse,
        "rounded": np.round(normal, 1), "equal": np.ones_like(normal),
        "ramp": np.arange(300_000, dtype=np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("name", shapes_of_values())
@pytest.mark.parametrize("k", [1, 300, 3000, 150_000, 299_999])
def test_the_threshold_finds_the_k_largest_of_many_whatever_the_values(name, k):
    values = shapes_of_values()[name]
    order = np.lexsort((np.arange(len(values)), -np.abs(values)))
    assert np.array_equal(topk.largest(values, k), np.sort(order[:k]))


@pytest.mark.parametrize("fraction", [0.01, 0.2])
def test_top_k_keeps_the_values_themselves_at_their_places(fraction):
    vector = drawn(10_000)
    decoded = there_and_back(build("topk", {"fraction": fraction}), vector)[0]
    kept = decoded != 0
    assert int(kept.sum()) == 10_000 * fraction
    assert torch.equal(decoded[kept], vector[kept])
    assert vector[kept].abs().min() >= vector[~kept].abs().max()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_rising_numbers_come_back_in_few_bits(data):
    n = data.draw(st.integers(1, 5000))
    numbers = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    places = topk.Places.of(n, len(numbers))
    payload = places.encode(np.array(numbers))
    assert len(payload) == places.nbytes
    assert 8 * len(payload) <= len(numbers) * (3 + places.low) + 8 * (1 + places.low)
    assert places.decode(payload).tolist() == numbers


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.floats(0.01, 1), st.binary(min_size=900, max_size=900))
def test_bytes_that_are_no_places_are_refused_and_others_are_rising_numbers(n, fraction, drawn):
    places = topk.Places.of(n, math.ceil(fraction * n))
    data = np.frombuffer(drawn, np.uint8)[: places.nbytes]
    with contextlib.suppress(BadUpdate):
        found = places.decode(data).tolist()
        assert found == sorted(set(found))
        assert 0 <= found[0] <= found[-1] < n
        assert len(found) == places.k


@pytest.mark.parametrize("numbers", [[5, 1000], [7, 7], [9, 3]])
def test_places_that_cannot_be_are_refused(numbers):
    payload = parse("topk:0.002").encode(drawn(1000), 0, {})[0]
    low, row = np.array([i & 255 for i in numbers], np.uint8), np.zeros(5, bool)  # 8 bits of each, then 2 + 3
    row[[(numbers[0] >> 8), (numbers[1] >> 8) + 1]] = True
    places = np.concatenate([*(np.packbits(low >> bit & 1) for bit in range(8)), np.packbits(row)])
    payload[8:] = torch.from_numpy(places)
    with pytest.raises(BadUpdate, match="not 2 rising numbers below 1000"):
        parse("topk:0.002").decode(payload, 0, 1000)


def test_bits_that_name_another_number_of_places_are_refused():
    _, payload, _ = there_and_back(parse("topk:0.5"), drawn(100))
    payload[-2] ^= 0b10000
    with pytest.raises(BadUpdate, match="not 50 rising numbers below 100"):
        parse("topk:0.5").decode(payload, 0, 100)


# --- error feedback


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 300), steps=st.integers(1, 8), seed=seeds)
@pytest.mark.parametrize("inner", ["topk:0.1", "randomk:0.1", "topk:0.5"])
def test_what_was_sent_and_the_residual_are_what_was_given_to_the_last_bit(inner, n, steps, seed):
    """Of whole numbers, whose sums float32 has exactly."""
    compressor = parse(f"error_feedback:{inner}")
    state, given_, sent = compressor.init(n), torch.zeros(n), torch.zeros(n)
    for step in range(steps):
        vector = drawn(n, (seed + step) % 2**32).mul(100).round()
        decoded, _, state = there_and_back(compressor, vector, step, state)
        given_, sent = given_ + vector, sent + decoded
    assert torch.equal(sent + state["residual"], given_)


@pytest.mark.parametrize(
    "inner", ["sign", "quantize:8", "quantize:2", "quantize:4", "lowrank:2", "powersgd:2", "float16"]
)
def test_with_error_feedback_the_mean_of_what_is_sent_tends_to_the_vector(inner):
    compressor, vector, steps = parse(f"error_feedback:{inner}"), drawn(400), 300
    state, sent = compressor.init(400), torch.zeros(400)
    for step in range(steps):
        decoded, _, state = there_and_back(compressor, vector, step, state)
        sent += decoded
    torch.testing.assert_close(sent + state["residual"], vector * steps, rtol=1e-4, atol=2e-2)
    assert (sent / steps - vector).norm() < 0.2 * vector.norm()


def test_top_k_alone_never_sends_the_small_values_and_with_error_feedback_it_does():
    vector = torch.linspace(1, 2, 20)
    alone = torch.stack([there_and_back(parse("topk:0.1"), vector, step)[0] for step in range(60)]).mean(0)
    assert int((alone == 0).sum()) == 18
    compressor = parse("error_feedback:topk:0.1")
    state, sent = compressor.init(20), []
    for step in range(60):
        decoded, _, state = there_and_back(compressor, vector, step, state)
        sent.append(decoded)
    assert bool((torch.stack(sent).mean(0) > 0).all())


def test_error_feedback_passes_shapes_and_state_on_to_what_it_wraps():
    compressor = parse("error_feedback:powersgd:2").shaped([(20, 10)])
    assert compressor.inner.shapes == ((20, 10),)
    state = compressor.init(200)
    assert set(state) == {"residual", "inner/q"}
    after = compressor.encode(drawn(200), 0, state)[1]
    assert not torch.equal(after["inner/q"], state["inner/q"])


# PROTOCOLS: to a thousandth on a ring of 8 int8 takes 29 rounds (as dense vectors do), sign 58, top-10 % 98
@pytest.mark.parametrize(
    ("text", "gamma", "rounds"), [("quantize:8", 1.0, 29), ("sign", 1.0, 58), ("topk:0.1", 0.3, 99)]
)
def test_choco_gossip_on_a_ring_keeps_the_mean_and_agrees_in_the_rounds_known(text, gamma, rounds):
    """x ← x + γ(W − I)x̂ with x̂ ← x̂ + C(x − x̂) (Koloskova et al. 2019, Algorithm 1)."""
    compressor, start = parse(text).contraction(), drawn(8 * 1000, seed=2).view(8, 1000)
    w = sum(torch.roll(torch.eye(8), shift, 0) for shift in (-1, 0, 1)) / 3
    x, known, mean, taken = start.clone(), torch.zeros(8, 1000), start.mean(0), 0
    while (x - mean).norm() > 1e-3 * (start - mean).norm() and taken < 200:
        for i in range(8):
            known[i] += there_and_back(compressor, x[i] - known[i], taken)[0]
        x = x + gamma * (w @ known - known)
        taken += 1
    torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-5)
    assert taken == pytest.approx(rounds, rel=0.05)


# --- one line


def test_a_line_says_a_compressor():
    assert parse("quantize:4,block=64") == build("quantize", {"bits": 4, "block": 64})
    assert parse("quantize:4, 64, false") == build("quantize", {"bits": 4, "block": 64, "unbiased": False})
    assert parse("topk:0.05") == build("topk", {"fraction": 0.05})
    assert parse("topk:1").fraction == 1.0
    assert parse("error_feedback:topk:0.05").inner == parse("topk:0.05")
    assert parse("float16") == build("float16", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topq:0.1", "'topq' is not one of .* Did you mean 'topk'"),
        ("topk:2", r"compression.fraction: 2.0 must be in \(0, 1\]"),
        ("topk:a", "compression.fraction must be a number, got 'a'"),
        ("topk:0.1,float32,2", "has more options than topk, which has fraction, values"),
        ("topk:fractoin=1", "topk has no such option. Did you mean fraction"),
        ("float16:3", "has more options than float16, which has none"),
        ("quantize:3", "compression.bits: 3 is not one of 2, 4, 8"),
        ("quantize:8,block=100", "compression.block: 100 must be a power of two from 8 to 262144"),
        ("sign:0", "compression.block"),
        ("randomk:0", "compression.fraction"),
        ("lowrank:0", "compression.rank"),
        ("powersgd:-1", "compression.rank"),
        ("lowrank:shapes=1", "lowrank has no such option"),
        ("error_feedback", "wraps another"),
        ("error_feedback:", "wraps another"),
        ("error_feedback:topq", "'topq' is not one of"),
        ("", "'' is not one of"),
    ],
)
def test_a_mistake_is_a_config_error_that_says_what_to_change(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_the_table_names_every_compressor_file():
    files = {f.stem for f in Path(compression.__file__).parent.glob("*.py")}
    assert files - {"__init__", "base", "blocks", "codec", "probe"} == set(COMPRESSORS)
