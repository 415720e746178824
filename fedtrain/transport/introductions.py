"""What was signed (entries of the roster, lists of the revoked, mask keys) on its way from peer to peer."""

from __future__ import annotations

from collections.abc import Iterator

from ..digest import digest_of
from ..errors import CertificateError
from ..exchange import PeerId
from ..wire.codec import decode
from .admission import PeerDirectory, bundles


class Introductions:
    """What a peer passes on of its roster: to one that it meets all, to those that it has met what is new."""

    def __init__(self, roster: PeerDirectory) -> None:
        self._roster = roster
        self._told: frozenset[bytes] = frozenset()  # what all connected peers were sent
        self.digest = b""  # of all: who has the same one needs none

    def all(self) -> Iterator[bytes]:
        """Bodies of MEMBERS with all statements."""
        return bundles(self._roster.statements())

    def news(self) -> Iterator[bytes]:
        """Bodies of MEMBERS with what is new since the last call."""
        statements = self._roster.statements()
        new = [each for each in statements if each not in self._told]
        if new or len(statements) != len(self._told):
            self._told = frozenset(statements)
            self.digest = digest_of(b"".join(sorted(statements))).encode()
        return bundles(new)

    def take(self, text: bytes) -> tuple[list[PeerId], list[str]]:
        """Statements that a peer passed on: whose entries came, and why others are refused."""
        known, peers, refused = set(self._roster.statements()), list[PeerId](), list[str]()
        for statement in decode(text, list[bytes]):
            if statement not in known:
                try:
                    contact = self._roster.add(statement)
                except CertificateError as e:
                    refused.append(str(e))
                    continue
                if contact is not None:
                    peers.append(contact.peer)
        return peers, refused

    def changed(self) -> bool:
        """Whether there is something that not all were told."""
        return self._told != frozenset(self._roster.statements())
