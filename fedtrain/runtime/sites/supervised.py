"""A trainer that is replaced when its process dies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from ...arena import ArenaFile
from ...errors import ConfigError
from ...messages import Evaluation, Metrics, SiteId, Update
from ...store.memory import NEVER
from ..journal import Averages
from ..trainers.trainer import TRIES, TrainerDied
from ..trainers.trainer_messages import Description

T = TypeVar("T")


class Trains(Protocol):
    """What a site, or a peer, needs of its trainer process; see trainer.Trainer."""

    @property
    def description(self) -> Description: ...
    async def initial(self, out: Path, *, frozen: bool = False) -> ArenaFile: ...
    async def apply(self, base: ArenaFile, patch: ArenaFile, out: Path) -> str: ...
    async def examples(self, site: SiteId) -> float | None: ...
    async def train(
        self, site: SiteId, round: int, weights: ArenaFile, out: Path, counted: int = NEVER
    ) -> Update: ...
    async def evaluate(self, site: SiteId, round: int, weights: ArenaFile) -> Evaluation: ...
    async def freeze(self, frozen: ArenaFile) -> None: ...
    async def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]: ...
    async def close(self) -> None: ...


class Supervised:
    """Trains, by a process that is started again when it dies; TrainerDied when it died TRIES times over one
    request."""

    def __init__(self, start: Callable[[], Awaitable[Trains]], trainer: Trains) -> None:
        """`trainer` is what `start` gave first."""
        self._start, self._trainer, self._dead = start, trainer, False
        self.description = trainer.description
        self._frozen: ArenaFile | None = None  # of the run

    @classmethod
    async def begin(cls, start: Callable[[], Awaitable[Trains]]) -> Supervised:
        return cls(start, await start())

    async def initial(self, out: Path, *, frozen: bool = False) -> ArenaFile:
        return await self._ask(lambda trainer: trainer.initial(out, frozen=frozen))

    async def freeze(self, frozen: ArenaFile) -> None:
        self._frozen = frozen
        await self._ask(lambda trainer: trainer.freeze(frozen))

    async def apply(self, base: ArenaFile, patch: ArenaFile, out: Path) -> str:
        return await self._ask(lambda trainer: trainer.apply(base, patch, out))

    async def examples(self, site: SiteId) -> float | None:
        return await self._ask(lambda trainer: trainer.examples(site))

    async def train(
        self, site: SiteId, round: int, weights: ArenaFile, out: Path, counted: int = NEVER
    ) -> Update:
        return await self._ask(lambda trainer: trainer.train(site, round, weights, out, counted))

    async def evaluate(self, site: SiteId, round: int, weights: ArenaFile) -> Evaluation:
        return await self._ask(lambda trainer: trainer.evaluate(site, round, weights))

    async def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        return await self._ask(lambda trainer: trainer.shown(total, by_site))

    async def close(self) -> None:
        await self._trainer.close()

    async def _ask(self, ask: Callable[[Trains], Awaitable[T]]) -> T:
        for left in reversed(range(TRIES)):
            if self._dead:
                await self._replace()
            try:
                return await ask(self._trainer)
            except TrainerDied:
                self._dead = True
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _replace(self) -> None:
        trainer = await self._start()
        try:
            unchanged(self.description, trainer.description)
            if self._frozen is not None:
                await trainer.freeze(self._frozen)
        except BaseException:
            await trainer.close()
            raise
        self._trainer, self._dead = trainer, False


def unchanged(agreed: Description, found: Description) -> None:
    """ConfigError when a trainer that was started again has other code than the one before it."""
    if found != agreed:
        raise ConfigError(
            "the task's code was changed while it is being trained, and a trainer process had to be started "
            "again. Undo the change; or start the run's processes again, with the same code at all of them."
        )
