"""What peers' keys for masked sums are, for those who never meet: signed, so that any peer may carry them.

Two peers behind NAT have no connection with each other, and yet both may tell a third their models under
masks. The peer between passes on what each has signed with its certificate's key. It learns a public key by
that, and can't put its own in place of one; at most it keeps one back, and there is no sum then.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..errors import CertificateError
from ..messages import SiteId
from .signing import Signed, Signer, Verifier, claimed

CONTEXT = b"fedtrain mask key 1\0"  # what is signed begins with this, and so is no other statement
PREFIX = b"MASK"  # of the statement, by which it is told from a roster entry

Told = Callable[[SiteId, bytes, int], None]  # peer, its key, and its number


class MaskKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer says of itself."""

    peer: SiteId
    federation: str
    run: str
    key: bytes  # X25519, public, of this start of its process
    number: int  # grows from start to start: the highest counts


def state(signer: Signer, claim: MaskKey) -> bytes:
    """The signed statement of a mask key, ready to be sent."""
    return PREFIX + Signed.by(signer, CONTEXT, claim).encode()


class MaskKeys:
    """The newest statement of each peer, its own too. A Roster passes them on beside its entries."""

    def __init__(self, verifier: Verifier, federation: str, run: str, told: Told) -> None:
        """`told` hears of each that is newer; CertificateError where the key is no good."""
        self._verifier, self._federation, self._run, self._told = verifier, federation, run, told
        self._newest: dict[SiteId, tuple[int, bytes]] = {}

    def statements(self, peers: list[SiteId]) -> list[bytes]:
        """Those of these peers."""
        newest = dict(self._newest)  # as it is now: `add` may be called from another thread
        return [newest[peer][1] for peer in peers if peer in newest]

    def add(self, data: bytes) -> None:
        """One that was passed on; CertificateError when it can't be believed. An older one is no news."""
        signed_by, claim = claimed(data.removeprefix(PREFIX), MaskKey, CONTEXT, "mask key", self._verifier)
        if signed_by != claim.peer:
            raise CertificateError(f"{signed_by} signed a mask key for {claim.peer[:80]!r}")
        if (claim.federation, claim.run) != (self._federation, self._run):
            raise CertificateError(f"{claim.peer}: its mask key is for another run")
        if claim.number > self._newest.get(claim.peer, (-1, b""))[0]:
            self._told(claim.peer, claim.key, claim.number)
            self._newest[claim.peer] = claim.number, data
