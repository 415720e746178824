"""Processes that are forked from one that has torch, for to load it takes longer than most of what they are
there for: worlds of ranks, and commands. Those begin as they do from a shell, but with their imports done.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from fedtrain.training.devices import backend_of, device_of_rank
from tests.pretended import PRESENT, PretendedGPU
from tests.signals import hear_ctrl_c

TIMEOUT = timedelta(seconds=120)  # of one collective
TAIL = 6000  # characters of a log that tell why its process goes on
LOADED = [
    "fedtrain.cli",
    "fedtrain.runtime.datacenters.datacenter",
    "fedtrain.runtime.star.federated",
    "fedtrain.runtime.peers.peer",
    "fedtrain.runtime.trainers.ranks",
    "fedtrain.runtime.simulations.simulation",
    "fedtrain.runtime.sites.site",
    "fedtrain.runtime.trainers.trainer",
    "fedtrain.training.checkpoint",
    "fedtrain.training.stacked",
    "fedtrain.training.parallel.pipeline",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(LOADED)


def world(
    ranks: int, work: Callable[..., None], *arguments: Any, device: str = "cpu", backend: str = "auto"
) -> None:
    """`work(rank, ranks, *arguments)` in so many processes of one group, to the end; where one of them
    raises, the others are ended and its traceback is raised here; where a signal ends one, the error's notes
    have the stack that its faulthandler wrote. `device`, `backend`: as train.device and
    parallel.backend; by Gloo the ranks share a GPU. Where this process has a pretended GPU, so have they."""
    with TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        given = ranks, meeting, device, backend, bool(PRESENT), work, arguments
        try:
            torch.multiprocessing.start_processes(_rank, given, ranks, start_method="forkserver")
        except Exception as e:
            for rank in range(ranks):
                file = crash_file(meeting, rank)
                if file.exists() and (text := file.read_text(errors="replace")):
                    e.add_note(f"rank {rank}, by its faulthandler:\n{text[:TAIL]}")
            raise


def crash_file(meeting: Path, rank: int) -> Path:
    """Where a rank's faulthandler writes what the rank did when a signal ended it."""
    return meeting.with_name(f"crash-{rank}")


def _rank(
    rank: int,
    ranks: int,
    meeting: Path,
    device: str,
    backend: str,
    pretended: bool,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    with crash_file(meeting, rank).open("w") as file, PretendedGPU() if pretended else nullcontext():
        faulthandler.enable(file)
        _work(rank, ranks, meeting, device, backend, work, arguments)


def _work(
    rank: int,
    ranks: int,
    meeting: Path,
    device: str,
    backend: str,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    here = device_of_rank(device, backend)
    store = dist.FileStore(str(meeting), ranks)
    speaks = backend_of(here, backend)
    dist.init_process_group(speaks, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    work(rank, ranks, *arguments)
    dist.barrier()
    dist.destroy_process_group()


class Command:
    """`main(arguments)` as a command: a session, a folder, an environment and a log of its own."""

    def __init__(
        self,
        main: Callable[[list[str]], None],
        arguments: list[str],
        *,
        folder: Path,
        log: Path,
        env: Mapping[str, str],
    ) -> None:
        """`env`: beside ours."""
        self._log = log
        whole = {**os.environ, **env}
        self._process = FORKED.Process(target=_command, args=(main, arguments, folder, log, whole))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, -N where signal N ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Its exit code; a TimeoutError has the end of its log, and where its threads stand."""
        self._process.join(timeout_s)
        if (code := self.poll()) is None:
            self.send_signal(signal.SIGUSR2)  # it writes where its threads are
            self._process.join(1)
            log = self._log.read_text(errors="replace")[-TAIL:]
            raise TimeoutError(f"process {self.pid} goes on after {timeout_s} s:\n{log}")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _command(
    main: Callable[[list[str]], None], arguments: list[str], folder: Path, log: Path, env: dict[str, str]
) -> None:
    hear_ctrl_c()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(arguments)
