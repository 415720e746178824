"""What connects peers in a simulated world: links.Links without sockets, and its thread without a thread.

What ZeroMQ over TCP gives is given here: the messages of a connection come in order, those under way are lost
with it, a caller calls again by itself, a connection on which nothing is heard for three heartbeats ends, a
full one takes no more, and each end learns of all this in its own time, by its own poll.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from fedtrain.errors import ConnectError
from fedtrain.exchange import PeerId
from fedtrain.transport import links as production
from fedtrain.transport.link import OUR_CALL, Link, LinkSettings
from fedtrain.transport.peer_thread import PeerThread
from tests.vsim.clock import CURRENT, Process, VirtualLoop
from tests.vsim.network import DOWN, UP


class Wires:
    """All connections between peers. The draws of what happens are the seed's."""

    def __init__(self, loop: VirtualLoop, draw: random.Random) -> None:
        self.loop, self._seed = loop, draw.getrandbits(64)
        self._draws: dict[tuple[PeerId, PeerId], random.Random] = {}
        self.latency_s = draw.choice([0.001, 0.001, 0.02, 0.3])
        self.broken = draw.choice([0.0, 0.0, 0.002, 0.02])  # of a message that its connection ends with
        self.blocked: dict[tuple[PeerId, str], float] = {}  # (peer, direction) -> until when
        self.listening: dict[str, SimLinks] = {}
        self.calls: list[Call] = []
        self.numbers = itertools.count(10)
        self.counts = dict.fromkeys(("messages", "broken", "blocked", "halved", "full", "refused"), 0)

    def draw(self, giver: PeerId, taker: PeerId) -> random.Random:
        """Of one way between two: peers call others in the order of sets, another in each process."""
        if (giver, taker) not in self._draws:
            self._draws[giver, taker] = random.Random(f"{self._seed} {giver} {taker}")
        return self._draws[giver, taker]

    def heal(self) -> None:
        """From now on nothing goes wrong by itself."""
        self.broken = 0.0
        self.blocked.clear()

    def block(self, peer: PeerId, ways: tuple[str, ...], seconds: float) -> None:
        """Nothing passes from (UP) or to (DOWN) this peer for so long; TCP sends it again afterwards."""
        self.counts["blocked" if len(ways) > 1 else "halved"] += 1
        for way in ways:
            self.blocked[peer, way] = max(self.blocked.get((peer, way), 0.0), self.loop.now + seconds)
        for call in self.calls:
            if peer in call.ends and seconds >= 3 * call.heartbeat_s:
                self.later(3 * call.heartbeat_s, call.lose)

    def reset(self, peer: PeerId) -> None:
        """All connections of a peer end."""
        for call in [call for call in self.calls if peer in call.ends]:
            call.lose()

    def died(self, process: Process, power: bool) -> None:
        """A killed process's kernel closes what it had open; one without power says nothing."""
        for address in [at for at, links in self.listening.items() if links.process is process]:
            del self.listening[address]
        for call in [c for c in self.calls if process in (c.caller.process, c.callee.process)]:
            call.lose(3 * call.heartbeat_s if power else 0.0)

    def arrives_s(self, giver: PeerId, taker: PeerId) -> float:
        """When a message that is sent now arrives."""
        until = max(self.blocked.get((giver, UP), 0.0), self.blocked.get((taker, DOWN), 0.0))
        return max(self.loop.now, until) + self.latency_s * self.draw(giver, taker).uniform(0.2, 2.0)

    def later(self, seconds: float, what: Callable[..., object], *arguments: Any) -> None:
        """The network's own doing, and no process's."""
        self.loop.call_at(self.loop.now + seconds, what, *arguments, context=Context())


@dataclass(eq=False)
class Dealer:
    """Our end of a call, which is tried until it is hung up, or refused."""

    links: SimLinks
    link: Link
    address: str
    call: Call | None = None
    closed: bool = False
    tried: int = 0

    def dial(self) -> None:
        """Knock; again after a while where nobody answers."""
        if self.closed or not self.links.process.alive:
            return
        wires, me, patience_s = self.links.wires, self.links.name, 3 * self.links._heartbeat_s
        self.tried += 1
        if (there := wires.listening.get(self.address)) is None:
            self.links.happens(self._nobody)
            self.again(self.tried)
            return
        both_s = wires.arrives_s(me, there.name) + wires.arrives_s(there.name, me) - 2 * wires.loop.now
        if both_s < patience_s:
            wires.later(both_s / 2, there.happens, partial(there.knocked, self, self.tried))
        wires.later(patience_s, self.again, self.tried)

    def again(self, tried: int) -> None:
        """What was tried so often has led to nothing."""
        if tried == self.tried and self.call is None:
            self.links.wires.later(self.draw().uniform(0.1, 2.0), self._redial, tried)

    def draw(self) -> random.Random:
        return self.links.wires.draw(self.links.name, self.link.peer)

    def _redial(self, tried: int) -> None:
        if tried == self.tried and self.call is None:
            self.dial()

    def _nobody(self) -> None:
        self.link.trouble = "nothing listens there yet"


