"""The roster of a gossip run: the peers that may take part, each with its CURVE key and its address.

    roster/NAME.peer     one file a peer: name, CURVE public key, address, signed with its certificate's key
    curve.key            beside key.pem: the CURVE key pair, mode 0600, made at the site on first use

ZeroMQ knows no certificates. So a peer signs its CURVE key with the key of its certificate, and other peers
accept only an entry whose certificate leads to the federation's root, names the peer, and is not revoked.
The folder is read again while a run goes on: a new file admits a peer; a deleted file, for good (strikes.py),
or the federation's revocation list, which travels with the entries, cuts a peer off.
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

from ..errors import CertificateError, ConfigError, FedtrainError, NotPinned, writing
from ..exchange import Contact
from ..messages import SiteId
from .invitation import Guestbook
from .mask_keys import PREFIX as MASK
from .mask_keys import MaskKeys
from .revocation import LIST, Revoked
from .signing import SIGNED_BYTES, Signed, Signer, Verifier, claimed
from .strikes import Strikes

SUFFIX = ".peer"
Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
UNPINNED = 1024  # statements that wait for a pin
CONTEXT = b"fedtrain roster entry 1\0"  # signed bytes begin with this: the signature serves for nothing else


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's statement of its own key and address."""

    peer: SiteId
    federation: str
    key: bytes  # CURVE public key, z85, 40 bytes
    address: str | None = None  # host:port; None for a peer that only makes outbound connections
    number: int = 0  # the claim with the highest number counts; seconds since 1970, so that a claim made on
    # a new machine, without the former files, still has a higher number


def enrol(signer: Signer, claim: Claim) -> Signed:
    """A peer's entry, signed by the peer; anybody may pass it on."""
    return Signed.by(signer, CONTEXT, claim)


def check(data: bytes, verifier: Verifier, federation: str) -> tuple[Contact, int]:
    """The contact in an entry's bytes, and the entry's number; CertificateError when it is not valid."""
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


def certificate_of(entry: bytes) -> bytes:
    """The certificate chain in PEM with which an entry that `check` found valid was signed."""
    return msgspec.msgpack.decode(entry, type=Signed).certificate


def _is_z85_key(text: bytes) -> bool:
    """Whether `text` is 32 bytes in ZeroMQ's z85: 8 groups of 5 characters, each a base-85 number < 2^32."""
    digits = [Z85.find(character) for character in text]
    numbers = [sum(d * 85 ** (4 - i) for i, d in enumerate(digits[at : at + 5])) for at in range(0, 40, 5)]
    return len(text) == 40 and min(digits) >= 0 and max(numbers) < 1 << 32


def can_be_called(address: str) -> bool:
    """Whether others can call an address: it is host:port, and not that of all of a machine's interfaces."""
    return is_address(address) and address.rpartition(":")[0] not in ("0.0.0.0", "[::]")  # noqa: S104 - refused


def is_address(text: str) -> bool:
    """Whether `text` is host:port for ZeroMQ; host: a name, an IPv4 address, or an IPv6 address in []."""
    host, _, port = text.rpartition(":")
    if re.fullmatch(r"[1-9]\d{0,4}", port, re.ASCII) is None or int(port) > 65535:
        return False
    if re.fullmatch(r"\[[0-9A-Fa-f:.]+\]", host):
        with suppress(ipaddress.AddressValueError):
            return bool(ipaddress.IPv6Address(host[1:-1]))
    return re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9])?", host) is not None


