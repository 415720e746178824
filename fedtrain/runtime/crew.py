"""Work over all cores, for what lets go of Python's lock: ciphers, signatures, numpy on long arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle


class Crew:
    """The caller and `threads` - 1 helpers, which take items from one heap: a secagg.masking.Spread.

    Helpers sleep between calls, and the kernel takes up to milliseconds to wake one. So the caller works from
    the start, and who has not come by the end of the work is not waited for.

    Each works on a core of its own. Left to itself the kernel moves a thread that waited for Python's lock to
    the core of the one that let go of it; two then share a core, and are no faster than one. So `work` must
    start no threads: they would stay on its core.
    """

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        cores = cycle(sorted(os.sched_getaffinity(0)))
        for _ in range(os.getpid() % threads):  # not all processes' callers on the same
            next(cores)
        self._core = next(cores)
        self._pool = ThreadPoolExecutor(
            max(self._helpers, 1), thread_name_prefix="crew", initializer=lambda: settle(next(cores))
        )

    def __call__(self, work: Callable[[int], object], items: range) -> Iterable[None]:
        """work(item) for all items; when all is done, an error of one of them is raised."""
        heap = iter(items)  # a range's next is one step under Python's lock

        def take() -> None:
            for item in heap:
                work(item)

        helpers = [self._pool.submit(take) for _ in range(min(self._helpers, len(items) - 1))]
        with settled(self._core if helpers else None):
            try:
                take()
            finally:
                for helper in helpers:
                    if not helper.cancel():
                        helper.result()
        return ()


@contextmanager
def settled(core: int | None) -> Iterator[None]:
    """This thread on that core; None: wherever it likes."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    settle(core)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def settle(core: int) -> None:
    with suppress(OSError):  # a container may forbid it, or have lost the core since
        os.sched_setaffinity(0, {core})
