"""TensorBoard: a run's numbers as scalars, by round or by step. `where`: its folder; RUN/tensorboard else.

It needs the package tensorboard alone, neither torch nor TensorFlow.
"""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Written
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ...events import Event
from .base import Tracker, scalars


class TensorBoard(Tracker):
    """Event files that `tensorboard --logdir` reads. Values are float32 there."""

    extra = "tensorboard"

    def __init__(self, run_dir: Path, where: str, kept: dict[str, str]) -> None:
        super().__init__(run_dir, where, kept)
        self._writer = EventFileWriter(where or str(run_dir / "tensorboard"))

    def __call__(self, event: Event) -> None:
        at, found = scalars(event)
        if found:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in found.items()]
            self._writer.add_event(Written(wall_time=event.time, step=at, summary=Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
