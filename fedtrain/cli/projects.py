"""`fedtrain new`: a project from a template, with certificates for sites that are made up as its data is."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ..errors import ConfigError, writing
from .arguments import Command
from .certificates import begin_authority


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
