"""What callers may cost an aggregator's port: descriptors, connections, joins, lines in its log.

gRPC's own limits (grpc.py) hold each connection; these hold what gRPC leaves open.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import resource
import socket
import sys
import termios
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from ..events import Emit, Event, Notice, SiteRefused, UpdateRefused
from .barred import Barred

OWN_FILES = 192  # descriptors that are kept for the store, the logs and Python
LINE_S = 1.0  # between two lines about one caller
WATCH_S = 0.5  # between two looks at the connections
TOLD_S = 10.0  # between two lines about silent ones
REFUSED = 16  # addresses of refused connections that are told at a time; others are one line
SILENT = 64  # connections without a call that are nothing to tell of
TURNS_S = 5.0  # that a stranger may take, all its turns together, until its first call
OWING_S = 1.5  # a connection without a call whose turn it was for so long is one that a stranger abandoned
HOME_S = 3600.0  # an address from which a site called in it is no stranger's
ARRIVAL_S = 0.02  # that a look in a handshake may hold up the others; what it has not seen by then it misses
COSTS = 20  # between two looks passes so many times what the last one took
BESIDE = 65 / 64  # bytes on the wire for one of a message
SPARE_BYTES = 128 << 10  # a second, that may be of no message: headers, pings, windows
UNREAD_BYTES = 5 << 20  # that may be under way: a message, and what comes with it
UNDER_WAY_BYTES = 32 << 20  # the same of who uploads: what the kernel and gRPC hold back
UNACKED, LAST_DATA_RECV, RECEIVED = 24, 52, 128  # where struct tcp_info has these (uint32, uint32, uint64)
Peer = tuple[str, int]  # address and port of the other end


class TcpState(NamedTuple):
    """A connection, as the kernel knows it."""

    fd: int
    received: int  # bytes that TCP has acknowledged
    owes_s: float  # how long it has been the other end's turn; 0: it is ours


def defer(port: int, seconds: float) -> None:
    """Have the kernel keep a connection to itself until its caller has sent something, for so many seconds
    at least (Linux counts in powers of two): a silent caller costs this process nothing meanwhile. Then the
    connection is taken as it is (TCP_DEFER_ACCEPT in tcp(7))."""
    if sys.platform == "linux":
        for one in _listening(port):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(seconds))


def connections() -> int:
    """How many connections there may be at once, after the soft limit of open files was raised to the hard
    one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a container may not let us
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

    name: str = ""  # of the site that calls; "" while it has made no call
    heard: int = 0  # bytes of messages that were read
    transfers: bool = False  # it has uploaded, so that megabytes may be under way
    received: int = 0  # bytes that TCP had when it was looked at last
    counted: int = 0  # of `heard`, at that time
    since_s: float = math.inf  # when it was seen first
    debt: float = 0.0  # bytes that are nobody's messages, beyond what may be

    def owes(self, received: int, now: float, passed_s: float) -> bool:
        """Whether it has sent far more than its messages: frames that gRPC alone reads."""
        grown, heard = received - self.received, self.heard - self.counted
        self.received, self.counted, self.since_s = received, self.heard, min(self.since_s, now)
        self.debt = max(0.0, self.debt + grown - heard * BESIDE - SPARE_BYTES * passed_s)
        return self.debt > (UNDER_WAY_BYTES if self.transfers else UNREAD_BYTES)


