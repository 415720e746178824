"""What `fedtrain doctor` finds, and what it asks at an aggregator as at a peer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Literal

import msgspec

from ..config import Config


class Finding(msgspec.Struct, frozen=True):
    """What one check found; with --json as it stands here."""

    check: str
    state: Literal["good", "look", "bad"]  # look: it works, and may disappoint
    said: str
    fix: str = ""


def listening(config: Config, who: str) -> Iterator[Finding]:
    """Whether network.listen is free for `who`."""
    host, _, port = config.network.listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind((host.strip("[]"), int(port)))
    except OSError as e:
        fix = f"Another process has it ({who}?), or network.listen is no address of this machine."
        return (yield Finding("port", "look", f"{config.network.listen}: {e.strerror}", fix))
    yield Finding("port", "good", f"{config.network.listen} is free")
