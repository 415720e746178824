"""The star seam and the graph seam: all that a coordinator, and all that a peer, asks of the network.

`Cohort` is real over a network in `transport/endpoints.py`, `Neighbors` over ZeroMQ in `transport/zmq.py`,
both are in memory in `transport/memory.py`. Code that is given one (a round, secure aggregation, a gossip
algorithm) can't tell which.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from .messages import Folded, Reply, Request, SiteId, Train


class Traffic(Protocol):
    """What counts the bytes that it moves: a cohort, a peer's neighbours."""

    @property
    def bytes_in(self) -> int: ...
    @property
    def bytes_out(self) -> int: ...


class Cohort(Protocol):
    """The sites that can be asked."""

    @property
    def bytes_in(self) -> int:
        """Model bytes received so far, for the log."""

    @property
    def bytes_out(self) -> int:
        """Model bytes sent so far."""

    async def members(self, at_least: int) -> Sequence[SiteId]:
        """The sites that have joined, sorted; waits until there are `at_least` so many. Of a large simulation
        there are too many to go over them all in each round."""

    async def newcomer(self, known: Collection[SiteId]) -> None:
        """Returns when a site is there that is not among those `known`."""

    def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        """Send each site its request; yield (site, reply) as replies come, until all came or the deadline.

        A site that stays silent, or is lost for longer than the idle time, simply does not appear.
        A request with the same id may be sent again (after a restart, say): sites answer it once.
        """

    def tell(self, site: SiteId, line: str) -> None:
        """One line for the people at a site: why its update was refused, say. Best effort."""


@runtime_checkable
class Folds(Protocol):
    """A cohort whose sites' updates may be summed where they are trained, as those of a simulation are."""

    def fold(
        self, requests: Mapping[SiteId, Train], deadline_s: float, summands: int = 0,
        plan: Sequence[SiteId] = (),
    ) -> AsyncGenerator[tuple[Sequence[SiteId], Folded | Reply], None]:  # fmt: skip
        """Send each site its request; yield what comes in the order of the requests: of sites that are whole
        blocks of the mean one Folded, and else the single reply of one site.

        `summands`: the sites of the sum under masks' arithmetic; 0: sums are those of the open.
        `plan`: all sites of the round, of which the others are not asked; (): all are.
        """


class CohortWrapper:
    """A cohort that passes on to another one all but its exchanges, which are its subclasses' own."""

    def __init__(self, inner: Cohort) -> None:
        self._inner = inner

    @property
    def bytes_in(self) -> int:
        return self._inner.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._inner.bytes_out

    async def members(self, at_least: int) -> Sequence[SiteId]:
        return await self._inner.members(at_least)

    async def newcomer(self, known: Collection[SiteId]) -> None:
        await self._inner.newcomer(known)

    def tell(self, site: SiteId, line: str) -> None:
        self._inner.tell(site, line)


async def gather(
    cohort: Cohort, requests: Mapping[SiteId, Request], deadline_s: float
) -> dict[SiteId, Reply]:
    """All the replies of one exchange, for those small enough to hold at once."""
    return {site: reply async for site, reply in cohort.exchange(requests, deadline_s)}


async def in_order(
    replies: AsyncGenerator[tuple[SiteId, Reply], None], sites: list[SiteId]
) -> AsyncGenerator[tuple[SiteId, Reply], None]:
    """The same replies in the order of `sites`: an early one waits (spooled or shared) for its turn.

    A float sum folded in this order has the same bits whatever the order of arrival.
    """
    held: dict[SiteId, Reply] = {}
    turn = iter(sites)
    due = next(turn, None)
    async for site, reply in replies:
        if site != due:
            held[site] = reply
            continue
        yield site, reply
        due = next(turn, None)
        while due in held:
            yield due, held.pop(due)
            due = next(turn, None)
    for site in sites:
        if site in held:
            yield site, held[site]


# --- the graph seam

PeerId = str


@dataclass(frozen=True)
class Neighborhood:
    """One peer's part of one round's graph: its neighbours, and how much each counts.

    W is the round's mixing matrix, W[i, j] the weight of j's model at i. Its rows sum to 1 (own + incoming)
    and its columns too (own + outgoing), unless the weights are push-sum's: then only the columns do.
    """

    peer: PeerId
    own: float  # W[peer, peer]
    incoming: Mapping[PeerId, float]  # j -> W[peer, j], by name, without the peer itself
    outgoing: Mapping[PeerId, float]  # j -> W[j, peer]
    fellows: Mapping[PeerId, Sequence[PeerId]] = field(
        default_factory=dict
    )  # of whom each neighbour receives


@dataclass(frozen=True)
class Share:
    """What one peer gives one neighbour in one round: bytes, and how they are to be read.

    The same payload may stand in the shares of all neighbours: who receives it scales it. It must not be
    written to until the exchange has returned. `note` is the algorithm's own, 4 KiB at most.
    """

    payload: memoryview  # uint8 [nbytes], little-endian; a view of an arena, no copy is made
    weight: float = 1.0  # the edge's mixing weight, or the push-sum mass given away
    degree: int = 0  # the giver's, for Metropolis weights
    codec: int = 0  # how the payload is encoded: the algorithm's table; 0 is an arena as it is
    note: bytes = b""


@dataclass(frozen=True)
class ShareHeader:
    """What a neighbour says of its share before the bytes; the fields are as in Share."""

    peer: PeerId
    round: int
    nbytes: int
    weight: float
    degree: int
    codec: int
    note: bytes


