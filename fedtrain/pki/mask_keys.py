"""Public keys of peers for masked sums, signed by their owners so that any peer may pass them on.

Two peers behind NAT have no connection with each other, and yet both may send a third peer their models under
masks. The third peer passes on the keys that each has signed with its certificate's key. The third peer can't
replace a key by its own; at most it withholds a key, and then no sum is formed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..errors import CertificateError
from ..messages import SiteId
from .signing import Signed, Signer, Verifier, claimed

CONTEXT = b"fedtrain mask key 1\0"  # signed bytes begin with this: the signature serves for nothing else
PREFIX = b"MASK"  # marks a mask key's statement among roster entries

OnKey = Callable[[SiteId, bytes, int], None]  # peer, the peer's key, and the key's number


class MaskKey(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's statement of its own key."""

    peer: SiteId
    federation: str
    run: str
    key: bytes  # X25519 public key, made anew at each start of the peer's process
    number: int  # grows with each start: the key with the highest number counts


def state(signer: Signer, claim: MaskKey) -> bytes:
    """The signed statement of a mask key, ready to be sent."""
    return PREFIX + Signed.by(signer, CONTEXT, claim).encode()


class MaskKeys:
    """The newest statement of each peer, this peer's too. A Roster passes them on with its entries."""

    def __init__(self, verifier: Verifier, federation: str, run: str, on_key: OnKey) -> None:
        """`on_key` is called with each newer key, and raises CertificateError to refuse a bad one."""
        self._verifier, self._federation, self._run, self._on_key = verifier, federation, run, on_key
        self._newest: dict[SiteId, tuple[int, bytes]] = {}

    def statements(self, peers: list[SiteId]) -> list[bytes]:
        """The statements of these peers; peers without one are left out."""
        newest = dict(self._newest)  # a copy: `add` may be called from another thread
        return [newest[peer][1] for peer in peers if peer in newest]

    def add(self, data: bytes) -> None:
        """Take a statement that a peer passed on, unless it is older; CertificateError if it is not valid."""
        signed_by, claim = claimed(data.removeprefix(PREFIX), MaskKey, CONTEXT, "mask key", self._verifier)
        if signed_by != claim.peer:
            raise CertificateError(f"{signed_by} signed a mask key for {claim.peer[:80]!r}")
        if (claim.federation, claim.run) != (self._federation, self._run):
            raise CertificateError(f"{claim.peer}: its mask key is for another run")
        if claim.number > self._newest.get(claim.peer, (-1, b""))[0]:
            self._on_key(claim.peer, claim.key, claim.number)
            self._newest[claim.peer] = claim.number, data
