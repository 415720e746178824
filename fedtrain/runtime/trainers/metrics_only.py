"""A trainer of an aggregator, which has no data."""

from __future__ import annotations

from ...config import Config
from ...schema import Schema
from ..own_code import source_digest
from . import trainer_messages as msg


class MetricsOnly:
    """The task's metrics() and nothing else, for an aggregator: it has no data and makes no model."""

    def __init__(self, config: Config) -> None:
        from ...training.task import derives, load_task

        digest = source_digest(config)
        self._task = load_task(config.run.task, config.root)
        self.description = msg.Description(Schema(()), digest, derives=derives(self._task))

    def answer(self, command: msg.Command) -> msg.Outcome:
        from ...training.task import shown

        assert isinstance(command, msg.Show), command
        return msg.Showing(*shown(self._task, command.total, command.by_site))
