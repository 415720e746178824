"""The certificate authority (CA) of one federation: an offline root, one issuing CA, short-lived leaves.

    ca/root.pem  ca/root.key.pem            10 years; the key is needed only to renew the issuing CA
    ca/issuing.pem  ca/issuing.key.pem      1 year; may sign only names under <federation>.fedtrain
    ca/issued                               the CA's register: a line for each certificate, for `revoke`
    aggregator/  sites/NAME/                key.pem (0600), cert.pem (leaf + issuing), root.pem

Each leaf folder (aggregator/, sites/NAME/) has all that TLS needs on the machine to which it is copied.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ..errors import CertificateError, ConfigError, writing
from .identity import UNREADABLE, USAGE, certificates, check_label, dns_name, identity_of, serial_hex

PublicKey = ec.EllipticCurvePublicKey
PrivateKey = ec.EllipticCurvePrivateKey

ROOT_LIFE = timedelta(days=3650)
ISSUING_LIFE = timedelta(days=365)
CLOCK_SKEW = timedelta(minutes=5)  # a certificate is valid at once, on a machine whose clock is a little slow


@dataclass(frozen=True)
class Authority:
    """A CA that signs certificates: its certificate, its key, and the root above it."""

    certificate: x509.Certificate
    key: PrivateKey
    root: x509.Certificate

    @classmethod
    def load(cls, certs_dir: Path) -> Authority:
        """The issuing CA under `certs_dir`; ConfigError when there is none."""
        ca = Path(certs_dir) / "ca"
        if not (ca / "issuing.pem").exists():
            raise ConfigError(
                f"{ca} holds no certificate authority. Make it once per federation: fedtrain certs init"
            )
        issuing, root = _load_certificate(ca / "issuing.pem"), _load_certificate(ca / "root.pem")
        return cls(issuing, _load_key(ca / "issuing.key.pem"), root)

    @classmethod
    def root_of(cls, certs_dir: Path) -> tuple[x509.Certificate, PrivateKey]:
        """The root under `certs_dir` and its key; ConfigError when the key is kept elsewhere."""
        ca = Path(certs_dir) / "ca"
        if not (ca / "root.key.pem").exists():
            raise ConfigError(
                f"{ca}: bring root.key.pem back from where it is kept; the root alone signs this"
            )
        return _load_certificate(ca / "root.pem"), _load_key(ca / "root.key.pem")

    @property
    def federation(self) -> str:
        """The name of the federation for which this CA may sign, read from the CA's name constraint."""
        return _federation_of(self.certificate)


def federation_of(certs_dir: Path) -> str:
    """The federation of the authority under `certs_dir`, whose keys may be elsewhere."""
    return _federation_of(_load_certificate(Path(certs_dir) / "ca" / "issuing.pem"))


def _federation_of(issuing: x509.Certificate) -> str:
    constraints = issuing.extensions.get_extension_for_class(x509.NameConstraints).value
    subtrees = constraints.permitted_subtrees or []
    return str(subtrees[0].value).removesuffix(".fedtrain")


def init(certs_dir: Path, federation: str = "fedtrain", *, now: datetime | None = None) -> Path:
    """Make the root and the issuing CA, or only a new issuing CA where a root exists; returns the folder ca/.

    ConfigError where an issuing CA exists: overwriting it would end every certificate that it has signed.
    """
    check_label("federation", federation)
    ca, now = Path(certs_dir) / "ca", now or datetime.now(UTC)
    if (ca / "issuing.pem").exists():
        raise ConfigError(
            f"{ca} already holds a certificate authority, which is never overwritten. Use it: fedtrain certs "
            f"issue NAME. To renew its issuing CA, move issuing.pem and issuing.key.pem away, then run "
            f"this again. For another federation, choose another directory."
        )
    ca.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (ca / "root.pem").exists():
        _make_root(ca, federation, now)
    _make_issuing(ca, *Authority.root_of(certs_dir), federation, now)
    return ca


def renew_issuing(certs_dir: Path, now: datetime) -> None:
    """Put a new issuing CA, with a new key, in the place of the one in use."""
    federation = Authority.load(certs_dir).federation
    _make_issuing(Path(certs_dir) / "ca", *Authority.root_of(certs_dir), federation, now)


