"""The aggregator's check of its callers: every call must come from an unrevoked site of its federation.

The list of revoked certificates is `certs/revoked.pem` (revocation.py). The aggregator reads the list again
while a run goes on, and cuts off a newly listed site within seconds, with its open streams (S6).
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

RELOAD_S = 2.0  # seconds between two reads of the list


class Callers:
    """The sites that have called, each with its latest certificate."""

    def __init__(self, credentials: Credentials, certs: Path) -> None:
        """`certs`: the folder of the list, if there is one; CertificateError when the list is damaged."""
        self._federation = credentials.identity.federation
        self.revoked = Revoked(Path(certs) / LIST, credentials.root)
        self.revoked.reload()
        self._seen: dict[SiteId, tuple[Identity, bytes]] = {}
        self._cut: set[str] = set()  # serials of the certificates that `watch` has cut off
        self._read = lru_cache(maxsize=4096)(lambda pem: (identity_of(pem), fingerprint(pem)))

    def identify(self, pem: bytes) -> SiteId:
        """The caller's name; CertificateError unless it is an unrevoked site of this federation."""
        identity, printed = self._read(pem)
        if identity.role != "site" or identity.federation != self._federation:
            raise CertificateError(f"{identity} is not a site of {self._federation}")
        if self.revoked(identity.serial):
            raise CertificateError(self._struck_off(identity))
        self._seen[identity.name] = identity, printed
        return identity.name

    def may_call(self, site: SiteId) -> bool:
        """Whether a site's latest certificate is still unrevoked; True for a site that hasn't called."""
        seen = self._seen.get(site)
        return seen is None or not self.revoked(seen[0].serial)

    def fingerprints(self, sites: Sequence[SiteId]) -> dict[SiteId, bytes]:
        """The fingerprints of the keys of those of these sites that have called."""
        return {site: self._seen[site][1] for site in sites if site in self._seen}

    async def watch(self, cut: Callable[[SiteId, str], None], emit: Emit) -> None:
        """Read the list every RELOAD_S; `cut(site, reason)` ends the streams of a site on it."""
        last = ""
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                await asyncio.to_thread(self.revoked.reload)
            except CertificateError as e:  # the list that was read before stays in force
                if str(e) != last:
                    emit(Notice(text=f"{LIST}: {e}"))
                    last = str(e)
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
