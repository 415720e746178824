"""Seconds of a round of a real federation: `fedtrain aggregator` and 4 sites over mutual TLS on loopback.

The sites' trainers do nothing but hand over a payload, random and distinct for each site and round, as a
trainer process would: a file and its digest. All else is what users run: the commit to disk, the checks,
the fold. Beside it a bare gRPC stream with mutual TLS moves the same bytes and does nothing with them.

  round_s, round_s_worst   median and worst of the rounds, from one commit to the next
  copies                   bytes over the loopback device (TLS and TCP included) / bytes of the model
  rss_mb                   the aggregator's peak resident memory
  bare_stream_ratio        round_s / the bare stream's seconds
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
import grpc
import grpc.aio
import numpy as np
import psutil

from fedtrain.config import Config
from fedtrain.digest import Digest
from fedtrain.events import silent
from fedtrain.pki import Credentials, aggregator_target, init, issue
from fedtrain.runtime.sites import site as runtime_site
from fedtrain.runtime.trainers import trainer_messages as msg
from fedtrain.runtime.trainers.trainer import Trains
from fedtrain.schema import Schema, TensorSpec
from fedtrain.training.task import task_digest
from fedtrain.transport.grpc import channel_options
from fedtrain.transport.tls import Tls
from fedtrain.wire import CHUNK_BYTES

CASES = {"1k": 1_000, "1M": 1_000_000, "10M": 10_000_000, "50M": 50_000_000}
SITES = ["a", "b", "c", "d"]
WARM_UP = 2

TASK = """
import torch
import fedtrain

class Payload(fedtrain.Task):
    def model(self):
        model = torch.nn.Module()
        model.register_parameter("w", torch.nn.Parameter(torch.randn({numel})))
        return model

    def data(self, site):
        return torch.zeros(1), torch.zeros(1)

    def loss(self, model, batch):
        return model.w.sum()
"""


class Idle(Trains):
    """A trainer that trains nothing: a random vector, cut and swapped elsewhere each round, is its delta."""

    def __init__(self, config: Config, numel: int, seed: int) -> None:
        self._schema = Schema((TensorSpec("w", (numel,), "float32", True),))
        self.description = msg.Description(self._schema, task_digest(config.run.task, config.root))
        self._random = np.random.default_rng(seed)
        vector = self._random.standard_normal(numel, dtype=np.float32) * np.float32(1e-3)
        self._payload = memoryview(vector.tobytes() + bytes(self._schema.nbytes - 4 * numel))

    async def _ask(self, message: Any) -> Any:
        match message:
            case msg.Examples():
                return msg.Counted(10.0)
            case msg.TrainOne(out=out):
                digest = self._write(Path(out), 4 * int(self._random.integers(1, self._schema.numel)))
                return msg.Done([msg.Trained(10.0, {"loss": (1.0, 1.0)}, digest)])
            case msg.EvaluateMany():
                return msg.Done([msg.Measured({})])
        raise AssertionError(message)

    def _write(self, out: Path, cut: int) -> str:
        end, digest = 4 * self._schema.numel, Digest()
        with out.open("r+b" if out.exists() else "wb", buffering=0) as f:
            for part in (self._payload[cut:end], self._payload[:cut], self._payload[end:]):
                f.write(part)
                digest.update(part)
        return digest.hexdigest()


def project(root: Path, numel: int, rounds: int, secure: bool = False) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (root / "task.py").write_text(TASK.format(numel=numel))
    (root / "fedtrain.toml").write_text(
        f'[run]\nname = "bench"\ntask = "task:Payload"\nrounds = {rounds}\n'
        f"[strategy]\nmin_sites = {len(SITES)}\n[secagg]\nenabled = {str(secure).lower()}\n"
        f'[evaluate]\nevery = 0\n[network]\nlisten = "127.0.0.1:{port}"\n'
    )
    init(root / "certs")
    issue(root / "certs", "aggregator")
    for name in SITES:
        issue(root / "certs", "site", name)


def deployed(numel: int, rounds: int, secure: bool) -> dict[str, float]:
    """One run of the real thing."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        project(root, numel, rounds + WARM_UP, secure)
        sites = [
            subprocess.Popen(
                [sys.executable, __file__, "site", folder, name, str(numel)], stdout=subprocess.DEVNULL
            )
            for name in SITES
        ]
        aggregator = subprocess.Popen(
            [sys.executable, "-m", "fedtrain", "aggregator", "--json"],
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
        )
        commits, moved, peak = [], [], 0.0
        try:
            assert aggregator.stdout is not None
            for line in aggregator.stdout:
                event = json.loads(line)
                peak = max(peak, _peak_mb(aggregator.pid))
                if event["kind"] == "round_committed":
                    commits.append(event["time"])
                    moved.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)
            assert aggregator.wait(60) == 0
            assert [s.wait(60) for s in sites] == [0] * len(sites)
        finally:
            for process in (*sites, aggregator):
                if process.poll() is None:
                    process.kill()
                    process.wait()
        times = [b - a for a, b in pairwise(commits)][WARM_UP - 1 :]
        assert len(times) == rounds
        return {
            "round_s": statistics.median(times),
            "round_s_worst": max(times),
            "copies": (moved[-1] - moved[WARM_UP - 1]) / rounds / (4 * numel),
            "rss_mb": peak,
        }


