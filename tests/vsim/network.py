"""A transport of the star between processes of one loop: streams.Transport with faults.

What gRPC over TCP gives is given here: the messages of a stream come in order or not at all, a link that is
blocked for three heartbeats is lost, each end learns of a loss in its own time. Within that, messages of
different streams overtake each other, connections break with messages under way (which may still arrive,
though their sender saw an error), links are blocked one way or both, and a message may come twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

from fedtrain.errors import CertificateError, ConnectError, WireError
from fedtrain.events import Emit, silent
from fedtrain.transport.streams import Connection, Denied, MessageStream, Serve
from tests.vsim.clock import CURRENT, Killed, Process, VirtualLoop

CONNECT_S = 20.0  # until a caller that hears nothing gives up
UP, DOWN = "up", "down"  # from a site to the aggregator, and back


@dataclass
class Server:
    """A process that listens."""

    process: Process
    context: Context
    calls: Mapping[str, Serve]
    serving: dict[asyncio.Task[None], None]  # in the order in which they came


class Network:
    """All links between the sites and one aggregator. The draws of what happens are the seed's."""

    def __init__(self, loop: VirtualLoop, draw: random.Random) -> None:
        self.loop, self.draw = loop, draw
        self.latency_s = draw.choice([0.001, 0.001, 0.02, 0.3])
        self.twice = draw.choice([0.0, 0.0, 0.05])  # probability of a message to come twice
        self.broken = draw.choice([0.0, 0.0, 0.002, 0.02])  # of a message that its connection ends with
        self.blocked: dict[tuple[str, str], float] = {}  # (site, direction) -> until when
        self.server: Server | None = None
        self.links: list[Link] = []
        self.counts = dict.fromkeys(("messages", "twice", "broken", "blocked", "halved"), 0)

    def heal(self) -> None:
        """From now on nothing goes wrong by itself."""
        self.twice = self.broken = 0.0
        self.blocked.clear()

    def block(self, site: str, ways: tuple[str, ...], seconds: float) -> None:
        """Nothing passes in these directions for so long; TCP sends it again afterwards."""
        self.counts["blocked" if len(ways) > 1 else "halved"] += 1
        for way in ways:
            self.blocked[site, way] = max(self.blocked.get((site, way), 0.0), self.loop.now + seconds)
        for link in self.links:
            if link.site == site and seconds >= 3 * link.heartbeat_s:
                self.later(3 * link.heartbeat_s, link.lose)

    def reset(self, site: str) -> None:
        """All connections of a site end."""
        for link in [link for link in self.links if link.site == site]:
            link.lose()

    def died(self, process: Process, power: bool) -> None:
        """A killed process's kernel closes what it had open; one without power says nothing."""
        if self.server is not None and self.server.process is process:
            self.server = None
        for link in [link for link in self.links if process in (link.caller, link.served)]:
            link.lose(3 * link.heartbeat_s if power else 0.0)

    def arrives_s(self, site: str, way: str) -> float:
        """When a message that is sent now arrives."""
        begins = max(self.loop.now, self.blocked.get((site, way), 0.0))
        return begins + self.latency_s * self.draw.uniform(0.2, 2.0)

    def later(self, seconds: float, what: Any, *arguments: Any) -> None:
        """The network's own doing, and no process's."""
        self.loop.call_at(self.loop.now + seconds, what, *arguments, context=Context())


class Link:
    """One connection of a site."""

    def __init__(self, network: Network, site: str, heartbeat_s: float) -> None:
        self.network, self.site, self.heartbeat_s = network, site, heartbeat_s
        self.caller, self.served = CURRENT.get(), network.server.process if network.server else None
        self.up, self.ends = True, list[tuple[End, End]]()
        network.links.append(self)

    def lose(self, silent_s: float = 0.0) -> None:
        """It ends; each end learns of it in its own time, after `silent_s` at least. What is under way
        arrives until then."""
        if not self.up:
            return
        self.close()
        self.network.counts["broken"] += 1
        for pair in self.ends:
            for end in pair:
                late = self.network.draw.choice([0.0, 0.0, self.network.latency_s, 2 * self.heartbeat_s])
                self.network.later(silent_s + late, end.broke)

    def close(self) -> None:
        self.up = False
        with suppress(ValueError):
            self.network.links.remove(self)


