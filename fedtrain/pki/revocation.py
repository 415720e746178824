"""Revoked certificates: X.509 lists (CRL, RFC 5280), signed by the root or by an issuing CA under the root.

    revoked.pem     beside ca/, aggregator/ and sites/: each list, followed by the certificate of its signer
    ca/issued       one line a certificate: serial, site, expiry; `revoke` finds a site's serials here

A list carries its signer's signature, so anybody may pass it on: the aggregator sends it to its sites, peers
send it along with the roster. The newest list of each signer counts. The number of a list is the time of its
signature, and a number from the future is refused, so a thief of an issuing key can't lock out later lists.
An issuing CA itself is revoked by a list of the root, which also ends all lists of that CA.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import CertificateError, ConfigError, nearest
from ..events import Emit, Notice
from . import identity
from .authority import ROOT_LIFE, Authority, issued, renew_issuing, write
from .identity import certificates, serial_hex

LIST = "revoked.pem"
LIST_BYTES = 48 << 10  # of one list: about 1,000 serials; expired certificates need not be listed
LISTS = 8  # signers whose lists are kept
LIST_DAYS = 30.0  # a list is good for so long, unless `revoke` is told otherwise
AHEAD = timedelta(days=1)  # what the clocks of a list's signer and of its reader may differ by
WARNING = timedelta(days=5)  # before a list's end its reader is told
RELOAD_S = 2.0  # seconds between two reads of the file
BEGIN = b"-----BEGIN X509 CRL-----"
UNREADABLE = (*identity.UNREADABLE, CertificateError, TypeError, InvalidSignature)
PEM = serialization.Encoding.PEM


def revoke(
    certs_dir: Path, names: Iterable[str], *, days: float = LIST_DAYS, now: datetime | None = None
) -> list[str]:
    """Add the unexpired certificates of these sites (or "aggregator") to the issuing CA's list, and sign the
    list anew, good for `days`; returns the serials. ConfigError when one has no such certificate."""
    certs_dir, now = Path(certs_dir), now or datetime.now(UTC)
    authority, valid = Authority.load(certs_dir), _valid(certs_dir, now)
    found: list[str] = []
    for name in names:
        serials = [serial for serial, whose in valid.items() if whose == name]
        if not serials:
            raise ConfigError(
                f"{name}: no certificate of {certs_dir / 'ca'} that is valid now is this site's."
                f"{nearest(name, {*valid.values()})}"
            )
        found += serials
    _sign(certs_dir, authority.certificate, authority.key, found, valid, days, now)
    return found


def revoke_issuing(certs_dir: Path, *, path: Path | None = None, now: datetime | None = None) -> str:
    """Revoke an issuing CA by a list of the root, whose key must be here, and with it every certificate that
    the CA has signed; returns its serial. `path`: its certificate; None: the CA in use, of which a new one
    takes the place."""
    certs_dir, now = Path(certs_dir), now or datetime.now(UTC)
    ca = certs_dir / "ca"
    root, key = Authority.root_of(certs_dir)
    issuing = certificates((path or ca / "issuing.pem").read_bytes(), path)[0]
    try:
        issuing.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(f"{path}: this is no issuing CA under {ca / 'root.pem'}") from None
    serial = serial_hex(issuing)
    _sign(certs_dir, root, key, [serial], {}, ROOT_LIFE.days, now)
    if serial == serial_hex(Authority.load(certs_dir).certificate):
        renew_issuing(certs_dir, now)
    return serial


def check_not_revoked(certs_dir: Path, folder: Path) -> None:
    """ConfigError where the certificate in a leaf's folder was revoked: another one for its key would let the
    holder of that key in again."""
    if not (folder / "cert.pem").exists():
        return
    revoked = Revoked(certs_dir / LIST, (certs_dir / "ca" / "root.pem").read_bytes())
    revoked.reload()
    serial = identity.identity_of((folder / "cert.pem").read_bytes()).serial
    if any(serial in one.serials for one in revoked._lists.values()):
        raise ConfigError(
            f"{folder.name}: its certificate was revoked, and a new one would be for the same key. Move "
            f"{folder} away, then: fedtrain certs {'issue' if folder.name == 'aggregator' else 'invite'} "
            f"{folder.name}"
        )


def _valid(certs_dir: Path, now: datetime) -> dict[str, str]:
    return {serial: name for serial, name, until in issued(certs_dir) if until > now}


def _sign(
    certs_dir: Path, signer: x509.Certificate, key: ec.EllipticCurvePrivateKey, serials: Iterable[str],
    valid: dict[str, str], days: float, now: datetime,
) -> None:  # fmt: skip
    """Put a new list by this signer into the file: with these serials, and with those of its former list."""
    if days <= 0:
        raise ConfigError(f"days: {days} must be positive")
    root = certificates((certs_dir / "ca" / "root.pem").read_bytes())[0]
    revoked = Revoked(certs_dir / LIST, root.public_bytes(PEM), now=lambda: now)
    revoked.reload()
    former = revoked.by(signer)
    number = max(int(now.timestamp()), former.number + 1 if former else 0)
    listed = former.serials if former else frozenset()
    if signer != root:  # the root's list also names issuing CAs, which the register doesn't
        listed &= valid.keys()
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(signer.subject)
        .last_update(now)
        .next_update(min(now + timedelta(days=days), signer.not_valid_after_utc))
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial in sorted(listed | {*serials}):
        one = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(now)
        builder = builder.add_revoked_certificate(one.build())
    signed = builder.sign(key, hashes.SHA256()).public_bytes(PEM)
    revoked.add(signed + signer.public_bytes(PEM))


@dataclass(frozen=True)
class SignedList:
    """One list that was checked."""

    data: bytes  # as it was signed, with its signer's certificate
    signer: x509.Certificate
    number: int  # seconds since 1970
    until: datetime  # UTC
    serials: frozenset[str]


def check(data: bytes, root: x509.Certificate, now: datetime) -> SignedList:
    """One list; CertificateError unless the root, or a CA under it, has signed the list, and not in the
    future. A list past its end is no error here."""
    if len(data) > LIST_BYTES:
        raise CertificateError(f"a revocation list of {len(data)} bytes: at most {LIST_BYTES}")
    try:
        revoked, signer = x509.load_pem_x509_crl(data), certificates(data)[0]
        signer.verify_directly_issued_by(root)
        may = signer.extensions.get_extension_for_class(x509.KeyUsage).value.crl_sign
        number = revoked.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        key, until = signer.public_key(), revoked.next_update_utc
        signed = isinstance(key, ec.EllipticCurvePublicKey) and revoked.is_signature_valid(key)
    except UNREADABLE:
        raise CertificateError("not a revocation list of this federation") from None
    plain = revoked.public_bytes(PEM) + signer.public_bytes(PEM) == data  # no other bytes in between
    if not may or not signed or not plain or until is None:
        raise CertificateError("a revocation list that this federation's CA has not signed")
    if number > (now + AHEAD).timestamp():
        raise CertificateError(
            f"a revocation list numbered {str(number)[:20]}, which is a time more than a day ahead of this "
            f"machine's clock. Set the clock; if it is right, whoever signed the list has a stolen CA key."
        )
    return SignedList(data, signer, number, until, frozenset(serial_hex(each) for each in revoked))


class Revoked:
    """The newest lists known, from the file or from elsewhere. Safe to use from any thread."""

    def __init__(
        self, path: Path, root: bytes, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._path, self._root, self._now = Path(path), certificates(root)[0], now
        self._lists: dict[bytes, SignedList] = {}  # by the signer's key; replaced, never changed
        self._read = b""  # the file as it was read last

    def __call__(self, chain: Sequence[str]) -> str:
        """Why a certificate was revoked; "" when it was not. CertificateError when the newest list is past
        its end, so that nobody here knows. `chain`: the serials of the certificate and of those above it."""
        leaf, *above = chain
        for one in self._lists.values():
            if one.signer == self._root and (stolen := one.serials.intersection(above)):
                return f"the issuing CA {min(stolen)} that signed it was revoked"
            if leaf in one.serials:
                return f"its certificate {leaf} was revoked"
        if stale := self._ending(timedelta()):
            raise CertificateError(stale)
        return ""

    @property
    def lists(self) -> list[bytes]:
        """The lists as they were signed, for others; the root's first."""
        return [each.data for each in self._lists.values()]

    def by(self, signer: x509.Certificate) -> SignedList | None:
        """The list of this signer."""
        return self._lists.get(_key(signer))

    def reload(self) -> None:
        """Read the file again; CertificateError when it is damaged, and the lists known before stay."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        if data != self._read:
            self._take(data)
            self._read = data

    def add(self, data: bytes) -> None:
        """Check lists that came from elsewhere, and write them to the file if one of them is newer."""
        if self._take(data):
            write(self._path, b"".join(self.lists))

    def _take(self, data: bytes) -> bool:
        if not data.startswith(BEGIN) or len(data) > LISTS * LIST_BYTES:
            raise CertificateError("not a revocation list of this federation")
        lists, now = dict(self._lists), self._now()
        for part in data.split(BEGIN)[1:]:
            one = check(BEGIN + part, self._root, now)
            if (known := lists.get(_key(one.signer))) is None or one.number > known.number:
                lists[_key(one.signer)] = one
        dead = lists[_key(self._root)].serials if _key(self._root) in lists else frozenset()
        kept = [each for each in lists.values() if serial_hex(each.signer) not in dead]
        kept.sort(key=lambda each: (each.signer != self._root, -each.number))
        if (new := {_key(each.signer): each for each in kept[:LISTS]}) == self._lists:
            return False
        self._lists = new
        return True

    def _ending(self, within: timedelta) -> str:
        """What is to be done when the newest list of an issuing CA ends `within` this time."""
        issuing = [each for each in self._lists.values() if each.signer != self._root]
        newest = max(issuing, key=lambda each: each.number, default=None)
        if newest is None or self._now() <= newest.until - within:
            return ""
        when = "was" if self._now() > newest.until else "is"
        return (
            f"{self._path} {when} good until {newest.until:%Y-%m-%d %H:%M} UTC. Where the authority is, "
            f"`fedtrain certs revoke` without a name signs a new one; copy it here."
        )

    async def reloads(self, emit: Emit, also: Callable[[], str] = lambda: "") -> AsyncIterator[None]:
        """Read the file every RELOAD_S, for ever; what is wrong with it, or about to be, is told once, and so
        is what `also` returns."""
        told = ""
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                await asyncio.to_thread(self.reload)
                trouble = self._ending(WARNING) or also()
            except CertificateError as e:  # the lists that were read before stay in force
                trouble = f"{LIST}: {e}"
            if trouble and trouble != told:
                emit(Notice(text=trouble))
            told = trouble
            yield


def _key(signer: x509.Certificate) -> bytes:
    return signer.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
