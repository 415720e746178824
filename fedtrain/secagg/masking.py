"""Masks: the AES-128 keystream of a key, added to a vector modulo 2^r.

A key's stream is a sequence of blocks of 1 MiB. Block i is AES-128 in counter mode from the counter
i (12 bytes, big-endian) ‖ 00000002, so work can begin at any block. The same bytes come from AES-GCM over
zeros under the nonce i, its tag dropped; which of the two is faster differs by a factor of two either way
from CPU to CPU, so the first use times both for some milliseconds. Read as integers, bytes are little-endian.

A site that masks, or an aggregator that takes masks out, adds up to thousands of streams to one vector. The
work is cut by blocks of the vector: a block stays in the CPU's cache while all streams pass over it, and
threads share nothing but Python's lock. After each call to cipher or numpy a thread waits 10 µs and more for
the lock when another thread works. A block of 1 MiB takes about 100 µs, so that two threads are nearly twice
as fast as one; with blocks of 256 KiB they were one and a half times as fast. New memory costs several times
the work done in it, so buffers are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from timeit import default_timer  # it picks a kernel and can change no bit; so it isn't handed in
from typing import Any, Protocol, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

KEY_BYTES = 16
BLOCK_BYTES = 1 << 20
TAG_BYTES = 16  # GCM puts its tag behind a block
RINGS: dict[int, np.dtype[Any]] = {r: np.dtype(f"u{r // 8}") for r in (16, 32, 64)}  # integers modulo 2^r

RingVector = NDArray[Any]  # 1-D, contiguous, of a dtype of RINGS
Bytes = NDArray[np.uint8]  # 1-D, contiguous
Stream = Callable[[bytes, memoryview, memoryview], object]  # (a block's nonce, zeros, out): see _block
Item = TypeVar("Item")


class Parallel(Protocol):
    """How work(item) is done for all items, in no order: by `serial`, or by a runtime.threads.ThreadPool.

    Use it as `with parallel(work, items) as mine: exhaust(mine)`. The block works through its own part of
    the items, while other threads may take the rest; after it, all items are done, or an error is raised.
    """

    def __call__(
        self, work: Callable[[Item], object], items: Sequence[Item], /
    ) -> AbstractContextManager[Iterator[object]]: ...


def serial(work: Callable[[Item], object], items: Sequence[Item]) -> AbstractContextManager[Iterator[object]]:
    """A Parallel in one thread."""
    return nullcontext(map(work, items))


exhaust = partial(deque[object], maxlen=0)  # runs an iterator to its end, and keeps nothing


def add_masks(
    vector: RingVector,
    masks: Sequence[tuple[bytes, int]],
    parallel: Parallel = serial,
    wrote: Callable[[int, int], object] = lambda start, stop: None,
    read: Callable[[int], object] = lambda block: None,
    blocks: range | None = None,
) -> None:
    """vector += Σ sign · stream(key) modulo 2^r in place, over all (key, sign) of `masks`.

    `wrote(start, stop)` is called for each part of the vector when it is done, in the thread that did it, and
    `read(block)` before it is begun, for who wants a part that is in the cache then anyway. `blocks`: of the
    vector, to go on with others later.
    """
    assert vector.ndim == 1
    assert vector.flags.c_contiguous
    assert vector.dtype in RINGS.values(), vector.dtype
    assert all(len(key) == KEY_BYTES and sign in (1, -1) for key, sign in masks)
    opened, per_block = kernel(), BLOCK_BYTES // vector.itemsize
    # The streams of threads that are between blocks: one thread at a time may use a stream.
    idle: list[list[tuple[Stream, np.ufunc]]] = []

    def add(block: int) -> None:
        try:
            streams = idle.pop()
        except IndexError:
            streams = [(opened(key), np.add if sign > 0 else np.subtract) for key, sign in masks]
        part = vector[block * per_block : (block + 1) * per_block]
        read(block)
        nonce, zeros = _block(block, part.nbytes)
        with buffers.one() as buffer:
            out = buffer.data[: part.nbytes + TAG_BYTES]
            mask = buffer[: part.nbytes].view(vector.dtype.newbyteorder("<"))
            for stream, combine in streams:
                stream(nonce, zeros, out)
                combine(part, mask, part)
        idle.append(streams)
        wrote(block * per_block, block * per_block + len(part))

    with parallel(add, range(blocks_of(vector)) if blocks is None else blocks) as mine:
        exhaust(mine)


def blocks_of(vector: RingVector) -> int:
    """How many blocks it has."""
    return -(-vector.nbytes // BLOCK_BYTES)


def keystream(key: bytes, block: int, out: Bytes, nbytes: int = BLOCK_BYTES) -> None:
    """The first `nbytes` of one block of a key's stream into `out`, which has TAG_BYTES more than that."""
    assert len(key) == KEY_BYTES
    kernel()(key)(*_block(block, nbytes), out.data[: nbytes + TAG_BYTES])


class Buffers:
    """Buffers of `nbytes`, kept for reuse: as many as were ever in use at once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._idle: list[Bytes] = []  # a list's pop and append are atomic

    @contextmanager
    def one(self) -> Iterator[Bytes]:
        """A buffer, which holds what its last user left in it."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = np.zeros(self.nbytes, np.uint8)
        try:
            yield buffer
        finally:
            self._idle.append(buffer)


buffers = Buffers(BLOCK_BYTES + TAG_BYTES)
ZEROS = memoryview(bytes(BLOCK_BYTES))


def _block(block: int, nbytes: int) -> tuple[bytes, memoryview]:
    """A block's nonce, and as many zeros as bytes of it are wanted."""
    return block.to_bytes(12, "big"), ZEROS[:nbytes]


# --- The two ways to the same bits


def counter_mode(key: bytes) -> Stream:
    cipher = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
    start, write = cipher.reset_nonce, cipher.update_into

    def stream(nonce: bytes, zeros: memoryview, out: memoryview) -> None:
        start(nonce + b"\0\0\0\2")  # where GCM's counter stands after it has used 1 for the tag
        write(zeros, out)

    return stream


def galois_mode(key: bytes) -> Stream:
    encrypt = AESGCM(key).encrypt_into
    return lambda nonce, zeros, out: encrypt(nonce, zeros, None, out)


@cache
def kernel() -> Callable[[bytes], Stream]:
    """The faster of the two on this CPU, by a trial of a few milliseconds at first use."""
    with buffers.one() as buffer:
        trials = {
            opened: min(_time_s(opened(bytes(KEY_BYTES)), buffer) for _ in range(20))
            for opened in (counter_mode, galois_mode)
        }
    return min(trials, key=lambda opened: trials[opened])


def _time_s(stream: Stream, out: Bytes) -> float:
    began = default_timer()
    stream(*_block(0, BLOCK_BYTES), out.data)
    return default_timer() - began
