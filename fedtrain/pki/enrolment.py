"""How a site gets its certificate while its key stays at the site: a one-time code, a request, spoken words.

    ca/invited/DIGEST        at the authority: whom a code is for, until when, and when it was used (0600)
    requests/NAME.csr        at the authority: what the site asks to be signed

Host and guest make a key from the code's secret (128 bits), and both use that key as the authority of one
TLS connection. So nobody without the code gets through the handshake, and nothing is told to him. The code
also carries the fingerprint of the federation's root, so that nobody with the code can hand the site another.

A thief of the code can ask in the site's name. Therefore both ends show three words (48 bits): the person at
the host hears from the site, on the telephone, what the host's own screen shows. The words are made of the
root, the name, the key that is to be signed, and a random number of each end, in the order of ZRTP (RFC 6189,
section 4.4.1.1), so that a thief between both ends has one guess in 2^48 however much he computes:

    1. guest -> host   the hash of the guest's number and key (the commitment)
    2. host -> guest   the host's number, one for each code
    3. guest -> host   the guest's number, and the request with the key

Towards the host the thief must commit to his key before he learns the host's number, and a code takes one
commitment. Towards the guest he must choose the host's number before he learns the guest's, and the guest
takes one number for each code, also when `fedtrain join` is started again.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ..errors import CertificateError, ConfigError
from ..messages import SiteId
from . import authority
from .authority import Authority, own_key, pem, requested_key
from .identity import USAGE, certificates, check_label, identity_of
from .signing import Verifier

VERSION = 2  # of the enrolment's protocol, which must be the same at both ends
NUMBER_BYTES = 32  # of the random number of each end
SECRET_BYTES = 16
FAULTS = 5  # requests that are none, after which a code is void
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256's group
CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aiou"  # of proquints (arXiv:0901.4016): 16 bits a word


class Code(msgspec.Struct, frozen=True, array_like=True):
    """What the guest is given."""

    guest: SiteId
    federation: str
    root: bytes  # SHA-256 of the root certificate
    until: int  # seconds since 1970
    secret: bytes

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> Code:
        """The code as it was printed; ConfigError when it is damaged, or its time is over."""
        try:
            data = base64.urlsafe_b64decode(text.strip() + "=" * (-len(text.strip()) % 4))
            code = msgspec.msgpack.decode(data, type=cls)
        except (ValueError, RecursionError, msgspec.DecodeError):
            raise ConfigError("CODE: this is none. Paste all that `fedtrain certs invite` printed.") from None
        if len(code.secret) != SECRET_BYTES or len(code.root) != 32:
            raise ConfigError("CODE: it is damaged. Paste all that `fedtrain certs invite` printed.")
        check_label("site", code.guest)
        check_label("federation", code.federation)
        return code

    @property
    def id(self) -> str:
        """The name of its connection, which tells nothing of the secret."""
        return hashlib.sha256(b"fedtrain invitation\0" + self.secret).hexdigest()[:32]

    @property
    def authority(self) -> Authority:
        """The authority of the one connection, the same at both ends."""
        derived = HKDF(hashes.SHA256(), 48, None, b"fedtrain invitation authority 1").derive(self.secret)
        key = ec.derive_private_key(int.from_bytes(derived) % (ORDER - 1) + 1, ec.SECP256R1())
        return authority.own_authority(self.id, key, timedelta(days=30), datetime.now(UTC))

    def leaf(self, role: str) -> tuple[bytes, bytes]:
        """(key, chain) in PEM for this end of the connection, with a key of its own."""
        above, key, now = self.authority, ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        certificate = authority.sign(
            above, key.public_key(), role, dns=[self.target], usages=[USAGE[role]],
            not_before=now - timedelta(days=1), not_after=now + timedelta(days=30),
        )  # fmt: skip
        return pem(key), pem(certificate) + pem(above.certificate)

    @property
    def target(self) -> str:
        """The name in both certificates of the connection."""
        return f"{self.id}.invitation.fedtrain"


def words(root: bytes, name: SiteId, public: ec.EllipticCurvePublicKey, numbers: bytes) -> str:
    """Three words of five letters to be read aloud; the same at both ends when the key and the `numbers` (the
    guest's, then the host's) are the same."""
    said = root + name.encode() + b"\0" + numbers + csr_key(public)
    digest = hashlib.sha256(b"fedtrain words 2\0" + said).digest()
    return " ".join(_proquint(int.from_bytes(digest[at : at + 2])) for at in (0, 2, 4))


def commitment(number: bytes, public: ec.EllipticCurvePublicKey) -> bytes:
    """What the guest sends of its number and key before it knows the host's number."""
    return hashlib.sha256(b"fedtrain commitment 2\0" + number + csr_key(public)).digest()