def issue(
    certs_dir: Path,
    role: str,
    name: str = "aggregator",
    *,
    days: float = 30,
    csr: bytes | None = None,
    now: datetime | None = None,
) -> Path:
    """Make or renew the folder of the aggregator or of one site; returns its path. `days`: the lifetime.

    Renewing keeps the key, also where the folder has cert.pem alone because the key lies at the site. With
    `csr` (a signing request in PEM) the private key stays with the requester: only the public key is taken
    from the request. ConfigError where a second key for one name would come about.
    """
    certs_dir, now = Path(certs_dir), now or datetime.now(UTC)
    if days <= 0:
        raise ConfigError(f"days: {days} must be positive")
    if role not in USAGE:
        raise ConfigError(f"role: {role!r} is neither 'aggregator' nor 'site'")
    authority = Authority.load(certs_dir)
    dns = dns_name(role, name, authority.federation)
    end = authority.certificate.not_valid_after_utc
    if now >= end:
        raise CertificateError(
            f"the issuing CA in {certs_dir / 'ca'} expired on {end:%Y-%m-%d}. Move issuing.pem and "
            f"issuing.key.pem away and run fedtrain certs init: it makes a new one under the same root."
        )
    folder = certs_dir / "aggregator" if role == "aggregator" else certs_dir / "sites" / name
    key, public = None, requested_key(csr) if csr is not None else _key_elsewhere(certs_dir, folder, dns)
    if public is None:
        key = own_key(folder)
        public = key.public_key()
    if (folder / "key.pem").exists() and _load_key(folder / "key.pem").public_key() != public:
        raise ConfigError(f"csr: {folder / 'key.pem'} is another key than the request's; delete it first")
    certificate = sign(
        authority,
        public,
        name if role == "site" else "aggregator",
        dns=[dns],
        usages=[USAGE[role]],
        not_before=now - CLOCK_SKEW,
        not_after=min(now + timedelta(days=days), end),
    )
    _enter(certs_dir, name if role == "site" else "aggregator", certificate)
    return save(folder, certificate, authority, key)


def _key_elsewhere(certs_dir: Path, folder: Path, dns: str) -> PublicKey | None:
    """The public key of a site whose private key is not in the folder, from its certificate there; None where
    this authority makes the key itself, or has it."""
    request = certs_dir / "requests" / f"{folder.name}.csr"
    if (folder / "key.pem").exists() or not ((folder / "cert.pem").exists() or request.exists()):
        return None
    if not (folder / "cert.pem").exists():
        raise ConfigError(
            f"{folder.name} made its key itself and sent {request}. `fedtrain certs sign {request}` makes a "
            f"certificate for that key; where the key is lost, `fedtrain certs invite {folder.name}`."
        )
    chain = (folder / "cert.pem").read_bytes()
    leaf, identity = certificates(chain, folder / "cert.pem")[0], identity_of(chain)
    known = any(serial == identity.serial for serial, _, _ in issued(certs_dir))
    public = leaf.public_key()
    if str(identity) != dns or not known or not isinstance(public, PublicKey):
        raise ConfigError(
            f"{folder / 'cert.pem'} is not a certificate that this authority gave to {dns} (ca/issued has "
            f"none with the serial {identity.serial}). Remove the file."
        )
    return public


def reissue(certs_dir: Path, authority: Authority, chain: bytes, now: datetime, until: datetime) -> bytes:
    """The chain, in PEM, of a new certificate with the name, the role and the key of an earlier one, which
    the caller has found to count."""
    identity, public = identity_of(chain), certificates(chain)[0].public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey), "as Verifier.trust finds it"
    certificate = sign(
        authority, public, identity.name, dns=[str(identity)], usages=[USAGE[identity.role]],
        not_before=now - CLOCK_SKEW, not_after=until,
    )  # fmt: skip
    _enter(certs_dir, identity.name, certificate)
    return pem(certificate) + pem(authority.certificate)


def _enter(certs_dir: Path, name: str, certificate: x509.Certificate) -> None:
    """Add a certificate to the register, before its file is written: the register misses none in use."""
    path = certs_dir / "ca" / "issued"
    with writing(path), path.open("a") as register:
        register.write(f"{serial_hex(certificate)} {name} {certificate.not_valid_after_utc:%Y-%m-%dT%H:%M}\n")


