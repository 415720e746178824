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
        self.fds = _nameless(), _nameless()
        self.weights, self.slab = (Path(f"/dev/fd/{fd}") for fd in self.fds)
        self._free: list[tuple[int, mmap.mmap]] = []
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

    def take(self, block_bytes: int) -> tuple[int, memoryview]:
        """A block (all are of one size) and where it is in the slab. It is free again when the view, and
        every tensor made from it, is gone."""
        if not self._free:
            size = -(-block_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self.fds[1], self._end + size)
            self._free.append((self._end, mmap.mmap(self.fds[1], size, offset=self._end)))
            self._end += size
        block = self._free.pop()
        view = memoryview(block[1])[:block_bytes]
        weakref.finalize(view, self._free.append, block)
        return block[0], view


def _nameless() -> int:
    """A file in memory; where the system has no such thing, one on disk that is already unlinked."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedtrain")
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())
