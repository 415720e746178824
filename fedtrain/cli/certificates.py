"""`fedtrain certs`: the certificates of the aggregator and the sites."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ConfigError, FedtrainError
from .arguments import Command, Commands, drive, with_config
from .output import short

if TYPE_CHECKING:
    from ..config import Config

CERTIFICATE_DAYS = 30
LOOPBACK = "127.0.0.1", "localhost", "[::1]"


@click.group(cls=Commands)
def certs() -> None:
    """Make the certificates of the aggregator and the sites."""


@certs.command("init")
@with_config
@click.argument("names", metavar="[aggregator] [SITE]...", nargs=-1)
@click.option("--federation", metavar="NAME", help="Who belongs together; without it, the run's name.")
def certs_init(config: Config, names: tuple[str, ...], federation: str | None) -> None:
    """Make the federation's certificate authority, once; and certificates, where names are given."""

    begin_authority(config.root / config.network.certs, federation or config.run.name, names)
    if not names:
        peers = any(key.startswith("gossip.") for key in config.given)  # there is no aggregator
        first = "" if peers else "fedtrain certs issue aggregator; "
        click.echo(f"Next: {first}fedtrain certs {'issue' if peers else 'invite'} site-1 site-2 site-3")


def begin_authority(certs_dir: Path, federation: str, names: Sequence[str]) -> None:
    """Make the authority of this federation, and a key and a certificate for each name."""
    from .. import pki

    label = re.sub(r"[^a-z0-9]+", "-", federation.lower()).strip("-")
    folder = pki.init(certs_dir, label)
    click.echo(f"{short(folder)} holds the authority of {label}; it stays here, and secret.")
    for name in names:
        _issue(certs_dir, name, days=CERTIFICATE_DAYS)


@certs.command("issue")
@with_config
@click.argument("names", metavar="[aggregator] [SITE]...", nargs=-1, required=True)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=CERTIFICATE_DAYS,
              show_default=True, help="How long they are valid.")  # fmt: skip
def certs_issue(config: Config, names: tuple[str, ...], days: float) -> None:
    """Make, or renew, keys and certificates: "aggregator" is the aggregator's, any other name a site's."""
    for name in names:
        _issue(config.root / config.network.certs, name, days=days)


@certs.command("invite")
@with_config
@click.argument("names", metavar="[SITE]...", nargs=-1)
@click.option("--listen", metavar="HOST:PORT",
              help="Where sites call; without it, the port after that of network.listen.")  # fmt: skip
@click.option("--address", metavar="HOST:PORT",
              help="What sites are told to call, where that is not --listen.")  # fmt: skip
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=7, show_default=True,
              help="How long a code is good for.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Sign without comparing words: whoever has the code gets in.")
def certs_invite(
    config: Config, names: tuple[str, ...], listen: str | None, address: str | None, days: float, yes: bool
) -> None:  # fmt: skip
    """Print a code for each site, and wait until each has its certificate; its key stays at the site."""
    import asyncio
    from datetime import UTC, datetime, timedelta

    from ..pki.enrolment import Codes
    from ..pki.roster import can_be_called
    from ..runtime.enrolling import Host
    from ..tracking.live import screen

    certs_dir = config.root / config.network.certs
    if not (certs_dir / "ca" / "root.pem").exists():
        begin_authority(certs_dir, config.run.name, ["aggregator"])
    address = address or listen or _next_port(config.network.address or config.network.listen)
    listen = listen or _next_port(config.network.listen)
    if not can_be_called(address):
        raise click.UsageError(f"no site can call {address}: name this machine with --address HOST:PORT.")
    codes, signs = Codes(certs_dir), (certs_dir / "ca" / "issuing.key.pem").exists()
    for name in names:
        codes.invite(name, timedelta(days=days))
    for code in codes.open():
        until = datetime.fromtimestamp(code.until, UTC)
        click.echo(f"{code.guest}, once, until {until:%Y-%m-%d %H:%M} UTC:\n  fedtrain join {address} {code}")
    talking = asyncio.Lock()

    async def approve(name: str, spoken: str) -> bool | None:
        async with talking:
            if signs and yes:
                return True
            if signs and (agreed := await asyncio.to_thread(_agreed, name, spoken)) is not None:
                return agreed
        request = short(certs_dir / "requests" / f"{name}.csr")
        folder = short(certs_dir / "sites" / name)
        click.echo(f"Where the key is: fedtrain certs sign {request}; then bring cert.pem here, to {folder}")
        return None

    with screen(json=False, plain=True) as show:
        drive(Host(codes, CERTIFICATE_DAYS, approve, show).run(listen))


