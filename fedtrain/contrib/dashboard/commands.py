"""`fedtrain report` and `fedtrain dashboard`: runs as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...cli.arguments import Command, with_config
from ...cli.output import short
from ...errors import ConfigError, writing

if TYPE_CHECKING:
    from ...config import Config

NEWEST = 30  # runs that a dashboard shows which was told none
VARIABLE = "FEDTRAIN_DASHBOARD_TOKEN"


@click.command(cls=Command)
@click.argument("run", metavar="[RUN]...", nargs=-1)
@with_config
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="The file to write; without it, RUN.html.")  # fmt: skip
def report(config: Config, run: tuple[str, ...], out: Path | None) -> None:
    """Write runs (without RUN, the newest) as one HTML file."""
    from .page import report

    folders = _folders(config, run, 1)
    path = out or Path(f"{folders[0].name}.html")
    with writing(path):
        partial = path.with_name(f".{path.name}.new")
        partial.write_text(report(folders), encoding="utf-8")
        partial.replace(path)
    click.echo(f"{short(path.resolve())} shows {', '.join(folder.name for folder in folders)}")


@click.command(cls=Command)
@click.argument("run", metavar="[RUN]...", nargs=-1)
@with_config
@click.option("--listen", default="127.0.0.1:8500", show_default=True, metavar="HOST:PORT",
              help="Where to listen; port 0: any that is free.")  # fmt: skip
@click.option("--tls", nargs=2, type=click.Path(path_type=Path, exists=True, dir_okay=False),
              metavar="CERT KEY", help="PEM files, for HTTPS.")  # fmt: skip
def dashboard(config: Config, run: tuple[str, ...], listen: str, tls: tuple[Path, Path] | None) -> None:
    """Serve runs (without RUN, the newest 30) as a live page."""
    try:
        from .server import serve
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"fedtrain dashboard needs {e.name}: pip install 'fedtrain[dashboard]'. `fedtrain report` writes "
            f"the same page as one file, without it."
        ) from None
    import secrets

    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise click.BadParameter(f"{listen!r} is not HOST:PORT, as in 127.0.0.1:8500", param_hint="--listen")
    host = host.strip("[]")
    token = os.environ.get(VARIABLE) or secrets.token_urlsafe(24)
    if len(token) < 16:
        raise ConfigError(f"{VARIABLE} has {len(token)} characters; 16 or more are hard to guess.")
    named = _folders(config, run, 1) if run else []

    def ready(address: str) -> None:
        click.echo(f"Open {address}")
        if tls is None and host not in ("127.0.0.1", "::1", "localhost"):
            click.echo("Without --tls the network in between can read the token and the page.", err=True)

    serve(lambda: named or _folders(config, (), NEWEST), host, int(port), token, tls, ready)


def _folders(config: Config, names: Sequence[str], newest: int) -> list[Path]:
    """The directories of the runs that were named; of none, the newest so many of the project."""
    from ...tracking.runs import find
    from ...tracking.runs import newest as newest_of

    runs = config.root / config.run.dir
    if not names and newest == 1:
        return [newest_of(runs)]
    if not names:
        files = sorted(runs.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
        return [file.parent for file in files[:newest]]
    found = [find(runs, name) for name in names]
    same = {folder.name for folder in found if sum(other.name == folder.name for other in found) > 1}
    if same:
        raise ConfigError(f"two of these runs have one name, {min(same)}: show them one after the other.")
    return found