class Watch:
    """Sees the connections to a port: those that make no call, and those that flood it. It tells where they
    come from, and bars an address that does such things."""

    def __init__(self, most: int, emit: Emit) -> None:
        """`most`: connections that there may be."""
        self._port, self._most, self._emit = 0, most, emit
        self._callers: dict[Peer, Caller] = {}
        self._barred, self._silent = (
            Barred(),
            dict[Peer, float](),
        )  # no call yet: how long their turns were
        self._homes: dict[str, float] = {}  # addresses of sites, and when one of them was seen last
        self._went: Counter[str] = Counter()  # of strangers, connections that ended without a call
        self._arrived = deque[dict[Peer, TcpState]]()  # connections, when one of them was new
        self._arrives_s = 0.0  # when they are looked at again
        self._refused: Counter[str] = Counter()  # of strangers, connections that ended since they were told
        self._told_s = self._forgot_s = self._refused_s = -TOLD_S
        self._looked_s = 0.0

    def arrived(self) -> None:
        """A connection begins its handshake: one that is refused in it is gone before the next look. gRPC's
        threads call this, and no other handshake begins meanwhile: waits for the interpreter count, too."""
        if self._port and (began := time.monotonic()) >= self._arrives_s:
            self._arrived.append(_connected(self._port, ARRIVAL_S))
            self._arrives_s = (now := time.monotonic()) + COSTS * (now - began)

    def called(self, peer: str) -> Caller:
        """A connection makes a call; `peer`: as gRPC names its other end."""
        return self._callers.setdefault(_ends(peer), Caller())

    def end(self, peer: str, what: str) -> None:
        """Shut down a connection that floods (`what` it does is told), and bar its address."""
        self._flooded(_ends(peer), _connected(self._port), what, asyncio.get_running_loop().time())

    async def run(self, port: int) -> None:
        """Watch the connections to this port of ours."""
        self._port, loop = port, asyncio.get_running_loop()
        try:
            while True:
                began = time.thread_time()
                self._look(loop.time())
                await asyncio.sleep(max(WATCH_S, COSTS * (time.thread_time() - began)))
        finally:
            seen = self._seen()
            # Sites call again while the port closes: who comes from where one was is no stranger.
            strangers = {peer for peer in seen if peer[0] not in self._homes}
            self._count_refused(strangers, _connected(port), math.inf)

    def _look(self, now: float) -> None:
        seen = self._seen()  # first: who comes after this is not gone because the next line missed it
        there, passed_s = _connected(self._port), min(now - self._looked_s, TOLD_S)
        self._looked_s = now
        self._count_refused(seen, there, now)
        self._callers = {peer: caller for peer, caller in self._callers.items() if peer in there}
        for peer, link in there.items():
            caller = self._callers.setdefault(peer, Caller())
            if caller.name:
                self._homes[peer[0]] = now
            if caller.owes(link.received, now, passed_s):
                self._flooded(peer, there, "sends megabytes that are no messages", now)
        self._look_at_strangers(there, now, passed_s)
        if self._barred.some:
            self._barred.apply(_listening(self._port), now)

    def _seen(self) -> set[Peer]:
        """Who was there without a call, or has come, since the last look."""
        seen = set(self._silent)
        while self._arrived:
            seen.update(self._arrived.popleft())
        return seen

    def _count_refused(self, seen: set[Peer], there: dict[Peer, TcpState], now: float) -> None:
        """Count who is gone and never was known by a call."""
        known = {peer for peer, caller in self._callers.items() if caller.name}
        self._refused.update(address for address, _ in seen - there.keys() - known)
        self._tell_refused(now)

    def _tell_refused(self, now: float) -> None:
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

    def _flooded(self, peer: Peer, there: dict[Peer, TcpState], what: str, now: float) -> None:
        address, caller = peer[0], self._callers.get(peer, Caller())
        if peer in there:
            _end(there[peer].fd, self._port)
        known = self._barred.has(address)
        seconds = self._barred.left_s(address, now) if known else self._barred.bar(address, now)
        if caller.name:
            mend = f"it may call again in {seconds:.0f} s. If it goes on: fedtrain certs revoke {caller.name}"
            self._emit(SiteRefused(site=caller.name, reason=f"its connection from {address} {what}: {mend}"))
        elif not known:
            others = ", ".join(
                sorted({c.name for p, c in self._callers.items() if p[0] == address and c.name})
            )
            who = f"; from there comes {others}" if others else ""
            text = f"the port: a connection from {address} {what}{who}. The address may call again in"
            self._emit(Notice(text=f"{text} {seconds:g} s"))

    def _look_at_strangers(self, there: dict[Peer, TcpState], now: float, passed_s: float) -> None:
        """Tell of connections that make no call, end those that take too long, and bar an address that has
        nothing else: many that ended, or that wait for nothing of ours."""
        silent = {
            peer: self._silent.get(peer, 0.0) + min(link.owes_s, passed_s)
            for peer, link in there.items()
            if not self._callers[peer].name
        }
        self._went.update(peer[0] for peer in self._silent.keys() - there.keys())
        if now - self._forgot_s > TOLD_S:
            self._homes = {address: at for address, at in self._homes.items() if now - at < HOME_S}
            self._went, self._forgot_s = Counter(), now
        self._silent = silent
        if now - self._told_s > TOLD_S:
            self._tell([*silent], len(there), now)
        owing = Counter(peer[0] for peer in silent if there[peer].owes_s > OWING_S)
        for address, many in (self._went + owing).items():
            if many > SILENT and address not in self._homes and not self._barred.has(address):
                seconds = self._barred.bar(address, now)
                text = f"the port: {address} made {many} connections, and no call: it may not connect for"
                self._emit(Notice(text=f"{text} {seconds:g} s"))
        for peer, took_s in silent.items():  # those that the kernel had taken before it knew of the bar, too
            if peer[0] not in self._homes and (took_s > TURNS_S or self._barred.has(peer[0])):
                _end(there[peer].fd, self._port)

    def _tell(self, silent: list[Peer], there: int, now: float) -> None:
        if len(silent) > SILENT:
            address, many = Counter(address for address, _ in silent).most_common(1)[0]
            self._told_s = now
            text = (
                f"the port: {len(silent):,} connections make no call, {many:,} of them from {address}; each"
            )
            self._emit(Notice(text=f"{text} is ended after some seconds"))
        elif there >= self._most:
            self._told_s = now
            text = (
                f"the port: all {there:,} connections that there may be are open, and no other site can join"
            )
            self._emit(Notice(text=f"{text}. Raise the limit of open files (ulimit -Hn)"))


