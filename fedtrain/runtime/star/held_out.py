"""Data that the aggregator holds itself: the task's eval_data("server"), where evaluate.server asks for it.

The task's code never runs in the aggregator's own process, which has its key: a trainer process evaluates.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ...arena import AnyArena, ArenaFile
from ...config import Config, ParallelConfig, PrivacyConfig
from ...errors import ConfigError, FedtrainError
from ...fairness import SERVER
from ...messages import Metrics, SiteId
from ...store import RunStore
from ..journal import Averages
from ..trainers.supervised import Supervised
from ..trainers.trainer import Trainer


class HeldOut:
    """What evaluates models on the server's data, and shows evaluations as people see them."""

    def __init__(self, trainer: asyncio.Task[Supervised]) -> None:
        """`trainer` loads the task while sites join."""
        self._trainer = trainer

    async def at_server(self, number: int, weights: AnyArena) -> Averages:
        """A journal.AtServer. TaskError where the task's evaluate() or eval_data("server") fails."""
        assert isinstance(weights, ArenaFile), "an aggregator's models are in its store"
        found = await (await self._trainer).evaluate(SERVER, number, weights)
        return (await self.shown(found.metrics, {}))[0]

    async def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        """A journal.Shown, of a task with a metrics() of its own too."""
        return await (await self._trainer).shown(total, by_site)


@asynccontextmanager
async def held_out(
    config: Config, store: RunStore, task_digest: str, data_dir: Path | None
) -> AsyncGenerator[HeldOut | None, None]:
    """None where evaluate.server is not set. ConfigError for data that nothing would be evaluated on.
    `data_dir`: what the task finds as self.data_dir; None: the project's data folder."""
    if not (config.evaluate.every and config.evaluate.server):
        if data_dir is not None:
            raise ConfigError(
                "--data: the aggregator looks at data with evaluate.server = true and evaluate.every above 0."
            )
        yield None
        return
    trainer = asyncio.create_task(_started(config, store, task_digest, data_dir))
    try:
        yield HeldOut(trainer)
    finally:
        with suppress(FedtrainError):  # whoever asked has had it
            await (await trainer).close()


async def _started(config: Config, store: RunStore, task_digest: str, data_dir: Path | None) -> Supervised:
    """A trainer of the run's task with its frozen parameters. ConfigError for other code than the run's."""
    alone = replace(config, parallel=ParallelConfig(), privacy=PrivacyConfig())  # sections of the sites
    trainer = await Supervised.begin(
        lambda: Trainer.start(alone, data_dir=data_dir, scratch=store.folder / "trainer", confine="auto")
    )
    try:
        if trainer.description.task_digest != task_digest:
            raise ConfigError("the task's code was changed since the run began. Undo the change.")
        if (frozen := store.frozen_file()) is not None:
            await trainer.freeze(frozen)
    except BaseException:
        await trainer.close()
        raise
    return trainer
