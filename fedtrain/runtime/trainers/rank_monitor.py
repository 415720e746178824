"""Rank 0's watch over the other ranks of a site: one that can't go on ends all of them, and is named."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NoReturn, Self

import msgspec

from ...errors import ConfigError, reason_of, story_of
from ..processes import ending, is_stopped

# Called before all ranks end: with the reason, whether the reason is the answer to the command under way
# (else new ranks may try it again), and whether the user's configuration is at fault.
GiveUp = Callable[[str, bool, bool], None]


def nobody(reason: str, answer: bool, config: bool) -> None:
    """A GiveUp where there is nobody to tell."""


POLL_S = 0.5  # how often each rank is checked for having been stopped
STOPPED_POLLS = 6  # a rank found stopped so many times in a row ends all
REPORT_BYTES = 1 << 16  # of a RankFailure: as much as a pipe holds
TRACEBACK_CHARACTERS = 1 << 13  # of its traceback: the end
SETTLE_S = 0.5  # the first rank to fail makes others fail: so long the monitor waits for all their reports


class RankFailure(msgspec.Struct, array_like=True):
    """Why one rank can't go on."""

    reason: str
    raised_at: float = 0.0  # time.monotonic() of its exception, one clock for all ranks; 0: the process ended
    config: bool = False  # a ConfigError
    traceback: str = ""  # the traceback, for the people here

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        traceback, config = story_of(error)[-TRACEBACK_CHARACTERS:], isinstance(error, ConfigError)
        return cls(f"rank {rank}: {reason_of(error)}", time.monotonic(), config, traceback)


class RankMonitor(threading.Thread):
    """Rank 0's: polls after the others, and ends all of them when one can't go on.

    A thread, for the main one may wait in a collective for a rank that is no more.
    """

    def __init__(self, give_up: GiveUp) -> None:
        super().__init__(daemon=True)
        self.asked = True  # whether an answer is due; the first is to the command to start
        self._give_up = give_up
        self._children: list[tuple[int, subprocess.Popen[bytes], int]] = []  # (rank, process, its reports)
        self._own: RankFailure | None = None
        self._wake, self._woken = os.pipe()

    def add(self, rank: int, process: subprocess.Popen[bytes], reports: int) -> None:
        """Watch one more rank; to be called before the thread starts."""
        os.set_blocking(reports, False)
        self._children.append((rank, process, reports))

    def raised(self, error: BaseException) -> NoReturn:
        """Rank 0 calls it when it can't go on: the monitor finds whose fault it was and ends the process."""
        self._own = RankFailure.of(0, error)
        os.write(self._woken, b".")
        while True:
            signal.pause()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for _, process, _ in self._children:
            poll.register(os.pidfd_open(process.pid), select.POLLIN)
        polls = dict.fromkeys((rank for rank, _, _ in self._children), 0)
        while not poll.poll(POLL_S * 1000):
            for rank, process, _ in self._children:
                polls[rank] = polls[rank] + 1 if is_stopped(process.pid) else 0
                if polls[rank] == STOPPED_POLLS:
                    how = f"was stopped for {STOPPED_POLLS * POLL_S:g} s"
                    return self._end(RankFailure(f"rank {rank} (pid {process.pid}) {how}"))
        time.sleep(SETTLE_S)
        return self._end(min(self._failures(), key=lambda failure: failure.raised_at))

    def _failures(self) -> Iterator[RankFailure]:
        """The failure of each rank that can't go on."""
        if self._own is not None:
            yield self._own
        for rank, process, reports in self._children:
            with suppress(BlockingIOError, msgspec.DecodeError):  # it wrote none, or was killed in it
                yield msgspec.json.decode(os.read(reports, REPORT_BYTES), type=RankFailure)
                continue
            if (status := process.poll()) is not None:
                yield RankFailure(f"rank {rank} (pid {process.pid}) {ending(status)}")

    def _end(self, first: RankFailure) -> None:
        for _, process, _ in self._children:
            process.kill()
        print(first.traceback + first.reason, file=sys.stderr, flush=True)
        self._give_up(first.reason, self.asked and first.raised_at > 0, first.config)
        os._exit(1)
