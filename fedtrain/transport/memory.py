"""Both seams in this process: public, for simulations and tests with seeded faults."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..errors import ConnectError, WireError
from ..exchange import Account, Exchanged, Mixer, PeerId, ReceivedShare, Share
from ..messages import Reply, Request, SiteId
from ..wire.gossip import Header, Kind
from .courier import Courier
from .shares import Limits, Parts

Handler = Callable[[Request], Reply | Awaitable[Reply]]


class LocalCohort:
    """Sites are functions. `loses(site, request)` says which requests get no reply."""

    def __init__(
        self,
        handlers: Mapping[SiteId, Handler],
        loses: Callable[[SiteId, Request], bool] = lambda site, request: False,
    ) -> None:
        self._handlers, self._loses = handlers, loses
        self.bytes_in = self.bytes_out = 0
        self.lines: list[tuple[SiteId, str]] = []

    async def members(self, at_least: int) -> list[SiteId]:
        return sorted(self._handlers)

    async def newcomer(self, known: Collection[SiteId]) -> None:
        await asyncio.get_running_loop().create_future()  # whoever takes part is there from the start

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        for site, request in requests.items():
            if not self._loses(site, request):
                reply = self._handlers[site](request)
                yield site, (reply if isinstance(reply, Reply) else await reply)

    def tell(self, site: SiteId, line: str) -> None:
        self.lines.append((site, line))


# --- the graph seam


class Crashed(ConnectError):
    """This peer was taken down by its network's faults."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong between peers, drawn from one seed. Times are of the network's own clock."""

    drop: float = 0.0  # probability of a message to be lost
    duplicate: float = 0.0  # to come twice
    delay_s: float = 0.0  # a message takes a time drawn from [0, delay_s]: some overtake others
    crash_s: Mapping[PeerId, float] = field(default_factory=dict)  # when a peer dies
    notice_s: float = 3.0  # after which the others know of it
    cut: Callable[[PeerId, PeerId, float], bool] = lambda giver, taker, now: False  # a link that is down now

    @property
    def none(self) -> bool:
        return not (self.drop or self.duplicate or self.delay_s or self.crash_s)


class LocalNetwork:
    """Peers in this process, on one event loop, with a virtual clock.

    Messages without delay arrive at once. Time passes only when every peer that is up waits for something, so
    whatever a peer computes takes no time, and a run is the same each time.

        network = LocalNetwork(["a", "b"])
        async with network.join("a") as neighbors: ...
    """

    def __init__(
        self,
        names: Sequence[PeerId],
        *,
        faults: Faults | None = None,
        seed: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.now = 0.0
        self.names = sorted(names)
        self.faults, self.limits = faults or Faults(), limits or Limits()
        self.lost = self.doubled = 0
        self.refused: list[tuple[PeerId, PeerId, str]] = []  # giver, taker, which breach of the protocol
        self._draw = random.Random(seed)
        self._up: dict[PeerId, LocalNeighbors] = {}
        self.waiting: set[PeerId] = set()  # all that wait are in it
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._number = itertools.count()
        self._busy: deque[PeerId] = deque()  # whose outbox may hold something
        self._flushing = self._advancing = False
        for name, at_s in self.faults.crash_s.items():
            self._later(at_s, lambda name=name: self._crash(name))  # type: ignore[misc]  # a default

    @asynccontextmanager
    async def join(self, name: PeerId) -> AsyncIterator[LocalNeighbors]:
        """A peer is up while its context lasts, and the others are told when it ends. It may come back."""
        assert name in self.names, name
        assert name not in self._up, name
        peer = self._up[name] = LocalNeighbors(self, name)
        for other in self._up.values():
            if other is not peer:
                other.courier.found(name, self.now)
        self._flush()
        try:
            yield peer
        finally:
            if self._up.get(name) is peer:
                self._take_down(name, "has left")

    def _crash(self, name: PeerId) -> None:
        if peer := self._up.pop(name, None):
            peer.fail(Crashed(f"{name} crashed at {self.now:g} s"))
            self._later(self.faults.notice_s, lambda: self._tell(name, "is dead"))

    def _take_down(self, name: PeerId, why: str) -> None:
        del self._up[name]
        self._tell(name, why)
        self._check_idle()

    def _tell(self, name: PeerId, why: str) -> None:
        if name not in self._up:
            for other in self._up.values():
                other.courier.lost(name, why, self.now)
                other.on_lost(name)
                self.touched(other)

    def touched(self, peer: LocalNeighbors) -> None:
        """Something happened at a peer: carry what it says, wake it if its wait is over."""
        self._busy.append(peer.name)
        self._flush()

    def _flush(self) -> None:
        if self._flushing:
            return
        self._flushing = True
        while self._busy:
            if peer := self._up.get(self._busy.popleft()):
                while peer.courier.outbox:
                    self._carry(peer.name, *peer.courier.outbox.popleft())
                peer.wake()
        self._flushing = False
        self._check_idle()

    def _carry(self, giver: PeerId, taker: PeerId, header: Header, parts: Parts) -> None:
        if self.faults.none:
            self._deliver(giver, taker, header, parts)
            return
        if self.faults.cut(giver, taker, self.now) or self._draw.random() < self.faults.drop:
            self.lost += 1
            return
        parts = [bytearray(part) for part in parts]  # it arrives when the giver may have written to them
        times = 1 + (self._draw.random() < self.faults.duplicate)
        self.doubled += times - 1
        for _ in range(times):
            delay_s = self._draw.uniform(0, self.faults.delay_s)
            self._later(delay_s, lambda: self._deliver(giver, taker, header, parts))

    def _deliver(self, giver: PeerId, taker: PeerId, header: Header, parts: Parts) -> None:
        if peer := self._up.get(taker):
            if header.kind is Kind.PING:
                peer.courier.heard(giver, header, self.now)
            else:
                try:
                    peer.courier.receive(giver, header, parts, self.now)
                except WireError as e:
                    self.refused.append((giver, taker, str(e)))
                peer.hear()
            self._busy.append(taker)

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + after_s, next(self._number), what))

    def _check_idle(self) -> None:
        if self._advancing or len(self.waiting) < len(self._up):  # which is nearly always so
            return
        if self._up and all(peer.waits for peer in self._up.values()):
            self._advancing = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Let time pass until a peer's wait is over."""
        self._advancing = False
        if not self._up or not all(peer.waits for peer in self._up.values()):
            return
        at_s = min(peer.wake_s() for peer in self._up.values())
        if self._due and self._due[0][0] <= at_s:
            self.now, _, what = heapq.heappop(self._due)
            what()
        elif at_s < math.inf:
            self.now = max(at_s, self.now)
            for peer in list(self._up.values()):
                peer.courier.tick(self.now)
                self._busy.append(peer.name)
        else:
            stuck = ", ".join(sorted(self._up))
            for peer in list(self._up.values()):
                peer.fail(ConnectError(f"{stuck}: all wait for each other, and nothing is under way"))
        self._flush()


