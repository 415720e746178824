"""An averaging round of real peers over ZeroMQ with CURVE, each a process of its own, on loopback.

In a round each peer sends its whole model to one other and mixes what comes (the one-peer exponential graph,
Ying et al. 2021): after log2(n) rounds all have the same average, which is checked. Beside it, in the same
run before and after each case, a bare pair of pyzmq sockets with CURVE moves the same chunks.

    round_s       median over rounds of the slowest peer's time
    bytes_ratio   all message bytes that a peer sends in a round / the model's bytes, which the graph needs
    curve_ratio   bytes a second of all peers together, from the first's start to the last's end, / those of
                  the bare pair
    cpu_ratio     the bare pair's CPU seconds a byte, both ends / those of the peers
    agreement_s   round_s · log2(n): until all have the average of all

`wan` has eight peers on slow links, each in a network namespace of its own (wan.py: 10 Mbit/s, 50 ms there
and back, 1 % of all packets lost; it needs root). By turns with ours, the same peers send the same bytes over
plain TCP connections, which stay open as ours do. Of all rounds of all peers it has

    bytes_ratio   bytes on the wire, with all headers and all that TCP sent again, ours / plain TCP's
    median_ratio  median of a peer's seconds, ours / plain TCP's
    max_ratio     our longest / the median of plain TCP's; beside it raw_max_ratio, plain TCP's own longest
    agreement_s   of three of our rounds, each as long as its slowest peer's: the median; with `--beside` of
                  hivemind too, on the same links right after ours

Of other frameworks, with `--beside PYTHON` (an interpreter of a virtual environment that has hivemind or
p2pfl; may be repeated), `1Mx4/hivemind` has agreement_s too, the median of `beside.py`'s rounds, taken right
after ours.

    python benchmarks/gossip.py [--json] [--case 10Mx4] [--beside PYTHON]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import torch
import zmq
from wan import enter, wan

from fedtrain.exchange import Contact, Share, ShareHeader
from fedtrain.transport.admission import Curve
from fedtrain.transport.zmq import ZmqNeighbors
from fedtrain.wire.frames import CHUNK_BYTES
from fedtrain.wire.gossip import Greeting

CASES = {"1Mx4": (1_000_000, 4), "10Mx4": (10_000_000, 4), "1Mx8": (1_000_000, 8), "tiny": (1000, 4)}
ROUNDS = 24
WAN, WAN_NUMEL, WAN_PEERS, WAN_ROUNDS, WAN_PORT = "wan", 1_000_000, 8, 12, 7000
PAIR_BYTES = 200 << 20
BESIDE_CASES, BESIDE_ROUNDS, BESIDE_S = ("1Mx4",), 5, 900
GREETING = Greeting(version="benchmark", task_digest="", schema_digest="", agreed={})


class Average:
    """acc = (x + share) / 2, in one pass over what comes"""

    def __init__(self, x: torch.Tensor, acc: torch.Tensor) -> None:
        self.x, self.acc = x, acc

    def begin(self, offer: ShareHeader) -> None:
        assert offer.nbytes == self.acc.nbytes

    def mix(self, peer: str, offset: int, chunk: memoryview) -> None:
        piece = torch.frombuffer(chunk, dtype=torch.float32)
        at = slice(offset // 4, offset // 4 + len(piece))
        torch.lerp(self.x[at], piece, 0.5, out=self.acc[at])

    def end(self, peer: str, nbytes: int) -> None:
        assert nbytes == self.acc.nbytes


class Roster:
    """A roster that is given. Implements admission.PeerDirectory, as far as a benchmark needs it."""

    def __init__(self) -> None:
        self.replace([])

    def replace(self, contacts: list[Contact]) -> None:
        self._contacts = {each.peer: each for each in contacts}

    def contact(self, peer: str) -> Contact | None:
        return self._contacts.get(peer)

    def peer_of(self, key: bytes) -> str | None:
        return next((each.peer for each in self._contacts.values() if each.key == key), None)

    def peers(self) -> list[str]:
        return sorted(self._contacts)

    def statements(self) -> list[bytes]:
        return []

    def proves(self, peer: str, message: bytes, signature: bytes) -> bool:
        return True  # nobody lies here

    def add(self, statement: bytes) -> Contact | None:
        raise NotImplementedError("nothing is passed on here")

    def is_guest(self, key: bytes) -> bool:
        return False

    def admit(self, key: bytes, entry: bytes) -> Contact:
        raise NotImplementedError("there are no guests here")


def peer(name: str, index: int, numel: int, pipe: Connection) -> None:
    """One process."""
    torch.set_num_threads(1)
    asyncio.run(_peer(name, index, numel, pipe))


async def _peer(name: str, index: int, numel: int, pipe: Connection) -> None:
    curve, roster = Curve.new(), Roster()
    neighbors = ZmqNeighbors(
        me=name, curve=curve, sign=bytes, roster=roster, run="benchmark", greeting=GREETING
    )
    neighbors.start()
    pipe.send(Contact(name, curve.public, f"127.0.0.1:{neighbors.port}"))
    contacts = pipe.recv()
    roster.replace(contacts)
    names = [each.peer for each in contacts]
    n = len(names)
    hops = [2**k for k in range(n.bit_length() - 1)]
    x = torch.randn(numel, generator=torch.Generator().manual_seed(index))
    other = torch.empty_like(x)
    neighbors.connect(set(names) - {name})
    async with asyncio.timeout(30):
        while len(neighbors.connected()) < n - 1:  # noqa: ASYNC110 - another thread connects
            await asyncio.sleep(0.005)
    pipe.send("ready")
    pipe.recv()
    times, sent, cpu, began = [], neighbors._links.wire_out, time.process_time(), time.perf_counter()
    for r in range(ROUNDS):
        hop = hops[r % len(hops)]
        to, source = names[(index + hop) % n], names[(index - hop) % n]
        share = Share(memoryview(x.numpy().data).cast("B"))
        start = time.perf_counter()
        done = await neighbors.exchange(r, {to: share}, [source], Average(x, other), 60.0)
        times.append(time.perf_counter() - start)
        assert done.arrived == {source}, done
        assert done.given == {to}, done
        x, other = other, x
        if r == len(hops) - 1:
            agreed = x[:: max(1, numel // 100)].clone()
    spent = (began, time.perf_counter()), time.process_time() - cpu
    pipe.send((times, *spent, neighbors._links.wire_out - sent, agreed))
    pipe.recv()
    await neighbors.stop()


def averaging(numel: int, n: int) -> tuple[float, float, float, float]:
    """Seconds of a round at its slowest peer, seconds a round of all, bytes that a peer sends in one, and CPU
    seconds of all peers in one."""
    spawn = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for i in range(n):
        here, there = spawn.Pipe()
        workers.append(spawn.Process(target=peer, args=(f"p{i}", i, numel, there), daemon=True))
        workers[-1].start()
        pipes.append(here)
    contacts = [_get(pipe) for pipe in pipes]
    for answer in (contacts, "go"):
        for pipe in pipes:
            pipe.send(answer)
        got = [_get(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send("over")
    for worker in workers:
        worker.join(30)
    times, spans, cpu, sent, agreed = zip(*got, strict=True)
    for each in agreed:
        torch.testing.assert_close(each, agreed[0], msg="the peers do not agree")
    slowest = [max(each) for each in zip(*times, strict=True)]
    all_s = max(end for _, end in spans) - min(start for start, _ in spans)  # one clock for all processes
    return statistics.median(slowest[2:]), all_s / ROUNDS, statistics.mean(sent) / ROUNDS, sum(cpu) / ROUNDS


# --- slow links


def wan_peer(name: str, index: int, namespace: str, address: str, pipe: Connection) -> None:
    """One process, on a network of its own."""
    enter(namespace)
    torch.set_num_threads(1)
    asyncio.run(_wan_peer(name, index, address, pipe))


async def _wan_peer(name: str, index: int, address: str, pipe: Connection) -> None:
    curve, roster = Curve.new(), Roster()
    neighbors = ZmqNeighbors(
        me=name, curve=curve, sign=bytes, roster=roster, run="benchmark", greeting=GREETING,
        listen=f"{address}:{WAN_PORT}",
    )  # fmt: skip
    neighbors.start()
    readers: dict[str, asyncio.Future[asyncio.StreamReader]] = {}

    def reader_of(peer: str) -> asyncio.Future[asyncio.StreamReader]:
        return readers.setdefault(peer, asyncio.get_running_loop().create_future())

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader_of((await reader.readline()).decode().strip()).set_result(reader)

    server = await asyncio.start_server(accept, address, WAN_PORT + 1, limit=1 << 20)
    pipe.send(Contact(name, curve.public, f"{address}:{WAN_PORT}"))
    contacts = await asyncio.to_thread(pipe.recv)
    roster.replace(contacts)
    names = [each.peer for each in contacts]
    at = {each.peer: each.address.partition(":")[0] for each in contacts}
    neighbors.connect(set(names) - {name})
    async with asyncio.timeout(60):
        while len(neighbors.connected()) < len(names) - 1:  # noqa: ASYNC110 - another thread connects
            await asyncio.sleep(0.02)
    x = torch.randn(WAN_NUMEL, generator=torch.Generator().manual_seed(index))
    writers = dict[str, asyncio.StreamWriter]()
    data = memoryview(x.numpy().data).cast("B")

    async def plain(to: str, source: str) -> None:
        async def read() -> None:
            left, reader = len(data), await reader_of(source)
            while left:
                left -= len(await reader.read(min(left, 1 << 20)))

        async def write() -> None:
            writers[to].write(data)
            await writers[to].drain()

        await asyncio.gather(read(), write())

    async def ours(r: int, to: str, source: str) -> None:
        acc = torch.empty_like(x)
        done = await neighbors.exchange(r, {to: Share(data)}, [source], Average(x, acc), 120.0)
        assert done.arrived == {source}, done
        assert done.given == {to}, done

    pipe.send("ready")
    while (told := await asyncio.to_thread(pipe.recv)) != "over":
        kind, r = told
        hop = 2 ** (r % (len(names).bit_length() - 1))
        to, source = names[(index + hop) % len(names)], names[(index - hop) % len(names)]
        if to not in writers:
            _, writers[to] = await asyncio.open_connection(at[to], WAN_PORT + 1)
            writers[to].write(f"{name}\n".encode())
        start = time.perf_counter()
        await (plain(to, source) if kind == "plain" else ours(r, to, source))
        pipe.send(time.perf_counter() - start)
    server.close()
    await neighbors.stop()


def slow_links(pythons: list[str]) -> None:
    """Rounds of both kinds by turns, then those of other frameworks."""
    spawn = multiprocessing.get_context("spawn")
    names = [f"p{i}" for i in range(WAN_PEERS)]
    with wan(WAN_PEERS) as (hosts, wire):
        pipes, workers = [], []
        for i, (name, host) in enumerate(zip(names, hosts, strict=True)):
            here, there = spawn.Pipe()
            workers.append(spawn.Process(target=wan_peer, args=(name, i, *host, there), daemon=True))
            workers[-1].start()
            pipes.append(here)
        contacts = [_get(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(contacts)
        for pipe in pipes:
            _get(pipe)
        times: dict[str, list[float]] = {"plain": [], "ours": []}
        sent = dict.fromkeys(times, 0)
        for r in range(WAN_ROUNDS):
            for kind in ("plain", "ours") if r % 2 else ("ours", "plain"):
                before = sum(wire.sent)
                for pipe in pipes:
                    pipe.send((kind, r))
                times[kind] += [_get(pipe) for pipe in pipes]
                sent[kind] += sum(wire.sent) - before
        for pipe in pipes:
            pipe.send("over")
        for worker in workers:
            worker.join(30)
        ours = times["ours"]
        slowest = [max(ours[at : at + WAN_PEERS]) for at in range(0, len(ours), WAN_PEERS)]
        agreement_s = statistics.median(slowest) * math.log2(WAN_PEERS)
        common.emit("gossip", WAN, "agreement_s", agreement_s, "s")
        for python in pythons:
            try:
                beside(python, WAN, WAN_NUMEL, WAN_PEERS, json.dumps(hosts))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                print(f"{python}: it did not end with the mean on these links", file=sys.stderr)
    median = {kind: statistics.median(each) for kind, each in times.items()}
    common.emit("gossip", WAN, "plain_tcp_s", median["plain"], "s")
    common.emit("gossip", WAN, "bytes_ratio", sent["ours"] / sent["plain"], "")
    common.emit("gossip", WAN, "median_ratio", median["ours"] / median["plain"], "")
    common.emit("gossip", WAN, "max_ratio", max(times["ours"]) / median["plain"], "")
    common.emit("gossip", WAN, "raw_max_ratio", max(times["plain"]) / median["plain"], "")


def _get(pipe: Connection) -> Any:
    assert pipe.poll(120), "a peer did not answer"
    return pipe.recv()


def bare_pair(total: int) -> tuple[float, float]:
    """(bytes a second, CPU seconds a byte) of two processes' bare sockets with CURVE, in chunks of 1 MiB."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    public, secret = zmq.curve_keypair()
    sink = spawn.Process(target=_sink, args=(public, secret, total, there), daemon=True)
    sink.start()
    port = _get(here)
    context: zmq.Context[Any] = zmq.Context()
    source = context.socket(zmq.DEALER)
    source.curve_serverkey = public
    source.curve_publickey, source.curve_secretkey = zmq.curve_keypair()
    source.sndhwm = 64
    source.connect(f"tcp://127.0.0.1:{port}")
    cpu = time.process_time()
    chunk = memoryview(torch.randint(0, 256, (CHUNK_BYTES,), dtype=torch.uint8).numpy().data)
    for _ in range(total // CHUNK_BYTES):
        source.send(chunk, copy=False)
    rate, its_cpu = _get(here)
    cpu = (time.process_time() - cpu + its_cpu) / total
    source.close(0)
    context.term()
    sink.join(30)
    return rate, cpu


def _sink(public: bytes, secret: bytes, total: int, pipe: Connection) -> None:
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
    router.rcvhwm = 64
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    first = router.recv_multipart(copy=False)
    start, cpu, got = time.perf_counter(), time.process_time(), 0
    del first
    for _ in range(total // CHUNK_BYTES - 1):
        got += len(router.recv_multipart(copy=False)[1])
    pipe.send((got / (time.perf_counter() - start), time.process_time() - cpu))
    router.close(0)
    context.term()


def beside(python: str, case: str, numel: int, n: int, *hosts: str) -> None:
    """The same of whatever other framework that interpreter has."""
    script = Path(__file__).with_name("beside.py")
    command = [python, str(script), str(numel), str(n), str(BESIDE_ROUNDS), *hosts]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=BESIDE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its children, too, which hold the pipe
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    for name, found in json.loads(out.splitlines()[-1]).items():
        common.emit(
            "gossip", f"{case}/{name} {found['version']}", "agreement_s",
            statistics.median(found["seconds"]), "s",
        )  # fmt: skip


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--case", choices=[*CASES, WAN], action="append", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--beside", action="append", default=[], metavar="PYTHON", help="one that has hivemind or p2pfl"
    )
    args = parser.parse_args()
    common.begin(args)
    for case in args.case or CASES:
        if case == WAN:
            slow_links(args.beside)
            continue
        numel, n = CASES[case]
        model = 4 * numel
        pairs = [bare_pair(PAIR_BYTES) for _ in range(3)] if case != "tiny" else []
        round_s, all_s, sent, cpu_s = averaging(numel, n)
        common.emit("gossip", case, "round_s", round_s, "s")
        common.emit("gossip", case, "agreement_s", round_s * math.log2(n), "s")
        if case != "tiny":
            pairs += [bare_pair(PAIR_BYTES) for _ in range(3)]
            rate, cpu_byte = (statistics.median(each) for each in zip(*pairs, strict=True))
            common.emit("gossip", case, "bytes_ratio", sent / model, "")
            common.emit("gossip", case, "curve_ratio", n * model / all_s / rate, "")
            common.emit("gossip", case, "cpu_ratio", cpu_byte / (cpu_s / (n * model)), "")
            common.emit("gossip", case, "bare_pair", rate / 1e9, "GB/s")
        for python in args.beside if case in BESIDE_CASES else ():
            beside(python, case, numel, n)


if __name__ == "__main__":
    main()
