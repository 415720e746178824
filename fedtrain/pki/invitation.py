"""How a newcomer finds its first peer: by a code that works once, for one name.

    invited/<digest of a key>     beside the inviting peer's curve.key: for whom, until when, and when it came

ZeroMQ lets in whom its key names, and a newcomer's key is not on any roster yet. So an invitation carries a
CURVE key pair for one call: the peer that made it lets that key in, hears the newcomer's signed entry, and
answers with its roster. The code alone opens nothing, since the entry must be signed with the certificate of
the name that was invited; whoever else shows it is told so.
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

KEPT = timedelta(days=30)  # after its end an invitation is remembered, to say what is wrong with it


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What the newcomer is given."""

    guest: SiteId
    host: SiteId
    address: str  # of the host, host:port
    key: bytes  # the host's CURVE public key, z85
    secret: bytes  # for the one call, z85; the host keeps its public half only

    @property
    def code(self) -> str:
        """One word, to be pasted."""
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
    """What the host remembers."""

    guest: SiteId
    until: datetime
    used: datetime | None = None


class Guestbook:
    """The invitations of one peer. Each is a file, read when it is asked for: what another process writes
    counts at once, and what was used stays used after a restart."""

    def __init__(self, folder: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """`folder`: where the peer's certificate and curve.key are."""
        self._folder, self._now = Path(folder) / "invited", now

    def invite(
        self, guest: SiteId, *, host: SiteId, address: str, key: bytes, life: timedelta,
        new: Callable[[], tuple[bytes, bytes]],
    ) -> Invitation:  # fmt: skip
        """`new` makes a CURVE key pair (public, secret)."""
        check_label("site", guest)
        public, secret = new()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._folder.iterdir():
            if msgspec.json.decode(path.read_bytes(), type=Invited).until + KEPT < self._now():
                path.unlink()
        self._write(public, Invited(guest=guest, until=self._now() + life))
        return Invitation(guest=guest, host=host, address=address, key=key, secret=secret)

    def find(self, key: bytes) -> Invited | None:
        """What this one-time key is for; None when no invitation of ours has it."""
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=Invited)
        except (FileNotFoundError, UnicodeDecodeError, RecursionError, msgspec.DecodeError):
            return None

    def check(self, key: bytes, peer: SiteId, *, again: bool = False) -> None:
        """CertificateError, in a line that the newcomer is told, unless this key lets `peer` in now.
        `again`: it has come in by it before, and may hear the answer once more."""
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
        """It was used: from now on, and after a restart, it lets nobody in."""
        invited = self.find(key)
        assert invited is not None, "only what was found is spent"
        self._write(key, msgspec.structs.replace(invited, used=self._now()))

    def _write(self, key: bytes, invited: Invited) -> None:
        write(self._path(key), msgspec.json.encode(invited), 0o600)

    def _path(self, key: bytes) -> Path:
        return self._folder / hashlib.sha256(key).hexdigest()[:32]
