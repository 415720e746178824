"""Who may call the aggregator: sites of its federation whose certificate is not revoked, in every call.

The list of revoked certificates is `certs/revoked.pem` (revocation.py). It is read again while a run goes
on: a site that is added to it is cut off within seconds, its open streams too (S6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from ..errors import CertificateError
from ..events import Emit, Notice
from ..messages import SiteId
from .identity import Credentials, Identity, identity_of
from .revocation import LIST, Revoked
from .signing import fingerprint

RELOAD_S = 2.0  # how often the list is read


class Callers:
    """The sites that called, each by the certificate that it showed last."""

    def __init__(self, credentials: Credentials, certs: Path) -> None:
        """`certs`: the folder that may hold the list; CertificateError when the list is damaged."""
        self._federation = credentials.identity.federation
        self.revoked = Revoked(Path(certs) / LIST, credentials.root)
        self.revoked.reload()
        self._seen: dict[SiteId, tuple[Identity, bytes]] = {}
        self._cut: set[str] = set()  # serials
        self._read = lru_cache(maxsize=4096)(lambda pem: (identity_of(pem), fingerprint(pem)))

    def identify(self, pem: bytes) -> SiteId:
        """The caller's name; CertificateError unless it is a site of this federation that is not revoked."""
        identity, printed = self._read(pem)
        if identity.role != "site" or identity.federation != self._federation:
            raise CertificateError(f"{identity} is not a site of {self._federation}")
        if self.revoked(identity.serial):
            raise CertificateError(self._struck_off(identity))
        self._seen[identity.name] = identity, printed
        return identity.name

    def may_call(self, site: SiteId) -> bool:
        """Whether the certificate that a site showed last still counts; True of one that hasn't called."""
        seen = self._seen.get(site)
        return seen is None or not self.revoked(seen[0].serial)

    def fingerprints(self, sites: Sequence[SiteId]) -> dict[SiteId, bytes]:
        """The fingerprints of the certificates of these sites; of those that called."""
        return {site: self._seen[site][1] for site in sites if site in self._seen}

    async def watch(self, cut: Callable[[SiteId, str], None], emit: Emit) -> None:
        """Read the list every RELOAD_S; `cut(site, reason)` ends the streams of a site on it."""
        told = ""
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                await asyncio.to_thread(self.revoked.reload)
            except CertificateError as e:  # what was known goes on counting
                if str(e) != told:
                    emit(Notice(text=f"{LIST}: {e}"))
                    told = str(e)
            for site, (identity, _) in list(self._seen.items()):
                if self.revoked(identity.serial) and identity.serial not in self._cut:
                    self._cut.add(identity.serial)
                    emit(Notice(text=f"{site} is cut off: its certificate was revoked"))
                    cut(site, self._struck_off(identity))

    def _struck_off(self, identity: Identity) -> str:
        return (
            f"{identity}: its certificate {identity.serial} was revoked. With one issued later the same "
            f"command goes on."
        )
