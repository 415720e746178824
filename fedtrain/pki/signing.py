"""Statements signed with the key of a certificate, for readers who trust the root and not the messenger.

TLS proves a sender to the aggregator only. Statements from site to site pass through an aggregator that may
lie, so they are signed: ECDSA on P-256 with SHA-256, with the key and the certificates that TLS uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from ..errors import CertificateError, CertificateRevoked, NotPinned
from ..messages import SiteId
from .identity import UNREADABLE, Credentials, Identity, certificates, identity_in, key_of, serial_hex

ECDSA = ec.ECDSA(hashes.SHA256())
CHAIN_BYTES = 16 << 10  # the longest certificate chain read; ours have under 2 KiB
USUAL_BYTES = 4 << 10  # a longer one is checked each time: what is kept has a bound
CHAINS = 1 << 14  # checked ones that are kept. Who asks for more of them in turns checks each one anew
VERIFIED = 4096  # signatures that need not be verified again
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
    """A certificate whose chain was checked up to the root."""

    identity: Identity
    fingerprint: bytes
    serials: tuple[str, ...]  # of the chain, the certificate's own first, the root's left out
    key: ec.EllipticCurvePublicKey
    not_before: datetime  # when the last certificate of the chain becomes valid, UTC
    not_after: datetime  # when the first certificate of the chain expires, UTC


class Verifier:
    """Verifies who has signed a message, by a chain up to this root. Checked chains are cached."""

    def __init__(
        self,
        root: bytes,
        federation: str,
        *,
        revoked: Callable[[Sequence[str]], str] = lambda chain: "",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        pinned: Mapping[SiteId, str] | None = None,
    ) -> None:
        """`root`: PEM. `revoked`, called at every check with the serials of a chain, says why the chain is
        not to be believed: see pki.Revoked. `pinned`: the only sites that count, and their keys' fingerprints
        in hex, asked for at every check; None: all of the root's."""
        self._store = Store(certificates(root)[:1])
        self._federation, self._revoked, self._now = federation, revoked, now
        self._pinned = pinned
        self._trusted = lru_cache(maxsize=CHAINS)(self._trust)
        self._signed: dict[bytes, None] = {}  # digests of what was verified: a roster is read again and again

    def verify(
        self, certificate: bytes, message: bytes, signature: bytes, role: str = "site"
    ) -> tuple[SiteId, bytes]:
        """The signer's name, and the fingerprint of its key. `certificate`: PEM, leaf first.
        CertificateError unless `trust` finds no fault and the signature is of this key and this message."""
        trusted = self._counts(certificate, role)
        whole = hashlib.sha256(msgspec.msgpack.encode((certificate, role, message, signature))).digest()
        if whole not in self._signed:
            try:
                trusted.key.verify(signature, message, ECDSA)
            except InvalidSignature:
                raise CertificateError(
                    f"{trusted.identity}: a signature is not by its key, or over something else"
                ) from None
            if len(self._signed) >= VERIFIED:
                self._signed.pop(next(iter(self._signed)), None)
            self._signed[whole] = None
        self._check_pin(trusted)
        return trusted.identity.name, trusted.fingerprint

    def trust(self, certificate: bytes, role: str = "site") -> Trusted:
        """Whose certificate this is. CertificateError unless the chain leads to the root within name
        constraints and dates, the role and the federation are right, and nothing of the chain is revoked;
        NotPinned where that is all that lacks."""
        trusted = self._counts(certificate, role)
        self._check_pin(trusted)
        return trusted

    def _check_pin(self, trusted: Trusted) -> None:
        name, key = trusted.identity.name, trusted.fingerprint.hex()
        if trusted.identity.role == "site" and self._pinned is not None and self._pinned.get(name) != key:
            raise NotPinned(name, key)

    def _counts(self, certificate: bytes, role: str) -> Trusted:
        trusted = (self._trusted if len(certificate) <= USUAL_BYTES else self._trust)(certificate, role)
        identity, now = trusted.identity, self._now()
        if not trusted.not_before <= now <= trusted.not_after:
            raise CertificateError(
                f"{identity}: its certificate is valid from {trusted.not_before:%Y-%m-%d %H:%M} to "
                f"{trusted.not_after:%Y-%m-%d %H:%M}, and now it is {now:%Y-%m-%d %H:%M} UTC. Renew it with "
                f"`fedtrain certs issue {identity.name}`, or set this machine's clock."
            )
        if why := self._revoked(trusted.serials):
            raise CertificateRevoked(f"{identity}: {why}. With one issued later the same command goes on.")
        return trusted

    def _trust(self, certificate: bytes, role: str) -> Trusted:
        if len(certificate) > CHAIN_BYTES:
            raise CertificateError(f"a certificate chain of {len(certificate)} bytes: at most {CHAIN_BYTES}")
        leaf, *above = certificates(certificate)
        identity = identity_in(leaf)
        if identity.role != role or identity.federation != self._federation:
            what = "a site" if role == "site" else "the aggregator"
            raise CertificateError(f"{identity} is not {what} of {self._federation}")
        if _pem([leaf, *above]) != certificate:  # each chain has one encoding only: no bytes in between
            raise CertificateError(f"{identity}: its certificate chain is not in plain PEM")
        rules = PolicyBuilder().store(self._store).time(self._now())
        try:
            if role == "site":
                chain = rules.build_client_verifier().verify(leaf, above).chain
            else:
                chain = rules.build_server_verifier(x509.DNSName(str(identity))).verify(leaf, above)
        except (VerificationError, *UNREADABLE) as e:  # what it looks at is parsed only now
            raise CertificateError(
                f"{identity}: its certificate does not lead to the root of this federation: {e}"
            ) from None
        key = key_of(leaf)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise CertificateError(f"{identity}: its certificate has no P-256 key, which signing needs")
        start, end = max(c.not_valid_before_utc for c in chain), min(c.not_valid_after_utc for c in chain)
        serials = tuple(serial_hex(each) for each in chain[:-1])
        return Trusted(identity, _hash_of(key), serials, key, start, end)


def _pem(chain: Iterable[x509.Certificate]) -> bytes:
    return b"".join(c.public_bytes(serialization.Encoding.PEM) for c in chain)


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 (32 bytes) of the public key in the first certificate in PEM bytes, as DER: a renewed
    certificate of the same key has the same one."""
    return _hash_of(key_of(certificates(certificate)[0]))


def _hash_of(key: CertificatePublicKeyTypes) -> bytes:
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
    site, claim, _ = signed_claim(data, kind, context, what, verifier)
    return site, claim


def signed_claim(
    data: bytes, kind: type[Claim], context: bytes, what: str, verifier: Verifier, role: str = "site"
) -> tuple[SiteId, Claim, bytes]:
    """As `claimed`, for a signer of any role; the signer's certificate chain too."""
    if len(data) > SIGNED_BYTES:
        raise CertificateError(f"a {what} of {len(data)} bytes: at most {SIGNED_BYTES}")
    try:
        signed = msgspec.msgpack.decode(data, type=Signed)
        claim = msgspec.msgpack.decode(signed.claim, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as e:
        raise CertificateError(f"not a {what}: {str(e)[:120]}") from None
    name, _ = verifier.verify(signed.certificate, context + signed.claim, signed.signature, role)
    return name, claim, signed.certificate
