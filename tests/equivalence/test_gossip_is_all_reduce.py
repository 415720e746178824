"""One mean by three ways: gossip on the complete graph, an all-reduce by Gloo, and FedAvg with all sites."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fedtrain import gossip
from fedtrain.aggregation import WeightedMean
from fedtrain.arena import Arena
from fedtrain.messages import Update
from fedtrain.runtime.peers.parcels import trained_part
from fedtrain.strategies import FedAvg
from fedtrain.strategies.base import server_step

from ..test_gossip_peers import PLAIN, arena, halfway_to, run_peers

ROUNDS = 4


def target(number):
    return trained_part(arena(PLAIN, 100 + number)).clone()


async def local_update(weights, number):
    return await halfway_to(target(number))(0, weights, Arena.zeros(PLAIN))


async def fedavg(n):
    weights = arena(PLAIN, 0)
    for _ in range(ROUNDS):
        mean = WeightedMean(PLAIN)
        for number in range(n):
            update = await local_update(weights, number)
            mean.add(Update(delta=update.delta, num_examples=update.num_examples))
        weights, _ = server_step(FedAvg(), weights, {}, mean.result())
    return trained_part(weights)


def all_reduce(n):
    """Each rank a thread with a Gloo group of its own end, over sockets: what a datacenter's ranks do."""
    store = dist.HashStore()

    def rank(number):
        group = dist.ProcessGroupGloo(store, number, n, timedelta(seconds=60))
        x, toward = trained_part(arena(PLAIN, 0)).clone(), target(number)
        for _ in range(ROUNDS):
            x += (toward - x) / 2
            group.allreduce([x]).wait()
            x /= n
        return x

    with ThreadPoolExecutor(n) as ranks:
        return list(ranks.map(rank, range(n)))


@pytest.mark.parametrize("n", [2, 5, 8])
def test_gossip_on_the_complete_graph_is_all_reduce_is_fedavg_with_all_sites(n):
    peers, _, errors = asyncio.run(
        run_peers(gossip.build("dpsgd", {}), "complete", n, ROUNDS, models=lambda _: arena(PLAIN, 0))
    )
    assert errors == {}
    expected = asyncio.run(fedavg(n))
    assert expected.dtype == torch.float64
    assert float((expected - trained_part(arena(PLAIN, 0))).abs().max()) > 1.0  # it has moved
    for found in [*(trained_part(peer.model) for peer in peers.values()), *all_reduce(n)]:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
