"""Coming and going: leaving in time when told to, and meeting again after a restart.

Who ends a process politely sends SIGTERM and waits a while: a cloud that takes its machine back, SLURM
before a time limit, torchrun when a machine comes or goes. All ranks then finish the same step, checkpoint,
and leave with exit code LEFT: whoever started them knows that the same command goes on from there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public all the same

EVERY_S = 0.25  # ranks ask each other whether one was told to leave
MAX_STEPS = 20  # between two such questions, for a run that becomes slow
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

    def __enter__(self) -> Leave:
        self._before = signal.signal(signal.SIGTERM, self._tell)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)
        if self._work is not None and kind is None:
            self._work.wait()  # every rank has begun it
        self._work = None

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
