"""Read a certificate: role, name and federation come from its single DNS name, and from nothing else.

    aggregator.<federation>.fedtrain      may serve only   (EKU serverAuth)
    <name>.site.<federation>.fedtrain     may call only    (EKU clientAuth)

A site pins `aggregator_target`, so another site's certificate can't pose as the aggregator (S4 of
docs/security.md). The aggregator reads `identity_of` on every call, so it knows which site calls (S5).
"""

from __future__ import annotations

import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtendedKeyUsageOID

from ..errors import CertificateError, ConfigError, nearest

LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"  # one part of a DNS name
NAMES = {
    "aggregator": re.compile(rf"aggregator\.(?P<federation>{LABEL})\.fedtrain"),
    "site": re.compile(rf"(?P<name>{LABEL})\.site\.(?P<federation>{LABEL})\.fedtrain"),
}
USAGE = {"aggregator": ExtendedKeyUsageOID.SERVER_AUTH, "site": ExtendedKeyUsageOID.CLIENT_AUTH}

UNREADABLE = (
    ValueError, UnsupportedAlgorithm, x509.InvalidVersion, x509.ExtensionNotFound, x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType, CryptographyDeprecationWarning,
)  # the errors that `cryptography` raises for malformed certificates  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """The holder of a certificate, as the certificate names it."""

    role: str  # aggregator | site
    name: str  # "aggregator", or the site's name
    federation: str
    serial: str  # hex, as `openssl x509 -serial` prints it
    not_after: datetime  # UTC

    def __str__(self) -> str:
        return dns_name(self.role, self.name, self.federation)


@dataclass(frozen=True)
class Credentials:
    """The key and certificates of one end of a TLS connection, in PEM, read from a folder made by `issue`."""

    key: bytes
    chain: bytes  # leaf, then issuing CA
    root: bytes
    identity: Identity

    @classmethod
    def load(cls, folder: Path, now: datetime | None = None) -> Credentials:
        """Read and check a folder; a CertificateError names the bad file and says what to do."""
        folder, now = Path(folder), now or datetime.now(UTC)
        if not folder.exists() and folder.parent.name == "sites":
            there = [path.parent.name for path in folder.parent.glob("*/cert.pem")]
            raise CertificateError(f"{folder} does not exist.{nearest(folder.name, there)} {get_one(folder)}")
        key, chain, root = (_read(folder / name) for name in ("key.pem", "cert.pem", "root.pem"))
        mode = stat.S_IMODE((folder / "key.pem").stat().st_mode)
        if mode & 0o077:
            path = folder / "key.pem"
            raise CertificateError(f"{path} can be read by others (mode {mode:04o}): chmod 600 {path}")
        identity = identity_of(chain)
        leaf, *above = certificates(chain, folder / "cert.pem")
        _check_key(key, leaf, folder)
        _check_chain([leaf, *above, *certificates(root, folder / "root.pem")[:1]], folder)
        _check_dates(leaf, identity, folder, now)
        return cls(key, chain, root, identity)


class Current:
    """The credentials of a folder as they are now: a renewed certificate counts without a restart."""

    def __init__(self, folder: Path) -> None:
        """CertificateError when the folder is not in order at the start."""
        self._folder, self._now = Path(folder), Credentials.load(folder)
        self.trouble = ""  # why the newest files are not used

    def __call__(self) -> Credentials:
        """Those of the files, unless these are no good: half copied, or of another name; then the last ones
        that were. Safe to be called from any thread."""
        try:
            if (self._folder / "cert.pem").read_bytes() != self._now.chain:
                new, old = Credentials.load(self._folder), self._now
                if str(new.identity) != str(old.identity) or new.root != old.root or new.key != old.key:
                    raise CertificateError(
                        f"{self._folder}: another name, root or key counts after a restart"
                    )
                self._now = new
            self.trouble = ""
        except (CertificateError, OSError) as e:
            self.trouble = str(e)
        return self._now

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Key, chain and root, each in PEM."""
        now = self()
        return now.key, now.chain, now.root


def identity_of(pem: bytes) -> Identity:
    """The identity in a certificate (of a chain: the first one). Signature and dates are not checked here.

    CertificateError unless the certificate has exactly one DNS name, of our form, and its role's key usage.
    The TLS handshake checks who signed a certificate and whether it has expired.
    """
    return identity_in(certificates(pem)[0])


def identity_in(leaf: x509.Certificate) -> Identity:
    """As `identity_of`, of a certificate that is read already."""
    try:
        with _warnings_are_errors():
            names = list(leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
            usages = list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
            serial = serial_hex(leaf)
    except UNREADABLE as e:
        raise CertificateError(f"not a fedtrain certificate: {e}") from None
    if len(names) != 1 or not isinstance(names[0], x509.DNSName):
        raise CertificateError(f"a certificate has {len(names)} names; exactly one DNS name is allowed")
    dns = names[0].value
    role, match = next(((r, m) for r, name in NAMES.items() if (m := name.fullmatch(dns))), (None, None))
    if role is None or match is None:
        raise CertificateError(
            f"{dns[:120]!r} is neither aggregator.FEDERATION.fedtrain nor NAME.site.FEDERATION.fedtrain"
        )
    if usages != [USAGE[role]]:
        raise CertificateError(
            f"{dns} may be used for {', '.join(u._name for u in usages)}; {role} certificates "
            f"are for {USAGE[role]._name} only"
        )
    name = match.groupdict().get("name", "aggregator")
    return Identity(role, name, match["federation"], serial, leaf.not_valid_after_utc)


def aggregator_target(federation: str) -> str:
    """The DNS name that a site requires in the aggregator's certificate, at whatever address it calls."""
    return f"aggregator.{federation}.fedtrain"


