"""Processes that share one event loop whose time jumps to the next timer. A process may be killed before any
of its steps, or stand still for a while: a step is what runs between two awaits."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
RESOLUTION_S = 1e-9  # closer together is the same moment
STEPS = 400_000  # of all processes: more is a loop without end


class Killed(BaseException):
    """Ends the step in which a process is killed; what handles it does so in vain."""


class Stuck(AssertionError):
    """Nothing will ever happen again, or never stops to happen."""


class Process:
    """One that runs tasks of its own until it ends or is killed. Killed, no line of it runs any more: no
    `finally` either, as long as what it had is not collected: hunt.py ends without collecting it."""

    def __init__(self, name: str, dies_at: int | None = None, dies_at_write: int | None = None) -> None:
        """`dies_at`: before which of its steps it is killed; `dies_at_write`: before which sync or rename."""
        self.name, self.dies_at, self.dies_at_write = name, dies_at, dies_at_write
        self.writes, self.boot = 0, name  # the start of its machine that it lives in
        self.on_kill: Callable[[], None] = lambda: None
        self.alive, self.steps, self.busy_until = True, 0, 0.0
        self.killed: asyncio.Future[None] | None = None  # done when it is
        self._loop: VirtualLoop | None = None
        self._parked: deque[asyncio.Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []  # all that it ever had: a dead one's are never collected
        self._dropped: list[asyncio.Handle] = []

    def start(self, loop: VirtualLoop, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run its main task."""
        self._loop, self.killed = loop, loop.create_future()
        context = copy_context()
        context.run(CURRENT.set, self)
        return loop.create_task(main, context=context)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.on_kill()
            assert self.killed is not None
            self.killed.get_loop().call_soon(
                lambda: None if self.killed.done() else self.killed.set_result(None), context=Context()
            )

    def writing(self) -> None:
        """It is about to sync or rename a file."""
        self.writes += 1
        if self.alive and self.writes == self.dies_at_write:
            self.kill()
        if not self.alive:
            raise Killed

    def busy(self, seconds: float) -> None:
        """It does nothing else for so long: its disk is slow, or it is stopped."""
        assert self._loop is not None
        self.busy_until = max(self.busy_until, self._loop.time()) + seconds

    def takes(self, handle: asyncio.Handle) -> bool:
        """Whether it takes a step now; else the step is taken later, or never."""
        assert self._loop is not None
        if self.alive and (self._parked or self.busy_until > self._loop.time()):
            if not self._parked:
                self._loop.call_at(self.busy_until, self._wake, context=Context())
            self._parked.append(handle)
            return False
        self.steps += 1
        if self.alive and self.steps == self.dies_at:
            self.kill()
        if not self.alive:
            self._dropped.append(handle)
        return self.alive

    def _wake(self) -> None:
        assert self._loop is not None
        if self.busy_until > self._loop.time():
            self._loop.call_at(self.busy_until, self._wake, context=Context())
        else:
            self._loop._ready.extendleft(reversed(self._parked))  # before what came since
            self._parked.clear()


class _Soon(asyncio.Handle):
    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        """As asyncio's, which would ask the loop whether it is debugged: a world makes very many."""
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class _Timer(_Soon, asyncio.TimerHandle):
    __slots__ = ()
    _scheduled = False  # in asyncio's own heap


class VirtualLoop(asyncio.BaseEventLoop):
    """One thread, no sockets: nothing is ever ready but timers, and time goes on to the next one. Timers of
    one moment come in the order in which they were set: a heap alone has another order with each other timer
    in it. What is given to a thread runs as a step, `thread_s()` later."""

    def __init__(self, thread_s: Callable[[], float]) -> None:
        super().__init__()
        self.now, self.steps, self._thread_s = 0.0, 0, thread_s
        self._timers: list[tuple[float, int, _Timer]] = []
        self._numbers = itertools.count()
        self.set_task_factory(_task)
        self.set_exception_handler(lambda loop, about: None)  # who was killed retrieves nothing

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise Stuck("every process waits, and nothing will come")
            self.now = max(self.now, timers[0][0])
        if self.steps > STEPS:
            raise Stuck(f"more than {STEPS} steps")
        while timers and timers[0][0] < self.now + RESOLUTION_S:
            due, _, timer = heapq.heappop(timers)
            self.now = max(self.now, due)  # else who is woken finds that it is too early, for ever
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            self.steps += 1
            process = handle._context.get(CURRENT)
            if process is None or process.takes(handle):
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as e:
                    self.call_exception_handler({"exception": e})

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = _Soon(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        timer = _Timer(callback, args, self, context)
        timer._when = when
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()

        def run() -> None:
            if not done.cancelled():
                try:
                    done.set_result(work(*args))
                except Exception as e:
                    done.set_exception(e)

        self.call_later(self._thread_s(), run)
        return done


def _task(loop: Any, coroutine: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
    process = (context or copy_context()).get(CURRENT)
    if process is not None:
        process.tasks.append(task)
    return task
