"""Who is connected with whom where peers are too many for all with all.

Peers stand on several rings, on each in an order of its own, which hashes of their names decide; a peer's
circle are those beside it on each ring. All peers with the same roster compute the same circles, and whoever
is in one's circle has one in its own. On one ring alone peers reach each other; on several they do with many
gone or silent: such random regular graphs are expanders. News of who is there, and entries of the roster,
travel from circle to circle; models travel between a round's neighbours, who are connected besides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache

from ..exchange import PeerId

FEW = 16  # peers up to which each is in everybody's circle
TURN = 8  # peers of many that are turned to at once


class Overlay:
    """The circles of these peers."""

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self._peers = sorted(peers)
        n = len(self._peers)
        count = math.ceil(math.log2(n) / 2) if n > FEW else 0
        self._rings = [sorted(self._peers, key=lambda p: _place(ring, p)) for ring in range(count)]
        self._at = [{peer: at for at, peer in enumerate(ring)} for ring in self._rings]

    def circle(self, peer: PeerId) -> set[PeerId]:
        """Whom this peer is always connected with; nobody, of a peer that is not among these."""
        near = set() if self._rings else set(self._peers)
        for ring, places in zip(self._rings, self._at, strict=True):
            if (at := places.get(peer)) is not None:
                near |= {ring[at - 1], ring[(at + 1) % len(ring)]}
        return near - {peer}


@lru_cache(maxsize=1 << 16)
def _place(ring: int, peer: PeerId) -> bytes:
    return hashlib.sha256(f"{ring}/{peer}".encode()).digest()


def turns_of(peers: int) -> int:
    """In how many turns each of so many peers turns to all others."""
    return 1 if peers <= FEW else math.ceil((peers - 1) / TURN)


def in_turn(me: PeerId, others: Iterable[PeerId], turns: int) -> list[set[PeerId]]:
    """The others in so many turns: in whichever turn this peer has one of them, that one has this peer."""
    members = sorted({*others, me})
    at, n = members.index(me), len(members)
    each = -(-(n // 2) // turns)  # on either side
    starts = range(1, 1 + each * turns, each)
    beside = [range(start, min(start + each, n // 2 + 1)) for start in starts]
    return [{members[(at + k * side) % n] for k in part for side in (1, -1)} for part in beside]
