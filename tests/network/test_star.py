"""The star seam over real sockets on loopback: gRPC with real certificates, and a second transport."""

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest
from msgspec import structs

from fedtrain.arena import ArenaFile
from fedtrain.errors import ConnectError, JoinRefused, StoreError
from fedtrain.exchange import gather
from fedtrain.messages import Train, Update
from fedtrain.schema import Schema, TensorSpec
from fedtrain.transport import star
from fedtrain.transport.grpc import SiteStream
from fedtrain.transport.streams import SMALL_BYTES, UPLOAD, opened
from fedtrain.wire.codec import decode, encode
from fedtrain.wire.frames import Finished, FromAggregator, Welcome
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


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), *NAMES)


@pytest.fixture(autouse=True, params=sorted(STARS))
def kind(request, monkeypatch):
    """Every claim of this page holds over each of the transports."""
    monkeypatch.setattr(federation, "STAR", request.param)


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


async def ended(certs, folder, weights, agg, away, back):
    """A run that ends while `away` of its sites are: what each of `back` hears when it comes."""
    stopping = asyncio.create_task(agg.cohort.stop("rounds done", away))
    await asyncio.sleep(0)
    heard = []
    for name in back:
        assert not stopping.done(), "it waits until all have heard"
        site = link(certs, name, agg.cohort.port, folder)
        heard.append(await site.serve(hello(weights.schema), echo_plus(0)))
    await stopping
    return heard


def test_a_site_that_was_away_when_the_run_ended_hears_it_when_it_comes_back(certs, tmp_path):
    weights = random_arena(10, 1)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema, idle_s=3600) as agg:
            links = {"a": link(certs, "a", agg.cohort.port, tmp_path)}
            async with sites(links, weights.schema, lambda n: echo_plus(0)) as tasks:
                await agg.cohort.members(1)
                heard = await ended(certs, tmp_path, weights, agg, NAMES, ["b", "c"])
                return [*heard, *await asyncio.gather(*tasks)], agg.of("notice")

    heard, notices = bounded(main())
    assert heard == ["rounds done"] * 3
    assert ["b, c may come back within 3600 s" in n["text"] for n in notices] == [True]


def test_a_site_whose_connection_broke_on_the_last_word_hears_it_again(certs, tmp_path):
    weights = random_arena(10, 1)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema, idle_s=3600) as agg:
            async with connected(certs, agg.cohort.port) as call, call("Session") as stream:
                await stream.write(encode(hello(weights.schema)))
                assert isinstance(decode(await stream.read(), FromAggregator), Welcome)
                ending = asyncio.create_task(ended(certs, tmp_path, weights, agg, ["a", "b"], ["b", "a"]))
                assert isinstance(decode(await stream.read(), FromAggregator), Finished)
            return await ending

    assert bounded(main()) == ["rounds done"] * 2


def test_a_site_that_stays_away_is_not_waited_for_beyond_the_idle_time(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(star, "LEAVE_S", 0.05)
    weights = random_arena(10, 1)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema, idle_s=0.1) as agg:
            return await ended(certs, tmp_path, weights, agg, ["a"], [])

    assert bounded(main()) == []


def test_a_site_that_no_longer_fits_when_it_comes_back_is_not_waited_for(certs, tmp_path):
    def refuse(site, hello):
        raise JoinRefused("another model")

    weights = random_arena(10, 1)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema, idle_s=3600, welcome=refuse) as agg:
            stopping = asyncio.create_task(agg.cohort.stop("rounds done", ["a"]))
            with pytest.raises(JoinRefused):
                await link(certs, "a", agg.cohort.port, tmp_path).serve(hello(weights.schema), echo_plus(0))
            await stopping

    bounded(main())


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
            large = Schema((TensorSpec("w", (SMALL_BYTES,), "float32", True),))
            async with opened(Slow(), ArenaFile(large, Path("x"), "0" * 32)):
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


class Forgetful:
    """A call of gRPC whose connection breaks while it begins: its initializer swallows a cancellation."""

    async def read(self):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise asyncio.InvalidStateError("RPC already finished.")


