"""Where the trainers of a simulation run: simulate.on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from ...config import Config
from ...errors import ConfigError
from ...training.task import Task
from ..threads import while_torch_loads
from ..trainers.supervised import Supervised
from ..trainers.trainer import Trainer, Trains
from ..trainers.trainer_process import start_message
from ..trainers.workbench import Workbench
from .gpus import dealt, gpus_here, workers_on
from .local_trainer import ONE_AT_A_TIME, LocalTrainer
from .shared_memory import SharedMemory


class Launcher(Protocol):
    """Starts the trainers of a pool, and others in the place of those that died."""

    count: int  # trainers, where simulate.workers is "auto"

    async def start(self, number: int) -> Trains:
        """Trainer `number` of a pool. TrainerLost where there is no place for it."""

    async def close(self) -> None:
        """Called when all trainers are closed."""


class OnThisMachine:
    """Processes of this machine, one a core. Where it has GPUs, they are shared out."""

    def __init__(self, config: Config, data_dir: Path | None, scratch: Path, memory: SharedMemory) -> None:
        cores, gpus = len(os.sched_getaffinity(0)), gpus_here(config.train.device)
        self.count = workers_on(gpus, cores) if gpus else cores
        self.gpus = {} if ":" in config.train.device else gpus  # one that is named is what all trainers take
        self._config, self._data_dir, self._scratch, self._memory = config, data_dir, scratch, memory

    async def start(self, number: int) -> Trains:
        return await Trainer.start(
            self._config, data_dir=self._data_dir, scratch=self._scratch, simulated=True,
            pass_fds=self._memory.fds, gpu=dealt(self.gpus, number),
        )  # fmt: skip

    async def close(self) -> None:
        """Nothing is left."""


class OnRay:
    """Actors of a Ray cluster, one a CPU."""

    def __init__(self, config: Config, data_dir: Path | None, scratch: Path, memory: SharedMemory) -> None:
        from .on_ray import RayCluster

        self._cluster = RayCluster(gpus=config.train.device != "cpu")
        self._start = start_message(config, data_dir, simulated=True, metrics_only=False)
        self.count = self._cluster.cpus

    async def start(self, number: int) -> Trains:
        if number >= self.count:
            raise ConfigError(
                f"simulate.workers: {number + 1}, but the Ray cluster has {self.count} CPUs, one for each. "
                f'Set it to "auto".'
            )
        return await self._cluster.start(self._start)

    async def close(self) -> None:
        self._cluster.close()


class OnRanks:
    """The ranks of torchrun; that of rank 0, which runs the simulation, is a process of its own."""

    def __init__(self, config: Config, data_dir: Path | None, scratch: Path, memory: SharedMemory) -> None:
        from .on_ranks import Ranks

        self._ranks = Ranks(config)
        self._start = start_message(config, data_dir, simulated=True, metrics_only=False)
        self._here = OnThisMachine(config, data_dir, scratch, memory)
        self.count = 1 + len(self._ranks.numbers)

    async def start(self, number: int) -> Trains:
        if number >= self.count:
            raise ConfigError(
                f"simulate.workers: {number + 1}, but torchrun has started {self.count} ranks. Set it to "
                f'"auto".'
            )
        return await (self._ranks.start(number, self._start) if number else self._here.start(number))

    async def close(self) -> None:
        await self._ranks.close()


class InThisProcess:
    """No process at all: sites train in this one."""

    count = 1

    def __init__(self, config: Config, data_dir: Path | None, task: Task | None) -> None:
        self._config, self._data_dir, self._task = config, data_dir, task

    async def start(self, number: int) -> Trains:
        with ONE_AT_A_TIME:  # a model is drawn
            return LocalTrainer(Workbench(self._config, self._data_dir, simulated=True, task=self._task))

    async def close(self) -> None:
        """Nothing is left."""


LAUNCHERS: dict[str, Callable[[Config, Path | None, Path, SharedMemory], Launcher]] = {
    "local": OnThisMachine,
    "ray": OnRay,
    "torchrun": OnRanks,
}


async def launched(
    config: Config, workers: int | None, scratch: Path, data_dir: Path | None, task: Task | None,
    memory: SharedMemory,
) -> tuple[Launcher, list[Supervised]]:  # fmt: skip
    """The trainers of a pool, and who starts others in the place of those that die; see PoolCohort.start."""
    count = config.simulate.workers if workers is None else workers
    launcher: Launcher = InThisProcess(config, data_dir, task)
    if count:
        launcher = LAUNCHERS[config.simulate.on](config, data_dir, scratch, memory)
    numbers = range(launcher.count if count == "auto" else count or 1)
    starting = asyncio.gather(*map(launcher.start, numbers), return_exceptions=True)
    started = await while_torch_loads(starting)
    trainers = [
        Supervised(partial(launcher.start, number), trainer)
        for number, trainer in zip(numbers, started, strict=True)
        if isinstance(trainer, Trains)
    ]
    if errors := [e for e in started if isinstance(e, BaseException)]:
        await asyncio.gather(*(trainer.close() for trainer in trainers))
        await launcher.close()
        raise errors[0]
    return launcher, trainers
