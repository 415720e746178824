"""What an event loop waits for from a thread beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Promises:
    """The futures that a thread settles. Made on the loop, where `new` is called; the rest on the thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.Future[Any]] = set()

    def new(self) -> asyncio.Future[Any]:
        """What the thread will settle; it fails where the thread ends before."""
        answer = self._loop.create_future()
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        return answer

    def settle(self, answer: asyncio.Future[T], result: T) -> None:
        self.call(lambda: None if answer.done() else answer.set_result(result))

    def fail(self, error: Exception) -> None:
        """Nobody waits for a thread that is gone, whether it took the command or not."""

        def end() -> None:
            for answer in [each for each in self._open if not each.done()]:
                answer.set_exception(error)

        self.call(end)

    def call(self, what: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(what, *args)
