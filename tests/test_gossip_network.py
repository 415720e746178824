"""The graph seam in memory: shares arrive whole, once, in order; under seeded faults nothing hangs."""

import asyncio
import random

import pytest
import torch

from fedtrain.errors import BadUpdate
from fedtrain.exchange import Share
from fedtrain.transport.courier import Limits
from fedtrain.transport.memory import Faults, LocalNetwork

MIB = 1 << 20


def vector(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def share(x, weight=1.0):
    return Share(memoryview(x.view(torch.uint8).numpy().data), weight)


class Sum:
    """acc += weight · share, chunk by chunk; keeps what it was told."""

    def __init__(self, acc):
        self.acc, self.weight, self.begun, self.order, self.ended = acc, {}, [], [], {}

    def begin(self, offer):
        if offer.nbytes != self.acc.nbytes:
            raise BadUpdate(f"{offer.nbytes} bytes, {self.acc.nbytes} are due")
        self.weight[offer.peer] = offer.weight
        self.begun.append(offer)

    def mix(self, peer, offset, chunk):
        piece = torch.frombuffer(chunk, dtype=self.acc.dtype)
        at = offset // self.acc.itemsize
        self.acc[at : at + len(piece)].add_(piece, alpha=self.weight[peer])
        self.order.append((offset // MIB, peer))

    def end(self, peer, nbytes):
        self.ended[peer] = nbytes


def bounded(coroutine, seconds=60):
    async def run():
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(run())


async def one_round(network, name, x, others, round=0, deadline_s=60.0, late_s=0.0):
    async with network.join(name) as neighbors:
        if late_s:
            await neighbors.sleep(late_s)
        mixer = Sum(x * 0.5)
        shares = {peer: share(x, 0.25) for peer in others}
        done = await neighbors.exchange(round, shares, others, mixer, deadline_s)
        await neighbors.sleep(1000.0)  # stay, to answer those who are slower
        return mixer, done


async def all_to_all(network, numel, **late):
    names = network.names
    xs = {name: vector(numel, i) for i, name in enumerate(names)}
    rounds = [
        one_round(network, n, xs[n], [o for o in names if o != n], late_s=late.get(n, 0.0)) for n in names
    ]
    return xs, dict(zip(names, await asyncio.gather(*rounds), strict=True))


@pytest.mark.parametrize("numel", [0, 1, 7, MIB // 4, MIB // 4 + 1, 3 * MIB])
def test_shares_of_any_size_arrive_whole_and_are_mixed_with_their_weight(numel):
    xs, got = bounded(all_to_all(LocalNetwork("abc"), numel))
    for name, (mixer, done) in got.items():
        expected = xs[name] * 0.5
        for other in sorted(set("abc") - {name}):
            expected += 0.25 * xs[other]
        assert torch.equal(mixer.acc, expected)
        assert done.arrived == done.given == set("abc") - {name}
        assert not done.missing
        assert not done.kept


@pytest.mark.parametrize("seed", range(5))
def test_whoever_comes_first_chunks_are_mixed_in_the_peers_order(seed):
    late = dict(zip("abcd", random.Random(seed).sample([0.0, 1.0, 2.0, 3.0], 4), strict=True))
    network = LocalNetwork("abcd", faults=Faults(delay_s=0.5), seed=seed, limits=Limits(window=3))
    _, calm = bounded(all_to_all(LocalNetwork("abcd"), 5 * MIB // 4 + 3))
    _, got = bounded(all_to_all(network, 5 * MIB // 4 + 3, **late))
    for name, (mixer, _) in got.items():
        for c in range(6):
            assert [p for i, p in mixer.order if i == c] == sorted(set("abcd") - {name})
        assert torch.equal(mixer.acc, calm[name][0].acc)


def test_a_share_of_the_wrong_size_is_refused_before_a_byte_of_it_is_sent():
    network = LocalNetwork("ab")

    async def main():
        a = one_round(network, "a", vector(10, 1), ["b"])
        b = one_round(network, "b", vector(5 * MIB, 1), ["a"])
        return await asyncio.gather(a, b)

    (mixer, a), (_, b) = bounded(main())
    assert a.missing == {"b": "refused: 20971520 bytes, 40 are due"}
    assert "40 bytes, 20971520 are due" in a.kept["b"]
    assert b.missing.keys() == b.kept.keys() == {"a"}
    assert mixer.ended == {}
