"""Masks: the same stream from both kernels, added modulo 2^r, and gone when both ends have added it."""

from contextlib import nullcontext
from hashlib import sha256

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.runtime.threads import ThreadPool
from fedtrain.secagg import masking
from fedtrain.secagg.masking import BLOCK_BYTES, RINGS, TAG_BYTES, add_masks, keystream

KEYS = [bytes([i]) * 16 for i in range(1, 8)]
KERNELS = [masking.counter_mode, masking.galois_mode]


def stream_of(key, nbytes, first_block=0):
    """The definition: block i is AES-128-CTR from the counter i (12 bytes) ‖ 00000002."""
    made = b""
    for block in range(first_block, first_block + -(-nbytes // BLOCK_BYTES)):
        start = block.to_bytes(12, "big") + b"\0\0\0\2"
        made += Cipher(algorithms.AES128(key), modes.CTR(start)).encryptor().update(bytes(BLOCK_BYTES))
    return made[:nbytes]


def masked(vector, masks):
    """The definition of add_masks, in Python's integers."""
    total = [int(v) for v in vector]
    for key, sign in masks:
        stream = np.frombuffer(stream_of(key, vector.nbytes), vector.dtype.newbyteorder("<"))
        total = [(t + sign * int(m)) % 2 ** (8 * vector.itemsize) for t, m in zip(total, stream, strict=True)]
    return total


@pytest.fixture(params=KERNELS, ids=["counter", "galois"])
def each_kernel(request, monkeypatch):
    monkeypatch.setattr(masking, "kernel", lambda: request.param)


@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 1000, BLOCK_BYTES])
def test_both_kernels_give_the_same_bits(nbytes):
    found = []
    for kernel in KERNELS:
        room = np.full(BLOCK_BYTES + TAG_BYTES, 0xAA, np.uint8)
        kernel(KEYS[0])(*masking._block(3, nbytes), room.data[: nbytes + TAG_BYTES])
        found.append(bytes(room[:nbytes]))
    assert found[0] == found[1] == stream_of(KEYS[0], nbytes, 3)


def test_the_kernel_that_this_machine_prefers_is_one_of_the_two():
    assert masking.kernel() in KERNELS


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("nbytes", [1, 12345, BLOCK_BYTES])
@pytest.mark.parametrize("block", [0, 1, 2**32])
def test_a_stream_can_begin_at_any_block(nbytes, block):
    room = np.zeros(nbytes + TAG_BYTES, np.uint8)
    keystream(KEYS[1], block, room, nbytes)
    assert bytes(room[:nbytes]) == stream_of(KEYS[1], nbytes, block)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("ring_bits", RINGS)
def test_masks_are_added_and_subtracted_modulo_the_ring(ring_bits):
    vector = np.arange(1001, dtype=RINGS[ring_bits]) * RINGS[ring_bits].type(65521)
    masks = [(KEYS[0], 1), (KEYS[1], -1), (KEYS[2], -1)]
    expected = masked(vector, masks)
    add_masks(vector, masks)
    assert vector.tolist() == expected


@pytest.mark.parametrize("ring_bits", RINGS)
@pytest.mark.parametrize("blocks", [1, 2.5, 5])
def test_workers_give_the_bits_of_one(ring_bits, blocks):
    alone = np.zeros(int(blocks * BLOCK_BYTES) // (ring_bits // 8), RINGS[ring_bits])
    together = alone.copy()
    masks = [(key, 1 - 2 * (i % 2)) for i, key in enumerate(KEYS)]
    add_masks(alone, masks)
    add_masks(together, masks, ThreadPool(3))
    assert np.array_equal(alone, together)
    assert len(np.unique(alone[:1000])) > 900


def test_each_part_is_told_of_once_when_all_masks_are_on_it():
    vector = np.zeros(int(3.5 * BLOCK_BYTES) // 4, np.uint32)
    expected, told = vector.copy(), {}
    masks = [(key, 1) for key in KEYS]
    add_masks(expected, masks)
    add_masks(vector, masks, ThreadPool(3), lambda a, b: told.update({(a, b): vector[a:b].copy()}))
    assert [a for a, b in sorted(told)] == [0, *(b for a, b in sorted(told))][:-1]
    assert np.array_equal(np.concatenate([told[part] for part in sorted(told)]), expected)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), sites=st.integers(2, 7), ring_bits=st.sampled_from(sorted(RINGS)))
def test_pairwise_masks_are_gone_from_the_sum(data, sites, ring_bits):
    dtype, most = RINGS[ring_bits], 2**ring_bits - 1
    inputs = [
        np.array(data.draw(st.lists(st.integers(0, most), min_size=5, max_size=5)), dtype)
        for _ in range(sites)
    ]
    plain = sum(inputs[1:], start=inputs[0])
    for i, vector in enumerate(inputs):
        pairs = [
            (sha256(bytes(sorted((i, j)))).digest()[:16], 1 if i < j else -1) for j in range(sites) if j != i
        ]
        add_masks(vector, pairs)
    assert np.array_equal(sum(inputs[1:], start=inputs[0]), plain)


def test_no_masks_leave_a_vector_and_an_empty_vector_needs_none():
    vector = np.arange(9, dtype=np.uint16)
    add_masks(vector, [])
    assert vector.tolist() == list(range(9))
    add_masks(vector[:0], [(KEYS[0], 1)])


def test_what_a_worker_raises_reaches_the_caller():
    with pytest.raises(ValueError, match="key"):
        add_masks(
            np.zeros(5, np.uint32), [(KEYS[0], 1)], lambda work, items: nullcontext(_fail() for _ in items)
        )


def _fail():
    raise ValueError("no key")


def test_buffers_are_kept_for_the_next_user():
    buffers = masking.Buffers(64)
    with buffers.one() as first, buffers.one() as second:
        assert first is not second
    with buffers.one() as again:
        assert again is first or again is second


# Frozen: another version must make the same masks, or a federation of both would not add up.
FROZEN = {
    16: "832bb4cdd6cfd3b35d60e6955f9e6c1f",
    32: "3c2eaff03d7ab4557759a80a0ae4d175",
    64: "aa02a7599a2069dfbd0bfbedfa4cf00b",
}


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("ring_bits", RINGS)
def test_masks_are_what_they_were(ring_bits):
    vector = np.zeros(BLOCK_BYTES // (ring_bits // 8) + 3, RINGS[ring_bits])
    add_masks(vector, [(b"fedtrain's mask!", 1), (b"and another one.", -1)])
    assert (
        sha256(vector.astype(vector.dtype.newbyteorder("<")).tobytes()).hexdigest()[:32] == FROZEN[ring_bits]
    )
