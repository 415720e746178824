"""Coming and going: leaving in time when told to, and meeting again after a restart.

Who ends a process politely sends SIGTERM and waits a while: a cloud that takes its machine back, SLURM
before a time limit, torchrun when a machine comes or goes. All ranks then finish the same step, checkpoint,
and leave with exit code LEFT: whoever started them knows that the same command goes on from there.

The same signal comes when another rank has died. Then the step may never end: the process ends with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public all the same

from ..errors import FedtrainError, story_of

EVERY_S = 0.25  # ranks ask each other whether one was told to leave
MAX_STEPS = 20  # between two such questions, for a run that becomes slow
STUCK_S = 4.0  # after SIGTERM a step that lasts longer, and three times as long as any before, won't end
STORE_S = 2.0  # for the store that ranks share to answer one that fails
LEFT = 75  # exit code, EX_TEMPFAIL of sysexits.h: not done, and no failure; start it again


class Left(SystemExit):
    """A process ends because it was told to, with all that it knew checkpointed."""

    def __init__(self) -> None:
        super().__init__(LEFT)


class Leave:
    """SIGTERM as a question that all ranks answer alike. Made in the main thread, by every rank.

    with Leave() as leave:
        while ...:
            step()
            if leave.asked():
                break
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.told_at: float | None = None  # when this rank was; `clock`'s seconds
        self._clock = clock
        self._before: Any = None
        self._group: dist.ProcessGroup | None = None
        self._box = torch.zeros(3, dtype=torch.float64)  # whether told; seconds a step; whether under way
        self._work: dist.Work | None = None
        self._period, self._calls, self._since = 1, 0, clock()
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")  # its own: answers travel beside training's sums
        self._woken = self._woken_before = -1  # what signals are written to
        self._doing: tuple[str, float] | None = None  # what may never end, and since when
        self._longest: dict[str, float] = {}  # of what ended, in seconds

    def __enter__(self) -> Leave:
        self._before = signal.signal(signal.SIGTERM, self._tell)
        wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._woken_before = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._end_what_is_stuck, args=(wake,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)
        signal.set_wakeup_fd(self._woken_before)
        os.close(self._woken)
        self._woken = -1
        if self._work is not None and kind is None:
            self._work.wait()  # every rank has begun it
        self._work = None

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Within it this rank waits for others, and so for ever where one is gone. Told to leave meanwhile,
        and after a multiple of the time that the same took before, the process ends."""
        began = time.monotonic()
        self._doing = what, began
        yield
        self._doing = None
        self._longest[what] = max(self._longest.get(what, 0.0), time.monotonic() - began)

    def asked(self) -> bool:
        """Whether all ranks leave now: after each step, on every rank.

        One rank that was told is enough. Ranks exchange what they know about every EVERY_S seconds, or each
        step where that takes longer, and nobody waits: the answer is that to the exchange before, which has
        travelled meanwhile. All go by the same answers, so all leave after the same step.
        """
        if self._group is None:
            return self.told_at is not None
        self._calls += 1
        if self._calls < self._period:
            return False
        if self._work is not None:
            told, seconds, _ = self._answer()
            if told:
                return True
            self._period = max(1, min(MAX_STEPS, int(EVERY_S / max(seconds, 1e-6))))
        self._ask(under_way=True)
        return False

    def asked_while_waiting(self) -> bool:
        """Wait until every rank calls this too, whatever number of steps it takes until then. True: one was
        told to leave, and all do so now, wherever they are."""
        if self._group is None:
            return self.told_at is not None
        if self._work is not None and self._answer()[0]:
            return True
        while True:
            self._ask(under_way=False)
            told, _, under_way = self._answer()
            if told or not under_way:
                return bool(told)

    def _ask(self, *, under_way: bool) -> None:
        now = self._clock()
        seconds = (now - self._since) / self._calls if self._calls and under_way else 0.0
        self._box[:] = torch.tensor([self.told_at is not None, seconds, under_way])
        self._calls, self._since = 0, now
        self._work = dist.all_reduce(self._box, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _answer(self) -> list[float]:
        """Of the exchange under way: whether any was told, the slowest's step, whether any is under way."""
        assert self._work is not None, "nobody was asked"
        self._work.wait()
        self._work = None
        answer: list[float] = self._box.tolist()
        return answer

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self.told_at = self.told_at or self._clock()

    def _end_what_is_stuck(self, wake: int) -> None:
        """A thread: Python calls _tell between two of the main thread's instructions, and so never when it is
        in a call that doesn't return; but the signal's number is written to `wake` at once."""
        with open(wake, "rb", buffering=0) as numbers:
            while (number := numbers.read(1)) != signal.SIGTERM.to_bytes():
                if not number:
                    return
            told = time.monotonic()
            while True:
                if select.select([wake], [], [], 0.1)[0] and not numbers.read(1):
                    return
                what, began = self._doing or ("", 0.0)
                now = time.monotonic()
                if now > told + STUCK_S and now > began + 3 * self._longest.get(what, now):
                    rank = os.environ.get("RANK", "0")
                    line = f"fedtrain: rank {rank} was told to leave (SIGTERM), but its {what} of "
                    line += f"{now - began:.0f} s does not end. It ends without a checkpoint.\n"
                    os.write(2, line.encode())
                    os._exit(1)

    def _forked(self) -> None:
        """In a child: its signals are not ours."""
        if (descriptor := signal.set_wakeup_fd(-1)) != self._woken:
            signal.set_wakeup_fd(descriptor)


def failed_first() -> bool:
    """Whether no other of the ranks that met has failed before; those that fail later do so because of it."""
    if not dist.is_initialized():
        return True
    failed: list[int] = []

    def ask() -> None:
        try:
            failed.append(dist.distributed_c10d._get_default_store().add("failed", 1))
        except RuntimeError:  # the store was in the process of one that has ended
            failed.append(2)

    asking = threading.Thread(target=ask, daemon=True)  # the store's machine may be gone
    asking.start()
    asking.join(STORE_S)
    return failed in ([], [1])


def fail(error: Exception, line: str) -> NoReturn:
    """End this rank at once, with what people see of its error: to leave its group in good order it would
    wait for the others. `line` says what happened; torchrun shows the first rank's at the end."""
    began, first, rank = int(time.time()), failed_first(), os.environ["RANK"]
    ours = error.__cause__ is None and isinstance(error, FedtrainError | OSError)
    line = f"rank {rank}: {line}" if first else f"rank {rank} ends, for another one has failed"
    story = story_of(error) if first and not ours else ""
    os.write(2, f"{story}fedtrain: {line}\n".encode())  # at once: other ranks write to the same file
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        at = began if first else int(time.time()) + 1  # the first rank asked whether it is after it began
        told = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(at)}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": told}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def meet(backend: str, timeout_s: float, device: torch.device | None = None) -> None:
    """init_process_group for ranks that torchrun started, and may have started before.

    torchrun's ranks may share its own store, where the keys of a group that was killed still stand: of 16
    restarts after kill -9 some 7 then fail or hang. Here each restart has keys of its own. That doesn't help
    where a machine comes or goes, which torchrun doesn't count: for that it has to be started with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives every meeting a new store; `shares_store` tells.
    """
    if not shares_store():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=device)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = TCPStore(address, port, ranks, False, timeout=timedelta(seconds=timeout_s))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=PrefixStore(f"restart {restart} of {ranks} ranks", shared),
        rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s), device_id=device,
    )  # fmt: skip


def shares_store() -> bool:
    """Whether torchrun has its ranks meet in its own store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
