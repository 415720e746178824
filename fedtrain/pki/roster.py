"""The roster of a gossip run: who may speak, under which CURVE key, and where. Each entry is its peer's word.

    roster/NAME.peer     one file a peer: name, CURVE public key, address, signed with its certificate's key
    curve.key            beside key.pem: the secret half, mode 0600, made at the site on first use

ZeroMQ knows no certificates. So a site signs its CURVE key with the key of its certificate, and everybody
takes only entries whose certificate leads to the federation's root, names the peer, and is not revoked. The
folder is looked at again while a run goes on: a new file lets a peer in, a deleted one cuts it off, and so
does the federation's revocation list, which travels with the entries.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import CertificateError, ConfigError, writing
from ..exchange import Contact
from ..messages import SiteId
from .invitation import Guestbook
from .mask_keys import PREFIX as MASK
from .mask_keys import MaskKeys
from .revocation import LIST, Revoked
from .signing import SIGNED_BYTES, Signed, Signer, Verifier, claimed

SUFFIX = ".peer"
Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
CONTEXT = b"fedtrain roster entry 1\0"  # what is signed begins with this, and so is no other statement


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer says of itself."""

    peer: SiteId
    federation: str
    key: bytes  # CURVE public key, z85, 40 bytes
    address: str | None = None  # host:port; None: it can't be called, it calls
    number: int = 0  # grows with each new claim of a peer: the highest counts. Seconds since 1970, so that
    # one made on a new machine, from nothing, counts more than those before


def enrol(signer: Signer, claim: Claim) -> Signed:
    """A peer's own entry; anybody may pass it on."""
    return Signed.by(signer, CONTEXT, claim)


def check(data: bytes, verifier: Verifier, federation: str) -> tuple[Contact, int]:
    """What an entry's bytes say, and its number; CertificateError says why it can't be believed."""
    signed_by, claim = claimed(data, Claim, CONTEXT, "roster entry", verifier)
    if signed_by != claim.peer:
        raise CertificateError(
            f"{signed_by} signed an entry for {claim.peer[:80]!r}: a peer speaks for itself"
        )
    if claim.federation != federation:
        raise CertificateError(f"{claim.peer}: its entry is for the federation {claim.federation[:80]!r}")
    if not _is_z85_key(claim.key):
        raise CertificateError(f"{claim.peer}: {claim.key[:50]!r} is no CURVE key in z85")
    if claim.address is not None and not is_address(claim.address):
        raise CertificateError(f'{claim.peer}: its address {claim.address[:80]!r} must be "host:port"')
    return Contact(claim.peer, claim.key, claim.address), claim.number


def _is_z85_key(text: bytes) -> bool:
    """32 bytes as ZeroMQ writes them: 8 groups of 5 characters, each a number below 2^32, base 85."""
    digits = [Z85.find(character) for character in text]
    numbers = [sum(d * 85 ** (4 - i) for i, d in enumerate(digits[at : at + 5])) for at in range(0, 40, 5)]
    return len(text) == 40 and min(digits) >= 0 and max(numbers) < 1 << 32


def is_address(text: str) -> bool:
    """What ZeroMQ can call: a name or an IPv4 address, or an IPv6 address in brackets; and a port."""
    host, _, port = text.rpartition(":")
    if re.fullmatch(r"[1-9]\d{0,4}", port, re.ASCII) is None or int(port) > 65535:
        return False
    if re.fullmatch(r"\[[0-9A-Fa-f:.]+\]", host):
        with suppress(ipaddress.AddressValueError):
            return bool(ipaddress.IPv6Address(host[1:-1]))
    return re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9])?", host) is not None


