"""Who is there: SWIM (Das, Gupta, Motivala, DSN 2002) among peers of whom some lie, without I/O.

Each period a peer pings one other, in a shuffled round robin. Without an answer it asks `indirect` others to
ping it; still without one it is suspected, and after `suspicion_s` dead. No round waits for any of this: a
round's graph is a function of `alive()`, and views that differ for a moment cost an exchange that says so
(CANCEL, REFUSE), not one that hangs.

What is new travels on the pings themselves, and each peer speaks for itself only. That it is alive, with an
incarnation, and that it has left, it signs; nobody else can, so no number comes that its owner can't follow.
That another one is suspected, or dead, is hearsay: whoever hears it pings that peer itself, which refutes it
by signing the next incarnation, and ends it by its own failed pings only. A helper's word that somebody is
alive is such a signature, newer than the doubt. So liars can keep a ping from being helped, no more.

Where peers are many, a peer pings only those that it is connected with (overlay.py). Doubts of others it
passes on as hearsay, so that they reach those who are; where no refutation comes back, it dials that peer.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from ..errors import WireError
from ..exchange import PeerId
from ..wire.codec import decode
from ..wire.gossip import Kind
from .overlay import Overlay

CONTEXT = b"fedtrain liveness 2\0"  # signed bytes begin with this: the signature serves for nothing else
NEWS_PER_MESSAGE = 12
MAX_NEWS = 64  # in a message that comes
MAX_INCARNATION = 1 << 53
PROOF_BYTES = 128
DOUBTS = 2  # hearsay that is looked into in a period, beside the peer whose turn it is
DIALS = 8  # peers that are dialled in a period, of whom hearsay was not refuted
EAGER = 3  # peers that are told what is new without waiting for the next period
NAMED = 8  # wrong doubts of a peer, from which on it is named, at each doubling


class Liveness(IntEnum):
    """What a peer holds of another."""

    ALIVE = 0
    DOUBTED = 1  # by hearsay, of a peer that this one is not connected with
    SUSPECT = 2
    DEAD = 3
    LEFT = 4


class News(msgspec.Struct, frozen=True, array_like=True):
    """What the sender holds of a peer, and that peer's signature of this incarnation (`statement`)."""

    peer: PeerId
    status: Liveness
    incarnation: int
    proof: bytes
    end: int = -1


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """The body of PING, PONG and SUSPECT. `about`: whom a SUSPECT asks to ping, or a PONG answers for."""

    news: list[News]
    about: PeerId = ""


@dataclass(slots=True)
class Member:
    """The newest that a peer has signed, and what this peer makes of it."""

    status: Liveness
    since_s: float
    incarnation: int = -1  # -1: never heard of
    proof: bytes = b""
    end: int = -1  # the round after which it would end the run; -1: it would go on


@dataclass(frozen=True)
class Voice:
    """How a peer signs, and knows what others have signed."""

    sign: Callable[[bytes], bytes]
    proves: Callable[[PeerId, bytes, bytes], bool]  # peer, message, signature
    run: bytes = b""  # what is signed counts in this run only
    number: int = 0  # of the first incarnation; above all that this peer's former processes have signed


def statement(run: bytes, peer: PeerId, incarnation: int, left: bool, end: int = -1) -> bytes:
    """What a peer signs: that it is alive with this incarnation, or has left with it; when it would end."""
    return CONTEXT + msgspec.msgpack.encode((run, peer, incarnation, left, end))


@dataclass(frozen=True)
class View:
    """The peers that are alive, as one peer sees it."""

    alive: tuple[PeerId, ...]  # sorted, this peer too; a round's graph is over these
    epoch: int  # it stands in every header
    degraded: bool  # half of the roster, or fewer, are alive: perhaps the others go on without this peer


