"""Calls of a peer that are to end in a moment: it may still read why, and nobody hears what it says."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from .link import Link, address_of, shut

LAST_WORDS_S = 0.5  # that a peer has to read why its connections end


class Parting:
    """Those calls."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Any]] = []  # when each is to end, fd, address

    def has(self, fd: int) -> bool:
        return any(fd == parting and address_of(fd) == address for _, parting, address in self._calls)

    def part(self, link: Link, calls: Iterable[int]) -> None:
        """Have these calls of a peer end in a moment."""
        until_s = time.monotonic() + LAST_WORDS_S
        self._calls += [(until_s, fd, link.routes.pop(fd)[1]) for fd in list(calls)]

    def tick(self, now: float) -> None:
        for _, fd, address in [each for each in self._calls if each[0] <= now]:
            shut(fd, address)
        self._calls = [each for each in self._calls if each[0] > now]
