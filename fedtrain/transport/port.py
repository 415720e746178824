"""Limits on the aggregator's port: file descriptors, connections, calls of a site, log lines.

gRPC's own limits (grpc.py) hold each connection. A firewall or nginx in front of the port holds
what these leave open: packets and connections of one address (deployment/nginx).
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from ..events import Emit, Event, Notice, SiteRefused, UpdateRefused

OWN_FILES = 192  # descriptors that are kept for the store, the logs and Python
LINE_S = 1.0  # between two lines about one caller
WATCH_S = 0.5  # between two looks at the connections
TOLD_S = 10.0  # between two lines about connections without a call
REFUSED = 16  # addresses in one set of lines; the others share a line
SILENT = 64  # connections without a call that need no line
ARRIVAL_S = 0.02  # the longest look during a handshake; it misses what it has not seen by then
COSTS = 20  # the pause between two looks, in multiples of what the last one took
BESIDE = 65 / 64  # bytes on the wire for one of a message
SPARE_BYTES = 128 << 10  # a second, of headers, pings and windows
UNREAD_BYTES = 5 << 20  # of a connection that may be under way: a message, and what comes with it
UNDER_WAY_BYTES = 32 << 20  # the same for a site that uploads: what the kernel and gRPC hold back
RECEIVED = 128  # where struct tcp_info has the bytes received (uint64)
Peer = tuple[str, int]  # address and port of the other end


def defer(port: int, seconds: float) -> None:
    """Have the kernel keep a connection until its caller has sent something, for so many seconds at
    least (Linux counts in powers of two; TCP_DEFER_ACCEPT in tcp(7)): a silent caller costs this
    process nothing meanwhile."""
    if sys.platform == "linux":
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError, IndexError, ValueError), _borrowed(int(name)) as one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and one.getsockname()[1] == port:
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(seconds))


def connections() -> int:
    """How many connections there may be at once, after raising the soft limit of open files to the
    hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    most = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(most - OWN_FILES, most // 2)


class Rate:
    """How often each caller may do something: so many times at once, and then once in `each_s`."""

    def __init__(self, at_once: int, each_s: float) -> None:
        self._ahead_s, self._each_s = at_once * each_s, each_s
        self._used_until: dict[str, float] = {}

    def wait_s(self, caller: str, now: float) -> float:
        """0, and one more counts; or the seconds until it may."""
        until = max(self._used_until.get(caller, now), now) + self._each_s
        if (wait_s := until - now - self._ahead_s) > 0:
            return wait_s
        if len(self._used_until) > 10_000:
            self._used_until = {name: at for name, at in self._used_until.items() if at > now}
        self._used_until[caller] = until
        return 0.0


class Sparing:
    """Tells of refusals at most once a second of each caller, with how many there were since."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: dict[tuple[str, str], tuple[int, Event | None]] = {}  # how many, and the last of them
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}

    def __call__(self, event: Event) -> None:
        if not isinstance(event, SiteRefused | UpdateRefused):
            self._emit(event)
            return
        key = event.kind, event.site
        if key in self._held:
            self._held[key] = self._held[key][0] + 1, event
        else:
            self._emit(event)
            self._hold(key)

    def _hold(self, key: tuple[str, str]) -> None:
        self._held[key] = 0, None
        self._timers[key] = asyncio.get_running_loop().call_later(LINE_S, self._tell, key)

    def _tell(self, key: tuple[str, str]) -> None:
        many, event = self._held.pop(key)
        self._timers.pop(key).cancel()
        if isinstance(event, SiteRefused | UpdateRefused):
            more = f" (and {many - 1:,} more like it)" if many > 1 else ""
            self._emit(msgspec.structs.replace(event, reason=f"{event.reason}{more}"))
            self._hold(key)

    def close(self) -> None:
        """Tell what is held back."""
        while self._held:
            self._tell(key := next(iter(self._held)))
            self._held.pop(key, None)
            if timer := self._timers.pop(key, None):
                timer.cancel()


@dataclass(eq=False)
class Caller:
    """A connection, as the handlers of its calls know it."""

    name: str = ""  # of the site that calls; "" before its first call
    heard: int = 0  # bytes of messages that were read
    transfers: bool = False  # it has uploaded, so that megabytes may be under way
    received: int = 0  # bytes that TCP had at the last look
    counted: int = 0  # of `heard`, at that time
    debt: float = 0.0  # bytes outside messages, beyond the allowance

    def owes(self, received: int, passed_s: float) -> bool:
        """Whether it has sent far more than its messages: frames that gRPC alone reads."""
        grown, heard = received - self.received, self.heard - self.counted
        self.received, self.counted = received, self.heard
        self.debt = max(0.0, self.debt + grown - heard * BESIDE - SPARE_BYTES * passed_s)
        return self.debt > (UNDER_WAY_BYTES if self.transfers else UNREAD_BYTES)


class Watch:
    """Looks at the connections to a port: logs those that make no call, ends those that flood it."""

    def __init__(self, most: int, emit: Emit) -> None:
        """`most`: connections that there may be."""
        self._port, self._most, self._emit = 0, most, emit
        self._callers: dict[Peer, Caller] = {}
        self._homes: set[str] = set()  # addresses from which a site has called
        self._silent: set[Peer] = set()  # connections without a call, at the last look
        self._arrived = deque[dict[Peer, int]]()  # connections, at the start of a handshake
        self._arrives_s = 0.0  # the time of the next look during a handshake
        self._refused: Counter[str] = Counter()  # addresses of connections that ended without a call
        self._looked_s = self._told_s = self._refused_s = self._stopped_s = -TOLD_S

    def arrived(self) -> None:
        """A connection begins its handshake: one that is refused in it is gone before the next look.
        gRPC's threads call this, and no other handshake begins meanwhile."""
        if self._port and (began := time.monotonic()) >= self._arrives_s:
            self._arrived.append(_connected(self._port, ARRIVAL_S))
            self._arrives_s = (now := time.monotonic()) + COSTS * (now - began)

    @property
    def arriving(self) -> bool:
        """Whether a connection is there that has made no call yet."""
        return any(not self._callers.get(peer, Caller()).name for peer in _connected(self._port))

    def called(self, peer: str) -> Caller:
        """A connection makes a call; `peer`: as gRPC names its other end."""
        return self._callers.setdefault(_ends(peer), Caller())

    def end(self, peer: str, what: str) -> None:
        """Shut down a connection that floods, and log `what` it does."""
        self._flooded(_ends(peer), _connected(self._port), what)

    async def run(self, port: int) -> None:
        """Watch the connections to this port of ours."""
        self._port, loop = port, asyncio.get_running_loop()
        try:
            while True:
                began = time.thread_time()
                self._look(loop.time())
                await asyncio.sleep(max(WATCH_S, COSTS * (time.thread_time() - began)))
        finally:
            # Sites call again while the port closes.
            strangers = {peer for peer in self._seen() if peer[0] not in self._homes}
            self._count_refused(strangers, _connected(port), math.inf)

    def _look(self, now: float) -> None:
        seen = self._seen()  # first: a connection that comes after this line is not gone
        there, passed_s = _connected(self._port), min(now - self._looked_s, TOLD_S)
        if passed_s == TOLD_S and self._homes:  # this process was stopped, and its sites gave up calls
            self._stopped_s = now
        self._looked_s = now
        self._count_refused(seen, there, now)
        self._callers = {peer: self._callers.get(peer, Caller()) for peer in there}
        self._homes.update(peer[0] for peer, caller in self._callers.items() if caller.name)
        for peer, fd in there.items():
            if self._callers[peer].owes(_received(fd), passed_s):
                self._flooded(peer, there, "sends megabytes that are no messages")
        self._silent = {peer for peer, caller in self._callers.items() if not caller.name}
        if now - self._told_s > TOLD_S and (text := self._crowd()):
            self._told_s = now
            self._emit(Notice(text=f"the port: {text}"))

    def _seen(self) -> set[Peer]:
        """Connections without a call at the last look, and those that have come since."""
        seen = set(self._silent)
        while self._arrived:
            seen.update(self._arrived.popleft())
        return seen

    def _count_refused(self, seen: set[Peer], there: dict[Peer, int], now: float) -> None:
        """Count connections that are gone without a call, and log them by address."""
        known = {peer for peer, caller in self._callers.items() if caller.name}
        if now - self._stopped_s <= TOLD_S:
            known |= {peer for peer in seen if peer[0] in self._homes}
        self._refused.update(address for address, _ in seen - there.keys() - known)
        if not self._refused or now - self._refused_s <= TOLD_S:
            return
        told = self._refused.most_common(REFUSED)
        if rest := self._refused.total() - sum(many for _, many in told):
            told.append(("other addresses", rest))
        for address, many in told:
            why = (
                "ended before the TLS handshake did: the caller was stopped, or its certificate is missing, "
                "expired or another authority's"
            )
            self._emit(SiteRefused(site="?", reason=f"{many:,} connections from {address}: {why}"))
        self._refused, self._refused_s = Counter(), now

    def _flooded(self, peer: Peer, there: dict[Peer, int], what: str) -> None:
        name = self._callers.get(peer, Caller()).name or "?"
        if peer in there:
            with suppress(OSError, IndexError), _borrowed(there[peer]) as one:
                if one.getsockname()[1] == self._port:
                    one.shutdown(socket.SHUT_RDWR)
        mend = f". If it goes on: fedtrain certs revoke {name}" if name != "?" else ""
        self._emit(SiteRefused(site=name, reason=f"its connection from {peer[0]} {what}{mend}"))

    def _crowd(self) -> str:
        """What to log of many connections that make no call; "" of few."""
        if len(self._silent) > SILENT:
            address, many = Counter(address for address, _ in self._silent).most_common(1)[0]
            return f"{len(self._silent):,} connections make no call, {many:,} of them from {address}"
        if len(self._callers) >= self._most:
            return (
                f"all {self._most:,} connections that there may be are open, and no other site can "
                f"join. Raise the limit of open files (ulimit -Hn)"
            )
        return ""


def _ends(peer: str) -> Peer:
    """Of gRPC's name of a connection: "ipv4:127.0.0.1:4321"."""
    address, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return address.strip("[]"), int(port or 0)


def _connected(port: int, within_s: float = math.inf) -> dict[Peer, int]:
    """The descriptors of this process's connections to a port of its own, by their other ends: all
    that are found in the time, the highest descriptors first."""
    found, until = dict[Peer, int](), time.monotonic() + within_s
    for name in reversed(os.listdir("/proc/self/fd")):
        if time.monotonic() > until:
            break
        with suppress(OSError, IndexError, ValueError), _borrowed(int(name)) as one:
            if one.getsockname()[1] == port:
                address, of = one.getpeername()[:2]
                found[address.removeprefix("::ffff:"), of] = int(name)
    return found


def _received(fd: int) -> int:
    """Bytes that TCP has acknowledged on a connection; 0 where the kernel does not say."""
    with suppress(OSError, AttributeError), _borrowed(fd) as one:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED + 8)
        return int.from_bytes(info[RECEIVED:], sys.byteorder)
    return 0


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """gRPC's own descriptor, which stays open."""
    one = socket.socket(fileno=fd)
    try:
        yield one
    finally:
        one.detach()
