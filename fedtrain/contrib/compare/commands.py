"""`fedtrain compare`: runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...cli.arguments import Command, as_json, with_config
from ...cli.output import columns, print_json

if TYPE_CHECKING:
    from ...config import Config
    from .comparison import Comparison


@click.command(cls=Command)
@click.argument("run", metavar="RUN RUN...", nargs=-1, required=True)
@with_config
@as_json
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw each metric by round, a line a run.")  # fmt: skip
def compare(config: Config, run: tuple[str, ...], json: bool, png: Path | None) -> None:
    """Print how runs went side by side, and the settings that differ."""
    from ...tracking.runs import find
    from .comparison import compared

    if len(run) < 2:
        raise click.UsageError("name two runs or more; `fedtrain runs` lists them.")
    folders = [find(config.root / config.run.dir, name) for name in run]
    found = compared(folders)
    if json:
        print_json(found)
    else:
        columns(list(_rows(found)))
    if png is not None:
        _draw(config, folders, png)


def _rows(found: Comparison) -> Iterator[tuple[str, ...]]:
    from ...tracking.live import duration, number, size

    runs = found.runs
    yield "", *(s.run for s in runs)
    yield "state", *(s.state for s in runs)
    yield "rounds", *(f"{s.round} of {s.rounds}" for s in runs)
    yield "training loss", *(_told(s.loss, number) for s in runs)
    for name in dict.fromkeys(name for s in runs for name in s.metrics):
        yield name, *(_told(s.metrics.get(name), number) for s in runs)
    if any(s.best_round is not None for s in runs):
        yield "best", *("-" if s.best_round is None else f"{number(s.best_value)} in round {s.best_round}"
                        for s in runs)  # fmt: skip
    yield "time of rounds", *(_told(cost.seconds, duration) for cost in found.costs)
    yield "bytes", *(size(cost.bytes) for cost in found.costs)
    yield ("",) * (len(runs) + 1)
    if not found.settings:
        yield "settings that decide the model", "the same", *("",) * (len(runs) - 1)
    for key, values in (found.settings | found.others).items():
        yield key, *("-" if value is None else value for value in values)


def _told(value: float | None, words: Callable[[float], str]) -> str:
    return "-" if value is None else words(value)


def _draw(config: Config, folders: Sequence[Path], path: Path) -> None:
    from ...api import open_run
    from ...errors import ConfigError, writing
    from ...fairness import averaged

    runs = [open_run(folder, config) for folder in folders]
    names = [*dict.fromkeys(name for run in runs for name in averaged(run.metrics))]
    if not names:
        raise ConfigError("--png: none of these runs has an evaluation yet.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * len(names), 4.0), layout="constrained")
    for at, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), at, xlabel="round", title=name)
        for run in runs:
            if any(row.get(name) is not None for row in run.history):
                run.plot(name, ax=axes)
    with writing(path):
        figure.savefig(path)
