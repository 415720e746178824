"""S5 between peers: nobody speaks for another one, nor ends it, over real sockets."""

import asyncio
import contextlib
import threading
import time

import msgspec
import pytest
import torch
import zmq

from fedtrain.exchange import Contact
from fedtrain.transport.admission import Curve
from fedtrain.wire.gossip import Header, Kind, pack
from tests.gossip import Sum, party, share, vector
from tests.limits import WAIT_S, bounded
from tests.security.test_gossip_security import HELLO, STAMP, Caller, until

HONEST = ("a", "b", "c", "d")
SUSPECT, DEAD, LEFT = 2, 3, 4


@contextlib.asynccontextmanager
async def with_liar():
    """Four honest peers that see each other, and mallory, who is on the roster and connected with all."""
    async with party("abcd", heartbeat_s=0.3, idle_s=1.2) as p:
        curve = Curve.new()
        p.enrol(Contact("mallory", curve.public))
        with contextlib.ExitStack() as stack:
            callers = {to: stack.enter_context(Caller(p, to, curve)) for to in HONEST}
            for caller in callers.values():
                caller.say(*HELLO)
                assert await caller.hear(Kind.WELCOME)
                caller.say(Header(Kind.WELCOME))
            await until(lambda: all({*HONEST} <= {*p.peers[name].view().alive} for name in HONEST))
            yield p, callers


async def all_stay(p, callers, lies, seconds=3.0):
    """Mallory says these things about the others to each, again and again; nobody loses sight of anybody."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for to, caller in callers.items():
            news = [lie for name in HONEST if name != to for lie in lies(p.peers[name]._thread.membership)]
            with contextlib.suppress(zmq.Again):  # cut off for her breaches
                caller.socket.send_multipart(
                    [pack(Header(Kind.PING), STAMP), msgspec.msgpack.encode([news, ""])], zmq.NOBLOCK
                )
        await asyncio.sleep(0.15)
        for name in HONEST:
            assert {*HONEST} <= {*p.peers[name].view().alive}, (name, p.peers[name].view())


async def all_exchange(p):
    x, sums = vector(1000, 1), {name: Sum(torch.zeros(1000)) for name in HONEST}
    found = await asyncio.gather(
        *(
            p.peers[name].exchange(
                0,
                {o: share(x) for o in HONEST if o != name},
                [o for o in HONEST if o != name],
                sums[name],
                20.0,
            )
            for name in HONEST
        )
    )
    assert all(len(each.arrived) == len(each.given) == 3 for each in found)


@pytest.mark.slow(5)
def test_s05_one_liar_cannot_put_honest_peers_out_by_numbers_that_they_never_signed():
    async def main():
        async with with_liar() as (p, callers):
            await all_stay(p, callers, lambda of: [[of.me, DEAD, 2**40 - 1]], seconds=1.0)
            await all_stay(p, callers, lambda of: [[of.me, DEAD, 2**53 - 1, b"p" * 64]])
            await all_exchange(p)
        assert any("has not signed" in each["reason"] for each in p.of("a", "update_refused"))

    bounded(main())


@pytest.mark.slow(4)
def test_s05_one_liar_who_calls_all_others_dead_with_their_own_signatures_is_named_and_ends_nobody():
    async def main():
        async with with_liar() as (p, callers):
            await all_stay(
                p,
                callers,
                lambda of: [[of.me, status, of.incarnation, of._own.proof] for status in (DEAD, SUSPECT)],
            )
            await all_exchange(p)
            await until(lambda: any("called others dead" in e["reason"] for e in p.of("a", "update_refused")))
        assert {e["site"] for e in p.of("a", "update_refused")} == {"mallory"}

    bounded(main())


@pytest.mark.slow(2)
def test_s05_a_liars_word_that_a_peer_has_left_counts_only_with_that_peers_signature():
    async def main():
        async with with_liar() as (p, callers):
            await all_stay(p, callers, lambda of: [[of.me, LEFT, of.incarnation, of._own.proof]], seconds=2.0)
            await all_exchange(p)

    bounded(main())


@pytest.mark.slow(5)
def test_a_neighbour_that_goes_is_told_in_the_log_even_where_its_connection_stays():
    async def main():
        async with party("abc", heartbeat_s=0.3, idle_s=1.0) as p:
            everybody = lambda: all(p.peers[name].view().alive == ("a", "b", "c") for name in "abc")
            await until(everybody)
            back = threading.Event()
            p.peers["c"]._submit(lambda: back.wait(WAIT_S))  # ZeroMQ's own heartbeats go on
            try:
                await until(lambda: all(p.peers[name].view().alive == ("a", "b") for name in "ab"))
                await until(lambda: all(p.of(name, "site_lost") for name in "ab"))
            finally:
                back.set()
            assert {each["reason"] for name in "ab" for each in p.of(name, "site_lost")} == {
                "answers nobody's pings"
            }
            await until(everybody)
            await until(lambda: all(len(p.of(name, "site_joined")) >= 3 for name in "ab"))

    bounded(main())