def spoken_of(root: bytes, name: SiteId, request: bytes) -> str:
    """What the site reads out so that a request in PEM is signed: the words where the site enrols by a code,
    else the SHA-256 of its public key (DER)."""
    public = requested_key(request)
    if found := re.search(rb"^numbers: ([0-9a-f]{128})$", request, re.MULTILINE):
        return words(root, name, public, bytes.fromhex(found[1].decode()))
    return hashlib.sha256(csr_key(public)).hexdigest()


def _proquint(number: int) -> str:
    shifts = ((12, CONSONANTS), (10, VOWELS), (6, CONSONANTS), (4, VOWELS), (0, CONSONANTS))
    return "".join(letters[number >> shift & len(letters) - 1] for shift, letters in shifts)


def root_digest(root: bytes) -> bytes:
    """SHA-256 (32 bytes) of the root certificate in PEM bytes."""
    return certificates(root)[0].fingerprint(hashes.SHA256())


# --- the guest's end


def request(folder: Path) -> tuple[bytes, ec.EllipticCurvePublicKey]:
    """A signing request in PEM for the key in the folder, which is made on first use and stays there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = own_key(folder)
    authority.write(folder / "key.pem", pem(key), 0o600)
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return csr.public_bytes(Encoding.PEM), key.public_key()


def number_of(folder: Path, code: Code) -> bytes:
    """The guest's number for this code: random for all others, and the same in each start of `join`."""
    secret = pem(own_key(folder))
    return HKDF(hashes.SHA256(), NUMBER_BYTES, None, f"fedtrain enrolment {code.id}".encode()).derive(secret)


def settle(folder: Path, code: Code, host: bytes) -> None:
    """Remember the host's number before the guest's own is revealed; CertificateError for a second one, by
    which a thief would choose the words."""
    kept = folder / "enrolling"
    before = kept.read_text().split() if kept.exists() else []
    if len(host) != NUMBER_BYTES or (before[:1] == [code.id] and before[1:] != [host.hex()]):
        raise CertificateError(
            "the other end answered with another number than before: somebody may sit in between. Ask for "
            "another code, over another way"
        )
    authority.write(kept, f"{code.id} {host.hex()}".encode(), 0o600)


def keep(folder: Path, code: Code, chain: bytes, root: bytes) -> None:
    """Keep the certificate that came for our request. CertificateError unless the root is the code's, and
    the certificate is under it, of our name and our key."""
    if root_digest(root) != code.root:
        raise CertificateError("the root that came is not the one in the code: don't use this invitation")
    trusted = Verifier(root, code.federation).trust(chain)
    if trusted.identity.name != code.guest or trusted.key != own_key(folder).public_key():
        raise CertificateError(f"a certificate came for another name or key: {identity_of(chain)}")
    authority.write(folder / "root.pem", root)
    authority.write(folder / "cert.pem", chain)
    (folder / "enrolling").unlink(missing_ok=True)


# --- the host's end


class KeptCode(msgspec.Struct, kw_only=True):
    """A code as the host keeps it."""

    code: Code
    commitment: str = ""  # hex, of the guest that used it
    number: str = ""  # hex, of the host, for that guest
    used: datetime | None = None  # when it was first used
    faults: int = 0  # requests that were none
    done: bool = False  # the guest has its certificate