def dns_name(role: str, name: str, federation: str) -> str:
    """The DNS name for a certificate; ConfigError when a part of the name is not allowed."""
    check_label("federation", federation)
    if role == "aggregator":
        return aggregator_target(federation)
    assert role == "site", role
    check_label("site", name)
    if name == "aggregator":
        raise ConfigError('"aggregator" is the aggregator\'s own name: choose another for the site')
    return f"{name}.site.{federation}.fedtrain"


def check_label(what: str, label: str) -> None:
    """ConfigError unless `label` can be one part of a DNS name; `what` says in the message what it names."""
    if not re.fullmatch(LABEL, label):
        raise ConfigError(
            f"{what} name {label[:80]!r}: use 1 to 63 of a-z, 0-9 and '-', not '-' first or last, "
            f'as in "st-mary-2"'
        )


def serial_hex(certificate: x509.Certificate | x509.RevokedCertificate) -> str:
    """The serial number in upper-case hex with an even number of digits, as openssl prints it."""
    digits = f"{certificate.serial_number:X}"
    return digits.zfill(len(digits) + len(digits) % 2)


def get_one(folder: Path) -> str:
    """How the aggregator, a site or a peer gets the certificate of its folder: a site's key is made at
    the site, unless the federation's authority is on the same machine."""
    site = folder.parent.name == "sites"
    here = (folder.parents[site] / "ca" / "issuing.pem").exists()
    if site and not here:
        return (
            f"`fedtrain join HOST:PORT CODE` makes the key here and fetches a certificate for it. "
            f"The code is printed by `fedtrain certs invite {folder.name}`, where the federation's "
            f"certificate authority is (as a rule at the aggregator's operator)."
        )
    first = "" if here else "`fedtrain certs init` makes the federation's authority, once; then "
    return f"{first}`fedtrain certs issue {folder.name}` makes it."


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CertificateError(f"{path} does not exist. {get_one(path.parent)}") from None
    except OSError as e:
        raise CertificateError(f"{path} cannot be read: {e.strerror}") from None


def certificates(pem: bytes, path: Path | None = None) -> list[x509.Certificate]:
    """The certificates in PEM bytes, at least one; `path` names the file in the CertificateError."""
    try:
        with _warnings_are_errors():
            return x509.load_pem_x509_certificates(pem)
    except UNREADABLE:
        raise CertificateError(f"{path or 'these bytes'}: not a PEM certificate") from None


def key_of(certificate: x509.Certificate) -> CertificatePublicKeyTypes:
    """The key that a certificate is for. CertificateError for a kind that can't be read: it is parsed now."""
    try:
        return certificate.public_key()
    except UNREADABLE as e:
        raise CertificateError(f"the key in a certificate can't be read: {e}") from None


_filters = threading.Lock()  # warning filters belong to the whole process


@contextmanager
def _warnings_are_errors() -> Iterator[None]:
    """Raise the warnings of `cryptography`, as for a serial number below 1: none of our certificates causes
    one, and a sender of damaged certificates must not be able to write to our stderr."""
    with _filters, warnings.catch_warnings(action="error", category=CryptographyDeprecationWarning):
        yield


def _check_key(key: bytes, leaf: x509.Certificate, folder: Path) -> None:
    try:
        public = serialization.load_pem_private_key(key, password=None).public_key()
    except (ValueError, TypeError):
        raise CertificateError(f"{folder / 'key.pem'}: not an unencrypted PEM private key") from None
    if public != key_of(leaf):
        raise CertificateError(
            f"{folder}: key.pem and cert.pem do not belong together. Leave key.pem where it is, and copy "
            f"cert.pem alone from where the authority is: `fedtrain certs issue {folder.name}` makes one for "
            f"the key that it knows; for another key, `fedtrain certs sign` signs its request."
        )


def _check_chain(chain: list[x509.Certificate], folder: Path) -> None:
    """CertificateError unless each is signed by the next one: files of two CAs fail only in the handshake."""
    for below, above in pairwise(chain):
        try:
            below.verify_directly_issued_by(above)
        except (*UNREADABLE, TypeError, InvalidSignature):
            raise CertificateError(
                f"{folder}: cert.pem was not signed under root.pem. Copy both from the same authority."
            ) from None


def _check_dates(leaf: x509.Certificate, identity: Identity, folder: Path, now: datetime) -> None:
    start, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    valid = (
        f"valid from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}, and now it is {now:%Y-%m-%d %H:%M} UTC"
    )
    clock = "If it is not, this machine's clock is wrong: set it."
    if now > end:
        raise CertificateError(
            f"{folder / 'cert.pem'} has expired: {valid}. {clock} Else renew it with "
            f"`fedtrain certs issue {identity.name}` where the authority is, which keeps the key, and copy "
            f"its cert.pem here, and no other file."
        )
    if now < start:
        raise CertificateError(f"{folder / 'cert.pem'} is not valid yet: {valid}. {clock}")
