"""Whom a site's people have pinned, also while it runs.

A pin is a word of the site's own people, in the file where only they write. So one that they add, or take
out, counts at the next look: nobody has to stop what runs. All other rules count from the next start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...config import SitePolicy
from ...config.policy import FILE
from ...errors import FedtrainError
from ...events import Emit, Notice
from ...messages import SiteId
from ...pki import Credentials, fingerprint
from .approval import policy_of


class Pins(Mapping[SiteId, str]):
    """name -> fingerprint of its key, of this site too, as the policy's file has them now. A file that a
    start would refuse changes nothing, and is told once."""

    def __init__(self, folder: Path, policy: SitePolicy, credentials: Credentials, emit: Emit) -> None:
        """`policy`: as the site began with it; `folder`: where its file is."""
        self._path, self._signed, self._credentials = folder / FILE, policy.signed_members, credentials
        self._emit = emit
        self._seen: tuple[int, ...] | None = None
        self._own = {credentials.identity.name: fingerprint(credentials.chain).hex()}
        self._now: Mapping[SiteId, str] = {**policy.members, **self._own}

    def __getitem__(self, site: SiteId) -> str:
        self._look()
        return self._now[site]

    def __iter__(self) -> Iterator[SiteId]:
        self._look()
        return iter(self._now)

    def __len__(self) -> int:
        self._look()
        return len(self._now)

    def _looks(self) -> tuple[int, ...]:
        """What changes with the file."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode

    def _look(self) -> None:
        if (looks := self._looks()) == self._seen:
            return
        self._seen = looks
        try:
            members = policy_of(self._path.parent, self._credentials, signed=self._signed).members
        except (FedtrainError, OSError) as e:
            self._emit(Notice(text=f"the members that were pinned before still count: {e}"))
            return
        self._now = {**members, **self._own}


def pins_of(folder: Path, policy: SitePolicy, credentials: Credentials, emit: Emit) -> Pins | None:
    """The only sites that count here; None: all that the federation's authority certifies."""
    return Pins(folder, policy, credentials, emit) if policy.pin_members else None
