"""`fedtrain task` and `fedtrain policy`: what a site's people let happen there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arguments import Commands, with_config
from .output import columns, short

if TYPE_CHECKING:
    from ..config import Config

SHOWN = 16  # characters of a digest in a table; more than enough to withdraw by

at_sites = click.option(
    "--site", "sites", multiple=True, metavar="NAME", help="Only at this site; without it, at all whose "
    "keys lie here.",
)  # fmt: skip


@click.group(cls=Commands)
def task() -> None:
    """Say which task may run at the sites whose keys are here."""


@task.command("approve")
@with_config
@click.argument("sites", metavar="[SITE]...", nargs=-1)
@click.option("--rule", "rules", multiple=True, metavar="KEY=VALUE", help="Set a rule of the policy, too.")
def task_approve(config: Config, sites: tuple[str, ...], rules: tuple[str, ...]) -> None:
    """Let the task run here, as its files are now."""
    from ..runtime.sites import approval

    given = _values(rules)
    approved, folders = approval.approve(config, sites)
    for folder in folders if given else ():
        _set(folder, given)
    for folder in folders:
        _enter(config, folder, f"{config.run.task} may run; {', '.join(rules)}".rstrip("; "), approved.digest)
    names = [folder.name for folder in folders]
    click.echo(f"{config.run.task} may run at {', '.join(names)}, until a byte of these files changes:")
    columns([(f"  {name}", sha256[:SHOWN]) for name, sha256 in approved.files.items()])
    if approved.command:
        click.echo(f"It trains by train.command: {approved.command}")
    click.echo(f"Approved as {approved.digest}. What else {names[0]} allows: {short(folders[0])}/policy.toml")


@task.command("withdraw")
@with_config
@click.argument("digest", metavar="DIGEST")
@at_sites
def task_withdraw(config: Config, digest: str, sites: tuple[str, ...]) -> None:
    """Approve a task no longer, by its digest or how that begins."""
    from ..runtime.sites import approval

    for folder in approval.folders_of(config, sites):
        gone = approval.Approvals(folder).withdraw(digest)
        _enter(config, folder, f"{gone.task} may run no more", gone.digest)
        click.echo(f"{gone.task} as {gone.digest[:SHOWN]} starts at {folder.name} no more. Stop what runs.")


@click.group(cls=Commands)
def policy() -> None:
    """Show and set what the sites whose keys are here allow."""


@policy.command("show")
@with_config
@at_sites
def policy_show(config: Config, sites: tuple[str, ...]) -> None:
    """Print each site's key, policy and approvals."""
    from ..config import policy_from
    from ..runtime.sites import approval

    for folder in approval.folders_of(config, sites):
        click.echo(f"{folder.name}={approval.key_in(folder)}  its key, by which others pin it")
        own = policy_from(folder)
        rows = [(f"  {f.name}", _said(getattr(own, f.name))) for f in fields(own) if f.name != "members"]
        rows += [(f"  member {name}", key[:SHOWN]) for name, key in sorted(own.members.items())]
        approvals = approval.Approvals(folder).valid.values()
        rows += [(f"  may run {a.task}", f"{a.digest[:SHOWN]}, {a.at}, {a.by}") for a in approvals]
        columns([*rows, *(("  may run train.command", a.command) for a in approvals if a.command)])


@policy.command("set")
@with_config
@click.argument("values", metavar="KEY=VALUE...", nargs=-1, required=True)
@at_sites
def policy_set(config: Config, values: tuple[str, ...], sites: tuple[str, ...]) -> None:
    """Change rules, as in min_cohort=5; they count from the next start."""
    from ..runtime.sites import approval

    given = _values(values)
    for folder in approval.folders_of(config, sites):
        _set(folder, given)
        _enter(config, folder, f"policy: {', '.join(values)}")
        click.echo(f"{short(folder)}/policy.toml: {', '.join(values)}")


@policy.command("pin")
@with_config
@click.argument("members", metavar="NAME=KEY...", nargs=-1, required=True)
@at_sites
def policy_pin(config: Config, members: tuple[str, ...], sites: tuple[str, ...]) -> None:
    """Let these sites be in a cohort; their people read KEY off `fedtrain policy show`."""
    from ..config import keep_policy, policy_from
    from ..runtime.sites import approval

    pins = dict(_pair(each) for each in members)
    for folder in approval.folders_of(config, sites):
        own = policy_from(folder)
        keep_policy(folder, replace(own, members={**own.members, **pins}))
        _enter(config, folder, f"policy: members {', '.join(members)}")
        click.echo(f"{folder.name} sums with {', '.join(pins)} from now on, also where it runs")


@policy.command("sign")
@with_config
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@at_sites
def policy_sign(config: Config, path: Path, sites: tuple[str, ...]) -> None:
    """Sign the list of all members, and pass FILE on; when all have, this site holds to it."""
    from ..runtime.sites import approval

    def agree(new: Mapping[str, str]) -> bool:
        columns([(f"  {name}", key) for name, key in sorted(new.items())])
        return click.confirm("These are not pinned here. Do their people read you these keys?")

    for folder in approval.folders_of(config, sites):
        missing = approval.sign_members(folder, path, agree)
        _enter(config, folder, f"members: signed; {len(missing)} have not")
        if missing:
            click.echo(f"{folder.name} has signed {short(path)}. Pass it on to {', '.join(missing)}")
        else:
            click.echo(
                f"{folder.name} holds to {short(path)} from its next start on: all members have signed"
            )


def _values(texts: Iterable[str]) -> dict[str, Any]:
    from ..config.load import parsed

    return {key: parsed(value) for key, value in map(_pair, texts)}


def _set(folder: Path, values: dict[str, Any]) -> None:
    from ..config import keep_policy, policy_from
    from ..config.policy import changed

    keep_policy(folder, changed(policy_from(folder), values))


def _enter(config: Config, folder: Path, what: str, digest: str = "") -> None:
    """Add to a site's audit log what its people allowed."""
    from contextlib import closing

    from ..events import ActionApproved, silent
    from ..pki import Credentials
    from ..runtime.auditing import audited
    from ..runtime.sites.approval import user

    with closing(audited(config, folder.name, silent, Credentials.load(folder))) as log:
        log.emit(ActionApproved(who=user(), what=what, digest=digest))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{text}: write NAME=VALUE, as in min_cohort=5")
    return name.strip(), value.strip()


def _said(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value).lower()