class Call:
    """One connection."""

    def __init__(self, wires: Wires, dealer: Dealer, callee: SimLinks) -> None:
        self.wires, self.dealer, self.caller, self.callee = wires, dealer, dealer.links, callee
        self.ends, self.heartbeat_s = (self.caller.name, callee.name), callee._heartbeat_s
        self.number, self.up = next(wires.numbers), True
        self.under_way = {self.caller: 0, callee: 0}  # messages, by their giver
        self._last_s = {self.caller: 0.0, callee: 0.0}
        self.over: set[SimLinks] = set()  # the ends that know that it ended
        wires.calls.append(self)

    def other(self, me: SimLinks) -> SimLinks:
        return self.callee if me is self.caller else self.caller

    def send(self, giver: SimLinks, frames: list[bytes]) -> None:
        """zmq.Again where it is full."""
        wires, taker = self.wires, self.other(giver)
        if self.under_way[giver] >= production.SENDING:
            wires.counts["full"] += 1
            raise zmq.Again
        wires.counts["messages"] += 1
        if self.up and wires.draw(giver.name, taker.name).random() < wires.broken:
            self.lose()
        if not self.up:
            return  # into a buffer that is never emptied
        self.under_way[giver] += 1
        at_s = max(self._last_s[giver] + 1e-6, wires.arrives_s(giver.name, taker.name))
        self._last_s[giver] = at_s
        wires.later(at_s - wires.loop.now, self._arrived, giver, frames)

    def _arrived(self, giver: SimLinks, frames: list[bytes]) -> None:
        self.under_way[giver] -= 1
        taker = self.other(giver)
        if taker not in self.over:
            taker.happens(lambda: taker.heard(self, frames))

    def lose(self, silent_s: float = 0.0) -> None:
        """It ends; each end learns of it in its own time. What is under way arrives until then."""
        if not self.up:
            return
        self.up = False
        self.wires.counts["broken"] += 1
        self.wires.calls.remove(self)
        for end in (self.caller, self.callee):
            late = self.wires.draw(end.name, self.other(end).name).choice(
                [0.0, 0.0, self.wires.latency_s, 2 * self.heartbeat_s]
            )
            self.wires.later(silent_s + late, self.ended, end)

    def ended(self, end: SimLinks) -> None:
        """One end learns that it is over."""
        if end not in self.over:
            self.over.add(end)
            end.happens(lambda: end.lost(self))


@dataclass
class Frame:
    """As zmq.Frame."""

    buffer: bytes | bytearray