def test_work_that_is_cancelled_as_its_connection_breaks_does_not_go_on():
    """It would make its next call on a channel that is closed, and end the site with the error."""

    async def main():
        work = asyncio.create_task(SiteStream(Forgetful(), "127.0.0.1:1").read())
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())


def test_an_aggregator_without_room_for_an_upload_ends_the_exchange_at_once_and_names_the_file(
    certs, tmp_path, monkeypatch
):
    weights, opened = random_arena(1000, 99), os.open
    part = tmp_path / "inbox" / "a" / f"{random_arena(1000, 0).digest}.part"
    full = lambda path, flags, *mode, **at: opened(  # a disk that is
        *(("/dev/full", os.O_RDWR) if Path(path) == part else (path, flags)), *mode, **at
    )
    monkeypatch.setattr(os, "open", full)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema) as agg:
            links = {"a": link(certs, "a", agg.cohort.port, tmp_path)}
            async with sites(links, weights.schema, lambda n: echo_plus(0)):
                await agg.cohort.members(1)
                request = Train(id="r/0/0/train", round=0, weights=weights)
                with pytest.raises(
                    StoreError, match=rf"no room for {part.with_suffix('')}: No space left.*free"
                ):
                    await gather(agg.cohort, {"a": request}, 3600)

    bounded(main())


def test_two_processes_with_one_certificate_are_told_so_once_and_slow_down(certs, tmp_path):
    weights, waits, told = random_arena(10, 1), {1: [], 2: []}, []

    async def main():
        async with aggregator(certs, tmp_path, weights.schema) as agg:

            def one(number):
                async def sleep(seconds):
                    waits[number].append(seconds)
                    if len(waits[number]) == 6:
                        done[number].set()
                        await asyncio.Event().wait()

                emit = lambda event: told.append((number, event.kind, getattr(event, "reason", None)))
                return link(
                    certs,
                    "a",
                    agg.cohort.port,
                    tmp_path / str(number),
                    sleep=sleep,
                    jitter=lambda: 0.5,
                    emit=emit,
                )

            done = {number: asyncio.Event() for number in waits}
            first = asyncio.create_task(one(1).serve(hello(weights.schema), echo_plus(0)))
            second = asyncio.create_task(one(2).serve(hello(weights.schema), echo_plus(0)))
            await asyncio.wait(
                [asyncio.create_task(each.wait()) for each in done.values()],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in first, second:
                task.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            return agg.of("notice")

    notices = [n["text"] for n in bounded(main()) if "certificate" in n["text"]]
    assert len(notices) == 1
    assert notices[0].startswith("a: two processes join with one certificate")
    assert "fedtrain certs revoke a" in notices[0]
    longest = max(waits.values(), key=len)
    assert longest == pytest.approx([0.2 * 1.7**i for i in range(6)]), (
        "each waits longer than the time before"
    )
    lost = [(number, reason) for number, kind, reason in told if kind == "site_lost"]
    assert len(lost) == len(set(lost)) <= 2
    assert all(
        "another process has joined as a, with the same certificate. Stop one" in why for _, why in lost
    )


def test_a_site_that_reconnects_before_its_loss_is_noticed_is_no_second_process(certs, tmp_path):
    weights = random_arena(10, 1)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema) as agg:
            said = encode(structs.replace(hello(weights.schema), process="one"))
            async with connected(certs, agg.cohort.port) as call, contextlib.AsyncExitStack() as calls:
                for _ in range(4):
                    stream = await calls.enter_async_context(call("Session"))
                    await stream.write(said)
                    assert isinstance(decode(await stream.read(), FromAggregator), Welcome)
            return agg.of("notice")

    assert bounded(main()) == []


def test_a_call_over_a_connection_that_is_closed_is_a_lost_connection_and_no_bug(certs, tmp_path):
    async def main():
        async with (
            aggregator(certs, tmp_path, random_arena(4, 0).schema) as agg,
            connected(certs, agg.cohort.port) as call,
        ):
            pass
        with pytest.raises(ConnectError):
            async with call(UPLOAD) as stream:
                await stream.read()

    bounded(main())
