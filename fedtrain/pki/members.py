"""The members of a federation, signed by each of them: `fedtrain policy sign FILE`.

    federation.members            passed from site to site, by any way, until all have signed
    sites/NAME/members.json       the same, once all have: what that site's policy holds to

Pins alone are each site's own list, and two sites may have been told of different ones. A list that all have
signed is one list: nobody is in it whom a member has not agreed to, and each member knows that the others
agreed to it. A signature is by the key whose fingerprint stands in the list, so neither whoever carries the
file nor the holder of the issuing key can change it, and no certificate's end ends it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from ..errors import CertificateError
from ..messages import SiteId
from .authority import write
from .identity import certificates
from .signing import ECDSA, Signer

FILE = "members.json"
CONTEXT = b"fedtrain members 1\0"  # signed bytes begin with this: the signature serves for nothing else
LONGEST = 1 << 20  # bytes of a file that is read


class Consent(msgspec.Struct, frozen=True):
    """A member's signature."""

    key: bytes  # the public key, DER
    signature: bytes  # DER, over Members.statement


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """A list of members, as far as they have signed it."""

    federation: str
    members: dict[SiteId, str]  # name -> fingerprint of the key, in hex
    signatures: dict[SiteId, Consent] = {}

    @property
    def statement(self) -> bytes:
        """What each member signs."""
        return CONTEXT + msgspec.json.encode([self.federation, sorted(self.members.items())])

    def signed_by(self, site: SiteId, signer: Signer) -> Members:
        """The list with this member's signature; CertificateError where it has another key, or is none."""
        public = certificates(signer.certificate)[0].public_key()
        key = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if self.members.get(site) != hashlib.sha256(key).hexdigest():
            raise CertificateError(f"{site} is not among these members with its key: begin a new list")
        own = Consent(key, signer.sign(self.statement))
        return msgspec.structs.replace(self, signatures={**self.signatures, site: own})

    def missing(self) -> list[SiteId]:
        """The members that have not signed, sorted; CertificateError for a signature that is none."""
        for site, consent in self.signatures.items():
            if self.members.get(site) != hashlib.sha256(consent.key).hexdigest():
                raise CertificateError(f"the signature of {site} is by no key of the list")
            try:
                key = load_der_public_key(consent.key)
                if not isinstance(key, ec.EllipticCurvePublicKey):
                    raise CertificateError(f"the key of {site} is no elliptic-curve key")
                key.verify(consent.signature, self.statement, ECDSA)
            except (InvalidSignature, ValueError, UnsupportedAlgorithm):
                raise CertificateError(f"the signature of {site} is not over this list") from None
        return sorted(self.members.keys() - self.signatures.keys())

    def write(self, path: Path) -> None:
        """Into the file, in one step."""
        write(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Members:
        """CertificateError for a file that holds none; FileNotFoundError without one."""
        try:
            with path.open("rb") as file:
                return msgspec.json.decode(file.read(LONGEST), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise CertificateError(f"{path} is no list of members: {str(e)[:120]}") from None


def check(folder: Path, federation: str, pinned: Mapping[SiteId, str]) -> None:
    """CertificateError unless the list in a site's folder is exactly `pinned`, and each member has signed
    it."""
    path = folder / FILE
    how = "Have all sign one: fedtrain policy sign FILE"
    try:
        found = Members.read(path)
    except FileNotFoundError:
        raise CertificateError(f"{path} is gone, and policy.signed_members = true. {how}") from None
    if found.federation != federation:
        raise CertificateError(f"{path} is of the federation {found.federation[:80]!r}. {how}")
    if missing := found.missing():
        raise CertificateError(f"{path}: {', '.join(missing[:5])} has not signed the list of members. {how}")
    if odd := sorted({name for name, _ in found.members.items() ^ pinned.items()}):
        raise CertificateError(
            f"{path}: {', '.join(odd[:5])} is pinned in the policy alone, or stands in the list alone "
            f"(policy.signed_members). {how}"
        )