class End:
    """One end of a stream. Implements streams.MessageStream."""

    def __init__(self, link: Link, way: str) -> None:
        self.link, self._way = link, way  # in which it writes
        self.other: End
        self._inbox: deque[bytes | ConnectError | None] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._last_s, self.over = 0.0, False

    async def read(self) -> bytes | None:
        while not self._inbox:
            self._reading = self.link.network.loop.create_future()
            await self._reading
        found = self._inbox[0]
        if isinstance(found, bytes):
            self._inbox.popleft()
        if isinstance(found, ConnectError):
            raise found
        return found

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0)
        process = CURRENT.get()
        if process is not None and not process.alive:
            raise Killed
        if self.over:
            raise next((e for e in self._inbox if isinstance(e, ConnectError)), ConnectError("it is closed"))
        network = self.link.network
        network.counts["messages"] += 1
        if self.link.up and network.draw.random() < network.broken:
            self.link.lose()
            if network.draw.random() < 0.5:
                raise ConnectError("the connection broke")
        if not self.link.up:
            return  # into a buffer that is never emptied
        self.send(message)
        if network.draw.random() < network.twice:
            network.counts["twice"] += 1
            self.send(message)

    def send(self, what: bytes | ConnectError | None) -> None:
        """Let it arrive at the other end, after what was sent before."""
        network = self.link.network
        self._last_s = max(self._last_s + 1e-6, network.arrives_s(self.link.site, self._way))
        network.loop.call_at(self._last_s, self.other.arrived, what, context=Context())

    def arrived(self, what: bytes | ConnectError | None) -> None:
        if not self.over:
            self.over = isinstance(what, ConnectError)
            self._inbox.append(what)
            if self._reading is not None and not self._reading.done():
                self._reading.set_result(None)

    def broke(self) -> None:
        self.arrived(ConnectError("the connection broke"))


class SimTransport:
    """Implements streams.Transport, for the process that makes it."""

    def __init__(self, network: Network, tls: Any, heartbeat_s: float) -> None:
        self._network, self._tls, self.heartbeat_s = network, tls, float(heartbeat_s)
        self._serving = dict[asyncio.Task[None], None]()

    async def listen(self, address: str, calls: Mapping[str, Serve], emit: Emit = silent) -> int:
        process = CURRENT.get()
        assert process is not None
        self._network.server = Server(process, copy_context(), calls, self._serving)
        return 1

    def arriving(self) -> bool:
        return False

    async def close(self) -> None:
        if self._network.server is not None and self._network.server.process is CURRENT.get():
            self._network.server = None
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    @asynccontextmanager
    async def connect(self, address: str, target: str) -> AsyncIterator[Connection]:
        network, process = self._network, CURRENT.get()
        assert process is not None
        there = network.arrives_s(process.name, UP) - network.loop.now
        back = network.arrives_s(process.name, DOWN) - network.loop.now
        if there + back > CONNECT_S:
            await asyncio.sleep(CONNECT_S)
            raise ConnectError(f"{address}: no answer")
        await asyncio.sleep(there + back)
        if network.server is None:
            raise ConnectError(f"{address}: nobody listens")
        link = Link(network, process.name, self.heartbeat_s)

        @asynccontextmanager
        async def call(name: str) -> AsyncIterator[MessageStream]:
            await asyncio.sleep(0)
            if not link.up:
                raise ConnectError(f"{address}: the connection is closed.")
            mine, theirs = End(link, UP), End(link, DOWN)
            mine.other, theirs.other = theirs, mine
            link.ends.append((mine, theirs))
            begins = network.arrives_s(link.site, UP)
            mine._last_s = begins
            network.loop.call_at(begins, _serve, network, name, self._tls().chain, theirs, context=Context())
            try:
                yield mine
            except BaseException:
                theirs_learns = ConnectError("the call was cancelled")
                mine.send(theirs_learns)
                mine.over = True
                raise
            mine.send(None)

        try:
            yield call
        finally:
            link.close()
            for mine, _ in link.ends:
                mine.send(ConnectError("the other end has gone"))


def _serve(network: Network, name: str, certificate: bytes, stream: End) -> None:
    """A call reaches the aggregator."""
    if network.server is None or network.server.process is not stream.link.served or stream.over:
        stream.send(ConnectError("the connection broke"))
        return
    server = network.server

    async def serve() -> None:
        try:
            await server.calls[name](certificate, stream)
        except (CertificateError, WireError, Denied) as e:
            stream.send(Denied(str(e)))
        except ConnectError:
            return  # nobody is left to tell
        except asyncio.CancelledError:
            stream.send(ConnectError("the connection broke"))
        else:
            stream.send(None)
        finally:
            stream.over = True

    own = server.context.copy()
    task = own.run(lambda: network.loop.create_task(serve(), context=own))
    server.serving[task] = None
    own.run(task.add_done_callback, server.serving.pop)
