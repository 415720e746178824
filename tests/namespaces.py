"""Machines of their own for a test's processes, as far as the network goes: Linux namespaces and a wire."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

DEVICE = "wire"  # what each end of the wire is called in its namespace
_CLONE_NEWNET = 0x40000000  # sched.h


@dataclass(frozen=True)
class Host:
    """One machine; all that it shares with the others is the wire, and the disk."""

    namespace: str
    address: str

    def within(self, main: Callable[[list[str]], None], arguments: list[str]) -> None:
        """Have this process be on the machine from here on, and call `main`."""
        with open(f"/run/netns/{self.namespace}") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {self.namespace}")
        main(arguments)


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two machines with a wire between them; the test is skipped where this user may make none."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and `ip` of iproute2")
    hosts = [Host(f"fedtrain-{os.getpid()}-{i}", f"10.77.0.{i + 1}") for i in range(2)]
    with ExitStack() as made:
        try:
            for host in hosts:
                ip("netns", "add", host.namespace)
                made.callback(ip, "netns", "delete", host.namespace)
            ends = [("netns", host.namespace) for host in hosts]
            ip("link", "add", DEVICE, *ends[0], "type", "veth", "peer", "name", DEVICE, *ends[1])
            for host in hosts:
                ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
                for device in (DEVICE, "lo"):
                    ip("-n", host.namespace, "link", "set", device, "up")
        except subprocess.CalledProcessError as e:
            pytest.skip(f"network namespaces can't be made here: {e.stderr.strip()}")
        yield hosts


@contextmanager
def hosts_on_a_bridge(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """A machine for each name, all of them at one switch; the test is skipped where this user may make
    none."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and `ip` of iproute2")
    switch = f"fedtrain-{os.getpid()}-switch"
    hosts = {
        name: Host(f"fedtrain-{os.getpid()}-{name}", f"10.77.1.{10 + i}") for i, name in enumerate(names)
    }
    with ExitStack() as made:
        try:
            for namespace in (switch, *(host.namespace for host in hosts.values())):
                ip("netns", "add", namespace)
                made.callback(ip, "netns", "delete", namespace)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for name, host in hosts.items():
                ends = ("netns", host.namespace), ("netns", switch)
                ip("link", "add", DEVICE, *ends[0], "type", "veth", "peer", "name", name, *ends[1])
                ip("-n", switch, "link", "set", name, "master", "bridge", "up")
                ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
                for device in (DEVICE, "lo"):
                    ip("-n", host.namespace, "link", "set", device, "up")
        except subprocess.CalledProcessError as e:
            pytest.skip(f"network namespaces can't be made here: {e.stderr.strip()}")
        yield hosts


def ip(*words: Any) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
