"""Two peers that can't be called, and a third that forwards what they seal for each other. Real sockets."""

import asyncio

import pytest
import torch

from tests.gossip import Party, Sum, share, vector
from tests.limits import WAIT_S, bounded

BOTH = {"a": "b", "b": "a"}


async def started(p, relays=("r",), **options):
    for name in relays:
        p.start(name, heartbeat_s=1.0, relay_bytes_s=1e9, **options)
    for name in BOTH:
        p.start(name, heartbeat_s=1.0, listen=None, **options)
    for peer in p.peers.values():
        peer.revoked()  # each looks at the roster
        peer.keep()


async def connected(p, names=BOTH):
    async with asyncio.timeout(WAIT_S):
        while not all(BOTH[name] in p.peers[name].connected() for name in names):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def swapped(p, round, numel=1000, deadline_s=WAIT_S):
    models = {name: vector(numel, at) for at, name in enumerate(BOTH)}
    sums = {name: Sum(torch.zeros(numel)) for name in BOTH}
    found = await asyncio.gather(*(
        p.peers[name].exchange(round, {other: share(models[name])}, [other], sums[name], deadline_s)
        for name, other in BOTH.items()
    ))  # fmt: skip
    return found, all(torch.equal(sums[name].acc, models[other]) for name, other in BOTH.items())


async def stopped(p):
    await asyncio.gather(*(peer.stop() for peer in p.peers.values()))


def test_two_peers_that_cannot_be_called_exchange_by_a_relay_that_reads_nothing():
    async def main():
        p = Party()
        try:
            await started(p)
            await connected(p)
            taken = []
            relays = p.peers["r"]._thread.relays
            forward, relays._forward = relays._forward, lambda *a: (taken.append(a[3]), forward(*a))
            found, right = await swapped(p, 0, 3_000_000)  # 12 MB: more than is sent without credit
            assert right
            assert all(done.given and done.arrived for done in found)
            plain = bytes(share(vector(3_000_000, 0)).payload[:4096])
            seen = [bytes(part) for parts in taken for part in parts]
            assert sum(map(len, seen)) > 24e6
            assert not any(plain[:64] in each or b"FTGP" in each for each in seen)
            assert p.peers["r"]._courier.receiver.bytes_in == 0
        finally:
            await stopped(p)

    bounded(main())


def test_where_a_relay_is_gone_another_one_takes_its_place():
    async def main():
        p = Party()
        try:
            await started(p, relays=("r", "s"))
            await connected(p)
            assert (await swapped(p, 0))[1]
            used = p.peers["a"]._links.get("b").via
            await p.peers.pop(used).stop()
            assert (await swapped(p, 1))[1]
        finally:
            await stopped(p)

    bounded(main())


def test_a_relay_forwards_for_nobody_who_can_be_called_and_nothing_without_the_setting():
    async def main():
        p = Party()
        try:
            p.start("r", heartbeat_s=1.0)
            for name in BOTH:
                p.start(name, heartbeat_s=1.0, listen=None, idle_s=1.5)
            for peer in p.peers.values():
                peer.revoked()
                peer.keep()
            found, right = await swapped(p, 0, deadline_s=2.5)
            assert not right
            assert all(done.missing for done in found)
            assert "no peer with gossip.relay reaches both" in p.peers["a"].trouble("b")
        finally:
            await stopped(p)

    bounded(main())


@pytest.mark.parametrize("limit", [1e6])
def test_a_relay_forwards_models_no_faster_than_its_limit_and_the_rest_at_once(limit):
    from fedtrain.transport.relay import Relays

    class Local:
        relay_bytes_s, name = limit, "r"

    passed = []
    relays = Relays(Local, None, lambda link: None, lambda event: None, 1.0)
    relays._pass_on = lambda taker, lane, parts: (
        passed.append(sum(map(len, parts))), setattr(relays, "_room", relays._room - passed[-1])
    )  # fmt: skip
    relays._room_s = now = 100.0
    relays._held.extend((None, [bytes(500_000)]) for _ in range(20))
    relays._held_bytes = 10_000_000
    for _ in range(200):
        now += 0.05
        relays._release(now)
        assert sum(passed) <= limit * (now - 100.0) + 500_000
    assert sum(passed) >= 0.9 * limit * (now - 100.0)
