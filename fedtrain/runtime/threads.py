"""Work in threads: off the event loop, and over all cores."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from itertools import cycle
from typing import Any, TypeVar

T = TypeVar("T")
SMALL_BYTES = 1 << 20  # work on a smaller model holds up the event loop for less than a thread costs


async def in_thread(nbytes: int, work: Callable[..., T], *args: Any) -> T:
    """work(*args) on a model of so many bytes: in a thread when the model is large, else here."""
    return work(*args) if nbytes <= SMALL_BYTES else await asyncio.to_thread(work, *args)


async def while_awaited(work: Callable[..., T], *args: Any) -> T:
    """work(*args, over) in a thread; over() is true once nobody awaits this any more. Then work should end: a
    process waits for such threads before it ends."""
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(work, *args, cancelled.is_set)
    finally:
        cancelled.set()


async def while_torch_loads(starting: Awaitable[T]) -> T:
    """Await the start of trainers, and load torch in this process meanwhile: it takes as long."""
    loading = asyncio.create_task(asyncio.to_thread(import_module, "torch"))
    try:
        return await starting
    finally:
        await loading


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Have torch work with so many threads inside the with block, in a process that may have others."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ThreadPool:
    """A secagg.masking.Parallel for work that releases Python's lock: ciphers, signatures, numpy.

    The caller works too, beside `threads` - 1 helper threads. Helpers sleep between calls, and the kernel
    takes up to milliseconds to wake one: a helper that has not begun when all items are taken is cancelled.

    Every thread works on a core of its own. The kernel would move a thread that waited for Python's lock to
    the core of the thread that released it; two threads on one core are no faster than one. So `work` must
    start no threads: they would stay on its core.
    """

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        cores = cycle(sorted(os.sched_getaffinity(0)))
        for _ in range(os.getpid() % threads):  # the callers of different processes begin on different cores
            next(cores)
        self._core = next(cores)
        self._pool = ThreadPoolExecutor(
            max(self._helpers, 1), thread_name_prefix="parallel", initializer=lambda: pin(next(cores))
        )

    @contextmanager
    def __call__(self, work: Callable[[T], object], items: Sequence[T]) -> Iterator[Iterator[object]]:
        """See Parallel. When all items are done, an error of one of them is raised."""
        left = iter(items)  # shared: the next of a sequence's iterator is one step under Python's lock
        helpers = [
            self._pool.submit(deque, map(work, left), 0) for _ in range(min(self._helpers, len(items) - 1))
        ]
        with pinned(self._core if helpers else None):
            try:
                yield map(work, left)
            finally:
                for helper in helpers:
                    if not helper.cancel():
                        helper.result()


@cache
def all_cores() -> ThreadPool:
    """The pool of this process, of a thread for each core."""
    return ThreadPool(len(os.sched_getaffinity(0)))


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Keep this thread on that core inside the with block; None: leave it to the kernel."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    pin(core)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def pin(core: int) -> None:
    """Move this thread to a core for good."""
    with suppress(OSError):  # a container may forbid it, or have lost the core since
        os.sched_setaffinity(0, {core})
