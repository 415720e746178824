"""The aggregator's check of its callers: every call must come from an unrevoked site of its federation.

The lists of revoked certificates are in `certs/revoked.pem` (revocation.py). The aggregator reads the file
again while a run goes on, and cuts off a newly listed site within seconds, with its open streams (S6); so it
does when a certificate expires. Its sites are passed new lists at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import CertificateError, CertificateRevoked
from ..events import Emit, Notice
from ..messages import SiteId
from .identity import Credentials, identity_of
from .revocation import LIST, Revoked
from .signing import Verifier

Cut = Callable[[SiteId, str, bool], None]  # site, reason, whether the same certificate never comes in again


class Callers:
    """The sites that have called, each with its latest certificate."""

    def __init__(self, credentials: Credentials, certs: Path) -> None:
        """`certs`: the folder of the lists, if there are any; CertificateError when they are damaged."""
        self.revoked = Revoked(Path(certs) / LIST, credentials.root)
        self.revoked.reload()
        self.verifier = Verifier(credentials.root, credentials.identity.federation, revoked=self.revoked)
        self._seen: dict[SiteId, tuple[bytes, bytes]] = {}  # chains in PEM, and fingerprints of keys
        self._cut: dict[SiteId, bytes] = {}  # the chains that `watch` has cut off

    def identify(self, chain: bytes) -> SiteId:
        """The caller's name; CertificateError unless it is an unrevoked site of this federation."""
        trusted = self.verifier.trust(chain)
        self._seen[trusted.identity.name] = chain, trusted.fingerprint
        return trusted.identity.name

    def may_call(self, site: SiteId) -> bool:
        """Whether a site's latest certificate still counts; True for a site that hasn't called."""
        return not self._fault(site)[0]

    def fingerprints(self, sites: Sequence[SiteId]) -> dict[SiteId, bytes]:
        """The fingerprints of the keys of those of these sites that have called."""
        return {site: self._seen[site][1] for site in sites if site in self._seen}

    def shown(self, site: SiteId) -> tuple[str, bytes]:
        """The serial of the latest certificate of a site that has called, and the fingerprint of its key."""
        chain, printed = self._seen[site]
        return identity_of(chain).serial, printed

    def that_count(self) -> list[tuple[SiteId, bytes]]:
        """The sites that have called, and their latest certificates, of those whose certificate counts."""
        return [(site, chain) for site, (chain, _) in self._seen.items() if not self._fault(site)[0]]

    async def watch(
        self,
        cut: Cut,
        emit: Emit,
        pass_on: Callable[[bytes], None] = lambda lists: None,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        """Read the lists every RELOAD_S; `cut` ends the streams of a site whose certificate counts no more,
        `pass_on` gives lists that are new to all sites. A new `trouble` of our own is told."""
        passed = self.lists
        async for _ in self.revoked.reloads(emit, trouble):
            if self.lists != passed:
                passed = self.lists
                pass_on(passed)
            for site, (chain, _) in list(self._seen.items()):
                why, final = self._fault(site)
                if why and self._cut.get(site) != chain:
                    self._cut[site] = chain
                    emit(Notice(text=f"{site} is cut off: {why}"))
                    cut(site, why, final)

    @property
    def lists(self) -> bytes:
        """The lists of revoked certificates, for the sites."""
        return b"".join(self.revoked.lists)

    def _fault(self, site: SiteId) -> tuple[str, bool]:
        """Why a site's latest certificate doesn't count, and whether it never will again."""
        try:
            if site in self._seen:
                self.verifier.trust(self._seen[site][0])
        except CertificateError as e:
            return str(e), isinstance(e, CertificateRevoked)
        return "", False
