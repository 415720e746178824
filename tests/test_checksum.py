"""A checksum of a sum is the sum of the checksums, and of no other sum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.runtime.threads import ThreadPool
from fedtrain.secagg.checksum import Checksums
from fedtrain.secagg.fixedpoint import FixedPoint
from fedtrain.secagg.masking import BLOCK_BYTES, add_masks, serial
from fedtrain.secagg.messages import CHECKSUM_BITS


def session(seed, ring, sites, length):
    """(checksums, the sum of the sites' vectors, the sum of their checksums, names)"""
    draw = np.random.default_rng(seed)
    point = FixedPoint(sites, ring, 1.0, 100.0, unsigned=True)
    both, names = Checksums(draw.bytes(32), point), tuple(f"s{i:02}" for i in range(sites))
    total, checksum = np.zeros(length, point.dtype), np.zeros(point.digits(CHECKSUM_BITS), point.dtype)
    for name in names:
        edge = draw.integers(0, 8)  # some sites send what is largest, so that sums touch both ends
        high = 2 * point.q_max if edge else point.q_max
        vector = draw.integers(0, high, length, endpoint=True).astype(point.dtype)
        if edge == 1:
            vector[:] = point.dtype.type(high)
        total += vector
        checksum += both.of(vector, name)
    return both, total, checksum, names


RINGS = st.sampled_from([16, 32, 64])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), RINGS, st.integers(3, 40), st.integers(1, 70))
def test_the_sum_of_all_fits_and_no_other_sites_do(seed, ring, sites, length):
    both, total, checksum, names = session(seed, ring, sites, length)
    assert both.fits(total, checksum, names)
    assert not both.fits(total, checksum, names[1:])
    assert not Checksums(bytes(32), both.point).fits(total, checksum, names)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), ring=RINGS, sites=st.integers(3, 12))
def test_any_alteration_of_any_coordinate_is_found(data, seed, ring, sites):
    """By one bit, by one, by half of the ring, in one place or many, swapped, doubled, without a site."""
    length = data.draw(st.integers(2, 70))
    both, total, checksum, names = session(seed, ring, sites, length)
    other, at = total.copy(), data.draw(st.integers(0, length - 1))
    match data.draw(st.sampled_from(["bit", "add", "swap", "scale", "zero", "several", "opposite"])):
        case "bit":
            other[at] ^= total.dtype.type(1 << data.draw(st.integers(0, ring - 1)))
        case "add":
            other[at : at + 1] += total.dtype.type(data.draw(st.integers(1, (1 << ring) - 1)))
        case "swap":
            other[[at, at - 1]] = other[[at - 1, at]]
        case "scale":
            other *= total.dtype.type(data.draw(st.integers(2, 9)))
        case "zero":
            other[:] = 0
        case "several":
            other += np.random.default_rng(seed).integers(0, 1 << ring, length, total.dtype)
        case "opposite":  # what a sum of all coordinates would not see
            other[at : at + 1] += total.dtype.type(1)
            other[[at - 1]] -= total.dtype.type(1)
    assert both.fits(other, checksum, names) == np.array_equal(other, total)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), ring=RINGS)
def test_an_altered_checksum_does_not_fit(data, seed, ring):
    both, total, checksum, names = session(seed, ring, 4, 9)
    at = data.draw(st.integers(0, len(checksum) - 1))
    checksum[at : at + 1] += total.dtype.type(1)
    assert not both.fits(total, checksum, names)


@pytest.mark.parametrize("ring", [16, 32, 64])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_long_vectors_have_a_key_for_each_block_and_all_cores_find_the_same(ring, extra):
    length = 2 * BLOCK_BYTES // (ring // 8) + extra
    both, total, checksum, names = session(ring, ring, 3, length)
    assert Checksums(both.seed, both.point, ThreadPool(2)).fits(total, checksum, names)
    half = len(total) // 2
    total[[0, half]] = total[[half, 0]]  # alike in place within their blocks
    assert not both.fits(total, checksum, names)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ring", [16, 32, 64])
@pytest.mark.parametrize("beside", [-3, 0, 1])
def test_masked_in_one_pass_a_vector_is_what_its_checksum_and_its_masks_make_one_after_the_other(
    ring, beside, threads
):
    """Also where the checksum begins in one block and ends in another."""
    both, vector, _, (name, *_) = session(ring, ring, 3, 2 * BLOCK_BYTES // (ring // 8) + beside)
    masks = [(b"k" * 16, 1), (b"l" * 16, -1)]
    expected = np.append(vector, both.of(vector, name))
    found, wrote = np.append(vector, np.zeros_like(both.of(vector, name))), []
    add_masks(expected, masks)
    parallel = ThreadPool(threads) if threads > 1 else serial
    Checksums(both.seed, both.point, parallel).mask(
        found, len(vector), name, masks, lambda start, stop: wrote.append((start, stop))
    )
    assert np.array_equal(found, expected)
    starts, stops = zip(*sorted(wrote), strict=True)  # each part once, as it will travel
    assert (0, *stops[:-1]) == starts
    assert stops[-1] == len(found)


def test_a_checksum_alone_says_nothing_of_its_vector():
    """Under one site's pad it is evenly spread, so equal vectors have unlike checksums."""
    point = FixedPoint(3, 32, 1.0, 100.0, unsigned=True)
    vector = np.arange(50, dtype=np.uint32)
    found = {tuple(Checksums(bytes([i]) * 32, point).of(vector, "a")) for i in range(20)}
    found |= {tuple(Checksums(bytes(32), point).of(vector, name)) for name in "bcde"}
    assert len(found) == 24
