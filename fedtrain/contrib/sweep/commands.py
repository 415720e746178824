"""`fedtrain sweep`: simulations over many settings, and a table of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...cli.arguments import Command, as_json, with_config
from ...cli.output import columns, print_json
from ...errors import ConfigError, writing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...config import Config
    from .trials import Tried


@click.command(cls=Command)
@with_config
@as_json
@click.option("--grid", metavar="KEY=V,V", multiple=True, help="Every combination of these values.")
@click.option(
    "--random", "drawn", metavar="KEY=LOW:HIGH[:log]", multiple=True, help="Draw from these ranges."
)
@click.option("--trials", type=click.IntRange(1, 10_000), default=10, show_default=True,
              help="How many to draw, for each combination of --grid.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
@click.option("--jobs", type=click.IntRange(1, 1024), default=None,
              help="Simulations at a time; without it, one for each core.")  # fmt: skip
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw the metric over each setting.")  # fmt: skip
def sweep(
    config: Config, json: bool, grid: tuple[str, ...], drawn: tuple[str, ...], trials: int, seed: int,
    jobs: int | None, png: Path | None,
) -> None:  # fmt: skip
    """Simulate with many settings, and tell which is best."""
    from . import trials as runs

    if not grid and not drawn:
        raise click.UsageError("say over which settings: --grid train.lr=0.01,0.1, say.")
    file, sets = (click.get_current_context().params[name] for name in ("file", "sets"))
    points = [
        {**fixed, **free}
        for fixed in runs.grid(grid)
        for free in (runs.drawn(drawn, trials, seed) if drawn else [{}])
    ]
    wanted = runs.trials(file, sets, points)

    def say(done: Tried) -> None:
        given = " ".join(f"{key}={value}" for key, value in done.settings.items())
        click.echo(f"{done.run}: {given}: {done.state} {done.said}".rstrip(), err=True)

    done = runs.sweep(config, file, sets, wanted, jobs or len(os.sched_getaffinity(0)), say)
    if json:
        print_json(done)
    else:
        columns(_table(config.evaluate.metric, done))
    if png is not None:
        _draw(config.evaluate.metric, done, png)
    if failed := sum(each.state == "failed" for each in done):
        raise ConfigError(f"{failed} of {len(done)} trials failed; the lines above say why.")


def _table(metric: str, done: Sequence[Tried]) -> list[tuple[str, ...]]:
    from ...tracking.live import number

    keys = list(dict.fromkeys(key for each in done for key in each.settings))
    rows = [
        (
            each.run,
            *(each.settings.get(key, "") for key in keys),
            number(each.value),
            str(each.round),
            each.state,
        )
        for each in done
    ]
    return [("RUN", *keys, metric.upper(), "ROUND", "STATE"), *rows]


def _draw(metric: str, done: Sequence[Tried], path: Path) -> None:
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys(key for each in done for key in each.settings))
    figure = Figure(figsize=(4.0 * len(keys), 4.0), layout="constrained")
    for at, key in enumerate(keys, 1):
        found = [(each.settings[key], each.value) for each in done if each.value is not None]
        axes = figure.add_subplot(1, len(keys), at, xlabel=key, ylabel=metric)
        places: Any = [_number(text) for text, _ in found]
        if all(place is not None for place in places):
            axes.set_xscale(
                "log" if min(places, default=0) > 0 and max(places) > 50 * min(places) else "linear"
            )
        else:
            places = [text for text, _ in found]
        axes.scatter(places, [value for _, value in found])
    with writing(path):
        figure.savefig(path)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
