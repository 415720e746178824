"""A thundering start: thousands of sites call at one moment, and a turn of their aggregator's loop takes
longer than a site may take for its Hello."""

import asyncio

import pytest

from fedtrain.transport.endpoints import HELLO_S, in_time


def began(begin, arrives):
    """What a session begins with. While it waits, a turn of its loop takes longer than HELLO_S; in the next
    one, where it `arrives`, its Hello is there."""

    async def session():
        loop, now = asyncio.get_running_loop(), 0.0
        loop.time = lambda: now
        hello = loop.create_future()

        def turn():
            nonlocal now
            now += 2 * HELLO_S
            if arrives:
                loop.call_soon(hello.set_result, b"hello")  # gRPC looks what has come, before timers' turn

        loop.call_soon(loop.call_soon, turn)
        return await begin(hello)

    return asyncio.run(session())


async def simply(hello):
    async with asyncio.timeout(HELLO_S):
        return await hello


def test_a_hello_that_is_there_counts_however_late_its_aggregator_reads_it():
    assert began(in_time, arrives=True) == b"hello"
    with pytest.raises(TimeoutError):  # the simpler way refuses all that came in such a turn
        began(simply, arrives=True)


def test_a_hello_that_does_not_come_is_not_waited_for():
    with pytest.raises(TimeoutError):
        began(in_time, arrives=False)


def test_a_session_that_ends_before_its_hello_waits_for_none():
    async def ended():
        hello = asyncio.get_running_loop().create_future()
        session = asyncio.create_task(in_time(hello))
        await asyncio.sleep(0)
        session.cancel()
        with pytest.raises(asyncio.CancelledError):
            await session
        return hello.cancelled()

    assert asyncio.run(ended())