def _ends(peer: str) -> Peer:
    """Of gRPC's name of a connection: "ipv4:127.0.0.1:4321"."""
    address, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return address.strip("[]"), int(port or 0)


def _connected(port: int, within_s: float = math.inf) -> dict[Peer, TcpState]:
    """This process's connections to a port of its own, by their other ends: all that are found in the time,
    the highest descriptors first."""
    found, until = dict[Peer, TcpState](), time.monotonic() + within_s
    for name in reversed(os.listdir("/proc/self/fd")):
        if time.monotonic() > until:
            break
        with suppress(OSError, IndexError, ValueError), _borrowed(int(name)) as one:  # it may be no socket
            if one.getsockname()[1] == port:
                address, of = one.getpeername()[:2]
                found[address.removeprefix("::ffff:"), of] = TcpState(int(name), *_state(one))
    return found


def _state(one: socket.socket) -> tuple[int, float]:
    """As in TcpState: bytes received, and for how long it has been the other end's turn: it is ours while
    something lies unread here, or is on its way there. 0 where the kernel does not say."""
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED + 8)
    unacked, last_ms, received = (
        int.from_bytes(info[at : at + size], sys.byteorder)
        for at, size in ((UNACKED, 4), (LAST_DATA_RECV, 4), (RECEIVED, 8))
    )
    idle = not unacked and not int.from_bytes(fcntl.ioctl(one, termios.FIONREAD, bytes(4)), sys.byteorder)
    return received, last_ms / 1000 if idle else 0.0


def _listening(port: int) -> Iterator[socket.socket]:
    """The sockets that listen at a port of this process's."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, IndexError, ValueError), _borrowed(int(name)) as one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1] == port:
                yield one


def _end(fd: int, port: int) -> None:
    """Shut a connection to the port down; gRPC closes it then."""
    with suppress(OSError, IndexError), _borrowed(fd) as one:
        if one.getsockname()[1] == port:
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """gRPC's own descriptor, which stays open."""
    one = socket.socket(fileno=fd)
    try:
        yield one
    finally:
        one.detach()
