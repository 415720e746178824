"""Work over all cores, for what lets go of Python's lock: ciphers, signatures, numpy on long arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor


class Crew:
    """The caller and `threads` - 1 helpers, which take items from one heap: a secagg.masking.Spread.

    Helpers sleep between calls, and the kernel takes up to milliseconds to wake one. So the caller works from
    the start, and who has not come by the end of the work is not waited for.
    """

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(self._helpers, 1), thread_name_prefix="crew")

    def __call__(self, work: Callable[[int], object], items: range) -> Iterable[None]:
        """work(item) for all items; when all is done, an error of one of them is raised."""
        heap = iter(items)  # a range's next is one step under Python's lock

        def take() -> None:
            for item in heap:
                work(item)

        helpers = [self._pool.submit(take) for _ in range(min(self._helpers, len(items) - 1))]
        try:
            take()
        finally:
            for helper in helpers:
                if not helper.cancel():
                    helper.result()
        return ()
