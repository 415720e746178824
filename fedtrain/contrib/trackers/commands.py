"""`fedtrain track`: a run's events to TensorBoard, MLflow and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ...cli.arguments import Command, with_config

if TYPE_CHECKING:
    from ...config import Config


@click.command(cls=Command)
@click.argument("run", required=False)
@with_config
@click.option("--to", "trackers", metavar="TRACKER[=WHERE]", multiple=True, required=True,
              help="tensorboard, mlflow, wandb, opentelemetry, or MODULE:CLASS of yours.")  # fmt: skip
@click.option("--once", is_flag=True, help="Tell what is there, and end.")
def track(config: Config, run: str | None, trackers: tuple[str, ...], once: bool) -> None:
    """Tell TensorBoard, MLflow or others of a run as it goes."""
    from ... import events
    from ...api import run_dir
    from ...tracking import log
    from .base import tell

    folder, finished, told = run_dir(config, run), False, 0
    to = {name: where for name, _, where in (each.partition("=") for each in trackers)}
    for event in tell(folder, log.follow(folder), to, config.root):
        if event is not None:
            told += 1
            finished = isinstance(event, events.RunFinished) or (
                finished and not isinstance(event, events.RunStarted)
            )
        elif finished or once:
            break
    click.echo(f"{', '.join(to)}: told of {told} events of {folder.name}")
