"""Shares over slow links: each crosses once, and nothing urgent waits behind it."""

import asyncio
import contextlib
import importlib
from pathlib import Path

import pytest
import torch

from fedtrain.exchange import Contact
from fedtrain.transport.admission import Curve
from fedtrain.transport.link import LinkSettings
from fedtrain.transport.shares import Limits
from fedtrain.transport.zmq import ZmqNeighbors
from tests.gossip import GREETING, MIB, Sum, share, vector
from tests.limits import WAIT_S, bounded
from tests.rosters import FixedRoster, met, signs

RETRY_S = 0.1  # of many while a share is on its way


@pytest.fixture
def slow_links(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("slow_link").SlowLinks


@contextlib.asynccontextmanager
async def over(links, names):
    """Peers that call each other over these links."""
    settings = LinkSettings(limits=Limits(retry_s=RETRY_S))
    rosters, curves, peers = {name: FixedRoster() for name in names}, {n: Curve.new() for n in names}, {}
    for name in names:
        peers[name] = ZmqNeighbors(
            me=name,
            curve=curves[name],
            sign=signs(name),
            roster=rosters[name],
            run="r",
            greeting=GREETING,
            settings=settings,
        )
        peers[name].start()
    for name in names:
        rosters[name].replace([
            Contact(other, curves[other].public, f"127.0.0.1:{links.port(name, other, peers[other].port)}")
            for other in names
        ])  # fmt: skip
    try:
        yield peers
    finally:
        for peer in peers.values():
            await peer.stop()
        links.close()


@pytest.mark.parametrize("mib", [3, 9])  # all with the offer, and by credit
def test_over_a_slow_link_each_share_crosses_once_also_while_connections_are_made(slow_links, mib):
    x = vector(mib * MIB // 4, 1)

    async def main():
        async with over(slow_links(rate=8e6, delay_s=0.02, stall=0.02), "ab") as peers:

            async def one(name, other):
                got = []
                for t in range(2):
                    mixer = Sum(torch.zeros_like(x))
                    peers[name].announce(t)
                    got.append(await peers[name].exchange(t, {other: share(x)}, [other], mixer, WAIT_S))
                    assert torch.equal(mixer.acc, x)
                return got

            await asyncio.gather(one("a", "b"), one("b", "a"))
            return [peer._links.wire_out for peer in peers.values()]

    for sent in bounded(main()):
        assert 2 * x.nbytes < sent <= 1.02 * 2 * x.nbytes


def test_an_announcement_overtakes_a_share_that_crosses_a_slow_link(slow_links):
    x = vector(3 * MIB // 4, 1)

    async def main():
        async with over(slow_links(rate=8e6, delay_s=0.02), "ab") as peers:
            for name, other in ("ab", "ba"):
                assert await met(peers[name], {other}, WAIT_S) == [other]
            both = [
                asyncio.ensure_future(
                    peers[name].exchange(0, {other: share(x)}, [other], Sum(torch.zeros_like(x)), WAIT_S)
                )
                for name, other in ("ab", "ba")
            ]
            peers["a"].announce(1)
            while peers["b"].progress().get("a", 0) < 1:
                assert not both[1].done()
                await asyncio.sleep(0.005)
            assert not both[1].done()
            await asyncio.gather(*both)

    bounded(main())