def _peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024 if "VmHWM:" in status else 0.0  # it has ended


async def idle_site(folder: str, name: str, numel: int) -> None:
    config = Config.load(Path(folder) / "fedtrain.toml")

    async def start(scratch: Path) -> Idle:
        return Idle(config, numel, SITES.index(name))

    await runtime_site.run(config, name, emit=silent, start_trainer=start)


# --- the bare stream: the same bytes down and up, four at a time, nothing done with them


async def bare_server(certs: Path, nbytes: int) -> None:
    payload = memoryview(os.urandom(min(nbytes, 64 << 20)))

    async def down(request: bytes, context: object):
        for at in range(0, nbytes, CHUNK_BYTES):
            start, length = at % max(len(payload) - CHUNK_BYTES, 1), min(CHUNK_BYTES, nbytes - at)
            yield bytes(payload[start : start + length])

    async def up(chunks, context: object) -> bytes:
        return b"%d" % sum([len(chunk) async for chunk in chunks])

    server = grpc.aio.server(options=channel_options(60))
    handlers = {
        "Down": grpc.unary_stream_rpc_method_handler(down),
        "Up": grpc.stream_unary_rpc_method_handler(up),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", handlers),))
    port = server.add_secure_port("127.0.0.1:0", _tls(certs / "aggregator").server())
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def bare_client(certs: Path, name: str, port: int, nbytes: int, repeat: int) -> None:
    options = [*channel_options(60), ("grpc.ssl_target_name_override", aggregator_target("fedtrain"))]
    credentials = _tls(certs / "sites" / name).channel()
    payload = memoryview(os.urandom(min(nbytes, 64 << 20) + CHUNK_BYTES))
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:

        async def chunks():
            for at in range(0, nbytes, CHUNK_BYTES):
                start = at % (len(payload) - CHUNK_BYTES)
                yield bytes(payload[start : start + min(CHUNK_BYTES, nbytes - at)])

        for _ in range(repeat):
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            async for _chunk in channel.unary_stream("/Bare/Down")(b""):
                pass
            await channel.stream_unary("/Bare/Up")(chunks())
        print("ready", flush=True)


def bare(numel: int, repeat: int = 5) -> float:
    """Median seconds for all four to get the bytes and to send as many back."""
    with tempfile.TemporaryDirectory() as folder:
        project(Path(folder), 1, 1)
        certs, nbytes = str(Path(folder) / "certs"), str(4 * numel)
        me = [sys.executable, __file__]
        server = subprocess.Popen([*me, "bare-server", certs, nbytes], stdout=subprocess.PIPE, text=True)
        clients: list[subprocess.Popen[str]] = []
        try:
            port = server.stdout.readline().strip()
            clients += [
                subprocess.Popen([*me, "bare-client", certs, name, port, nbytes, str(repeat + 1)],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for name in SITES
            ]  # fmt: skip
            times = []
            for client in clients:
                client.stdout.readline()
            for _ in range(repeat + 1):
                began = time.perf_counter()
                for client in clients:
                    client.stdin.write("go\n")
                    client.stdin.flush()
                for client in clients:
                    client.stdout.readline()
                times.append(time.perf_counter() - began)
        finally:
            for process in (*clients, server):
                process.kill()
                process.wait()
        return statistics.median(times[1:])


def _tls(folder: Path) -> Tls:
    credentials = Credentials.load(folder)
    return Tls(credentials.key, credentials.chain, credentials.root)


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="which of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--secure", action="store_true", help="with secure aggregation; cases end in -secure")
    args = parser.parse_args()
    common.begin(args)
    units = {
        "round_s": "s",
        "round_s_worst": "s",
        "copies": "models",
        "rss_mb": "MiB",
        "bare_stream_ratio": "x",
    }
    for case in args.cases.split(","):
        figures = deployed(CASES[case], args.rounds, args.secure)
        figures["bare_stream_ratio"] = figures["round_s"] / bare(CASES[case])
        for metric, value in figures.items():
            name = f"{case}-secure" if args.secure else case
            common.emit("deployed_round", name, metric, value, units[metric])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["site", folder, name, numel]:
            asyncio.run(idle_site(folder, name, int(numel)))
        case ["bare-server", certs, nbytes]:
            asyncio.run(bare_server(Path(certs), int(nbytes)))
        case ["bare-client", certs, name, port, nbytes, repeat]:
            asyncio.run(bare_client(Path(certs), name, int(port), int(nbytes), int(repeat)))
        case _:
            main()
