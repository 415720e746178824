"""Addresses that may not call a port for a while: the kernel drops their packets before anybody accepts one.

A filter of the listening socket looks at the sender of each packet (classic BPF, which needs no privilege;
https://docs.kernel.org/networking/filter.html). Connections inherit the filter that was there when they were
made, so those that are open stay. Where the kernel takes no filter, the port's watch ends new connections.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

FIRST_S, LONGEST_S = 30.0, 3600.0  # that an address is barred; twice as long each time
MOST = 40  # addresses at once: a jump of the filter's is at most 255 instructions long
ATTACH, DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
NETWORK = 0xFFF00000  # SKF_NET_OFF: where the header of the network's packet begins
BYTE, WORD, SHIFT, EQUAL, RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
KEEP, DROP = (RETURN, 0, 0, 0xFFFFFFFF), (RETURN, 0, 0, 0)


class Barred:
    """The addresses, each with when it may call again."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}  # how long each was barred
        self._attached: list[str] = []
        self.some = False  # whether there is anything to apply

    def bar(self, address: str, now: float) -> float:
        """For how many seconds from now on the address may not call."""
        self._last_s[address] = min(2 * self._last_s.get(address, FIRST_S / 2), LONGEST_S)
        self._until_s[address] = now + self._last_s[address]
        self.some = True
        return self._last_s[address]

    def has(self, address: str) -> bool:
        return address in self._until_s

    def left_s(self, address: str, now: float) -> float:
        """For how many seconds more an address that is barred may not call."""
        return self._until_s[address] - now

    def apply(self, listening: Iterable[socket.socket], now: float) -> None:
        """Have these sockets refuse who is barred now, and nobody else."""
        self._until_s = {address: until for address, until in self._until_s.items() if until > now}
        if len(self._last_s) > 10_000:
            self._last_s = {address: self._last_s[address] for address in self._until_s}
        wanted = sorted(self._until_s)[-MOST:]
        self.some = bool(wanted)
        if wanted == self._attached:
            return
        self._attached = wanted
        for one in listening:
            with suppress(OSError):  # nothing was attached, or the kernel takes no filter
                if not wanted:
                    one.setsockopt(socket.SOL_SOCKET, DETACH, 0)
                elif sys.platform == "linux":
                    attach(one, program(wanted))


def program(addresses: Iterable[str]) -> list[tuple[int, int, int, int]]:
    """Instructions (operation, jump where true, jump where false, operand) that drop what these send. Of an
    IPv6 address its network of 64 bits counts."""
    four, six = list[tuple[int, int, int, int]](), list[tuple[int, int, int, int]]()
    for address in addresses:
        if ":" in address:
            high, low = struct.unpack("!II", socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8])
            six += [(WORD, 0, 0, NETWORK + 8), (EQUAL, 0, 3, high), (WORD, 0, 0, NETWORK + 12),
                    (EQUAL, 0, 1, low), DROP]  # fmt: skip
        else:
            (whole,) = struct.unpack("!I", socket.inet_aton(address))
            four += [(EQUAL, 0, 1, whole), DROP]
    version = [(BYTE, 0, 0, NETWORK), (SHIFT, 0, 0, 4), (EQUAL, 0, len(four) + 2, 4)]
    return [*version, (WORD, 0, 0, NETWORK + 12), *four, KEEP, *six, KEEP]


def attach(one: socket.socket, instructions: list[tuple[int, int, int, int]]) -> None:
    """Filter what the socket receives; OSError where the kernel does not."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    one.setsockopt(socket.SOL_SOCKET, ATTACH, struct.pack("HL", len(instructions), ctypes.addressof(code)))
