"""The star seam over real gRPC, real certificates, real sockets on loopback."""

import asyncio
import threading
from pathlib import Path

import pytest

from fedtrain.exchange import gather
from fedtrain.transport.grpc import opened
from fedtrain.update import ArenaFile, Train, Update
from tests.federation import aggregator, certificates, echo_plus, link, random_arena, sites

NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), *NAMES)


def bounded(coroutine, seconds=60):
    async def run():
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(run())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_what_sites_send_is_what_the_aggregator_gets(certs, tmp_path, dtype):
    weights = random_arena(1_500_000, 99, dtype)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema) as agg:
            links = {n: link(certs, n, agg.cohort.port, tmp_path) for n in NAMES}
            async with sites(links, weights.schema, lambda n: echo_plus(NAMES.index(n))):
                assert await agg.cohort.members(3) == NAMES
                request = Train(id="r/0/0/train", round=0, weights=weights)
                return await gather(agg.cohort, dict.fromkeys(NAMES, request), 30)

    got = bounded(main())
    assert sorted(got) == NAMES
    for i, name in enumerate(NAMES):
        assert isinstance(got[name], Update)
        assert isinstance(got[name].delta, ArenaFile)
        assert got[name].delta.digest == random_arena(1_500_000, i, dtype).digest
        assert got[name].delta.load().digest == got[name].delta.digest
        assert got[name].num_examples == 1.0 + i


def test_a_transfer_cancelled_while_its_file_is_opened_is_closed_all_the_same():
    entered, go, closed = threading.Event(), threading.Event(), []

    class Slow:
        """An inbox and its one transfer."""

        def receive(self, digest, nbytes):
            entered.set()
            assert go.wait(30)
            return self

        def close(self):
            closed.append(True)

    async def run():
        async def transfer():
            async with opened(Slow(), ArenaFile(random_arena(10, 0).schema, Path("x"), "0" * 32)):
                raise AssertionError("it was cancelled before")

        task = asyncio.create_task(transfer())
        await asyncio.to_thread(entered.wait, 30)
        for _ in range(3):  # as a server does that stops
            task.cancel()
            await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert closed == [True]
