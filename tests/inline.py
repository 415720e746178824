"""A trainer in this process: all that the real one does except its own process, for quick tests."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, Self

from fedtrain.config import Config
from fedtrain.errors import FedtrainError, TaskError
from fedtrain.runtime.trainer import Trainer, Workbench

ONE_AT_A_TIME = threading.Lock()  # their random numbers are of one process


class Inline(Trainer):
    def __init__(self, bench: Workbench) -> None:
        self.bench, self.description = bench, bench.description
        self.asked: list[Any] = []

    @classmethod
    async def start(
        cls, config: Config, *, data_dir: Path | None = None, simulated: bool = False, **_: Any
    ) -> Self:
        def make() -> Workbench:
            with ONE_AT_A_TIME:
                return Workbench(config, data_dir, simulated=simulated)

        return cls(await asyncio.to_thread(make))

    async def _ask(self, message: Any) -> Any:
        self.asked.append(message)
        return await asyncio.to_thread(self._answer, message)

    def _answer(self, message: Any) -> Any:
        with ONE_AT_A_TIME:
            try:
                return self.bench.answer(message)
            except FedtrainError as e:
                raise TaskError(str(e)) from e

    @property
    def backlog(self) -> int:
        return 0

    async def close(self) -> None:
        """There is no process."""

    stop = close
