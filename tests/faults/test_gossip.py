"""Peers as processes: killed, frozen, cut off, and back again. No round waits longer than its deadline."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedtrain.transport.admission import Curve

ROOT = Path(__file__).parents[2]
DEADLINE_S, IDLE_S = 6.0, 1.0


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cable:
    """TCP connections through this process, which it can hold up: nothing is lost, and nothing arrives."""

    def __init__(self):
        self._servers, ready = [], threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=[self._main(ready)], daemon=True)
        self._thread.start()
        assert ready.wait(20)

    async def _main(self, ready):
        self._loop, self._flows, self._over = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._flows.set()
        ready.set()
        await self._over.wait()
        for server in self._servers:
            server.close()

    def to(self, address):
        """The address that leads to another one."""
        host, port = address.split(":")

        async def carry(reader, writer):
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    await self._flows.wait()
                    writer.write(data)
                    await writer.drain()

        async def call(reader, writer):
            with contextlib.closing(writer), contextlib.suppress(OSError):
                other_reader, other_writer = await asyncio.open_connection(host, port)
                with contextlib.closing(other_writer):
                    ways = [carry(reader, other_writer), carry(other_reader, writer)]
                    await asyncio.wait(
                        [asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED
                    )

        made = asyncio.run_coroutine_threadsafe(asyncio.start_server(call, "127.0.0.1", 0), self._loop)
        self._servers.append(made.result(20))
        return f"127.0.0.1:{self._servers[-1].sockets[0].getsockname()[1]}"

    def cut(self):
        self._loop.call_soon_threadsafe(self._flows.clear)

    def mend(self):
        self._loop.call_soon_threadsafe(self._flows.set)

    def close(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)


class Peers:
    """Each a process; all that the last one says and hears goes through `cable`."""

    def __init__(self, folder, n):
        self.folder, self.names, self.processes = folder, [f"p{i}" for i in range(n)], {}
        self.cable = Cable()
        *rest, apart = self.names
        listen = {name: f"127.0.0.1:{free_port()}" for name in self.names}
        calls = {name: listen | {apart: self.cable.to(listen[apart])} for name in rest}
        calls[apart] = {name: self.cable.to(listen[name]) for name in rest} | {apart: listen[apart]}
        peers = {}
        for i, name in enumerate(self.names):
            curve = Curve.new()
            keys = {"public": curve.public.decode(), "secret": curve.secret.decode()}
            peers[name] = keys | {"listen": listen[name], "calls": calls[name], "start": i}
        self.spec = {"peers": peers, "deadline_s": DEADLINE_S, "idle_s": IDLE_S, "train_s": 0.3}
        (folder / "spec.json").write_text(json.dumps(self.spec))

    def __enter__(self):
        for name in self.names:
            self.start(name)
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(10)
        self.cable.close()

    def start(self, name, *more):
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.gossip_peer", name, str(self.folder / "spec.json"), *more]
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def said(self, name, *kinds):
        """What of these kinds, rounds where none is named, it has told, in order."""
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [each for each in found if each["kind"] in (kinds or ("round",))]

    def wait_for(self, what, seconds=60.0):
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, {
                n: (self.folder / f"{n}.log").read_text()[-600:] for n in self.names
            }
            time.sleep(0.1)

    def are_with(self, names, others):
        """Whether the last round of each was with just these."""
        return all(self.said(n) and set(self.said(n)[-1]["both"]) == set(others) - {n} for n in names)

    def agree(self, names):
        """Whether the last rounds of these ended with one number."""
        last = [self.said(n)[-1]["x"] for n in names]
        return max(last) - min(last) < 1e-9


@pytest.mark.slow(20)
def test_of_eight_peers_killed_frozen_and_cut_off_ones_stop_nobody_and_those_who_return_catch_up(tmp_path):
    with Peers(tmp_path, 8) as peers:
        killed, returning, frozen, apart, rest = ["p0", "p1"], "p0", "p2", "p7", ["p3", "p4", "p5", "p6"]
        peers.wait_for(lambda: peers.are_with(peers.names, peers.names))
        for name in killed:  # each round takes 0.3 s, so they are in the middle of one
            peers.processes[name].kill()
            peers.processes[name].wait(10)
        peers.processes[frozen].send_signal(signal.SIGSTOP)
        peers.cable.cut()
        peers.wait_for(lambda: peers.are_with(rest, rest) and peers.are_with([apart], []))
        at = {n: len(peers.said(n)) for n in rest}
        peers.wait_for(lambda: all(len(peers.said(n)) >= at[n] + 10 for n in rest))  # for nobody who is away
        peers.processes[frozen].send_signal(signal.SIGCONT)
        peers.cable.mend()
        peers.start(returning, "--back")
        here = [returning, frozen, *rest, apart]
        peers.wait_for(lambda: peers.are_with(here, here) and peers.agree(here), 120)

        for name in rest:
            t = 0
            for each in peers.said(name, "round", "pulled"):
                if each["kind"] == "round":
                    assert each["round"] == t + 1  # none was left out
                    # a few seconds beside the deadline, and as long as the machine did not let it run
                    assert each["waited_s"] < DEADLINE_S + 4.0 + each["stood_s"]
                else:  # only where the machine kept it from the others' rounds
                    assert each["stood_s"] > IDLE_S, each
                    assert each["source"] != apart  # who was cut off alone doesn't change the others' model
                t = each["round"]
        for name in (returning, frozen):
            assert peers.said(name, "pulled")  # the one that came back, and the one that had slept
        assert 0 <= peers.said(apart)[-1]["x"] <= 7
