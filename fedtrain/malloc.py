"""How the C library keeps memory that was freed. Models and their chunks come and go many times a second.

glibc gives a freed buffer of their size back to the kernel, and takes it again page by page, zeroed: a
quarter of a round's processor time. So a process keeps some, and asks for large pages.
"""

from __future__ import annotations

import ctypes
import os

MMAP_BYTES = 4 << 20  # a larger buffer has pages of its own, given back when it is freed
TRIM_BYTES = 16 << 20  # of freed memory are kept, in each arena of the heap
ENVIRONMENT = {  # of a trainer, whose batches come and go thousands of times a second; most is below 32 MiB
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed() -> None:
    """From here on, in this process; before the first large tensor. Another C library needs nothing."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: pages of 2 MiB for its large tensors
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
