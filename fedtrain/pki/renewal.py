"""Certificates that are renewed before they end, by a process that has the issuing key, with nobody there.

A certificate is due when a third of its life is left. Its key stays, so the public key that stands in it is
signed again for as long: no request is needed, and nothing secret moves. An aggregator whose certs folder has
the issuing key renews its own certificate and those of its sites, which it gives to them (frames.Renewed); a
peer, or a site, with the issuing key beside it renews its own. Where the key lives offline, people renew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..errors import CertificateError, FedtrainError
from ..events import Emit, Notice
from ..messages import SiteId
from .authority import Authority, reissue, write
from .identity import Credentials, Current, certificates
from .signing import CHAIN_BYTES, Verifier

LOOK_S = 30.0  # between looks whether a certificate is due
LEFT = 3  # a certificate is due when less than one part of so many of its life is left


def due(chain: bytes, now: datetime) -> bool:
    """Whether the first certificate in PEM bytes is to be renewed."""
    leaf = certificates(chain)[0]
    return now > leaf.not_valid_after_utc - (leaf.not_valid_after_utc - leaf.not_valid_before_utc) / LEFT


def renewed(certs: Path, chain: bytes, now: datetime) -> bytes:
    """A new chain for the key of this one, whose certificate counts; CertificateError where the issuing key
    is not in `certs`, or its CA ends no later than the certificate."""
    if not (certs / "ca" / "issuing.key.pem").exists():
        raise CertificateError(f"the issuing key is not in {certs}. Renew it where the authority is")
    authority, old = Authority.load(certs), certificates(chain)[0]
    end = authority.certificate.not_valid_after_utc
    until = min(now + (old.not_valid_after_utc - old.not_valid_before_utc), end)
    if until <= old.not_valid_after_utc + timedelta(minutes=1):
        raise CertificateError(f"the issuing CA ends on {end:%Y-%m-%d}. Renew it (certs/README.md)")
    return reissue(certs, authority, chain, now, until)


def keep(folder: Path, chain: bytes) -> None:
    """Put a renewed certificate in the place of the one in a folder; CertificateError unless it is one: of
    the same name, key and root, and for longer."""
    if len(chain) > CHAIN_BYTES:
        raise CertificateError(f"a certificate chain of {len(chain)} bytes: at most {CHAIN_BYTES}")
    own = Credentials.load(folder)
    new = Verifier(own.root, own.identity.federation).trust(chain, own.identity.role)
    if str(new.identity) != str(own.identity) or new.key != certificates(own.chain)[0].public_key():
        raise CertificateError(f"{new.identity}: a renewed certificate of another name or key")
    if new.identity.not_after <= own.identity.not_after:
        raise CertificateError(f"{new.identity}: a renewed certificate that ends no later than the one here")
    write(folder / "cert.pem", chain)


async def watch(
    certs: Path,
    folder: Path,
    own: Current,
    emit: Emit,
    others: Callable[[], Iterable[tuple[SiteId, bytes]]] = tuple,
    give: Callable[[SiteId, bytes], None] = lambda site, chain: None,
) -> None:
    """Renew the certificate in `folder`, which `own` reads, and give new ones to the holders of those that
    `others` names, as they become due. What can't be renewed is told once."""
    told, gave = set[str](), dict[SiteId, bytes]()  # the chains in whose place new ones were given
    while True:
        for site, chain in [("", own().chain), *others()]:
            if not due(chain, now := datetime.now(UTC)) or gave.get(site) == chain:
                continue
            try:
                new = await asyncio.to_thread(renewed, certs, chain, now)
                give(site, new) if site else await asyncio.to_thread(keep, folder, new)
                gave[site], text = chain, f"the certificate of {site or folder.name} was renewed"
            except (FedtrainError, OSError) as e:
                text = f"the certificate of {site or folder.name} ends soon and can't be renewed: {e}"
            if text not in told:
                emit(Notice(text=text))
            told.add(text)
        await asyncio.sleep(LOOK_S)
