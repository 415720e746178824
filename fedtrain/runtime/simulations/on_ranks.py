"""Trainers of a simulation as ranks of torchrun or SLURM (simulate.on = "torchrun").

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m fedtrain simulate

Rank 0 runs the simulation and has a trainer process of its own; each other rank is a trainer. They speak over
a process group (Gloo). When a rank dies, torchrun starts them all again, and the run goes on from its last
committed round.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from ... import malloc
from ...config import Config
from ...errors import ConfigError, WireError
from ...training.mesh import shutdown
from ..meeting import meet
from ..trainers import trainer_messages as msg
from ..trainers.supervised import TrainerLost
from .gpus import dealt, gpus_here
from .remote import Bytes, Desk, Model, Remote

SILENT_S = 86_400.0  # that a rank may take for its work; the end of its process is noticed at once
DIGEST_BYTES = 64  # of a model's digest, as text
OVER = -1  # where the length of a message would be: none will come


def rank() -> int:
    """Of this process; 0 where torchrun did not start it."""
    return int(os.environ.get("RANK", "0"))


def work(config: Config) -> None:
    """Be the trainer of this rank, until rank 0 says that the run is over."""
    malloc.keep_freed()
    gpu = dealt(gpus_here(config.train.device), int(os.environ.get("LOCAL_RANK", "0")))
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    meet(config, "gloo", timeout_s=SILENT_S)
    desk = Desk()
    while (lengths := _numbers(0, 3))[0] != OVER:
        message, digest, model = map(partial(_receive, 0), lengths, (msg.FRAME_BYTES, DIGEST_BYTES, None))
        if digest:
            desk.hold(bytes(digest).decode(), model)
        _send(0, *desk.answer(bytes(message)))
    shutdown()


class Ranks:
    """All ranks but this one, which is rank 0."""

    def __init__(self, config: Config) -> None:
        if "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                'simulate.on = "torchrun": torchrun has not started this process. Run: torchrun '
                '--nproc-per-node N -m fedtrain simulate; or set simulate.on = "local".'
            )
        meet(config, "gloo", timeout_s=SILENT_S)
        self.numbers = range(1, dist.get_world_size())

    async def start(self, number: int, start: msg.Start) -> Remote:
        """The trainer of a rank."""
        return await Remote.begin(Rank(number), start)

    async def close(self) -> None:
        """Part from the ranks, which all have been closed."""
        await asyncio.to_thread(shutdown)


class Rank:
    """The carrier to a rank. A thread of its own has one message after the other answered."""

    def __init__(self, number: int) -> None:
        self._rank, self._held = number, ""
        self._thread = ThreadPoolExecutor(1, f"rank {number}")

    async def carry(self, message: bytes, model: Model | None) -> tuple[Bytes, Bytes]:
        asked = asyncio.get_running_loop().run_in_executor(self._thread, self._carry, message, model)
        return await asyncio.shield(asked)  # the answer is to be read, whoever waits for it

    def _carry(self, message: bytes, model: Model | None) -> tuple[Bytes, Bytes]:
        digest, weights = "", b""
        if model is not None and model[0] != self._held:
            digest, weights = model[0], model[1]()
        try:
            _send(self._rank, message, digest.encode(), weights)
            self._held = digest or self._held
            lengths = _numbers(self._rank, 2)
            body, written = map(partial(_receive, self._rank), lengths, (msg.FRAME_BYTES, None))
        except RuntimeError as e:
            raise TrainerLost(f"rank {self._rank} of torchrun is gone: {str(e).splitlines()[0]}") from e
        return body, written

    async def close(self) -> None:
        over = asyncio.get_running_loop().run_in_executor(self._thread, self._leave)
        await asyncio.shield(over)
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        dist.send(torch.tensor([OVER, 0, 0]), self._rank)


def _send(to: int, *parts: Bytes) -> None:
    dist.send(torch.tensor([len(part) for part in parts]), to)
    for part in parts:
        if part:
            dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), to)


def _numbers(source: int, count: int) -> list[int]:
    found = torch.empty(count, dtype=torch.int64)
    dist.recv(found, source)
    return found.tolist()


def _receive(source: int, length: int, most: int | None) -> memoryview:
    """`most`: bytes, where a limit is known; a model is as large as the task's."""
    if length < 0 or (most is not None and length > most):
        raise WireError(f"rank {source} announces {length:,} bytes; {most or 0:,} are allowed")
    found = torch.empty(length, dtype=torch.uint8)
    if length:
        dist.recv(found, source)
    return memoryview(found.numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers
