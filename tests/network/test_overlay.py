"""Many real peers in one process: who is connected with whom, and that all average with all."""

import asyncio
import contextlib
import gc
import json
import multiprocessing
import time

import psutil
import pytest
import torch
import zmq

from fedtrain import pki
from fedtrain.pki.roster import Claim, enrol, own_curve, save
from fedtrain.pki.signing import Signer
from fedtrain.topology import parse
from fedtrain.transport.links import SPARE, STRANGE
from fedtrain.transport.overlay import Overlay
from tests.gossip import Party, Sum, share, vector
from tests.limits import WAIT_S, bounded
from tests.peers import Village

NAMES = [f"p{i:02}" for i in range(64)]


@pytest.mark.slow(25)
def test_64_peers_over_sockets_are_connected_with_few_see_all_and_average_exactly_with_all():
    graph, n = parse("base:1"), len(NAMES)
    models = {name: vector(1000, at) for at, name in enumerate(NAMES)}
    mean = sum(models.values()) / n

    def near(name, t):
        return graph.round(NAMES, t).graph[name]

    async def one(p, name, t):
        part, mixer = near(name, t), Sum(models[name] * near(name, t).own)
        soon = [near(name, t + k) for k in range(3)]
        p.peers[name].keep({other for each in soon for other in (*each.incoming, *each.outgoing)})
        p.peers[name].announce(t, part.incoming)
        shares = {other: share(models[name], weight) for other, weight in part.outgoing.items()}
        done = await p.peers[name].exchange(t, shares, list(part.incoming), mixer, WAIT_S)
        assert not done.missing, (name, done.missing)
        models[name] = mixer.acc

    async def main():
        p, most = Party(), 0
        try:
            for name in NAMES:
                p.start(name, heartbeat_s=3.0, idle_s=30.0)
            for peer in p.peers.values():
                peer.revoked()  # it looks at the roster
                peer.keep()
            async with asyncio.timeout(2 * WAIT_S):
                while not all(len(peer.view().alive) == n for peer in p.peers.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            for t in range(graph.period(n)):
                await asyncio.gather(*(one(p, name, t) for name in NAMES))
                most = max(most, *(len(peer.connected()) for peer in p.peers.values()))
            async with asyncio.timeout(WAIT_S):
                while len({peer.view() for peer in p.peers.values()}) > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            await asyncio.gather(*(peer.stop() for peer in p.peers.values()))
        return most

    assert bounded(main()) <= n // 2
    assert all(torch.allclose(model, mean, atol=1e-5) for model in models.values())


def ways_of(peer):
    """The connections at a peer: its own calls, and those of others."""
    return {link.peer: link.calling + len(link.routes) for link in peer._links if link.up}


@pytest.mark.slow(10)
def test_a_peer_has_few_calls_of_those_it_does_not_need_and_each_gets_through_when_it_is_needed():
    names = NAMES[:28]
    hub, others = names[0], set(names[1:])
    circle = Overlay(names).circle(hub)

    async def until(what):
        async with asyncio.timeout(WAIT_S):
            while not what():  # noqa: ASYNC110 - threads call and answer
                await asyncio.sleep(0.02)

    async def main():
        p = Party()
        try:
            for name in names:
                p.start(name, heartbeat_s=3.0, idle_s=300.0)
            for peer in p.peers.values():
                peer.revoked()  # it looks at the roster
            for name in others:
                p.peers[name].connect({hub})
            at = p.peers[hub]
            strange = lambda: {peer for peer in ways_of(at).keys() - circle if at._links.get(peer).routes}
            await until(lambda: len(strange()) == STRANGE)
            at.keep(others)
            await until(lambda: at.connected() == sorted(others))
            at.keep(())
            await until(lambda: len(strange()) <= STRANGE)
            await until(lambda: sum(ways_of(at).values()) <= 2 * len(circle) + STRANGE + SPARE)
        finally:
            await asyncio.gather(*(peer.stop() for peer in p.peers.values()))

    assert len(others - circle) > STRANGE
    bounded(main())


def one_of(village, name, out):
    """A process's life as a peer: its rounds, and then what it agreed on, are in `out`."""

    async def live():
        network = {"listen": f"127.0.0.1:{village.ports[name]}", "heartbeat": "3s", "idle": "20s"}
        running = village.start(name, pace_s=0.2, network=network, gossip={"roster": f"rosters/{name}"})
        while not running.done():
            out.write_text(str(village.rounds_of(name)))
            await asyncio.wait([running], timeout=0.3)
        running.result()

    asyncio.run(live())
    agreed, said = village.of(name, "agreed"), [each["text"] for each in village.of(name, "notice")]
    out.write_text(json.dumps({"digest": agreed[-1]["digest"] if agreed else "", "said": said}))


def enrol_all(village):
    """Each peer has a roster of its own, and knows the two on either side of it."""
    root, entries = village.root, {}
    for name in NAMES:
        folder = root / "certs" / "sites" / name
        credentials = pki.Credentials.load(folder)
        key, _ = own_curve(folder, zmq.curve_keypair)
        claim = Claim(peer=name, federation=credentials.identity.federation, key=key,
                      address=f"127.0.0.1:{village.ports[name]}")  # fmt: skip
        entries[name] = enrol(Signer.of(credentials), claim).encode()
    for at, name in enumerate(NAMES):
        for other in NAMES[max(at - 2, 0) : at + 3]:
            save(root / "rosters" / name, other, entries[other])


def connections_of(process):
    """The peers that a process is connected with, by TCP: their ports, and the ports of their calls."""
    with contextlib.suppress(psutil.Error):
        return sum(each.status == "ESTABLISHED" for each in psutil.Process(process.pid).net_connections())
    return 0


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_64_processes_of_whom_some_are_killed_have_few_connections_and_end_with_one_model(tmp_path):
    made, fork = Village(tmp_path, NAMES, rounds=8, topology="base:1"), multiprocessing.get_context("fork")
    gc.collect()  # gRPC's of tests before, whose end waits for a thread, and that would be none in a fork
    enrol_all(made)
    outs = {name: tmp_path / f"{name}.json" for name in NAMES}
    processes = {name: fork.Process(target=one_of, args=(made, name, outs[name])) for name in NAMES}
    killed, most = {"p07": 2, "p20": 4, "p41": 6, "p63": 8}, 0  # after so many rounds; the last in the end
    try:
        for process in processes.values():
            process.start()
        until = time.monotonic() + 900
        while any(process.is_alive() for name, process in processes.items()):
            assert time.monotonic() < until, {n: out.exists() for n, out in outs.items()}
            most = max(most, *(connections_of(process) for process in processes.values()))
            for name, after in killed.items():
                told = outs[name].read_text() if outs[name].exists() else ""
                if told.isdecimal() and int(told) >= after:  # one that has ended says something else
                    processes[name].kill()
            time.sleep(0.3)
    finally:
        for process in processes.values():
            process.kill()
    ended = {name: json.loads(out.read_text()) for name, out in outs.items() if name not in killed}
    print("most TCP connections:", most)
    without = {name: each["said"][-3:] for name, each in ended.items() if not each["digest"]}
    assert not without
    assert len({each["digest"] for each in ended.values()}) == 1
    assert most <= 2 * 40  # of two peers each calls the other