def issued(certs_dir: Path) -> list[tuple[str, str, datetime]]:
    """(serial, site or "aggregator", expiry in UTC) of every certificate of this CA, expired ones too."""
    path = Path(certs_dir) / "ca" / "issued"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(serial, name, datetime.fromisoformat(f"{until}+00:00")) for serial, name, until in lines]


def sign(
    authority: Authority,
    public: PublicKey,
    common_name: str,
    *,
    dns: Iterable[str],
    usages: Iterable[x509.ObjectIdentifier],
    not_before: datetime,
    not_after: datetime,
) -> x509.Certificate:
    """A leaf certificate with exactly these fields, unchecked: `issue` checks them; security tests forge."""
    return (
        _certificate(common_name, public, authority.certificate.subject, not_before, not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(d) for d in dns]), critical=False)
        .add_extension(_signed_by(authority.certificate), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def save(
    folder: Path, certificate: x509.Certificate, authority: Authority, key: PrivateKey | None = None
) -> Path:
    """Write a leaf's folder and return it; each file is replaced atomically. Without `key`, key.pem stays."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if key is not None:
        write(folder / "key.pem", pem(key), 0o600)
    write(folder / "root.pem", pem(authority.root))
    write(folder / "cert.pem", pem(certificate) + pem(authority.certificate))
    return folder


def own_authority(name: str, key: PrivateKey, life: timedelta, now: datetime, below: int = 0) -> Authority:
    """An authority of a key that signs for itself, with at most `below` authorities below it."""
    certificate = (
        _certificate(name, key.public_key(), _name(name), now - CLOCK_SKEW, now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=below), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key, certificate)


def _make_root(ca: Path, federation: str, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = own_authority(f"{federation} root", key, ROOT_LIFE, now, below=1).certificate
    write(ca / "root.key.pem", pem(key), 0o600)
    write(ca / "root.pem", pem(certificate))


def _make_issuing(
    ca: Path, root: x509.Certificate, root_key: PrivateKey, federation: str, now: datetime
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now + ISSUING_LIFE, root.not_valid_after_utc)
    certificate = (
        _certificate(f"{federation} issuing CA", key.public_key(), root.subject, now - CLOCK_SKEW, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.NameConstraints([x509.DNSName(f"{federation}.fedtrain")], None), critical=True)
        .add_extension(_signed_by(root), critical=False)
        .sign(root_key, hashes.SHA256())
    )
    write(ca / "issuing.key.pem", pem(key), 0o600)
    write(ca / "issuing.pem", pem(certificate))


def _certificate(
    common_name: str, public: PublicKey, issuer: x509.Name, not_before: datetime, not_after: datetime
) -> x509.CertificateBuilder:
    """A builder with the fields that root, issuing CA and leaves have in common."""
    return (
        x509.CertificateBuilder()
        .subject_name(_name(common_name))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _signed_by(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    key_id = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def own_key(folder: Path) -> PrivateKey:
    """The folder's key, or a new one."""
    path = folder / "key.pem"
    return _load_key(path) if path.exists() else ec.generate_private_key(ec.SECP256R1())


def requested_key(csr: bytes) -> PublicKey:
    """The public key of a signing request in PEM that proves possession of its private half."""
    try:
        request = x509.load_pem_x509_csr(csr)
        public, signed = request.public_key(), request.is_signature_valid
    except UNREADABLE:
        raise ConfigError("csr: not a PEM certificate signing request") from None
    if not signed or not isinstance(public, ec.EllipticCurvePublicKey):
        raise ConfigError("csr: use an elliptic-curve key (P-256) and sign the request with it")
    return public


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return certificates(path.read_bytes(), path)[0]
    except OSError as e:
        raise CertificateError(f"{path}: not a readable PEM certificate ({e})") from None


def _load_key(path: Path) -> PrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as e:
        raise CertificateError(f"{path}: not a readable, unencrypted PEM private key ({e})") from None
    if not isinstance(key, PrivateKey):
        raise CertificateError(f"{path}: not an elliptic-curve key")
    return key


def pem(thing: x509.Certificate | PrivateKey) -> bytes:
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(serialization.Encoding.PEM)
    return thing.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file in one step; a key is never readable by others, not even for a moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with writing(path), os.fdopen(fd, "wb") as f:
        os.fchmod(fd, mode)  # overrides the umask, and the mode of a file that an interrupted run left
        f.write(data)
        os.fsync(fd)
    os.replace(temporary, path)
