"""Invitations: a code by which a newcomer joins through its first peer. A code works once, for one name.

    invited/<digest of a key>     beside the host's curve.key: the guest, the expiry, and when it was used

ZeroMQ accepts only known CURVE keys, and a newcomer's key is not on any roster yet. So an invitation carries
a key pair for one connection: the host, the peer that made the invitation, accepts that key, receives the
newcomer's signed roster entry, and sends its roster. The code alone opens nothing, since the entry must be
signed with the certificate of the invited name; any other holder gets an error that says so.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from ..errors import CertificateError, ConfigError
from ..messages import SiteId
from .authority import write
from .identity import check_label

KEPT = timedelta(days=30)  # how long the host keeps an expired invitation, to explain a refusal


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """An invitation as the newcomer (the guest) gets it."""

    guest: SiteId
    host: SiteId
    address: str  # of the host, host:port
    key: bytes  # the host's CURVE public key, z85
    secret: bytes  # CURVE secret key of the one connection, z85; the host keeps the public key only

    @property
    def code(self) -> str:
        """The invitation as one base64 word, to be pasted on a command line."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    @classmethod
    def read(cls, code: str) -> Invitation:
        """The invitation of a `code`; ConfigError when the code is damaged or no invitation."""
        try:
            data = base64.urlsafe_b64decode(code.strip() + "=" * (-len(code.strip()) % 4))
            found = msgspec.msgpack.decode(data, type=cls)
        except (ValueError, RecursionError, msgspec.DecodeError):
            raise ConfigError(
                "--invitation: this is no invitation. Paste the whole line that `fedtrain invite` printed."
            ) from None
        if len(found.key) != 40 or len(found.secret) != 40:
            raise ConfigError("--invitation: its keys are damaged. Paste the whole line again.")
        return found


class Invited(msgspec.Struct, kw_only=True):
    """An invitation as the host keeps it."""

    guest: SiteId
    until: datetime
    used: datetime | None = None


class Guestbook:
    """The invitations that one peer has made. Each is a file, read at every use: a change by another process
    counts at once, and a used invitation stays used after a restart."""

    def __init__(self, folder: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """`folder`: the peer's folder with its certificate and curve.key."""
        self._folder, self._now = Path(folder) / "invited", now

    def invite(
        self, guest: SiteId, *, host: SiteId, address: str, key: bytes, life: timedelta,
        new: Callable[[], tuple[bytes, bytes]],
    ) -> Invitation:  # fmt: skip
        """Make an invitation for `guest`, valid for `life`. `key`: the host's CURVE public key. `new` makes
        a CURVE key pair (public, secret). ConfigError when `guest` can't be a site's name."""
        check_label("site", guest)
        public, secret = new()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._folder.iterdir():
            if msgspec.json.decode(path.read_bytes(), type=Invited).until + KEPT < self._now():
                path.unlink()
        self._write(public, Invited(guest=guest, until=self._now() + life))
        return Invitation(guest=guest, host=host, address=address, key=key, secret=secret)

    def find(self, key: bytes) -> Invited | None:
        """The invitation with this one-time public key; None when this peer has made no such invitation."""
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=Invited)
        except (FileNotFoundError, UnicodeDecodeError, RecursionError, msgspec.DecodeError):
            return None

    def check(self, key: bytes, peer: SiteId, *, again: bool = False) -> None:
        """CertificateError, whose line is sent to the newcomer, unless this key admits `peer` now.
        `again`: the peer was admitted by it before, and may be sent the answer once more."""
        invited = self.find(key)
        if invited is None:
            raise CertificateError("no such invitation was made here")
        if invited.guest != peer:
            raise CertificateError(f"the invitation is for {invited.guest}, and {peer} showed it")
        if again:
            return
        if invited.used is not None:
            raise CertificateError(
                f"the invitation for {peer} was used on {invited.used:%Y-%m-%d %H:%M} UTC. Ask for another."
            )
        if self._now() >= invited.until:
            raise CertificateError(
                f"the invitation for {peer} expired on {invited.until:%Y-%m-%d %H:%M} UTC. Ask for another."
            )

    def spend(self, key: bytes) -> None:
        """Mark an invitation as used: from now on, and after a restart, it admits no other peer."""
        invited = self.find(key)
        assert invited is not None, "only what was found is spent"
        self._write(key, msgspec.structs.replace(invited, used=self._now()))

    def _write(self, key: bytes, invited: Invited) -> None:
        write(self._path(key), msgspec.json.encode(invited), 0o600)

    def _path(self, key: bytes) -> Path:
        return self._folder / hashlib.sha256(key).hexdigest()[:32]
