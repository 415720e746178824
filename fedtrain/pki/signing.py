"""Statements signed with the key of a certificate, for readers who trust the root and not the messenger.

TLS proves a sender to the aggregator only. Statements from site to site pass through an aggregator that may
lie, so they are signed: ECDSA on P-256 with SHA-256, with the key and the certificates that TLS uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from ..errors import CertificateError
from ..messages import SiteId
from .identity import Credentials, Identity, certificates, identity_of

ECDSA = ec.ECDSA(hashes.SHA256())
CHAIN_BYTES = 16 << 10  # the longest certificate chain read; ours have under 2 KiB
SIGNED_BYTES = 32 << 10  # the longest signed claim read; ours have under 3 KiB

Claim = TypeVar("Claim")


@dataclass(frozen=True)
class Signer:
    """Signs as the holder of `certificate`."""

    certificate: bytes  # PEM: leaf, then issuing CA; a Verifier needs it together with a signature
    _key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def of(cls, credentials: Credentials) -> Signer:
        """The signer with these credentials; CertificateError unless the key is a P-256 key."""
        key = serialization.load_pem_private_key(credentials.key, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise CertificateError(f"{credentials.identity}: key.pem is no P-256 key, which signing needs")
        return cls(_pem(certificates(credentials.chain)), key)

    def sign(self, message: bytes) -> bytes:
        """The signature in DER, about 71 bytes; ECDSA gives other bytes at each call."""
        return self._key.sign(message, ECDSA)


@dataclass(frozen=True)
class Trusted:
    """A site's certificate whose chain was checked up to the root."""

    identity: Identity
    fingerprint: bytes
    key: ec.EllipticCurvePublicKey
    not_before: datetime  # when the last certificate of the chain becomes valid, UTC
    not_after: datetime  # when the first certificate of the chain expires, UTC


class Verifier:
    """Verifies which site has signed a message, by a chain up to this root. Checked chains are cached."""

    def __init__(
        self,
        root: bytes,
        federation: str,
        *,
        revoked: Callable[[str], bool] = lambda serial: False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`root`: PEM. `revoked(serial)` is called at every check, with a serial as in Identity.serial."""
        self._store = Store(certificates(root)[:1])
        self._federation, self._revoked, self._now = federation, revoked, now
        self._trusted = lru_cache(maxsize=4096)(self._trust)

    def verify(self, certificate: bytes, message: bytes, signature: bytes) -> tuple[SiteId, bytes]:
        """The signing site's name, and the fingerprint of its key. `certificate`: PEM, leaf first.

        CertificateError unless the chain leads to the root within name constraints and dates, the role is
        site, the federation ours, the serial not revoked, and the signature is of this key and this message.
        """
        trusted = self._trusted(certificate)
        identity, now = trusted.identity, self._now()
        if not trusted.not_before <= now <= trusted.not_after:
            raise CertificateError(
                f"{identity}: its certificate is valid from {trusted.not_before:%Y-%m-%d %H:%M} to "
                f"{trusted.not_after:%Y-%m-%d %H:%M}, and now it is {now:%Y-%m-%d %H:%M} UTC. Renew it with "
                f"`fedtrain certs issue {identity.name}`, or set this machine's clock."
            )
        if self._revoked(identity.serial):
            raise CertificateError(f"{identity}: its certificate {identity.serial} was revoked")
        try:
            trusted.key.verify(signature, message, ECDSA)
        except InvalidSignature:
            raise CertificateError(
                f"{identity}: a signature is not by its key, or over something else"
            ) from None
        return identity.name, trusted.fingerprint

    def _trust(self, certificate: bytes) -> Trusted:
        if len(certificate) > CHAIN_BYTES:
            raise CertificateError(f"a certificate chain of {len(certificate)} bytes: at most {CHAIN_BYTES}")
        identity = identity_of(certificate)
        if identity.role != "site" or identity.federation != self._federation:
            raise CertificateError(f"{identity} is not a site of {self._federation}")
        leaf, *above = certificates(certificate)
        if _pem([leaf, *above]) != certificate:  # each chain has one encoding only: no bytes in between
            raise CertificateError(f"{identity}: its certificate chain is not in plain PEM")
        rules = PolicyBuilder().store(self._store).time(self._now())
        try:
            chain = rules.build_client_verifier().verify(leaf, above).chain
        except VerificationError as e:
            raise CertificateError(
                f"{identity}: its certificate does not lead to the root of this federation: {e}"
            ) from None
        key = leaf.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise CertificateError(f"{identity}: its certificate has no P-256 key, which signing needs")
        start, end = max(c.not_valid_before_utc for c in chain), min(c.not_valid_after_utc for c in chain)
        return Trusted(identity, fingerprint(certificate), key, start, end)


def _pem(chain: Iterable[x509.Certificate]) -> bytes:
    return b"".join(c.public_bytes(serialization.Encoding.PEM) for c in chain)


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 (32 bytes) of the public key in the first certificate in PEM bytes, as DER: a renewed
    certificate of the same key has the same one."""
    key = certificates(certificate)[0].public_key()
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


# --- Signed claims, which anybody may pass on


class Signed(msgspec.Struct, frozen=True, kw_only=True):
    """A claim with its signature and the signer's certificate chain."""

    claim: bytes  # in MessagePack, exactly the bytes that were signed
    signature: bytes  # DER
    certificate: bytes  # PEM: leaf, then issuing CA

    @classmethod
    def by(cls, signer: Signer, context: bytes, claim: msgspec.Struct) -> Signed:
        """Sign `context` followed by `claim`; each kind of claim has its own `context`."""
        body = msgspec.msgpack.encode(claim)
        return cls(claim=body, signature=signer.sign(context + body), certificate=signer.certificate)

    def encode(self) -> bytes:
        """The statement as MessagePack."""
        return msgspec.msgpack.encode(self)


def claimed(
    data: bytes, kind: type[Claim], context: bytes, what: str, verifier: Verifier
) -> tuple[SiteId, Claim]:
    """The site that has signed `data`, and its claim of type `kind`; CertificateError if it is not valid."""
    if len(data) > SIGNED_BYTES:
        raise CertificateError(f"a {what} of {len(data)} bytes: at most {SIGNED_BYTES}")
    try:
        signed = msgspec.msgpack.decode(data, type=Signed)
        claim = msgspec.msgpack.decode(signed.claim, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as e:
        raise CertificateError(f"not a {what}: {str(e)[:120]}") from None
    site, _ = verifier.verify(signed.certificate, context + signed.claim, signed.signature)
    return site, claim
