"""Peers that were struck off a roster by hand: each leaves a signed tombstone, so that it doesn't come back.

    roster/NAME.struck    who struck NAME off, signed with that peer's certificate's key
    roster/.known         the names that had an entry here: a file that is gone was deleted by somebody

Any neighbour that still has a deleted entry would bring it back with its next greeting. A tombstone counts
for the peers that read its folder and for nobody else: a peer decides for itself whom it speaks with. Who is
to be put out everywhere is revoked (revocation.py). To take a peer back, delete its tombstone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import CertificateError
from ..messages import SiteId
from .authority import write
from .signing import SIGNED_BYTES, Signed, Signer, Verifier, claimed

TOMBSTONE = ".struck"
KNOWN = ".known"
CONTEXT = b"fedtrain roster strike 1\0"  # signed bytes begin with this: the signature serves for nothing else


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's statement that it speaks with another no more."""

    peer: SiteId
    federation: str


class Strikes:
    """The tombstones of one roster's folder."""

    def __init__(self, folder: Path, federation: str, signer: Signer | None) -> None:
        """`signer`: this peer's, which signs for deleted entries; None: deleted entries leave nothing."""
        self._folder, self._federation, self._signer = folder, federation, signer

    def look(self, entries: set[SiteId]) -> set[SiteId]:
        """The peers that were struck off; those whose entry was here and is not among `entries` now are
        struck off from here on. A tombstone that is damaged counts too."""
        struck = {path.name.removesuffix(TOMBSTONE) for path in self._folder.glob(f"*{TOMBSTONE}")}
        if self._signer is None or not self._folder.is_dir():
            return struck
        path = self._folder / KNOWN
        known = set(path.read_text().split()) if path.exists() else set()
        for peer in known - entries - struck:
            claim = Strike(peer=peer, federation=self._federation)
            write(self._folder / (peer + TOMBSTONE), Signed.by(self._signer, CONTEXT, claim).encode())
            struck.add(peer)
        if (here := entries - struck) != known:
            write(path, "".join(f"{peer}\n" for peer in sorted(here)).encode())
        return struck

    def has(self, peer: SiteId) -> bool:
        """Whether there is a tombstone of this peer."""
        return (self._folder / (peer + TOMBSTONE)).exists()

    def why(self, peer: SiteId, verifier: Verifier) -> str:
        """One line: who struck the peer off, and what takes it back."""
        try:
            data = (self._folder / (peer + TOMBSTONE)).read_bytes()[: SIGNED_BYTES + 1]
            by, _ = claimed(data, Strike, CONTEXT, "tombstone", verifier)
        except (CertificateError, OSError):
            by = "an unknown hand"
        return f"{peer} was struck off by {by}. To take it back, delete {peer}{TOMBSTONE} from the roster"