def _agreed(name: str, spoken: str) -> bool | None:
    try:
        what = "words" if " " in spoken else "SHA-256 of its public key"
        return click.confirm(f"Does {name} read out the same {what}, {spoken}?")
    except click.Abort:  # nobody is there to be asked
        return None


def _next_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


@certs.command("sign")
@with_config
@click.argument("requests", metavar="REQUEST...", nargs=-1, required=True,
                type=click.Path(path_type=Path, exists=True, dir_okay=False))  # fmt: skip
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=CERTIFICATE_DAYS,
              show_default=True, help="How long the certificate is valid.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Sign without asking for the words.")
def certs_sign(config: Config, requests: tuple[Path, ...], days: float, yes: bool) -> None:
    """Sign requests (NAME.csr, in PEM) where the issuing key is; the site's key never leaves it."""
    from ..pki.enrolment import root_digest, spoken_of

    certs_dir = config.root / config.network.certs
    root = root_digest((certs_dir / "ca" / "root.pem").read_bytes())
    unsigned = []
    for path in requests:
        request = path.read_bytes()
        if yes or _agreed(path.stem, spoken_of(root, path.stem, request)):
            _issue(certs_dir, path.stem, days=days, request=request)
        else:
            unsigned.append(short(path))
    if unsigned:
        raise ConfigError(
            f"not signed: {', '.join(unsigned)}. Run this in a terminal, and answer y where the site reads "
            f"out the same; or give --yes."
        )


@click.command(cls=Command)
@click.argument("address", metavar="HOST:PORT")
@click.argument("code")
@with_config
def join(config: Config, address: str, code: str) -> None:
    """Make this site's key, and get its certificate by a code."""
    from ..pki.enrolment import Code
    from ..runtime.enrolling import join

    invitation = Code.read(code)
    folder = drive(join(config.root / config.network.certs, address, invitation, click.echo))
    click.echo(f"{short(folder)} holds key and certificate of {invitation.guest}")
    click.echo("\n".join(_next(config, folder, address)))


def _next(config: Config, folder: Path, host: str) -> Iterator[str]:
    """What is still to be done at a site that has its certificate from `host`, in its order."""
    from ..runtime.sites.approval import Approvals

    machine, port = host.rpartition(":")[0], config.network.listen.rpartition(":")[2]
    if not config.network.address and machine not in LOOPBACK:
        where = f'as in "{machine}:{port}"'
        yield f"Set network.address in fedtrain.toml to where the aggregator listens, {where}."
    try:
        Approvals(folder).check(config)
    except FedtrainError as e:
        yield str(e)
    yield f"Next: fedtrain site {folder.name}"


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


def _issue(certs_dir: Path, name: str, *, days: float, request: bytes | None = None) -> None:
    from .. import pki
    from ..pki.revocation import check_not_revoked

    role = "aggregator" if name == "aggregator" else "site"
    if request is None:
        place = name if role == "aggregator" else f"sites/{name}"
        check_not_revoked(certs_dir, certs_dir / place)
    folder = pki.issue(certs_dir, role, name, days=days, csr=request)
    if (folder / "key.pem").exists():
        click.echo(f"{short(folder)} holds key and certificate of {name}")
    else:
        where = f"; copy it to {name}, whose key stays there"
        click.echo(f"{short(folder / 'cert.pem')} is the certificate of {name}{where}")