class Roster:
    """The checked entries of a folder; `reload` reads the folder again. Safe to read from any thread."""

    def __init__(
        self,
        folder: Path,
        verifier: Verifier,
        federation: str,
        *,
        revoked: Revoked | None = None,
        guests: Guestbook | None = None,
        mask_keys: MaskKeys | None = None,
        signer: Signer | None = None,
        refuse: Callable[[str, str], None] = lambda file, reason: None,
    ) -> None:
        """`revoked`: the list that the verifier uses. `signer` signs for peers that are struck off here.
        `refuse(file, reason)` is called once for each entry that is not valid."""
        self.folder, self._verifier, self._federation = Path(folder), verifier, federation
        self._revoked, self._guests, self._refuse = revoked, guests, refuse
        self._mask_keys, self._strikes = mask_keys, Strikes(Path(folder), federation, signer)
        self._struck: set[SiteId] = set()
        self._withheld: dict[SiteId, bytes] = {}  # the newest entries of those, which count again later
        self._entries: dict[SiteId, bytes] = {}
        self._contacts: dict[SiteId, Contact] = {}
        self._names: dict[bytes, SiteId] = {}
        self._numbers: dict[SiteId, int] = {}
        self._refused: set[tuple[str, str]] = set()
        self._unpinned: dict[tuple[str, bool], bytes] = {}  # (pin that it lacks, is a mask key) -> statement
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
        """The statements for a peer that joins: each entry as its peer signed it, the revocation list, and
        the mask keys."""
        lists = self._revoked.lists if self._revoked is not None else []
        keys = self._mask_keys.statements(self.peers()) if self._mask_keys is not None else []
        return [*self._entries.values(), *lists, *keys]

    @property
    def struck(self) -> list[SiteId]:
        """The names of the peers that were struck off here, sorted."""
        return sorted(self._struck)

    def entry(self, peer: SiteId) -> bytes:
        """The entry of one peer, as that peer signed it; KeyError when the roster lacks the peer."""
        return self._entries[peer]

    def proves(self, peer: SiteId, message: bytes, signature: bytes) -> bool:
        """Whether a peer of the roster has signed a message, with the key of its entry's certificate."""
        try:
            return self._verifier.verify(certificate_of(self._entries[peer]), message, signature)[0] == peer
        except (KeyError, CertificateError):
            return False

    def is_guest(self, key: bytes) -> bool:
        """Whether a key is of an invitation, expired ones too: its holder may be sent a refusal's reason."""
        return self._guests is not None and self._guests.find(key) is not None

    def reload(self) -> bool:
        """Read the folder again; True when a peer is new, is gone, or has another key or address.

        Every entry is checked each time, so a peer whose certificate has expired or was revoked is dropped.
        """
        try:
            if self._revoked is not None:
                self._revoked.reload()
        except CertificateError as e:
            self._refuse_once(LIST, str(e))
        self._take_back()
        files = {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                with path.open("rb") as file:
                    files[path.name] = file.read(SIGNED_BYTES + 1)
            except FileNotFoundError:  # deleted since the folder was listed
                continue
            except OSError as e:
                self._refuse_once(path.name, f"it can't be read: {e.strerror}")
        entries = {path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}")}
        self._struck = self._strikes.look(entries)
        for peer in self._struck:
            if peer in self._entries:
                self._withheld[peer] = self._entries[peer]
            self._refuse_once(peer + SUFFIX, self._strikes.why(peer, self._verifier))
        kept = {file: data for file, data in files.items() if file.removesuffix(SUFFIX) not in self._struck}
        changed = self._set(kept)
        for key in [*self._unpinned]:
            with suppress(CertificateError, KeyError):
                changed |= self.add(self._unpinned.pop(key)) is not None
        return changed

    def _take_back(self) -> None:
        """Have the entries again of peers whose tombstones are gone: neighbours pass them on only when they
        introduce themselves."""
        for peer in [name for name in list(self._withheld) if not self._strikes.has(name)]:
            data = self._withheld.pop(peer)
            self._refused = {one for one in self._refused if one[0] != peer + SUFFIX}
            with suppress(FedtrainError):  # then a neighbour passes it on
                if not (self.folder / f"{peer}{SUFFIX}").exists():
                    save(self.folder, peer, data)

    def add(self, data: bytes) -> Contact | None:
        """Check a statement that a peer sent, and keep it as a file if it is newer than the one here. Returns
        the contact of an entry, None for another kind of statement. CertificateError when it is not valid.
        One that lacks a pin alone counts as soon as that is there: nobody may send it again."""
        try:
            return self._add(data)
        except NotPinned as e:
            if len(self._unpinned) < UNPINNED:
                self._unpinned[e.pin, data.startswith(MASK)] = data
            raise

    def _add(self, data: bytes) -> Contact | None:
        if self._mask_keys is not None and data.startswith(MASK):
            self._mask_keys.add(data)
            return None
        if data.startswith(b"-----BEGIN X509 CRL"):
            if self._revoked is not None:
                self._revoked.add(data)
                self.reload()
            return None
        contact, number = check(data, self._verifier, self._federation)
        if contact.peer in self._struck:  # told when it was struck off, and each neighbour may pass it on
            self._withhold(contact.peer, number, data)
            return None
        have = self._numbers.get(contact.peer, -1)
        if have >= 0 and not (self.folder / f"{contact.peer}{SUFFIX}").exists():
            self.reload()  # deleted since the last look: struck off, however new the entry is
            self._withhold(contact.peer, number, data)
            return None
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

    def _withhold(self, peer: SiteId, number: int, data: bytes) -> None:
        """Keep the entry of one that was struck off, where it is the newest."""
        newest = -1
        if peer in self._withheld:
            with suppress(CertificateError):
                newest = check(self._withheld[peer], self._verifier, self._federation)[1]
        if number > newest:
            self._withheld[peer] = data

    def admit(self, key: bytes, data: bytes) -> Contact:
        """Admit a newcomer by its entry `data` and the invitation with the CURVE key `key` of its connection;
        CertificateError says why not. A peer that was admitted may ask again, in case the answer was lost."""
        contact, _ = check(data, self._verifier, self._federation)
        if self._guests is None:
            raise CertificateError("nobody is invited here")
        again = contact == self._contacts.get(contact.peer)
        self._guests.check(key, contact.peer, again=again)
        if contact.peer in self._struck:
            raise CertificateError(self._strikes.why(contact.peer, self._verifier))
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
        if (file, why) not in self._refused:
            self._refused.add((file, why))
            self._refuse(file, why)


def save(folder: Path, peer: SiteId, data: bytes) -> Path:
    """Write a peer's entry into the roster's folder in one step; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{peer}{SUFFIX}"
    temporary = folder / f".{peer}.{secrets.token_hex(4)}"
    with writing(path):
        temporary.write_bytes(data)
    os.replace(temporary, path)
    return path


def own_curve(folder: Path, new: Callable[[], tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """(public, secret) in z85 from `folder`/curve.key, which `new` makes on first use. CertificateError when
    others can read the file or it is damaged."""
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
