"""`fedtrain audit`, and `fedtrain verify`: what nobody may have changed since."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError, FedtrainError
from .arguments import Command, Commands, as_json, with_config
from .output import print_json, short

if TYPE_CHECKING:
    from ..config import Config
    from ..runtime.auditing import Verdict


@click.group(cls=Commands)
def audit() -> None:
    """Check the logs of who did what, and when."""


@audit.command("verify")
@click.argument("logs", metavar="[NAME|FILE]...", nargs=-1)
@with_config
@as_json
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="The audit log of another end, which keeps signed heads of this one.",
)
@click.option(
    "--restored",
    type=click.IntRange(0),
    default=0,
    metavar="LINE",
    help="Lines from this one on were lost as the log was restored from a copy, once.",
)
def verify_logs(
    config: Config, logs: tuple[str, ...], json: bool, against: tuple[Path, ...], restored: int
) -> None:
    """Find lines of audit logs that were changed, left out, moved or cut off; without NAME, of all here."""
    from ..runtime.auditing import root_of, verify
    from ..tracking.audit import audit_file

    folder = audit_file(config, "").parent
    paths = [Path(name) if Path(name).is_file() else audit_file(config, name) for name in logs]
    paths = paths or sorted(folder.glob("*.jsonl"))
    if gone := [path for path in paths if not path.exists()]:
        raise ConfigError(f"{short(gone[0])} does not exist. Name a role that has run here, or its log.")
    if not paths:
        raise ConfigError(f"{short(folder)} has no audit log: nothing has run here yet.")
    found = [verify(path, root_of(config), against, restored) for path in paths]
    if json:
        print_json(found)
    else:
        for verdict in found:
            _tell(verdict)
    if bad := [verdict.log for verdict in found if verdict.problems]:
        raise FedtrainError(f"not what was written: {', '.join(bad)}")


def _tell(found: Verdict) -> None:
    since, until = (
        "-" if time is None else f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"
        for time in (found.since, found.until)
    )
    by = f"signed to line {found.signed}" if found.signed else "not signed"
    click.echo(f"{found.log}: {found.lines} lines, {since} to {until} UTC, {by}")
    for who, heads in sorted(found.witnessed.items()):
        click.echo(f"  keeps {heads} signed heads of {who}'s log")
    if found.torn_bytes:
        click.echo(f"  {found.torn_bytes} bytes of a line that was not finished: the process was killed")
    for line in found.disputes:
        click.echo(f"  disputed: {line}")
    for line in found.lost:
        click.echo(f"  restored: {line}")
    for line in found.problems:
        click.echo(f"  WRONG: {line}")


@click.command(cls=Command)
@click.argument("model", metavar="FOLDER", type=click.Path(path_type=Path, exists=True))
@with_config
@as_json
@click.option("--root", type=click.File("rb"), metavar="FILE",
              help="The federation's root.pem; without it, the one of this project.")  # fmt: skip
@click.option("--against", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="The aggregator's audit log: it must have the line that is named.")  # fmt: skip
def verify(config: Config, model: Path, json: bool, root: Any, against: Path | None) -> None:
    """Check that a model is what its aggregator signed."""
    from ..runtime import lineage
    from ..runtime.auditing import root_of

    trusted = root_of(config) if root is None else root.read()
    if trusted is None:
        raise ConfigError("no root.pem is in this project's certs folder: name the federation's with --root.")
    found = lineage.verify(model if model.is_dir() else model.parent, trusted, against)
    if json:
        return print_json(found)
    click.echo(f"{found.run}, round {found.round}: signed by its aggregator")
    click.echo(f"  sites       {', '.join(found.sites)}; {found.updates} in this round")
    click.echo(f"  task        {found.task_digest}")
    click.echo(f"  settings    {found.config_digest}")
    for graph, digest in sorted(found.graphs.items()):
        click.echo(f"  graph       {graph}, {digest[:16]}…")
    for site, (epsilon, delta) in sorted(found.epsilon.items()):
        click.echo(f"  epsilon     {epsilon:.3g} at delta {delta:g}, {site}")
    return click.echo(f"  audit log   line {found.audit[0]}, {found.audit[1][:16]}…")
