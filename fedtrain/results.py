"""What a run left behind, to look at and to use from Python."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .config import Config
from .errors import ConfigError, nearest
from .fairness import averaged
from .tracking import log
from .tracking.board import Board
from .tracking.notebook import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import nn

    from .training.task import Task


class Run:
    """A run directory, as it was when it was first looked at.

    >>> run = fedtrain.simulate("clinic")
    >>> run.metrics
    {'loss': 0.35, 'accuracy': 0.86}
    """

    def __init__(self, path: Path, config: Config, task: Task | None = None) -> None:
        """`config`: its project's; model() goes by what the run keeps of its own. `task`: the one that a
        program made for it."""
        self.path, self.config, self.task = path, config, task

    @cached_property
    def board(self) -> Board:
        """Its state, folded from its events."""
        return Board.of(log.read(self.path))

    @property
    def metrics(self) -> dict[str, float | None]:
        """The newest evaluation: averages over all sites, and what is worked out over sites (fairness.py)."""
        return dict(self.board.metrics)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each round, with the metrics of its evaluation; opens as a table in pandas."""
        rows = [asdict(row) for row in self.board.history.values()]
        if all(row["clock_s"] is None for row in rows):
            rows = [{k: v for k, v in row.items() if k not in ("clock_s", "late", "away")} for row in rows]
        return [
            {"round": r.pop("round"), "training_loss": r.pop("loss"), **r.pop("metrics"), **r} for r in rows
        ]

    def model(self, round: int | Literal["best"] | None = None, *, site: str | None = None) -> nn.Module:
        """The task's model() with the weights of a round (None: the last), in evaluation mode on the CPU.
        `site`: that site's own model, where the strategy gives each site one; the newest."""
        from .runtime.evaluation import model_with_weights
        from .training.devices import generators_kept

        with generators_kept():
            return model_with_weights(self.config, self.path, round, self.task, site)

    def plot(self, *names: str, ax: Axes | None = None) -> Axes:
        """Draw columns of the history by round, with matplotlib; without names all averages."""
        try:
            import matplotlib.pyplot as plt
        except ModuleNotFoundError:
            raise ConfigError(
                "run.plot() needs matplotlib: pip install matplotlib. run.history has the numbers without it."
            ) from None
        history = self.history
        known = {name for row in history for name in row} - {"round"}
        for name in names:
            if name not in known:
                raise ConfigError(f"run.plot: no round has {name!r}.{nearest(name, known)}")
        ax = ax or plt.figure().add_subplot(xlabel="round", title=self.path.name)
        for name in names or averaged(self.metrics):
            points = [(row["round"], row[name]) for row in history if row.get(name) is not None]
            ax.plot(*zip(*points, strict=True), label=f"{self.board.run}: {name}")
        ax.legend()
        return ax

    def __repr__(self) -> str:
        board = self.board
        metrics = {name: value for name, value in self.metrics.items() if value is not None}
        shown = "".join(f", {name} {metrics[name]:.4g}" for name in averaged(metrics))
        return f"<Run {self.path.name}: {board.noun} {board.round} of {board.rounds}{shown}>"

    def _repr_html_(self) -> str:
        return picture(self.board)
