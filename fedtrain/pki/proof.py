"""How the aggregator proves to a site which certificate it holds.

A site's gRPC checks the aggregator's certificate in the handshake and shows it to nobody, so the site could
not compare it with the lists of revoked ones. The aggregator therefore signs, with the key of its
certificate, the random number in the site's Hello together with the site's name. A thief of a revoked
certificate's key can answer in that certificate's name alone, and another site's answer can't serve here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ..errors import CertificateError, ConnectError
from ..events import Emit, Notice
from ..messages import SiteId
from .identity import Credentials, Current
from .renewal import keep
from .revocation import LIST, Revoked
from .signing import Signed, Signer, Verifier, signed_claim

CONTEXT = b"fedtrain welcome 1\0"  # signed bytes begin with this: the signature serves for nothing else


class Answering(msgspec.Struct, frozen=True, kw_only=True):
    """The aggregator's statement that it answers this Hello."""

    site: SiteId
    nonce: bytes


def prove(credentials: Credentials, site: SiteId, nonce: bytes) -> bytes:
    """The proof for a site's Hello with this nonce."""
    return Signed.by(Signer.of(credentials), CONTEXT, Answering(site=site, nonce=nonce)).encode()


class AggregatorCheck:
    """A site's check of its aggregator, at each Welcome and while a session is open; and of other sites."""

    def __init__(
        self, credentials: Credentials, certs: Path, emit: Emit, pinned: Mapping[SiteId, str] | None = None
    ) -> None:
        """`credentials`: the site's own; CertificateError when they count no more. `certs`: the folder of the
        lists of revoked certificates, if there are any. `pinned`: the only other sites, as in Verifier."""
        self.revoked = Revoked(Path(certs) / LIST, credentials.root)
        self.revoked.reload()
        federation = credentials.identity.federation
        self.verifier = Verifier(credentials.root, federation, revoked=self.revoked, pinned=pinned)
        self._site, self._emit = self.verifier.trust(credentials.chain).identity.name, emit
        self._pinned: Mapping[SiteId, str] = {} if pinned is None else pinned
        self._nonce, self._chain = b"", b""
        self._folder = Path(certs) / "sites" / self._site

    def nonce(self) -> bytes:
        """A new nonce, for the next Hello."""
        self._nonce, self._chain = secrets.token_bytes(32), b""
        return self._nonce

    def welcomed(self, proof: bytes, lists: bytes) -> None:
        """ConnectError unless the proof is for our Hello, by an aggregator whose certificate counts, also
        after the `lists` that came with it."""
        self.take(lists)
        try:
            _, claim, chain = signed_claim(
                proof, Answering, CONTEXT, "proof of the aggregator", self.verifier, "aggregator"
            )
        except CertificateError as e:
            raise ConnectError(f"this site refuses the aggregator: {e}") from None
        if claim != Answering(site=self._site, nonce=self._nonce):
            raise ConnectError("this site refuses the aggregator: its proof is for another Hello")
        self._chain = chain

    def take(self, lists: bytes) -> None:
        """Lists of revoked certificates that the aggregator passed on. They count here, and are kept in the
        file where that can be written."""
        try:
            if lists:
                self.revoked.add(lists)
        except (CertificateError, OSError) as e:
            self._emit(Notice(text=f"revoked certificates that the aggregator passed on: {e}"))

    def renewed(self, chain: bytes) -> str:
        """Keep a new certificate of this site that the aggregator brings; it counts within seconds. Returns
        why it can't be kept, for the aggregator's operator, or ""."""
        try:
            keep(self._folder, chain)
        except (CertificateError, OSError) as e:
            why = e.strerror if isinstance(e, OSError) else str(e)
            mend = f"Let the site's user write there, or copy a renewed cert.pem to {self._site} yourself."
            self._emit(Notice(text=f"the renewed certificate can't be kept in {self._folder}: {why}. {mend}"))
            return f"the renewed certificate can't be kept in the folder of its key: {why}. {mend}"
        return ""

    async def watch(self, cut: Callable[[str], None], own: Current) -> None:
        """Read the lists again and again; `cut(reason)` ends the session of an aggregator whose certificate
        counts no more, and the session of our `own` certificate when that was renewed, or of pins that were
        changed: the aggregator learns of both as the site joins again."""
        before = own().chain, {**self._pinned}
        async for _ in self.revoked.reloads(self._emit, lambda: own.trouble):
            if (now := (own().chain, {**self._pinned})) != before:
                what = "certificate was renewed" if now[0] != before[0] else "pins were changed"
                before = now
                cut(f"this site's {what}; it joins again with the new one{'s' * what.startswith('pins')}")
            try:
                if self._chain:
                    self.verifier.trust(self._chain, "aggregator")
            except CertificateError as e:
                self._chain = b""
                cut(f"this site refuses the aggregator: {e}")
