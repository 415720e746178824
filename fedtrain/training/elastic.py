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
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(
                backend="gloo"
            )  # its own: answers come beside training's collectives

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

        One rank that was told is enough. The answer is that to the step before, so that it has travelled
        while this step was computed: nobody waits for it.
        """
        if self._group is None:
            return self.told_at is not None
        if self._work is not None:
            self._work.wait()
            if int(self._flag):
                self._work = None
                return True
        self._flag.fill_(self.told_at is not None)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False

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
