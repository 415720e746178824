"""A trainer that is replaced when its process dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from ...arena import ArenaFile
from ...errors import ConfigError
from . import trainer_messages as msg
from .trainer import TRIES, TrainerDied, Trains


class TrainerLost(TrainerDied):
    """The trainer has died, and none can be started in its place."""


class Supervised(Trains):
    """A trainer whose process is started again when it dies; TrainerDied when it died TRIES times over one
    request."""

    def __init__(self, start: Callable[[], Awaitable[Trains]], trainer: Trains) -> None:
        """`trainer` is what `start` gave first."""
        self._start, self._trainer, self._dead = start, trainer, False
        self.description = trainer.description
        self._frozen: ArenaFile | None = None  # of the run
        self._engine = ""  # by which it trains, where it was told
        self._replacing = asyncio.Lock()  # several requests may find their process dead

    @classmethod
    async def begin(cls, start: Callable[[], Awaitable[Trains]]) -> Supervised:
        return cls(start, await start())

    @property
    def machine(self) -> str:  # type: ignore[override]  # it may be another one after a death
        return self._trainer.machine

    @property
    def backlog(self) -> int:
        return self._trainer.backlog

    async def freeze(self, frozen: ArenaFile) -> None:
        self._frozen = frozen
        await super().freeze(frozen)

    async def train_by(self, engine: str) -> None:
        """Have it train by this engine from here on."""
        self._engine = engine
        await self._ask(msg.TrainBy(engine))

    async def close(self) -> None:
        await self._trainer.close()

    async def _ask(self, message: msg.Start | msg.Command) -> Any:
        for left in reversed(range(TRIES)):
            async with self._replacing:
                if self._dead:
                    await self._replace()
            trainer = self._trainer
            try:
                return await trainer._ask(message)
            except TrainerLost:
                raise
            except TrainerDied:
                self._dead = self._dead or trainer is self._trainer
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _replace(self) -> None:
        trainer = await self._start()
        try:
            unchanged(self.description, trainer.description)
            if self._frozen is not None:
                await trainer.freeze(self._frozen)
            if self._engine:
                await trainer._ask(msg.TrainBy(self._engine))
        except BaseException:
            await trainer.close()
            raise
        self._trainer, self._dead = trainer, False


def on_machines(trainers: Sequence[Supervised]) -> str:
    """How many of these trainers are on which machine; "" where all are on this one."""
    counts = Counter(trainer.machine or "this machine" for trainer in trainers)
    told = ", ".join(f"{count} on {machine}" for machine, count in sorted(counts.items()))
    return "" if [*counts] == ["this machine"] else told


def unchanged(agreed: msg.Description, found: msg.Description) -> None:
    """ConfigError when a trainer that was started again has other code than the one before it."""
    found = msgspec.structs.replace(found, limits=agreed.limits)  # maybe shut in less
    if found != agreed:
        raise ConfigError(
            f"the task's code was changed while it is being trained (it has the digest "
            f"{found.task_digest[:12]}, the run {agreed.task_digest[:12]}), and a trainer process had to be "
            f"started again. Undo the change: then this process goes on by itself. To train the changed "
            f"code, stop all of the run's commands, and start them with that code and another run.name."
        )
