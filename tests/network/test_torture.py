"""Paths that reset, change, repeat, swap, hold and delay the bytes of real connections, by seed: while every
outage is shorter than the idle time no round fails, and the models are those of an undisturbed run."""

import asyncio
import contextlib
import os
from collections import deque
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedtrain.exchange import gather
from fedtrain.messages import Train
from fedtrain.transport.star import SiteEnd
from tests.federation import aggregator, certificates, echo_plus, link, random_arena, sites
from tests.limits import bounded
from tests.peers import village
from tests.ports import free_port
from tests.soaking import taken
from tests.torture import Torture

AT_ONCE = 6  # runs of gossip, which wait most of their time
NAMES, ROUNDS, SEEDS = ["a", "b", "c"], 3, 250
WEIGHTS = random_arena(200_000, 99)


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), *NAMES)


@pytest.fixture(autouse=True)
def soon_again(monkeypatch):
    """Who lost a connection tries again soon, so that hundreds of seeds take minutes."""
    monkeypatch.setattr(SiteEnd, "PAUSES", (0.02, 1.5, 0.2))


async def star(certs, folder, seed):
    """Rounds over gRPC and mutual TLS with a path for each site; what happened there."""
    async with contextlib.AsyncExitStack() as stack:
        options = {"idle_s": 30.0, "heartbeat_s": 1.0}
        agg = await stack.enter_async_context(aggregator(certs, folder, WEIGHTS.schema, **options))
        paths = {}
        for name in NAMES:
            path = paths[name] = Torture(free_port(), agg.cohort.port, (seed, name), 4, 500_000)
            await stack.enter_async_context(path)
        links = {n: link(certs, n, path._port, folder, heartbeat_s=1.0) for n, path in paths.items()}
        answers = lambda n: echo_plus(NAMES.index(n))
        await stack.enter_async_context(sites(links, WEIGHTS.schema, answers))
        for number in range(ROUNDS):
            await agg.cohort.members(len(NAMES))
            request = Train(id=f"r/{number}/0/train", round=number, weights=WEIGHTS)
            got = await gather(agg.cohort, dict.fromkeys(NAMES, request), 60)
            found = {name: update.delta.load().digest for name, update in got.items()}
            assert found == {n: digest_of(i) for i, n in enumerate(NAMES)}, (seed, number)
        return [fault for path in paths.values() for fault in path.happened]


@cache
def digest_of(seed):
    return random_arena(200_000, seed).digest


async def peers(folder, seed, faults):
    """The peers' models after rounds over ZeroMQ with a path to each peer; what happened there."""
    async with contextlib.AsyncExitStack() as stack:
        v = await stack.enter_async_context(village(folder, "abc", rounds=5))
        paths, tasks = [], []
        for name in NAMES:
            path = Torture(free_port(), v.ports[name], (seed, name), faults, 3_000)
            paths.append(await stack.enter_async_context(path) or path)
            network = {
                "listen": f"127.0.0.1:{v.ports[name]}", "address": f"127.0.0.1:{path._port}", "idle": "30s",
            }  # fmt: skip
            tasks.append(v.start(name, network=network, strategy={"min_sites": 3}))
        await asyncio.gather(*tasks)
        refused = [each for name in NAMES for each in v.of(name, "update_refused")]
        # of no round: half of a message, for CURVE does not cover the flags of its frames
        assert all(each["round"] is None for each in refused), (seed, refused)
        models = [v.model(name).tolist() for name in NAMES]
        return models, [fault for path in paths for fault in path.happened]


def tortured_star(certs, seeds):
    for seed in seeds:
        with TemporaryDirectory() as folder:
            assert bounded(star(certs, Path(folder), seed))


def tortured_peers(seeds):
    """Each seed in a process of its own: libzmq 4.3.5 aborts where a connection breaks while it is written to
    (https://github.com/zeromq/libzmq/pull/4852) and something keeps its socket, and then says nothing of the
    rest. It did so in 42 of 250 seeds while a call's monitor heard of all events (links.WATCHED)."""
    with TemporaryDirectory() as folder:
        whole, _ = bounded(peers(Path(folder), 0, 0))
    running: deque[tuple[int, int]] = deque()
    codes = {}
    for seed in chain(seeds, [None] * AT_ONCE):
        if len(running) == AT_ONCE or (seed is None and running):
            begun, process = running.popleft()
            codes[begun] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if seed is not None:
            running.append((seed, _in_a_process(seed, whole)))
    assert {seed: code for seed, code in codes.items() if code} == {}


def _in_a_process(seed, whole):
    """Its id; the code is 0 where the models are those of the undisturbed run."""
    if not (process := os.fork()):
        try:
            with TemporaryDirectory() as folder:
                found, happened = bounded(peers(Path(folder), seed, 4))
            os._exit(not (happened and found == whole))
        finally:
            os._exit(2)
    return process


@pytest.mark.slow(4)
def test_a_star_over_tortured_paths_loses_no_round_and_no_bit(certs):
    tortured_star(certs, range(2))


@pytest.mark.soak(part=0.05)
@pytest.mark.timeout(1800)
def test_a_star_over_hundreds_of_tortured_paths_loses_no_round_and_no_bit(certs, request):
    tortured_star(certs, taken(range(SEEDS), request))


@pytest.mark.soak(part=0.05)
@pytest.mark.timeout(1800)
def test_peers_over_hundreds_of_tortured_paths_lose_no_round_and_no_bit(request):
    tortured_peers(taken(range(SEEDS), request))
