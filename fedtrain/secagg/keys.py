"""The keys of one session: how they are drawn, agreed on and used; a site's half beside the aggregator's.

Every key comes by HKDF-SHA256 (RFC 5869) from a secret of this session, with the session's id and its one
use in the info. Agreement is X25519 (RFC 7748). A key seals one message, so its nonce is 0.
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..errors import SecAggError
from ..messages import SiteId
from .masking import KEY_BYTES
from .messages import statement
from .shamir import PRIME

SECRET_BYTES = 32
NONCE = bytes(12)
# Two shares and the tag; with Terms.verify a part of a seed, too.
SEALED_BYTES = {False: 2 * SECRET_BYTES + 16, True: 3 * SECRET_BYTES + 16}
# u of the points whose multiples are few, so that whoever sends one knows the shared secret (RFC 7748, 6.1):
# order 4, 2 and 1 on the curve or its twist are p - 1, 0 and 1; the other two have order 8.
LOW_ORDER = {
    0, 1, PRIME - 1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
}  # fmt: skip


class KeyPair:
    """X25519. The private half is one secret for shamir.share."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 unforeseeable bytes, or an earlier pair's; five of its bits are fixed here."""
        self.secret = bytes((secret[0] & 248, *secret[1:31], (secret[31] & 127) | 64))
        self._private = X25519PrivateKey.from_private_bytes(self.secret)
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """The secret shared with the holder of `public`, which passed check_public. [32]"""
        return self._private.exchange(X25519PublicKey.from_public_bytes(public))


def check_public(site: SiteId, *publics: bytes) -> None:
    """SecAggError for bytes that are no point's only encoding, or one with which nothing is secret."""
    for public in publics:
        u = int.from_bytes(public, "little")
        if len(public) != SECRET_BYTES or u >= PRIME or u in LOW_ORDER:
            raise SecAggError(f"{site} offers a key that keeps no secret (not a point of high order)")


def number_of(secret: bytes) -> int:
    """A secret or a share as Shamir's arithmetic has it."""
    return int.from_bytes(secret, "little")


def bytes_of(number: int) -> bytes:
    return number.to_bytes(SECRET_BYTES, "little")


# --- Keys of masks, for masking.add_masks


def self_mask_key(seed: bytes, sid: bytes, site: SiteId) -> bytes:
    """Of the mask that a site adds on its own; taken out when it is among the survivors."""
    return _derive(seed, "self mask", sid, site)


def pair_mask_key(shared: bytes, sid: bytes, site: SiteId, peer: SiteId) -> bytes:
    """Of the mask between two sites; the same at both."""
    return _derive(shared, "pair mask", sid, *sorted((site, peer)))


def pair_mask_sign(site: SiteId, peer: SiteId) -> int:
    """With which sign `site` adds the mask between the two, so that in a sum over both it is gone."""
    return 1 if site < peer else -1


# --- Sealing, from one site to another by way of the aggregator


def seal(shared: bytes, sid: bytes, site: SiteId, holder: SiteId, text: bytes, beside: bytes) -> bytes:
    """`text` for `holder` alone, which opens only beside the same `beside`, and as from `site`."""
    cipher = AESGCM(_derive(shared, "seal", sid, site, holder))
    return cipher.encrypt(NONCE, text, statement("sealed", sid, site, holder, beside))


def unseal(shared: bytes, sid: bytes, site: SiteId, holder: SiteId, text: bytes, beside: bytes) -> bytes:
    """What `site` sealed for `holder`; SecAggError when it did not."""
    cipher = AESGCM(_derive(shared, "seal", sid, site, holder))
    try:
        return cipher.decrypt(NONCE, text, statement("sealed", sid, site, holder, beside))
    except InvalidTag:
        raise SecAggError(
            f"what came as {site}'s was not sealed by it for {holder} and this roster"
        ) from None


def _derive(secret: bytes, use: str, *parts: bytes | str) -> bytes:
    return hkdf(secret, statement(use, *parts), KEY_BYTES)


def hkdf(secret: bytes, info: bytes, nbytes: int, salt: bytes = b"") -> bytes:
    """HKDF-SHA256 of up to 32 bytes: one block, which takes two HMACs."""
    assert nbytes <= 32
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\1", "sha256")[:nbytes]
