"""What a trainer says of a site's data: its columns, and the answer to one question about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...config import Config
from ...errors import TaskError
from ...messages import Metrics
from ...questions import Question
from ...statistics.sums import Tallies
from . import trainer_messages as msg

if TYPE_CHECKING:
    from ...training.columns import ColumnSource
    from ...training.task import Task


def told(
    task: Task, command: msg.ColumnsOf | msg.TallyOne, data: Callable[[], Any], config: Config
) -> msg.Outcome:
    """The answer to a command; `data` gives data(site)."""
    from ...training.columns import ColumnSource

    source, size = ColumnSource.at(task, command.site, data), config.train.eval_batch_size
    if isinstance(command, msg.ColumnsOf):
        return msg.HasColumns(source.form() if command.form else source.described(size))
    return msg.Done([msg.Measured(tally(source, size, command.question, command.least))])


def tally(source: ColumnSource, batch_size: int, question: Question, least: int = 0) -> Metrics:
    """The answer of one site. `least`: as Tallies.metrics; TaskError with fewer examples than that."""
    tallies = Tallies(question)
    for columns, values, rows in source.batches(batch_size):
        tallies.add(columns, values, rows)
    if tallies.rows < least:
        raise TaskError(f"it has fewer than stats.min_cell = {least} examples, for which masks are needed")
    return tallies.metrics(least)
