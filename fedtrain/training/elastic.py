"""Elastic runs: ranks that leave at SIGTERM with a checkpoint, and meet again after a restart.

SIGTERM announces the end of a process: from a cloud that takes its machine back, from SLURM before a time
limit, from torchrun when a machine joins or leaves. All ranks then finish the same step, write a checkpoint,
and exit with code LEFT, which tells the caller that the same command goes on from the checkpoint.

The same signal comes when another rank has died. Then the step may never end, and `Leave` ends the process.
So it does where no signal comes and a rank hangs, once all its threads' stacks are in the rank's log.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import FedtrainError, story_of
from .compat import default_store
from .rank_log import RankLog, main_thread_stands, tell_torchrun

EVERY_S = 0.25  # seconds between two exchanges in which ranks learn whether one of them got SIGTERM
MAX_STEPS = 20  # the most steps between two exchanges, in case steps become slow
STUCK_S = 4.0  # after SIGTERM, a step this long, and three times as long as any before, counts as stuck
STORE_S = 2.0  # seconds that a failing rank waits for the ranks' shared store
OVER = b"\0"  # no signal's number: what ends the thread that looks for stuck steps
LEFT = 75  # exit code, EX_TEMPFAIL of sysexits.h: neither done nor failed; start the command again


class Left(SystemExit):
    """The process exits because of SIGTERM, after a checkpoint."""

    def __init__(self) -> None:
        super().__init__(LEFT)


class Leave:
    """Lets all ranks leave after the same step once any rank got SIGTERM. Made by each rank's main thread.

    with Leave() as leave:
        while ...:
            step()
            if leave.asked():
                break
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, hangs_s: float = math.inf,
        log: RankLog | None = None,
    ) -> None:  # fmt: skip
        """`hangs_s`: where there are several ranks, a step (see `during`) that lasts longer hangs, and the
        process ends; `log` then has its threads' stacks."""
        self._hangs_s, self._log = math.inf, log
        self.told_at: float | None = None  # when this rank got SIGTERM, in seconds of `clock`
        self._clock = clock
        self._before: Any = None
        self._group: dist.ProcessGroup | None = None
        self._box = torch.zeros(
            3, dtype=torch.float64
        )  # whether SIGTERM came; seconds a step; whether steps go on
        self._work: dist.Work | None = None
        self._period, self._calls, self._since = 1, 0, clock()
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._hangs_s = hangs_s
            self._group = dist.new_group(backend="gloo")  # of its own, apart from training's collectives
        self._woken = self._woken_before = -1  # file descriptors to which Python writes signal numbers
        self._doing: tuple[str, float] | None = None  # (a step that may never end, its start)
        self._longest: dict[str, float] = {}  # the longest duration of each kind of step, in seconds

    def __enter__(self) -> Leave:
        self._before = signal.signal(signal.SIGTERM, self._tell)
        wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._woken_before = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forked)
        self._watch = threading.Thread(target=self._end_what_is_stuck, args=(wake,), daemon=True)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)
        signal.set_wakeup_fd(self._woken_before)
        os.write(self._woken, OVER)  # a child that was forked may have the pipe open
        os.close(self._woken)
        self._watch.join(STORE_S)
        self._woken = -1
        if self._work is not None and kind is None:
            self._work.wait()  # ends, because every rank has begun this collective
        self._work = None

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Mark a block in which this rank waits for others, so for ever if one is gone. A block that lasts
        three times as long as any with the same `what` before ends the process, after SIGTERM, or where it
        lasts longer than `hangs_s`, too."""
        began = time.monotonic()
        self._doing = what, began
        yield
        self._doing = None
        self._longest[what] = max(self._longest.get(what, 0.0), time.monotonic() - began)

    def asked(self) -> bool:
        """Whether all ranks leave now. Every rank calls this after each step.

        One rank with SIGTERM is enough. Ranks exchange their state about every EVERY_S seconds, or at each
        step where a step takes longer, and never wait: the answer is that of the exchange before, which was
        sent during the last step. All ranks use the same answers, so all leave after the same step.
        """
        if self._group is None:
            return self.told_at is not None
        self._calls += 1
        if self._calls < self._period:
            return False
        if self._work is not None:
            leave, seconds, _ = self._answer()
            if leave:
                return True
            self._period = max(1, min(MAX_STEPS, int(EVERY_S / max(seconds, 1e-6))))
        self._ask(under_way=True)
        return False

    def asked_while_waiting(self) -> bool:
        """Wait until every rank calls this method, however many steps other ranks still take. True when a
        rank got SIGTERM: all ranks leave now, after whatever step they are."""
        if self._group is None:
            return self.told_at is not None
        if self._work is not None and self._answer()[0]:
            return True
        while True:
            self._ask(under_way=False)
            leave, _, under_way = self._answer()
            if leave or not under_way:
                return bool(leave)

    def _ask(self, *, under_way: bool) -> None:
        now = self._clock()
        seconds = (now - self._since) / self._calls if self._calls and under_way else 0.0
        self._box[:] = torch.tensor([self.told_at is not None, seconds, under_way])
        self._calls, self._since = 0, now
        self._work = dist.all_reduce(self._box, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _answer(self) -> list[float]:
        """The exchange's result: (some rank got SIGTERM, slowest rank's s/step, some rank still steps)."""
        assert self._work is not None, "no exchange was begun"
        self._work.wait()
        self._work = None
        answer: list[float] = self._box.tolist()
        return answer

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self.told_at = self.told_at or self._clock()

    def _end_what_is_stuck(self, wake: int) -> None:
        """The body of a thread. Python calls _tell only between two instructions of the main thread, so never
        during a call that doesn't return; but it writes the signal's number to `wake` at once."""
        signalled, often = math.inf, min(1.0, self._hangs_s / 4) if self._hangs_s < math.inf else None
        with open(wake, "rb", buffering=0) as numbers:
            while True:
                if select.select([wake], [], [], 0.1 if signalled < math.inf else often)[0]:
                    if (number := numbers.read(1)) in (b"", OVER):
                        return
                    if number == signal.SIGTERM.to_bytes():
                        signalled = min(signalled, time.monotonic())
                self._end_if_stuck(signalled)

    def _end_if_stuck(self, signalled: float) -> None:
        what, began = self._doing or ("", 0.0)
        now, longest = time.monotonic(), self._longest.get(what)
        told = now > signalled + STUCK_S
        if self._log is not None and self._hangs_s < math.inf:
            self._log.write_stacks_after(self._hangs_s if longest is not None else 0)
        if longest is None or now - began < max(3 * longest, 0.0 if told else self._hangs_s):
            return
        rank, lasted = os.environ.get("RANK", "0"), f"its {what} of {now - began:.0f} s does not end"
        if told:
            line = f"rank {rank} was told to leave (SIGTERM), but {lasted}. It ends without a checkpoint."
        else:
            line = f"rank {rank} stands still: {lasted}. It is at {main_thread_stands()}."
        if self._log is not None:
            self._log.write_stacks(line)
            line += f" Its threads' stacks are in {self._log.path}."
        os.write(2, f"fedtrain: {line}\n".encode())
        if not told:
            tell_torchrun(line, int(time.time()))
        os._exit(1)

    def _forked(self) -> None:
        """In a forked child: stop writing the child's signals to the parent's pipe."""
        if (descriptor := signal.set_wakeup_fd(-1)) != self._woken:
            signal.set_wakeup_fd(descriptor)


def failed_first() -> bool:
    """Whether this rank is the first to fail; the others then fail because of it."""
    if not dist.is_initialized():
        return True
    failed: list[int] = []

    def ask() -> None:
        try:
            failed.append(default_store().add("failed", 1))
        except RuntimeError:  # the store's process has ended
            failed.append(2)

    asking = threading.Thread(target=ask, daemon=True)  # a thread, because the store's machine may be gone
    asking.start()
    asking.join(STORE_S)
    return failed in ([], [1])


def fail(error: Exception, line: str) -> NoReturn:
    """Print an error and end this rank at once; leaving its process group in order would wait for the others.
    `line` describes the error; torchrun shows the line of the first rank that failed at the end."""
    began, first, rank = int(time.time()), failed_first(), os.environ["RANK"]
    ours = error.__cause__ is None and isinstance(error, FedtrainError | OSError)
    line = f"rank {rank}: {line}" if first else f"rank {rank} ends, for another one has failed"
    story = story_of(error) if first and not ours else ""
    os.write(2, f"{story}fedtrain: {line}\n".encode())  # one write: other ranks write to the same file
    # The first rank's error is the oldest to torchrun.
    tell_torchrun(line, began if first else int(time.time()) + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
