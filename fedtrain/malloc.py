"""How the C library keeps memory that was freed. Models and their chunks come and go many times a second.

glibc gives a freed buffer of their size back to the kernel, and takes it again page by page, zeroed: a
quarter of a round's processor time. So a process keeps some, and asks for large pages. Whole models are kept
here: where the kernel, or a virtual machine's host, has to find 200 MB anew, that takes longer than to fold
four updates of that size.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MMAP_BYTES = 4 << 20  # a larger buffer has pages of its own, given back when it is freed
TRIM_BYTES = 16 << 20  # of freed memory are kept, in each arena of the heap
ENVIRONMENT = {  # of a trainer, whose batches come and go thousands of times a second; most is below 32 MiB
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class Blocks:
    """The memory of a few freed models, for the next ones of their size."""

    def __init__(self) -> None:
        self.most = 0  # so many are kept
        self._free: list[mmap.mmap] = []  # a list's pop and append are atomic

    def tensor(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor [nbytes] on the CPU; its numbers may be anything."""
        import torch

        if not self.most or nbytes < MMAP_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        import numpy as np

        block = self._taken(nbytes) or mmap.mmap(-1, nbytes)
        block.madvise(mmap.MADV_HUGEPAGE)
        lent = np.frombuffer(block, np.uint8)  # the tensor, and all that looks at its memory, keeps it
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent)

    def _taken(self, nbytes: int) -> mmap.mmap | None:
        for block in [block for block in self._free if len(block) == nbytes]:
            with suppress(ValueError):  # another thread took it
                self._free.remove(block)
                return block
        return None

    def _give_back(self, block: mmap.mmap) -> None:
        self._free.append(block)
        del self._free[: -self.most or None]


blocks = Blocks()


def keep_freed(models: int = 0) -> None:
    """From here on, in this process; before the first large tensor. Another C library needs nothing.
    `models`: the memory of so many models is kept too."""
    blocks.most = max(blocks.most, models)
    large_pages()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)


def large_pages() -> None:
    """From here on torch's large tensors lie in pages of 2 MiB, in this process and in those that it starts.
    Before its first tensor of any size: torch asks once, and then never again."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def give_back() -> None:
    """Give the kernel all that is freed now, in this process; for whoever just freed much and needs it no
    more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
