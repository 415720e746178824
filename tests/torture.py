"""A path that does to the bytes of TCP all that a path may do, by seed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.inprocess import Wire

FAULTS = ("reset", "flip", "duplicate", "reorder", "half-open", "slow", "late")
HELD_S = 0.4  # that a path which is half open stays so; every outage is shorter than the idle time


class Torture(Wire):
    """Carries what comes to `port` on to another one. After so many bytes each, `faults` things happen."""

    def __init__(self, port: int, to: int, seed: object, faults: int, apart: int) -> None:
        """`apart`: bytes from one fault to the next, on average."""
        super().__init__(port, to)
        self._draw, self._apart = random.Random(str(seed)), apart
        self._left, self._next = faults, self._draw.randrange(2 * apart)
        self.happened: list[str] = []

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            self.nbytes += len(data)
            if self._left and self.nbytes >= self._next:
                self._left -= 1
                self._next = self.nbytes + self._draw.randrange(2 * self._apart)
                self.happened.append(self._draw.choice(FAULTS))
                data = await self._tortured(self.happened[-1], data, source, sink)
            sink.write(data)
            await sink.drain()
        sink.write_eof()

    async def _tortured(self, fault: str, data: bytes, source: asyncio.StreamReader, sink: Any) -> bytes:
        """What is carried in the place of `data`; ConnectionError where the path breaks."""
        at = self._draw.randrange(len(data))
        if fault == "reset":
            raise ConnectionResetError
        if fault == "flip":
            return data[:at] + bytes([data[at] ^ 1 << self._draw.randrange(8)]) + data[at + 1 :]
        if fault == "duplicate":
            return data[:at] + data[max(0, at - 1000) :]
        if fault == "reorder":
            return data[at:] + data[:at]
        if fault == "half-open":  # the other direction goes on, and nobody is told
            await asyncio.sleep(HELD_S)
            raise ConnectionResetError
        if fault == "slow":  # a byte a second, for a while
            sink.write(data[:1])
            await asyncio.sleep(HELD_S)
            return data[1:]
        await asyncio.sleep(self._draw.uniform(0.0, 0.1))
        return data
