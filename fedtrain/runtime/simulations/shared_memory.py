"""Memory that a simulation shares with its trainer processes."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path

from ...arena import Arena, ArenaFile


class SharedMemory:
    """What a pool shares: one file with the global weights, and a slab of blocks for deltas.

    The files have no name, so nothing is left behind, whatever kills us. Trainers inherit them.
    """

    def __init__(self) -> None:
        self.fds = nameless(), nameless()
        self.weights, self.slab = (Path(f"/dev/fd/{fd}") for fd in self.fds)
        self._free: dict[int, list[tuple[int, mmap.mmap]]] = {}  # by size
        self._end = 0

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def publish(self, weights: Arena) -> ArenaFile:
        """Nobody may be at work with the model that was published before."""
        at, payload = 0, weights.payload
        while at < len(payload):
            at += os.pwrite(self.fds[0], payload[at:], at)
        return ArenaFile(weights.schema, self.weights, weights.digest)

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        """A block and where it is in the slab. It is free again when the view, and every tensor made from it,
        is gone; what has been used is warm, so that sizes are rounded up to few."""
        size = max(mmap.ALLOCATIONGRANULARITY, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if not free:
            os.ftruncate(self.fds[1], self._end + size)
            free.append((self._end, mmap.mmap(self.fds[1], size, offset=self._end)))
            self._end += size
        block = free.pop()
        view = memoryview(block[1])[:nbytes]
        weakref.finalize(view, free.append, block)
        return block[0], view


class Mapped:
    """What a trainer sees of the slab, which grows now and then."""

    def __init__(self) -> None:
        self._slab: tuple[str, mmap.mmap] | None = None

    def bytes_at(self, slab: str, offset: int, nbytes: int) -> memoryview:
        """These bytes, to be written."""
        if self._slab is None or self._slab[0] != slab or len(self._slab[1]) < offset + nbytes:
            with open(slab, "r+b") as f:
                self._slab = slab, mmap.mmap(f.fileno(), 0)
        return memoryview(self._slab[1])[offset : offset + nbytes]


def nameless() -> int:
    """A file in memory; where the system has no such thing, one on disk that is already unlinked."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedtrain")
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())