class Codes:
    """The invitations of one authority. Each is a file: it is read at every use, and outlives a restart."""

    def __init__(self, certs_dir: Path) -> None:
        self.certs = Path(certs_dir)
        self._folder = self.certs / "ca" / "invited"

    def invite(self, guest: SiteId, life: timedelta) -> Code:
        """A new code, which takes the place of an earlier one of this name; ConfigError for a bad name."""
        check_label("site", guest)
        if guest == "aggregator":
            raise ConfigError("the aggregator is not invited: fedtrain certs issue aggregator")
        root, now = (self.certs / "ca" / "root.pem").read_bytes(), datetime.now(UTC)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path, invited in self._all():
            if invited.code.guest == guest or now.timestamp() > invited.code.until + 30 * 86400:
                path.unlink()
        code = Code(
            guest=guest, federation=authority.federation_of(self.certs), root=root_digest(root),
            until=int((now + life).timestamp()), secret=secrets.token_bytes(SECRET_BYTES),
        )  # fmt: skip
        self._write(KeptCode(code=code))
        return code

    def open(self) -> list[Code]:
        """The codes that may be used, or still serve to fetch a certificate, in the guests' order."""
        return sorted((each.code for each in self._valid() if not each.done), key=lambda code: code.guest)

    def commit(self, code: Code, committed: bytes) -> bytes:
        """The host's number for a guest's commitment, the first one for this code. CertificateError, whose
        line is sent to the guest, when the code was used with another one, or has expired."""
        invited, now = self._find(code), datetime.now(UTC)
        if invited.used is not None and invited.commitment != committed.hex():
            raise CertificateError(
                f"this code was used on {invited.used:%Y-%m-%d %H:%M} UTC. Ask for another."
            )
        if now.timestamp() >= code.until:
            raise CertificateError("this code has expired. Ask for another.")
        if invited.used is None:
            number = secrets.token_hex(NUMBER_BYTES)
            invited = msgspec.structs.replace(invited, commitment=committed.hex(), number=number, used=now)
            self._write(invited)
        return bytes.fromhex(invited.number)

    def ask(self, code: Code, csr: bytes, number: bytes) -> str:
        """Take the request of a guest that has committed to it; kept as requests/NAME.csr. Returns its words.
        CertificateError, whose line is sent to the guest, when the request is none, or another one."""
        invited = self._find(code)
        try:
            public = requested_key(csr)
            if len(number) != NUMBER_BYTES or commitment(number, public).hex() != invited.commitment:
                raise ConfigError("csr: the guest has committed to another key or number")
        except ConfigError as e:
            self._write(msgspec.structs.replace(invited, faults=invited.faults + 1))
            if invited.faults + 1 >= FAULTS:
                self.void(code)
            raise CertificateError(str(e)) from None
        numbers = number + bytes.fromhex(invited.number)
        path = self.certs / "requests" / f"{code.guest}.csr"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        plain = x509.load_pem_x509_csr(csr).public_bytes(Encoding.PEM)
        authority.write(path, plain + f"numbers: {numbers.hex()}\n".encode())
        return words(code.root, code.guest, public, numbers)

    def done(self, code: Code) -> None:
        """The guest has its certificate: the code is over."""
        with suppress(CertificateError):
            self._write(msgspec.structs.replace(self._find(code), done=True))

    def signed(self, code: Code, csr: bytes) -> tuple[bytes, bytes] | None:
        """(chain, root) once this request was signed, here or elsewhere; None until then."""
        folder = self.certs / "sites" / code.guest
        try:
            chain, root = (folder / "cert.pem").read_bytes(), (self.certs / "ca" / "root.pem").read_bytes()
        except FileNotFoundError:
            return None
        return (chain, root) if certificates(chain)[0].public_key() == requested_key(csr) else None

    def void(self, code: Code) -> None:
        """Let nobody use this code from now on."""
        (self._folder / code.id).unlink(missing_ok=True)

    def caller(self, chain: bytes) -> Code:
        """The code whose holder shows this certificate; CertificateError when there is none."""
        leaf = certificates(chain)[0]
        for code in (each.code for each in self._valid()):
            with suppress(ValueError, TypeError, InvalidSignature):
                leaf.verify_directly_issued_by(code.authority.certificate)
                return code
        raise CertificateError("this code is good no more. Ask for another.")

    def _find(self, code: Code) -> KeptCode:
        try:
            return msgspec.json.decode((self._folder / code.id).read_bytes(), type=KeptCode)
        except FileNotFoundError:
            raise CertificateError("this code is good no more. Ask for another.") from None

    def _valid(self) -> list[KeptCode]:
        now = datetime.now(UTC).timestamp()
        return [each for _, each in self._all() if now < each.code.until]

    def _all(self) -> list[tuple[Path, KeptCode]]:
        paths = sorted(self._folder.glob("[0-9a-f]*")) if self._folder.exists() else []
        return [(path, msgspec.json.decode(path.read_bytes(), type=KeptCode)) for path in paths]

    def _write(self, invited: KeptCode) -> None:
        authority.write(self._folder / invited.code.id, msgspec.json.encode(invited), 0o600)


def csr_key(public: ec.EllipticCurvePublicKey) -> bytes:
    return public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
