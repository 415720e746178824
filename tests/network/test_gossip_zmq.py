"""The graph seam over real ZeroMQ with CURVE, on loopback."""

import asyncio

import pytest
import torch

from fedtrain.transport.memory import LocalNetwork
from tests.gossip import MIB, Sum, bounded, party, share, vector

NAMES = ["a", "b", "c"]


async def rounds(neighbors, name, names, numel, rounds=2):
    """Average with everybody, twice; the vector and how the exchanges went."""
    x, went = vector(numel, names.index(name)), []
    others = [n for n in names if n != name]
    for r in range(rounds):
        mixer = Sum(x / len(names))
        neighbors.announce(r)
        shares = dict.fromkeys(others, share(x, 1 / len(names)))
        went.append(await neighbors.exchange(r, shares, others, mixer, 30.0))
        x = mixer.acc
    return x, went


async def over_zmq(numel):
    async with party(NAMES) as p:
        got = await asyncio.gather(*(rounds(p.peers[n], n, NAMES, numel) for n in NAMES))
        sent = {n: p.peers[n].bytes_out for n in NAMES}
    return got, sent


async def in_memory(numel):
    network = LocalNetwork(NAMES)

    async def one(name):
        async with network.join(name) as neighbors:
            return await rounds(neighbors, name, NAMES, numel)

    return await asyncio.gather(*map(one, NAMES))


@pytest.mark.parametrize("numel", [1, 1000, 3 * MIB + 5])
def test_in_memory_and_over_zeromq_the_bits_are_the_same(numel):
    (real, sent), local = bounded(over_zmq(numel)), bounded(in_memory(numel))
    for (x, went), (y, _) in zip(real, local, strict=True):
        assert torch.equal(x, y)
        assert all(not w.missing and not w.kept and not w.unsure for w in went)
    assert set(sent.values()) == {2 * 2 * 4 * numel}  # two rounds, two neighbours, no byte twice