class Mixer(Protocol):
    """Where shares go as they arrive. Called between the start and the end of one exchange, from one thread,
    which may be another than the caller's.

    Chunks of a peer come in order, each once. The chunks at one offset come in the order of `expected`,
    whichever peer was first: so a sum of floats has the same bits in every run and over every transport.
    """

    def begin(self, offer: ShareHeader) -> None:
        """A share is about to come. BadUpdate refuses it (size, codec, weight) before a byte is mixed."""

    def mix(self, peer: PeerId, offset: int, chunk: memoryview) -> None:
        """At most 1 MiB from byte `offset` on, a multiple of 64 bytes unless it is the last; the memory is
        only lent for this call. BadUpdate refuses this chunk and what would follow."""

    def end(self, peer: PeerId, nbytes: int) -> None:
        """No more comes of this share: `nbytes` of it were mixed, which is all of it, or a prefix when the
        peer was lost or refused on the way."""


@dataclass(frozen=True)
class Exchanged:
    """How one exchange went. An in-neighbour is in one of the first two fields, an out-neighbour in one of
    the next three; where there is a mapping, it gives the reason."""

    arrived: frozenset[PeerId] = frozenset()  # in-neighbours whose share was mixed whole
    missing: Mapping[PeerId, str] = field(default_factory=dict)  # in-neighbours whose share was not
    given: frozenset[PeerId] = frozenset()  # out-neighbours that have our share whole
    kept: Mapping[PeerId, str] = field(default_factory=dict)  # out-neighbours that certainly don't have it
    unsure: Mapping[PeerId, str] = field(default_factory=dict)  # that may have it: their accounts will tell
    waited_s: float = 0.0  # from the start of the exchange to its end


@dataclass(frozen=True)
class ReceivedShare:
    """A share that came outside of an exchange, whole; its payload is the receiver's own."""

    peer: PeerId
    round: int  # the sender's, when it was sent; of an answer, that of the share which it answers
    share: Share
    answers: bool = False  # a share that we have posted


@dataclass(frozen=True)
class Account:
    """The rounds in which a taker has counted one giver's share: what it committed, and will not count again.

    >>> account = Account().counted(3).counted(5)
    >>> [round for round in range(8) if round in account]
    [3, 5]
    """

    last: int = -1  # the latest of them
    mask: int = 0  # bit i: round `last` - i is one of them; 32 bits

    def counted(self, round: int) -> Account:
        """The same with a later round."""
        assert round > self.last, (round, self.last)
        return Account(round, (self.mask << min(round - self.last, 32) | 1) & 0xFFFFFFFF)

    def __contains__(self, round: int) -> bool:
        return 0 <= self.last - round < 32 and bool(self.mask >> (self.last - round) & 1)


@dataclass(frozen=True)
class Contact:
    """Where a peer is found, and the key that proves it."""

    peer: PeerId
    key: bytes  # CURVE public key, z85
    address: str | None = None  # host:port; None: it can't be called, it calls


class Neighbors(Protocol):
    """A peer's neighbours: who they are in a round is the caller's to say, by its topology."""

    @property
    def bytes_in(self) -> int:
        """Payload bytes received so far, for the log."""

    @property
    def bytes_out(self) -> int:
        """Payload bytes sent so far."""

    def announce(self, round: int, to: Iterable[PeerId] | None = None) -> None:
        """Tell peers that this one is at `round` now, before it trains: their deadlines for it count from
        here, so a slow peer makes its neighbours wait but not miss each other. `to`: those who need to know,
        as the neighbours of that round; None: all. Others may be told as well."""

    def account(self, counted: Mapping[PeerId, Account]) -> None:
        """What this peer has counted of each giver, as it stands in its last commit. It goes out with the
        announcements that follow: a round that was announced says that all before it are committed."""

    def accounts(self) -> Mapping[PeerId, tuple[int, Account]]:
        """Of each taker the latest: it counts no more of our shares of rounds before the first number, and
        has counted those in the account."""

    def progress(self) -> dict[PeerId, int]:
        """The round that each peer announced last. A peer that is far behind pulls a state."""

    async def exchange(
        self, round: int, shares: Mapping[PeerId, Share], expected: Sequence[PeerId], mixer: Mixer,
        deadline_s: float,
    ) -> Exchanged:  # fmt: skip
        """Give each out-neighbour its share, feed those of the in-neighbours to `mixer`; never raises for a
        peer's sake.

        It ends when every share has come and gone, or its peer is dead, or `deadline_s` have passed since
        that peer announced this round. Rounds must grow. A share that comes later is not counted, and its
        sender is told so.
        """

    def post(self, round: int, shares: Mapping[PeerId, Share], *, answers: bool = False) -> None:
        """Send shares without waiting, for asynchronous modes. The payload is the transport's from here on. A
        share that was posted to the same peer before, and has not begun to leave, is replaced; one that
        `answers` a share of that peer's replaces no other."""

    def take(self) -> list[ReceivedShare]:
        """What was posted to us since the last call: of each peer its latest, in the peers' order."""

    def listen(self, heard: Callable[[ReceivedShare], None], lost: Callable[[PeerId], None]) -> None:
        """From here on have `heard` told of each share that is posted to us, as it comes, in place of `take`;
        and `lost` of each peer that dies or leaves, or to whom a share was posted in vain."""

    async def until(self, over: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `over()`, which what a listener is told may change, or the time is up. Says which."""

    def publish(self, round: int, share: Share) -> None:
        """Our state, for peers that join late and pull it. The snapshot is the transport's from here on."""

    async def pull(self, peer: PeerId, timeout_s: float) -> ReceivedShare | None:
        """The state that a peer has published; None when it has none, or doesn't answer in time."""
