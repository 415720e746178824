"""Revoked certificates: a federation's single list, an X.509 CRL (RFC 5280) that its CA signs.

    revoked.pem     beside ca/, aggregator/ and sites/: the list, then the issuing CA's certificate
    ca/issued       one line a certificate: serial, site, expiry; `revoke` finds a site's serials here

The list carries its CA's signature, so anybody may pass it on: peers send the newest one along with the
roster. Each list has a higher number than the one before; an older list is never accepted again.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import CertificateError, ConfigError, nearest
from . import identity
from .authority import Authority, issued, write
from .identity import certificates, serial_hex

LIST = "revoked.pem"
LIST_BYTES = 48 << 10  # about 1,000 serials; expired certificates need not be listed
UNREADABLE = (*identity.UNREADABLE, CertificateError, TypeError, InvalidSignature, UnsupportedAlgorithm)


def revoke(certs_dir: Path, names: Iterable[str], *, now: datetime | None = None) -> list[str]:
    """Add the unexpired certificates of these sites to the list and sign it; returns the serials.
    ConfigError when one of the sites has no such certificate."""
    certs_dir, now = Path(certs_dir), now or datetime.now(UTC)
    authority, path = Authority.load(certs_dir), certs_dir / LIST
    number, known = 0, frozenset[str]()
    if path.exists():
        number, known = check(path.read_bytes(), authority.root)
    valid = {serial: name for serial, name, until in issued(certs_dir) if until > now}
    found: list[str] = []
    for name in names:
        serials = [serial for serial, whose in valid.items() if whose == name]
        if not serials:
            raise ConfigError(
                f"{name}: no certificate of {certs_dir / 'ca'} that is valid now is this site's."
                f"{nearest(name, {*valid.values()})}"
            )
        found += serials
    if all(serial in known for serial in found):
        return found
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(now)
        .next_update(authority.certificate.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number + 1), critical=False)
    )
    for serial in sorted((known & valid.keys()) | set(found)):
        one = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(now)
        builder = builder.add_revoked_certificate(one.build())
    pem = serialization.Encoding.PEM
    signed = builder.sign(authority.key, hashes.SHA256()).public_bytes(pem)
    write(path, signed + authority.certificate.public_bytes(pem))
    return found


def check(data: bytes, root: x509.Certificate) -> tuple[int, frozenset[str]]:
    """The number and the serials of a list; CertificateError unless a CA under `root` has signed the list."""
    if len(data) > LIST_BYTES:
        raise CertificateError(f"a revocation list of {len(data)} bytes: at most {LIST_BYTES}")
    try:
        revoked, issuing = x509.load_pem_x509_crl(data), certificates(data)[0]
        issuing.verify_directly_issued_by(root)
        may = issuing.extensions.get_extension_for_class(x509.KeyUsage).value.crl_sign
        number = revoked.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        key = issuing.public_key()
        signed = isinstance(key, ec.EllipticCurvePublicKey) and revoked.is_signature_valid(key)
    except UNREADABLE:
        raise CertificateError("not a revocation list of this federation") from None
    pem = serialization.Encoding.PEM
    plain = revoked.public_bytes(pem) + issuing.public_bytes(pem) == data  # no other bytes in between
    if not may or not signed or not plain:
        raise CertificateError("a revocation list that this federation's CA has not signed")
    return number, frozenset(serial_hex(each) for each in revoked)


class Revoked:
    """The newest list known, from the file or from another peer. Called with a serial: is it revoked?"""

    def __init__(self, path: Path, root: bytes) -> None:
        self.data = b""  # the list as it was signed; empty while there is none
        self._path, self._root = Path(path), certificates(root)[0]
        self._number, self._serials = -1, frozenset[str]()

    def __call__(self, serial: str) -> bool:
        return serial in self._serials

    def reload(self) -> None:
        """Read the file again; CertificateError when it is damaged, and the list known before stays."""
        try:
            self._take(self._path.read_bytes())
        except FileNotFoundError:
            return

    def add(self, data: bytes) -> None:
        """Check a list that a peer sent, and write it to the file if it is newer."""
        if self._take(data):
            write(self._path, data)

    def _take(self, data: bytes) -> bool:
        if self.data and data == self.data:
            return False
        number, serials = check(data, self._root)
        if number <= self._number:
            return False
        self.data, self._number, self._serials = data, number, serials
        return True
