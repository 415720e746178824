"""A path that breaks again and again: sites come back faster than the idle time, and the round goes on."""

import asyncio
import contextlib
import random

import pytest

from fedtrain.exchange import gather
from fedtrain.messages import Train
from fedtrain.wire.codec import decode, encode
from fedtrain.wire.frames import FromAggregator, Welcome
from tests import federation
from tests.federation import (
    STARS,
    aggregator,
    certificates,
    connected,
    echo_plus,
    hello,
    link,
    random_arena,
    sites,
)
from tests.limits import bounded

NAMES = ["a", "b", "c"]
IDLE_S = 3600.0  # so long that no test lasts until it is over


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), *NAMES)


@pytest.fixture(autouse=True, params=sorted(STARS))
def kind(request, monkeypatch):
    """Every claim of this page holds over each of the transports."""
    monkeypatch.setattr(federation, "STAR", request.param)


class FlappingPath:
    """A TCP proxy that resets both ends of a connection after a drawn number of bytes."""

    def __init__(self, to_port, seed, least, most):
        self._to_port, self._draw, self._span = to_port, random.Random(seed), (least, most)
        self.resets, self._serving = 0, set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        await asyncio.sleep(0)  # connections that were just accepted begin, so that they end in order
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._serving.add(asyncio.current_task())
        carrying, ends = [], [writer]
        try:
            from_there, to_there = await asyncio.open_connection("127.0.0.1", self._to_port)
            ends.append(to_there)
            left = [self._draw.randint(*self._span)]
            for source, sink in (reader, to_there), (from_there, writer):
                carrying.append(asyncio.create_task(carry(source, sink, left)))
            await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
            self.resets += left[0] <= 0
        finally:
            for task in carrying:
                task.cancel()
            for end in ends:
                end.transport.abort()
            await asyncio.gather(*carrying, return_exceptions=True)


async def carry(reader, writer, left):
    """Bytes from one end to the other, for as long as any are `left`, which both directions share."""
    with contextlib.suppress(ConnectionError):
        while left[0] > 0 and (data := await reader.read(1 << 16)):
            left[0] -= len(data)
            writer.write(data)
            await writer.drain()


def test_a_path_that_resets_every_few_megabytes_costs_no_site_and_changes_no_bit(certs, tmp_path):
    weights = random_arena(1_400_000, 99)  # 5.6 MB

    async def soon(_):
        await asyncio.sleep(0.01)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema, idle_s=2) as agg:
            async with FlappingPath(agg.cohort.port, 1, 200_000, 4_000_000) as path:
                links = {n: link(certs, n, path.port, tmp_path, sleep=soon) for n in NAMES}
                async with sites(links, weights.schema, lambda n: echo_plus(NAMES.index(n))):
                    for number in range(2):
                        request = Train(id=f"r/{number}/0/train", round=number, weights=weights)
                        yield await gather(agg.cohort, dict.fromkeys(NAMES, request), 60)
            assert path.resets >= 10

    async def rounds():
        return [got async for got in main()]

    for got in bounded(rounds()):
        found = {name: update.delta.load().digest for name, update in got.items()}
        assert found == {name: random_arena(1_400_000, i).digest for i, name in enumerate(NAMES)}


@contextlib.asynccontextmanager
async def joined(certs, agg, schema):
    """A site's bare session, from Welcome to when the aggregator has noticed that it is gone."""
    lost = len(agg.of("site_lost"))
    async with connected(certs, agg.cohort.port) as call, call("Session") as stream:
        await stream.write(encode(hello(schema)))
        assert isinstance(decode(await stream.read(), FromAggregator), Welcome)
        yield
    while len(agg.of("site_lost")) == lost:  # noqa: ASYNC110  # no event tells it
        await asyncio.sleep(0.001)


def test_the_clock_of_an_earlier_loss_gives_nobody_up(certs, tmp_path):
    """The idle time is counted from the last loss: what an earlier one had started no longer counts."""
    weights = random_arena(10, 1)

    async def main():
        now = asyncio.get_running_loop().time
        async with aggregator(certs, tmp_path, weights.schema, idle_s=IDLE_S) as agg:
            request = Train(id="r/0/0/train", round=0, weights=weights)
            exchange = asyncio.create_task(gather(agg.cohort, {"a": request}, 2 * IDLE_S))
            for _ in range(3):
                async with joined(certs, agg, weights.schema):
                    before_s = now()
            agg.cohort._tick(before_s + IDLE_S)
            await asyncio.sleep(0.01)
            assert not exchange.done()
            agg.cohort._tick(now() + IDLE_S)
            return await exchange

    assert bounded(main()) == {}
