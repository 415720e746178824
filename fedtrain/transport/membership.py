"""Who is there: SWIM (Das, Gupta, Motivala, DSN 2002) with suspicion and incarnations, without I/O.

Each period a peer pings one other, in a shuffled round robin. Without an answer it asks `indirect` others to
ping it; still without one it is suspected, and after `suspicion_s` dead. A peer that learns that it is
suspected, or dead, refutes it with a higher incarnation; so does a peer that comes back. What is new travels
on the pings themselves. No round waits for any of this: a round's graph is a function of `alive()`, and views
that differ for a moment cost an exchange that says so (CANCEL, REFUSE), not one that hangs.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from ..errors import WireError
from ..exchange import PeerId
from ..wire.codec import decode
from ..wire.gossip import Kind

NEWS_PER_MESSAGE = 12
MAX_NEWS = 64  # in a message that comes
MAX_INCARNATION = 1 << 40


class Liveness(IntEnum):
    """In the order in which they override each other at the same incarnation."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class News(msgspec.Struct, frozen=True, array_like=True):
    peer: PeerId
    status: Liveness
    incarnation: int


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """The body of PING, PONG and SUSPECT. `about`: whom a SUSPECT asks to ping, or a PONG answers for."""

    news: list[News]
    about: PeerId = ""


@dataclass(slots=True)
class Member:
    status: Liveness
    incarnation: int
    since_s: float


