"""`fedtrain new`: a project from a template, with made-up sites. `fedtrain doctor`: checks of a project."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ConfigError, writing
from .arguments import Command, as_json, with_config, with_data
from .certificates import begin_authority
from .output import print_json

if TYPE_CHECKING:
    from ..config import Config


@click.command(cls=Command)
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
@click.option(
    "--template", type=click.Choice(["tabular", "vision", "text", "lora", "gossip"]), default="tabular",
    show_default=True, help="What kind of data and model, or peers without an aggregator.",
)  # fmt: skip
def new(folder: Path, template: str) -> None:
    """Make a folder with a small project that runs as it is."""
    name = folder.resolve().name
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
        raise ConfigError(f"{name!r} cannot name a project: use 1 to 64 letters, digits, '.', '_' or '-'.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty. Choose another name, or empty it first.")
    folder.mkdir(parents=True, exist_ok=True)
    templates = Path(__file__).parents[1] / "templates"
    own = {path.name: path for kind in ("tabular", template) for path in (templates / kind).iterdir()}
    for file in filter(Path.is_file, own.values()):
        to = folder / {"gitignore": ".gitignore"}.get(file.name, file.name)
        with writing(to):
            to.write_text(file.read_text(encoding="utf-8").replace("PROJECT", name), encoding="utf-8")
    made_up, peers = [f"site-{number}" for number in (1, 2, 3)], template == "gossip"
    begin_authority(folder / "certs", name, made_up if peers else ["aggregator", *made_up])
    mode = " --mode gossip" if peers else ""
    click.echo(f"{folder} is ready. Next: cd {folder} && fedtrain simulate{mode}")


@click.command(cls=Command)
@click.argument("site", required=False)
@with_config
@as_json
@with_data
def doctor(config: Config, site: str | None, json: bool, data_dir: Path | None) -> None:
    """Check this machine, the way to the aggregator and the data."""
    from ..runtime.doctor import examined

    signs, bad = {"good": "ok  ", "look": "look", "bad": "BAD "}, 0
    for found in examined(config, site, data_dir):
        bad += found.state == "bad"
        if json:
            print_json(found)
            continue
        click.echo(f"{signs[found.state]}  {found.check}: {found.said}")
        if found.fix:
            click.echo(f"      {found.fix}")
    if bad:
        click.get_current_context().exit(1)