class SimLinks(production.Links):
    """links.Links over Wires; all but its sockets is as it is there."""

    def __init__(self, wires: Wires, local: Any, settings: LinkSettings, observer: Any) -> None:
        process = CURRENT.get()
        assert process is not None
        self.wires, self.process, self.name = wires, process, local.name
        self._local, self._heartbeat_s, self._observer = local, settings.heartbeat_s, observer
        self._links, self._talking, self._ended, self._let_in = {}, {}, [], {}
        self._events: deque[Callable[[], tuple[Link, list[Frame]] | None]] = deque()
        self._something: asyncio.Future[None] | None = None
        self._told_to_wake, self.address, self.wire_out = False, "", 0
        self._routed: dict[int, Call] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter([self._links[peer] for peer in sorted(self._links)])

    def listen(self, address: str) -> int:
        if address in self.wires.listening:
            raise ConnectError(f"cannot listen on {address}: in use")
        self.wires.listening[address], self.address = self, address
        return int(address.rsplit(":", 1)[1])

    def wake(self) -> None:
        if not self._told_to_wake:
            self._told_to_wake = True
            self.happens(self._wake_up)

    def _wake_up(self) -> None:
        self._told_to_wake = False
        self._observer.woken()

    def close(self) -> None:
        for link in self:
            self.hang_up(link)
        for call in list(self._routed.values()):
            self._end(call)
        if self.wires.listening.get(self.address) is self:
            del self.wires.listening[self.address]

    # --- calls

    def call(self, link: Link) -> None:
        self._end_our_call(link)
        link.recall_s, link.contact = math.inf, self._local.roster.contact(link.peer)
        if link.contact is not None and link.contact.address is not None:
            dealer: Any = Dealer(self, link, link.contact.address)
            link.dealer = link.monitor = dealer
            dealer.dial()

    def _end_our_call(self, link: Link, linger_s: float = 0.0) -> None:
        dealer: Any = link.dealer
        if dealer is None:
            return
        dealer.closed = True
        if dealer.call is not None:
            self._end(dealer.call)
        link.dealer = link.monitor = None
        link.calling = False

    def _end_calls(self, link: Link) -> None:
        for number in list(link.routes):
            if (call := self._routed.pop(number, None)) is not None:
                call.lose()

    def _part(self, link: Link, calls: Iterable[int]) -> None:
        """A call ends at once, behind what was said over it."""
        for number in list(calls):
            del link.routes[number]
            if (call := self._routed.pop(number, None)) is not None:
                call.lose()

    def end_parting(self, now: float) -> None:
        """None waits."""

    def _end(self, call: Call) -> None:
        """This end closes it; it hears no more of it."""
        call.over.add(self)
        self._routed.pop(call.number, None)
        call.lose()

    # --- what happens

    def happens(self, what: Callable[[], tuple[Link, list[Frame]] | None]) -> None:
        """Something that the next `receive` sees."""
        self._events.append(what)
        if self._something is not None and not self._something.done():
            self._something.set_result(None)

    async def ready(self, timeout_s: float) -> None:
        """Until there is something for `receive`, at most so long."""
        if self._talking:
            timeout_s = min(timeout_s, production.FULL_S)
        if self._events or timeout_s <= 0:
            return await asyncio.sleep(0)
        self._something = asyncio.get_running_loop().create_future()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._something
        self._something = None

    def receive(self, timeout_s: float) -> Iterator[tuple[Link, list[Any]]]:
        for _ in range(len(self._events)):
            if not self._events:
                break
            if (found := self._events.popleft()()) is not None:
                yield found
        ended, self._ended = self._ended, []
        for link in ended:
            if link.recall_s < math.inf:
                self._end_our_call(link)
            if not link.up:
                link.went_down()

    def knocked(self, dealer: Dealer, tried: int) -> None:
        """Somebody calls: as Authenticator.answer says, whom the roster has for its key."""
        wires, peer = self.wires, self._local.roster.peer_of(dealer.links._local.curve.public)
        back_s = wires.arrives_s(self.name, dealer.links.name) - wires.loop.now
        if peer is None or peer == self.name or self._is_banned(peer):
            wires.counts["refused"] += 1
            wires.later(back_s, dealer.links.happens, partial(self._denied, dealer, tried))
        elif not self._has_room(peer):
            wires.later(back_s, dealer.again, tried)
        else:
            wires.later(back_s, self._answered, dealer, tried)

    def _answered(self, dealer: Dealer, tried: int) -> None:
        alive = dealer.links.process.alive and self.process.alive
        if alive and not dealer.closed and dealer.tried == tried and dealer.call is None:
            dealer.call = Call(self.wires, dealer, self)
            dealer.links.happens(partial(dealer.links._made, dealer, dealer.call))

    def _made(self, dealer: Dealer, call: Call) -> None:
        if not dealer.closed and self not in call.over:
            link = dealer.link
            link.calling, link.trouble, link.denials, link.failures = True, "", 0, 0
            self._observer.greet(link)

    @staticmethod
    def _denied(dealer: Dealer, tried: int) -> None:
        if not dealer.closed and dealer.tried == tried:
            dealer.tried += 1  # libzmq calls no peer again that refused a key
            dealer.links._observer.key_refused(dealer.link)

    def heard(self, call: Call, frames: list[bytes]) -> tuple[Link, list[Frame]] | None:
        """A message has come."""
        message = [Frame(bytearray(frame)) for frame in frames]
        if call.caller is self:
            call.dealer.link.heard = OUR_CALL
            return None if call.dealer.closed else (call.dealer.link, message)
        peer = self._local.roster.peer_of(call.caller._local.curve.public)
        if peer is None:
            self._end(call)
            return None
        link = self._links.get(peer) or self.to(peer)
        if link.is_banned():
            return None
        if call.number not in link.routes and self not in call.over:
            link.routes[call.number] = (b"", None)
            self._routed[call.number] = call
            self._observer.greet(link)
        link.heard = call.number
        return link, message

    def lost(self, call: Call) -> None:
        """A connection has ended."""
        if call.caller is self:
            if not call.dealer.closed:
                self._is_called_again(call.dealer.link)
            return
        self._routed.pop(call.number, None)
        link = next((each for each in self if each.routes.pop(call.number, None)), None)
        if link is not None and not link.up:
            self._ended.append(link)

    # --- what is said

    def _over(self, way: int, link: Link, header: bytes, parts: Any) -> None:
        frames = [header, *map(bytes, parts)]
        if way == OUR_CALL:
            dealer: Any = link.dealer
            if dealer is None or dealer.call is None or self in dealer.call.over:
                raise zmq.Again
            dealer.call.send(self, frames)
        elif (call := self._routed.get(way)) is None or self in call.over:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        else:
            call.send(self, frames)


class SimThread:
    """threading.Thread for a PeerThread: its turns are steps of its process."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.peer: PeerThread = target.__self__  # type: ignore[attr-defined]
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        """PeerThread._work."""
        peer, links = self.peer, self.links
        try:
            while not peer._has_left():
                await links.ready(peer._tick_s - links.wires.loop.now)
                peer._turn()
        except Exception as e:
            peer._error = e
        finally:
            peer._closed = True
            peer.promises.fail(peer._error or ConnectError(f"{links.name} has left"))
            links.close()

    @property
    def links(self) -> SimLinks:
        found = self.peer.links
        assert isinstance(found, SimLinks)
        return found


async def stop(neighbors: Any) -> None:
    """ZmqNeighbors.stop, which waits for no thread."""
    thread = neighbors._thread
    with suppress(ConnectError):
        thread.submit(thread._leave)
    await asyncio.wait([thread._thread.task], timeout=10)
