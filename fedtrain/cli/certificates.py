"""`fedtrain certs`: the certificates of the aggregator and the sites."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arguments import Commands, with_config
from .output import short

if TYPE_CHECKING:
    from ..config import Config

CERTIFICATE_DAYS = 30


@click.group(cls=Commands)
def certs() -> None:
    """Make the certificates of the aggregator and the sites."""


@certs.command("init")
@with_config
@click.argument("names", metavar="[aggregator] [SITE]...", nargs=-1)
@click.option("--federation", metavar="NAME", help="Who belongs together; without it, the run's name.")
def certs_init(config: Config, names: tuple[str, ...], federation: str | None) -> None:
    """Make the federation's certificate authority, once; and certificates, where names are given."""
    from .. import pki

    label = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")
    folder = pki.init(config.root / config.network.certs, federation or label)
    click.echo(f"{short(folder)} holds the authority of {federation or label}; it stays here, and secret.")
    for name in names:
        _issue(config, name, days=CERTIFICATE_DAYS, request=None)
    if not names:
        click.echo("Next: fedtrain certs issue aggregator site-1 site-2 site-3")


@certs.command("issue")
@with_config
@click.argument("names", metavar="[aggregator] [SITE]...", nargs=-1, required=True)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=CERTIFICATE_DAYS,
              show_default=True, help="How long they are valid.")  # fmt: skip
@click.option("--csr", type=click.File("rb"), metavar="FILE",
              help="Sign this request (PEM) of one site, whose key then never leaves it.")  # fmt: skip
def certs_issue(config: Config, names: tuple[str, ...], days: float, csr: Any) -> None:
    """Make, or renew, certificates: "aggregator" is the aggregator's, any other name a site's."""
    if csr is not None and len(names) > 1:
        raise click.UsageError("--csr is one site's: name just that site.")
    request = None if csr is None else csr.read()
    for name in names:
        _issue(config, name, days=days, request=request)


@certs.command("revoke")
@with_config
@click.argument("names", metavar="[aggregator] [SITE]...", nargs=-1)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=CERTIFICATE_DAYS,
              show_default=True, help="How long the new list is good.")  # fmt: skip
@click.option("--ca", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="Revoke an issuing CA whose key was stolen, as certs/ca/issuing.pem.")  # fmt: skip
def certs_revoke(config: Config, names: tuple[str, ...], days: float, ca: Path | None) -> None:
    """Strike all certificates of these off, for good; without names, sign the list anew."""
    from .. import pki

    certs_dir = config.root / config.network.certs
    if ca is None:
        serials = pki.revoke(certs_dir, names, days=days)
        what = f"{', '.join(names) or 'nobody new'} ({len(serials)} certificates)"
    elif names:
        raise click.UsageError("--ca revokes all that the CA has signed: name nobody.")
    else:
        what = f"the issuing CA {pki.revoke_issuing(certs_dir, path=ca)}, and so all that it has signed"
        click.echo("Then issue the aggregator and every site a new certificate: fedtrain certs issue NAME...")
    click.echo(f"{short(certs_dir / 'revoked.pem')} lists {what}.")
    click.echo("Copy it into the certs folder of the aggregator, or of one running peer: it passes it on.")
    click.echo("A site that is to leave a revoked aggregator needs it too. Nothing is restarted.")


def _issue(config: Config, name: str, *, days: float, request: bytes | None) -> None:
    from .. import pki

    role = "aggregator" if name == "aggregator" else "site"
    folder = pki.issue(config.root / config.network.certs, role, name, days=days, csr=request)
    what = "holds the certificate" if request else "holds key and certificate"
    click.echo(f"{short(folder)} {what} of {name}")
