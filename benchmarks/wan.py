"""Peers on slow links: a network namespace each, and between them a wire with a rate, a delay and losses.

The wire is a thread here that carries IP packets between the namespaces' TUN devices. What leaves a peer
waits for its turn in a queue as long as a router's, and is lost there when that is full; of what leaves the
queue a part is lost at random, the rest arrives a while later. TCP is the kernel's own, with whatever
congestion control it has. (tc netem does the same, where the kernel has it.) It needs root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000  # sched.h
MTU, DEVICE = 1500, "wan"


def enter(namespace: str) -> None:
    """Have this thread be in a network namespace from here on."""
    with open(f"/run/netns/{namespace}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


class Wire(threading.Thread):
    """`sent[i]`: bytes that left peer i, with all headers and all that TCP sent again."""

    def __init__(self, devices: list[int], rate: float, delay_s: float, loss: float, queue_s: float) -> None:
        """`rate`: bytes a second that leave a peer; `delay_s`: one way; `queue_s`: of a peer's queue."""
        super().__init__(daemon=True)
        self._devices, self._rate, self._delay_s = devices, rate, delay_s
        self._loss, self._queue_s, self._draw = loss, queue_s, random.Random(1)
        self.sent, self.stop = [0] * len(devices), False

    def run(self) -> None:
        poll, at = select.epoll(), {fd: i for i, fd in enumerate(self._devices)}
        for fd in self._devices:
            poll.register(fd, select.EPOLLIN)
        free_s, due, number = [0.0] * len(at), list[tuple[float, int, int, bytes]](), 0
        while not self.stop:
            wait_s = min(0.1, max(0.0, due[0][0] - time.monotonic())) if due else 0.1
            for fd, _ in poll.poll(wait_s):
                now, i = time.monotonic(), at[fd]
                for packet in _waiting(fd):
                    self.sent[i] += len(packet)
                    to = packet[19] - 1  # of the last byte of an IPv4 address; 10.78.0.1 is the first peer
                    if packet[0] >> 4 != 4 or not 0 <= to < len(at) or free_s[i] > now + self._queue_s:
                        continue
                    free_s[i] = max(free_s[i], now) + len(packet) / self._rate
                    if self._draw.random() >= self._loss:
                        number += 1
                        heapq.heappush(due, (free_s[i] + self._delay_s, number, self._devices[to], packet))
            now = time.monotonic()
            while due and due[0][0] <= now:
                _, _, fd, packet = heapq.heappop(due)
                try:
                    os.write(fd, packet)
                except OSError:
                    continue  # its namespace goes down
        poll.close()


def _waiting(fd: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(fd, MTU + 64)
        except BlockingIOError:
            return


@contextmanager
def wan(
    n: int, rate: float = 1.25e6, delay_s: float = 0.025, loss: float = 0.01, queue_s: float = 0.1
) -> Iterator[tuple[list[tuple[str, str]], Wire]]:
    """(namespace, address) of each peer, and the wire; by default 10 Mbit/s, 50 ms there and back, 1 %."""
    hosts = [(f"fedtrain-wan-{os.getpid()}-{i}", f"10.78.0.{i + 1}") for i in range(n)]
    here, devices = os.open("/proc/thread-self/ns/net", os.O_RDONLY), list[int]()
    try:
        for namespace, address in hosts:
            _ip("netns", "add", namespace)
            devices.append(_device(namespace, here))
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _ip("-n", namespace, "link", "set", device, "up")
        wire = Wire(devices, rate, delay_s, loss, queue_s)
        wire.start()
        yield hosts, wire
        wire.stop = True
        wire.join(5)
    finally:
        for fd in (here, *devices):
            os.close(fd)
        for namespace, _ in hosts:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _device(namespace: str, here: int) -> int:
    enter(namespace)
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        return fd
    finally:
        ctypes.CDLL(None).setns(here, CLONE_NEWNET)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