class Roster:
    """The entries of a folder, checked, and looked at again when it changes. Safe to ask from any thread."""

    def __init__(
        self,
        folder: Path,
        verifier: Verifier,
        federation: str,
        *,
        revoked: Revoked | None = None,
        guests: Guestbook | None = None,
        mask_keys: MaskKeys | None = None,
        refuse: Callable[[str, str], None] = lambda file, reason: None,
    ) -> None:
        """`revoked`: the list that the verifier asks. `refuse(file, reason)` hears of each entry that is not
        believed, once."""
        self.folder, self._verifier, self._federation = Path(folder), verifier, federation
        self._revoked, self._guests, self._refuse = revoked, guests, refuse
        self._mask_keys = mask_keys
        self._entries: dict[SiteId, bytes] = {}
        self._contacts: dict[SiteId, Contact] = {}
        self._names: dict[bytes, SiteId] = {}
        self._numbers: dict[SiteId, int] = {}
        self._told: set[tuple[str, str]] = set()
        self.reload()

    def contact(self, peer: SiteId) -> Contact | None:
        """The address and the key of a peer; None for a peer that the roster lacks."""
        return self._contacts.get(peer)

    def peer_of(self, key: bytes) -> SiteId | None:
        """The peer that has this CURVE key; None for an unknown key."""
        return self._names.get(key)

    def peers(self) -> list[SiteId]:
        """The names of all peers of the roster, sorted."""
        return sorted(self._contacts)

    def statements(self) -> list[bytes]:
        """What to give to a peer that joins: each entry as its peer signed it, the revocation list, and the
        keys of those who mask."""
        lists = [self._revoked.data] if self._revoked is not None and self._revoked.data else []
        keys = self._mask_keys.statements(self.peers()) if self._mask_keys is not None else []
        return [*self._entries.values(), *lists, *keys]

    def entry(self, peer: SiteId) -> bytes:
        """One peer's, as it signed it."""
        return self._entries[peer]

    def is_guest(self, key: bytes) -> bool:
        """Whether a key is an invitation's, of any time: its holder may be told what is wrong with it."""
        return self._guests is not None and self._guests.find(key) is not None

    def reload(self) -> bool:
        """Read the folder again; True when somebody is new, gone, or has another key or address.

        Every entry is checked each time, so a certificate that has expired or was revoked meanwhile strikes
        its peer off.
        """
        try:
            if self._revoked is not None:
                self._revoked.reload()
        except CertificateError as e:
            self._refuse_once(LIST, str(e))
        files = {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                with path.open("rb") as file:
                    files[path.name] = file.read(SIGNED_BYTES + 1)
            except FileNotFoundError:  # deleted at this moment
                continue
            except OSError as e:
                self._refuse_once(path.name, f"it can't be read: {e.strerror}")
        return self._set(files)

    def add(self, data: bytes) -> Contact | None:
        """A statement that came from a peer: checked, then kept as a file if it is newer than what is there.
        Whose it is; None for what is no entry. CertificateError when it is no good."""
        if self._mask_keys is not None and data.startswith(MASK):
            self._mask_keys.add(data)
            return None
        if data.startswith(b"-----BEGIN X509 CRL"):
            if self._revoked is not None:
                self._revoked.add(data)
                self.reload()
            return None
        contact, number = check(data, self._verifier, self._federation)
        have = self._numbers.get(contact.peer, -1)
        if number > have:
            try:
                save(self.folder, contact.peer, data)
            except OSError as e:
                raise CertificateError(
                    f"{contact.peer}: its entry can't be kept in {self.folder}: {e.strerror}"
                ) from None
            self.reload()
        elif contact != self._contacts[contact.peer]:
            raise CertificateError(f"{contact.peer}: an entry with number {number}, the one here has {have}")
        return contact

    def admit(self, key: bytes, data: bytes) -> Contact:
        """The entry of a newcomer who showed an invitation, by the key of its call. CertificateError says
        why it does not come in. Who has come in may ask again, so that a lost answer is no harm."""
        contact, _ = check(data, self._verifier, self._federation)
        if self._guests is None:
            raise CertificateError("nobody is invited here")
        again = contact == self._contacts.get(contact.peer)
        self._guests.check(key, contact.peer, again=again)
        if not again:
            self.add(data)
            self._guests.spend(key)
        return contact

    def _set(self, files: dict[str, bytes]) -> bool:
        entries: dict[SiteId, bytes] = {}
        contacts: dict[SiteId, Contact] = {}
        names: dict[bytes, SiteId] = {}
        numbers: dict[SiteId, int] = {}
        for file, data in files.items():
            try:
                contact, number = check(data, self._verifier, self._federation)
                if file != contact.peer + SUFFIX:
                    raise CertificateError(f"it is the entry of {contact.peer}")
                if contact.key in names:
                    raise CertificateError(f"{names[contact.key]} has the same CURVE key")
            except CertificateError as e:
                self._refuse_once(file, str(e))
                continue
            entries[contact.peer], contacts[contact.peer] = data, contact
            names[contact.key], numbers[contact.peer] = contact.peer, number
        changed = contacts != self._contacts
        self._entries, self._contacts, self._names, self._numbers = entries, contacts, names, numbers
        return changed

    def _refuse_once(self, file: str, why: str) -> None:
        if (file, why) not in self._told:
            self._told.add((file, why))
            self._refuse(file, why)


def save(folder: Path, peer: SiteId, data: bytes) -> Path:
    """Write an entry in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{peer}{SUFFIX}"
    temporary = folder / f".{peer}.{secrets.token_hex(4)}"
    with writing(path):
        temporary.write_bytes(data)
    os.replace(temporary, path)
    return path


def own_curve(folder: Path, new: Callable[[], tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """(public, secret) in z85 from `folder`/curve.key, made by `new` on first use, and never leaving it."""
    path = Path(folder) / "curve.key"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise CertificateError(
                f"{path} can be read by others (mode {mode:04o}): chmod 600 {path}"
            ) from None
        parts = path.read_bytes().split()
        if len(parts) != 2 or any(len(part) != 40 for part in parts):
            raise CertificateError(f"{path} is no CURVE key pair. Delete it: a new one is made.") from None
        return parts[0], parts[1]
    except OSError as e:
        raise ConfigError(f"{path} cannot be made: {e.strerror}") from None
    public, secret = new()
    with writing(path), os.fdopen(fd, "wb") as f:
        os.fchmod(fd, 0o600)
        f.write(public + b"\n" + secret + b"\n")
        os.fsync(fd)
    return public, secret
