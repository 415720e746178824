"""Peers over real sockets with CURVE have the models of peers in memory, bit for bit."""

import asyncio

import pytest
import torch

from fedtrain import compression, gossip
from fedtrain.runtime.peers.gossip import Peer
from fedtrain.runtime.peers.parcels import trained_part
from fedtrain.schema import Schema, TensorSpec
from fedtrain.topology import names, parse

from ..gossip import party
from ..limits import bounded
from ..test_gossip_peers import MIXED as SMALL
from ..test_gossip_peers import arena, halfway_to, run_peers

LARGE = Schema((TensorSpec("w", (700_001,), "float32", True), TensorSpec("mean", (5,), "float32", False)))


async def over_sockets(algorithm, graph, n, rounds, schema):
    async with party(names(n)) as all_:

        async def live(name, number):
            target = trained_part(arena(schema, 100 + number)).clone()
            peer = Peer(name, algorithm, arena(schema, number), halfway_to(target), all_.peers[name])
            for t in range(rounds):
                told = await peer.step(parse(graph).round(n, t).graph[name], 60.0)
                assert told.missing == {}
            return peer

        peers = await asyncio.gather(*(live(name, i) for i, name in enumerate(names(n))))
        return {peer.name: peer for peer in peers}


@pytest.mark.parametrize(
    ("kind", "graph", "schema"),
    [
        ("dpsgd", "complete", SMALL), ("dpsgd", "base:1", LARGE), ("sgp", "exponential", LARGE),
        ("gradient-tracking", "ring", LARGE), ("choco", "ring", LARGE),
    ],
)  # fmt: skip
def test_peers_over_sockets_have_the_bits_of_peers_in_memory(kind, graph, schema):
    compressor = compression.parse("quantize").contraction() if kind == "choco" else None
    algorithm = gossip.build(kind, {}, compressor)
    real = bounded(over_sockets(algorithm, graph, 4, 3, schema))
    memory, _, errors = asyncio.run(run_peers(algorithm, graph, 4, 3, schema=schema))
    assert errors == {}
    for name, peer in real.items():
        assert torch.equal(peer.model.data, memory[name].model.data)
        assert all(torch.equal(value, memory[name].state[key]) for key, value in peer.state.items())