class Membership:
    """One peer's view. Peers enter it by `add`, when the roster knows them: news of others are ignored."""

    def __init__(
        self,
        me: PeerId,
        voice: Voice,
        *,
        now: float,
        draw: random.Random,
        period_s: float = 1.0,
        suspicion_s: float = 5.0,
        indirect: int = 3,
    ) -> None:
        self.me, self._voice = me, voice
        self.outbox: deque[tuple[PeerId, Kind, bytes]] = deque()
        self.reports: deque[tuple[PeerId, str]] = deque()  # for the log: who is often wrong, and how
        self.members: dict[PeerId, Member] = {}  # the others
        self.changes = 0  # of members so far
        self._draw, self._period_s, self._suspicion_s = draw, period_s, suspicion_s
        self._indirect = indirect
        self._order: list[PeerId] = []  # whom to ping next
        self._probed: set[PeerId] = set()  # who has not answered yet
        self._asked = False  # others, for those who are probed
        self._probe_s = now  # when the last probes began
        self._helping: dict[PeerId, set[PeerId]] = {}  # pinged for these
        self._doubted: dict[PeerId, set[PeerId]] = {}  # by these, and not yet looked into
        self._corrected: dict[tuple[PeerId, PeerId], float] = {}  # (who doubts, whom): told of its refutation
        self._wrong: Counter[PeerId] = Counter()
        self._fresh: dict[PeerId, int] = {}  # of whom there are news, and how many times yet they are told
        self._eager_s = math.inf  # when to tell what is new
        self._also: frozenset[PeerId] = frozenset()  # connected for a while, beside the circle
        self._overlay = Overlay([me])
        self.circle = self.near = frozenset[PeerId]()  # whom it is always, and now, to be connected with
        self._renewed = 0  # changes that `near` has
        self._own = Member(Liveness.ALIVE, -math.inf)
        self._speak(voice.number, -math.inf)

    # --- the view

    @property
    def incarnation(self) -> int:
        return self._own.incarnation

    def alive(self) -> list[PeerId]:
        """All that are not dead, this one too, sorted. A suspect counts: it may only be slow."""
        others = (p for p, m in self.members.items() if m.status <= Liveness.SUSPECT)
        return sorted([self.me, *others])

    def view(self) -> View:
        """What this peer sees now. Equal views have equal epochs, without any agreement."""
        alive, others = self.alive(), len(self.members)
        epoch = zlib.crc32("\x1f".join(alive).encode())
        return View(tuple(alive), epoch, degraded=2 * len(alive) <= others + 1 and others > 1)

    def add(self, peers: Iterable[PeerId], now: float) -> None:
        """Peers of the roster. None counts as alive before there is news of it."""
        if new := [peer for peer in peers if peer != self.me and peer not in self.members]:
            self.members |= {peer: Member(Liveness.DEAD, now) for peer in new}
            self.changes += 1
            self._overlay = Overlay([self.me, *self.members])
            self._renew()

    def remove(self, peer: PeerId) -> None:
        """A peer that was struck off the roster."""
        self.changes += 1
        self._probed.discard(peer)
        for each in (self.members, self._fresh, self._helping, self._doubted):
            each.pop(peer, None)
        self._overlay = Overlay([self.me, *self.members])
        self._renew()

    def keep(self, peers: Iterable[PeerId] | None) -> None:
        """The peers to be connected with beside the circle, until the next call; None: the same as before."""
        self._also = self._also if peers is None else frozenset(peers)
        self._renew()

    def _renew(self) -> None:
        """Near are the circle among all on the roster, by which a cut off part is found again; the one
        among those who are here, so that no peer is alone when its circle has left; and those of `keep`."""
        self._renewed, here = self.changes, self.alive()
        circles = self._overlay.circle(self.me)
        if len(here) <= len(self.members):
            circles |= Overlay(here).circle(self.me)
        self.circle = frozenset(circles)
        self.near = self.circle | (self._also & self.members.keys())

    def end_after(self, round: int) -> None:
        """Say that this peer would end the run after a round."""
        self._own.end = round
        self.changes += 1
        self._speak(self.incarnation + 1, self._own.since_s)
        for peer in sorted(self.near & {*self.alive()}):
            self._say(peer, Kind.PING)

    def ends(self) -> dict[PeerId, int]:
        """After which round each peer would end the run, of those that would."""
        own = {self.me: self._own.end} if self._own.end >= 0 else {}
        return own | {peer: member.end for peer, member in self.members.items() if member.end >= 0}

    def met(self, peer: PeerId) -> None:
        """A connection with the peer stands: it is told all, and tells as much."""
        known = [p for p, m in self.members.items() if m.incarnation >= 0 and p != peer]
        for at in range(0, max(len(known), 1), MAX_NEWS // 2):
            self._say(peer, Kind.PING, first=known[at : at + MAX_NEWS // 2])

    def unheard(self, peer: PeerId) -> bool:
        """Whether no word of the peer says that it is here: it is not pinged, and may hold the same of us."""
        member = self.members.get(peer)
        return member is None or member.status is Liveness.DEAD

    def heard(self, peer: PeerId, now: float) -> None:
        """A message came over our own connection with the peer: that ends any suspicion of ours."""
        member = self.members.get(peer)
        if member is None:
            return
        if peer in self._probed:
            self._probed.discard(peer)
            self._cleared(peer)
        if member.status in (Liveness.DOUBTED, Liveness.SUSPECT):
            self._hold(peer, member, Liveness.ALIVE, now)
        elif member.status >= Liveness.DEAD and now >= member.since_s + self._period_s:
            member.since_s = now
            self._say(peer, Kind.PING)  # when the peer learns of it, it refutes it

    def leave(self, now: float) -> None:
        """Say good-bye."""
        self._own.status = Liveness.LEFT
        self._speak(self.incarnation, now)
        for peer in sorted(self.near & {*self.alive()}):
            self._say(peer, Kind.PING)

    # --- what happens

    def receive(self, peer: PeerId, kind: Kind, body: bytes | bytearray | memoryview, now: float) -> None:
        """A PING, PONG or SUSPECT of a peer; WireError when it can't be read, or is not signed."""
        probe: Probe = decode(bytes(body), Probe)
        if len(probe.news) > MAX_NEWS:
            raise WireError(f"{len(probe.news)} news in a message, at most {MAX_NEWS} are read")
        self.heard(peer, now)
        behind = [news.peer for news in probe.news if self._learn(news, peer, now)]
        if kind is Kind.PING or behind:
            self._say(peer, Kind.PONG if kind is Kind.PING else Kind.PING, first=behind)
        if kind is Kind.SUSPECT and probe.about in self.members:
            self._helping.setdefault(probe.about, set()).add(peer)
            self._say(probe.about, Kind.PING)
        elif kind is Kind.PONG:
            for asker in sorted(self._helping.pop(peer, ())):
                self._say(asker, Kind.PONG, about=peer)

    def tick(self, now: float) -> None:
        for peer, member in self.members.items():
            if member.status is Liveness.SUSPECT and now >= member.since_s + self._suspicion_s:
                self._hold(peer, member, Liveness.DEAD, now)
        if self.changes != self._renewed:
            self._renew()
        if not self._asked and now >= self._probe_s + self._period_s / 2:
            self._asked = True
            for probed in sorted(self._probed):
                others = self._overlay.circle(probed) if probed in self.near else self.near
                for helper in self._some(others & {*self.alive()} - {self.me, probed}, self._indirect):
                    self._say(helper, Kind.SUSPECT, about=probed)
        if now >= self._probe_s + self._period_s:
            for peer in sorted(self._probed):
                if (member := self.members[peer]).status is Liveness.ALIVE:
                    self._hold(peer, member, Liveness.SUSPECT, now)
                elif member.status is Liveness.DOUBTED:
                    self._hold(peer, member, Liveness.DEAD, now)
            self._probe_s, self._asked = now, False
            self._eager_s = math.inf
            self._probed = self._next(now)
            self._helping.clear()
            for peer in sorted(self._probed):
                self._say(peer, Kind.PING)
        if now >= self._eager_s:
            self._eager_s = math.inf
            for peer in self._some(self.near & {*self.alive()}, EAGER):
                self._say(peer, Kind.PING)

    def _some(self, peers: Iterable[PeerId], most: int) -> list[PeerId]:
        found = sorted(peers)
        return self._draw.sample(found, min(most, len(found)))

    def wake_s(self) -> float:
        """When `tick` has something to do next."""
        times = [self._probe_s + self._period_s, self._eager_s]
        if self._probed and not self._asked:
            times.append(self._probe_s + self._period_s / 2)
        suspects = (m.since_s for m in self.members.values() if m.status is Liveness.SUSPECT)
        return min(*times, min(suspects, default=math.inf) + self._suspicion_s)

    def _next(self, now: float) -> set[PeerId]:
        """Whom to ping: everybody near in turn, in a new order each time; suspects; a few in doubt."""
        late_s = now - self._suspicion_s  # hearsay from before that ought to be refuted by now
        late = [p for p, m in self.members.items() if m.status is Liveness.DOUBTED and m.since_s <= late_s]
        chosen = {peer for peer, member in self.members.items() if member.status is Liveness.SUSPECT}
        chosen |= {*list(self._doubted)[:DOUBTS], *late[:DIALS]}
        here = self.near & {*self.alive()}
        while self._order:
            if (peer := self._order.pop()) in here:
                return chosen | {peer}
        self._order = self._draw.sample(sorted(here), len(here))
        return chosen | set(self._order[-1:])

    # --- news

    def _learn(self, news: News, teller: PeerId, now: float) -> bool:
        """Believe what is signed, look into what is not; whether the peer has signed newer news."""
        if not 0 <= news.incarnation < MAX_INCARNATION or len(news.proof) > PROOF_BYTES or news.end < -1:
            raise WireError(f"an incarnation of {news.incarnation}, a signature of {len(news.proof)} bytes")
        member = self._own if news.peer == self.me else self.members.get(news.peer)
        if member is None:
            return False
        doubt = Liveness.DOUBTED <= news.status <= Liveness.DEAD
        if member.incarnation < 0 and news.status is Liveness.DEAD:
            return False  # of whom nobody says more it is true
        left = news.status is Liveness.LEFT
        theirs, ours = (news.incarnation, left), (member.incarnation, member.status is Liveness.LEFT)
        if theirs < ours:
            own_word = news.status is not Liveness.DOUBTED and member is not self._own
            if doubt and own_word:  # the doubted itself is asked, by who may not know the newest
                self._refuted(teller, news.peer, now)
            return True
        if theirs > ours:
            signed = statement(self._voice.run, news.peer, news.incarnation, left, news.end)
            if not self._voice.proves(news.peer, signed, news.proof):
                raise WireError(f"news of {news.peer[:80]} that it has not signed")
            if member is self._own:  # of a former process
                self._speak(news.incarnation + 1, now)
                return False
            member.incarnation, member.proof, member.end = news.incarnation, news.proof, news.end
            self._cleared(news.peer)
            self._probed.discard(news.peer)
            self._hold(news.peer, member, Liveness.LEFT if left else Liveness.ALIVE, now)
        if doubt and member is self._own:
            if now >= member.since_s + self._period_s / 8:  # before that, what it was told last is the answer
                self._speak(self.incarnation + 1, now)
        elif doubt and member.status is Liveness.ALIVE and news.peer not in self.near:
            self._hold(news.peer, member, Liveness.DOUBTED, now)
        elif doubt and member.status is Liveness.ALIVE:
            tellers = self._doubted.setdefault(news.peer, set())
            if news.status is not Liveness.DOUBTED or self.near == self.members.keys():  # its own word
                tellers.add(teller)
        return False

    def _speak(self, incarnation: int, now: float) -> None:
        """Sign what this peer is."""
        own = self._own
        left = own.status is Liveness.LEFT
        own.incarnation, own.since_s = incarnation, now
        own.proof = self._voice.sign(statement(self._voice.run, self.me, incarnation, left, own.end))

    def _hold(self, peer: PeerId, member: Member, status: Liveness, now: float) -> None:
        """Take a peer for this from now on, and tell it."""
        member.status, member.since_s = status, now
        self.changes += 1
        self._eager_s = min(self._eager_s, now + self._period_s / 8)
        self._fresh[peer] = 3 * math.ceil(math.log2(len(self.members) + 2))
        if status is not Liveness.ALIVE:
            self._doubted.pop(peer, None)  # whoever doubted it was not wrong

    def _cleared(self, peer: PeerId) -> None:
        """The peer answered: who doubted it was wrong."""
        for teller in sorted(self._doubted.pop(peer, ())):
            self._count(teller)

    def _refuted(self, teller: PeerId, peer: PeerId, now: float) -> None:
        """A doubt that the peer itself has refuted. Who was told so before is wrong again."""
        if now > self._corrected.setdefault((teller, peer), now) + self._period_s:
            self._count(teller)

    def _count(self, teller: PeerId) -> None:
        self._wrong[teller] = wrong = self._wrong[teller] + 1
        if wrong >= NAMED and wrong & (wrong - 1) == 0:
            what = f"has called others dead {wrong} times who answered: it lies, or hardly reaches them"
            self.reports.append((teller, what))

    def _say(self, peer: PeerId, kind: Kind, about: PeerId = "", first: Sequence[PeerId] = ()) -> None:
        """A message with our own signature, news of the addressee where it is doubted, then what was asked
        for, and the news that were told least often."""
        order = sorted(self._fresh.keys() - {peer}, key=lambda p: (-self._fresh[p], p))[:NEWS_PER_MESSAGE]
        for p in order:
            self._fresh[p] -= 1
            if not self._fresh[p]:
                del self._fresh[p]
        news = [_told(self.me, self._own)]
        if (to := self.members.get(peer)) is not None and to.incarnation >= 0:
            doubted = peer in self._helping or peer in self._doubted
            status = max(to.status, Liveness.DOUBTED) if doubted else to.status
            if status is not Liveness.ALIVE:
                news.append(_told(peer, to, status))
        known = ((p, self.members.get(p)) for p in dict.fromkeys([about, *first, *order]) if p != peer)
        news += [_told(p, m) for p, m in known if m and m.incarnation >= 0]
        self.outbox.append((peer, kind, msgspec.msgpack.encode(Probe(news[:MAX_NEWS], about))))


def _told(peer: PeerId, member: Member, status: Liveness | None = None) -> News:
    held = member.status if status is None else status
    return News(peer, held, member.incarnation, member.proof, member.end)
