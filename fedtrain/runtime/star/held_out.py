"""Data that the aggregator holds itself: the task's eval_data("server"), where evaluate.server asks for it.

The task's code never runs in the aggregator's own process, which has its key: a trainer process evaluates.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from ...arena import AnyArena, ArenaFile
from ...config import Config, ParallelConfig, PrivacyConfig
from ...errors import ConfigError
from ...fairness import SERVER
from ...store import RunStore
from ..journal import Averages
from ..trainers.supervised import Supervised
from ..trainers.trainer import Trainer


class HeldOut:
    """What evaluates models on the server's data, and shows evaluations as people see them."""

    def __init__(self, trainer: Supervised) -> None:
        self._trainer, self.shown = trainer, trainer.shown

    async def at_server(self, number: int, weights: AnyArena) -> Averages:
        """A journal.AtServer. TaskError where the task's evaluate() or eval_data("server") fails."""
        assert isinstance(weights, ArenaFile), "an aggregator's models are in its store"
        found = await self._trainer.evaluate(SERVER, number, weights)
        return (await self.shown(found.metrics, {}))[0]


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
    alone = replace(config, parallel=ParallelConfig(), privacy=PrivacyConfig())  # sections of the sites
    trainer = await Supervised.begin(lambda: Trainer.start(alone, data_dir=data_dir, scratch=store.folder))
    try:
        if trainer.description.task_digest != task_digest:
            raise ConfigError("the task's code was changed since the run began. Undo the change.")
        if (frozen := store.frozen_file()) is not None:
            await trainer.freeze(frozen)
        yield HeldOut(trainer)
    finally:
        await trainer.close()