class LocalNeighbors:
    """One peer's end of a LocalNetwork. Implements exchange.Neighbors."""

    def __init__(self, network: LocalNetwork, name: PeerId) -> None:
        self.name, self._network = name, network
        first = int.from_bytes(f"{name}{network.now}".encode()[-4:], "little")
        self.courier = Courier(network.limits, first_transfer=first)
        self._waits: dict[asyncio.Future[None], tuple[Callable[[], bool], float]] = {}  # over, or until when
        self._wake_s: float | None = None
        self._heard: Callable[[ReceivedShare], None] | None = None
        self.on_lost: Callable[[PeerId], None] = lambda peer: None

    @property
    def bytes_in(self) -> int:
        return self.courier.receiver.bytes_in

    @property
    def bytes_out(self) -> int:
        return self.courier.sender.bytes_out

    @property
    def waits(self) -> bool:
        return bool(self._waits) and not any(wait.done() for wait in self._waits)

    def announce(self, round: int, to: Iterable[PeerId] | None = None) -> None:
        self.courier.announces(self._network.now)
        for name in self._network.names if to is None else sorted(to):
            if name != self.name:
                self.courier.outbox.append((name, self.courier.heading(Kind.PING, name, round), ()))
        self._network.touched(self)

    def account(self, counted: Mapping[PeerId, Account]) -> None:
        self.courier.state.counted = dict(counted)

    def accounts(self) -> Mapping[PeerId, tuple[int, Account]]:
        return self.courier.state.told

    def progress(self) -> dict[PeerId, int]:
        return self.courier.progress

    async def exchange(
        self, round: int, shares: Mapping[PeerId, Share], expected: Sequence[PeerId], mixer: Mixer,
        deadline_s: float,
    ) -> Exchanged:  # fmt: skip
        self.courier.begin(round, shares, expected, mixer, deadline_s, self._network.now)
        await self._wait(lambda: self.courier.finished is not None)
        assert self.courier.finished is not None
        return self.courier.finished

    def post(self, round: int, shares: Mapping[PeerId, Share], *, answers: bool = False) -> None:
        for gone in self.courier.post(round, shares, answers, self._network.now):
            self.on_lost(gone)
        self._network.touched(self)

    def take(self) -> list[ReceivedShare]:
        received = self.courier.receiver.take_posted()
        return [received[key] for key in sorted(received)]

    def listen(self, heard: Callable[[ReceivedShare], None], lost: Callable[[PeerId], None]) -> None:
        self._heard, self.on_lost = heard, lost

    async def until(self, over: Callable[[], bool], timeout_s: float) -> bool:
        return over() or await self._wait(over, timeout_s)

    def publish(self, round: int, share: Share) -> None:
        self.courier.publish(round, share)

    async def pull(self, peer: PeerId, timeout_s: float) -> ReceivedShare | None:
        self.courier.pull(peer, self._network.now)
        await self._wait(lambda: peer in self.courier.receiver.states, timeout_s)
        self.courier.receiver.forget_pull(peer)
        return self.courier.receiver.states.pop(peer, None)

    async def sleep(self, seconds: float) -> None:
        """Let the network's time pass, as for a training that takes long."""
        await self._wait(lambda: False, seconds)

    # --- for the network

    async def _wait(self, over: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """Until `over()`, or the time is up; says which."""
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits[wait] = over, self._network.now + timeout_s
        self._network.waiting.add(self.name)
        self._network.touched(self)
        try:
            await wait
        finally:
            del self._waits[wait]
            self._network.waiting.discard(self.name)
            if self._waits:  # it trains on while its exchange is over
                self._network.waiting.add(self.name)
                self._network.touched(self)
        return over()

    def hear(self) -> None:
        if self._heard is not None and self.courier.receiver.posted:
            for received in self.take():
                self._heard(received)

    def wake(self) -> None:
        self._wake_s = None
        for wait, (over, until_s) in self._waits.items():
            if not wait.done() and (over() or self._network.now >= until_s):
                wait.set_result(None)
        if not self.waits:
            self._network.waiting.discard(self.name)

    def wake_s(self) -> float:
        """When it has something to do without being touched; asked far more often than it changes."""
        if self._wake_s is None:
            until_s = min((until_s for _, until_s in self._waits.values()), default=math.inf)
            self._wake_s = min(until_s, self.courier.wake_s()) if self.waits else math.inf
        return self._wake_s

    def fail(self, error: ConnectError) -> None:
        for wait in self._waits:
            if not wait.done():
                wait.set_exception(error)
        self._network.waiting.discard(self.name)
