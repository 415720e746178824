"""How long a test waits for what takes milliseconds unless the machine is very busy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

WAIT_S = 60.0


def bounded(coroutine: Awaitable[Any], seconds: float = 4 * WAIT_S) -> Any:
    """Run it to the end; TimeoutError where it takes longer."""

    async def run() -> Any:
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(run())