class Membership:
    """One peer's view. Peers enter it by `add`, when the roster knows them: news of others are ignored."""

    def __init__(
        self,
        me: PeerId,
        *,
        now: float,
        draw: random.Random,
        period_s: float = 1.0,
        suspicion_s: float = 5.0,
        indirect: int = 3,
    ) -> None:
        self.me, self.incarnation = me, 0
        self.outbox: deque[tuple[PeerId, Kind, bytes]] = deque()
        self.members: dict[PeerId, Member] = {}  # the others
        self.changes = 0  # of members so far
        self._draw, self._period_s, self._suspicion_s = draw, period_s, suspicion_s
        self._indirect = indirect
        self._order: list[PeerId] = []  # whom to ping next
        self._probed: PeerId | None = None  # who has not answered yet
        self._asked = False  # others, for the one who is probed
        self._probe_s = now  # when the last probe began
        self._helping: dict[PeerId, set[PeerId]] = {}  # pinged for these
        self._news: dict[PeerId, tuple[News, int]] = {}  # what is to be sent, and how many times yet

    # --- the view

    def alive(self) -> list[PeerId]:
        """All that are not dead, this one too, sorted. A suspect counts: it may only be slow."""
        others = (p for p, m in self.members.items() if m.status <= Liveness.SUSPECT)
        return sorted([self.me, *others])

    @property
    def epoch(self) -> int:
        """A number for the view: equal views have equal ones, without any agreement."""
        return zlib.crc32("\x1f".join(self.alive()).encode())

    def degraded(self) -> bool:
        """Half of those on the roster, or fewer, are here: perhaps the others go on without us."""
        return 2 * len(self.alive()) <= len(self.members) + 1 and len(self.members) > 1

    def add(self, peers: Iterable[PeerId], now: float) -> None:
        """Peers of the roster. None counts as alive before there is news of it."""
        for peer in peers:
            if peer != self.me and peer not in self.members:
                self.members[peer] = Member(Liveness.DEAD, -1, now)
                self.changes += 1

    def remove(self, peer: PeerId) -> None:
        """A peer that was struck off the roster."""
        self.members.pop(peer, None)
        self.changes += 1
        self._news.pop(peer, None)
        self._helping.pop(peer, None)

    def confirm(self, peer: PeerId, now: float) -> None:
        """The peer is connected and speaks to us, which ends any suspicion of ours."""
        member = self.members.get(peer)
        if member is None:
            return
        if self._probed == peer:
            self._probed = None
        if member.status >= Liveness.DEAD and member.incarnation < 0:  # the first news of the peer
            self._learn(News(peer, Liveness.ALIVE, 0), now)
        elif member.status >= Liveness.SUSPECT:  # when the peer learns of this, it refutes it
            self._news[peer] = (News(peer, member.status, member.incarnation), 1)
            self._say(peer, Kind.PING)

    def leave(self) -> None:
        """Say good-bye."""
        self._news[self.me] = (News(self.me, Liveness.LEFT, self.incarnation), len(self.members))
        for peer in self.alive():
            if peer != self.me:
                self._say(peer, Kind.PING)

    # --- what happens

    def receive(self, peer: PeerId, kind: Kind, body: bytes | bytearray | memoryview, now: float) -> None:
        """A PING, PONG or SUSPECT of a peer; WireError when it can't be read."""
        probe: Probe = decode(bytes(body), Probe)
        if len(probe.news) > MAX_NEWS:
            raise WireError(f"{len(probe.news)} news in a message, at most {MAX_NEWS} are read")
        for news in probe.news:
            if not 0 <= news.incarnation < MAX_INCARNATION:
                raise WireError(f"an incarnation of {news.incarnation}")
            self._learn(news, now)
        if kind is Kind.PING:
            self._say(peer, Kind.PONG)
        elif kind is Kind.SUSPECT and probe.about in self.members:
            self._helping.setdefault(probe.about, set()).add(peer)
            self._say(probe.about, Kind.PING)
        elif kind is Kind.PONG and probe.about:
            if probe.about == self._probed:
                self._probed = None
        elif kind is Kind.PONG:
            for asker in sorted(self._helping.pop(peer, ())):
                self._say(asker, Kind.PONG, about=peer)
        self.confirm(peer, now)

    def tick(self, now: float) -> None:
        for peer, member in self.members.items():
            if member.status is Liveness.SUSPECT and now >= member.since_s + self._suspicion_s:
                self._learn(News(peer, Liveness.DEAD, member.incarnation), now)
        if self._probed is not None and not self._asked and now >= self._probe_s + self._period_s / 2:
            self._asked = True
            others = [p for p in self.alive() if p not in (self.me, self._probed)]
            for helper in self._draw.sample(others, min(self._indirect, len(others))):
                self._say(helper, Kind.SUSPECT, about=self._probed)
        if now >= self._probe_s + self._period_s:
            if self._probed is not None and self._probed in self.members:
                incarnation = self.members[self._probed].incarnation
                self._learn(News(self._probed, Liveness.SUSPECT, incarnation), now)
            self._probe_s, self._asked, self._probed = now, False, self._next()
            self._helping.clear()
            if self._probed is not None:
                self._say(self._probed, Kind.PING)

    def wake_s(self) -> float:
        """When `tick` has something to do next."""
        times = [self._probe_s + self._period_s]
        if self._probed is not None and not self._asked:
            times.append(self._probe_s + self._period_s / 2)
        suspects = (m.since_s for m in self.members.values() if m.status is Liveness.SUSPECT)
        return min(*times, min(suspects, default=math.inf) + self._suspicion_s)

    def _next(self) -> PeerId | None:
        """Whom to ping: everybody alive once, in a new order each time."""
        here = set(self.alive()) - {self.me}
        while self._order:
            if (peer := self._order.pop()) in here:
                return peer
        self._order = self._draw.sample(sorted(here), len(here))
        return self._order.pop() if self._order else None

    def _learn(self, news: News, now: float) -> None:
        """Believe what is newer, and pass it on."""
        if news.peer == self.me:
            if news.status is not Liveness.ALIVE and news.incarnation >= self.incarnation:
                self.incarnation = news.incarnation + 1
                self._spread(News(self.me, Liveness.ALIVE, self.incarnation))
            return
        member = self.members.get(news.peer)
        if member is None or (news.incarnation, news.status) <= (member.incarnation, member.status):
            return
        if news.status is Liveness.SUSPECT and member.status >= Liveness.DEAD:
            return  # a doubt revives nobody
        since_s = member.since_s if news.status == member.status else now
        self.members[news.peer] = Member(news.status, news.incarnation, since_s)
        self.changes += 1
        self._spread(news)
        if news.status is Liveness.SUSPECT:
            self._say(news.peer, Kind.PING)  # the peer is to refute it

    def _spread(self, news: News) -> None:
        times = 3 * math.ceil(math.log2(len(self.members) + 2))
        self._news[news.peer] = (news, times)

    def _say(self, peer: PeerId, kind: Kind, about: PeerId = "") -> None:
        """A message with the news that were sent least often; news of the addressee come first."""
        order = sorted(self._news, key=lambda p: (p != peer, -self._news[p][1], p))[:NEWS_PER_MESSAGE]
        chosen = [self._news[p][0] for p in order]
        for p in order:
            news, left = self._news.pop(p)
            if left > 1:
                self._news[p] = (news, left - 1)
        if self.incarnation:  # our own costs little, and a peer that suspects us learns it
            chosen.append(News(self.me, Liveness.ALIVE, self.incarnation))
        self.outbox.append((peer, kind, msgspec.msgpack.encode(Probe(chosen, about))))
