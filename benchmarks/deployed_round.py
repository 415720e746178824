"""Seconds of a round of a real federation: `fedtrain aggregator` and 4 sites over mutual TLS on loopback.

The sites' trainers do nothing but hand over a payload, random and distinct for each site and round, as a
trainer process would: a file and its digest. All else is what users run: the commit to disk, the checks,
the fold. Beside it a bare gRPC stream with mutual TLS moves the same bytes and does nothing with them: by
turns, one round and one pass of the stream. While the stream moves, the federation's processes are stopped,
and the stream's processes wait while a round is under way.

  round_s, round_s_worst   median and worst of the rounds, from one commit to the next
  copies                   bytes over the loopback device (TLS and TCP included) / bytes of the model
  rss_mb                   the aggregator's peak resident memory
  bare_stream_s            median of the bare stream's passes
  bare_stream_ratio        median over the turns of a round / the pass after it
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import numpy as np
import phases
import psutil
from bare_stream import BareStream

from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.config.policy import changed
from fedtrain.digest import Digest
from fedtrain.events import silent
from fedtrain.pki import init, issue
from fedtrain.runtime.sites import site as runtime_site
from fedtrain.runtime.sites.approval import approve
from fedtrain.runtime.trainers import trainer_messages as msg
from fedtrain.runtime.trainers.trainer import Trains
from fedtrain.schema import Schema, TensorSpec
from fedtrain.training.task import task_digest

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
            case msg.ColumnsOf():
                return msg.HasColumns(())
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
    for folder in approve(Config.load(root / "fedtrain.toml"))[1]:
        keep_policy(folder, changed(policy_from(folder), {"secure_sums": secure}))


def deployed(numel: int, rounds: int, secure: bool, *, timed: bool = False) -> dict[str, float]:
    """One run of the real thing, by turns with the bare stream; `timed` prints where the time of its
    processes went instead, without the stream."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        project(root, numel, rounds + WARM_UP, secure)
        out = {who: root / f"{who}.json" for who in ("aggregator", *(f"site {name}" for name in SITES))}
        me = [sys.executable, __file__, "site", folder]
        sites = [
            subprocess.Popen(
                [*me, name, str(numel), *timed * [str(out[f"site {name}"])]], stdout=subprocess.DEVNULL
            )
            for name in SITES
        ]
        program = [phases.__file__, str(out["aggregator"])] if timed else ["-m", "fedtrain"]
        aggregator = subprocess.Popen(
            [sys.executable, *program, "aggregator", "--json"], cwd=root, stdout=subprocess.PIPE, text=True
        )
        turns = Turns(aggregator, sites)
        try:
            if timed:
                turns.follow(lambda: 0.0)
                phases.show(out, rounds + WARM_UP)
                return {}
            with BareStream(root / "certs", SITES, 4 * numel) as bare:
                turns.follow(bare.once)
        finally:
            processes: list[subprocess.Popen[Any]] = [*sites, aggregator]
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        assert len(turns.rounds) == len(turns.passes) == rounds
        return {
            "round_s": statistics.median(turns.rounds),
            "round_s_worst": max(turns.rounds),
            "copies": sum(turns.moved) / rounds / (4 * numel),
            "rss_mb": turns.peak_mb,
            "bare_stream_s": statistics.median(turns.passes),
            "bare_stream_ratio": statistics.median(map(float.__truediv__, turns.rounds, turns.passes)),
        }


class Turns:
    """Rounds of a federation by turns with something else, for which its processes are stopped."""

    def __init__(self, aggregator: subprocess.Popen[str], sites: Sequence[subprocess.Popen[bytes]]) -> None:
        self._aggregator, self._sites = aggregator, sites
        self.rounds: list[float] = []  # seconds of each after WARM_UP
        self.passes: list[float] = []  # what came after it
        self.moved: list[int] = []  # bytes over the loopback device in it
        self.peak_mb = 0.0

    def follow(self, other: Callable[[], float]) -> None:
        """Until the run is over; `other` returns how many seconds it took."""
        began_s, sent = 0.0, 0
        assert self._aggregator.stdout is not None
        for line in self._aggregator.stdout:
            event = json.loads(line)
            if event["kind"] != "round_committed":
                continue
            self.peak_mb = max(self.peak_mb, peak_mb(self._aggregator.pid))
            if event["round"] < WARM_UP:
                continue
            with self._stopped() as stopped_s:
                now_sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
                if event["round"] > WARM_UP:
                    self.rounds.append(event["time"] - began_s)
                    self.moved.append(now_sent - sent)
                    self.passes.append(other())
                sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            # what the next round did before it was stopped counts as its own
            began_s = event["time"] + time.time() - stopped_s
        assert self._aggregator.wait(60) == 0
        assert [site.wait(60) for site in self._sites] == [0] * len(self._sites)

    @contextmanager
    def _stopped(self) -> Iterator[float]:
        """No process of the federation runs inside the with block; since when, in seconds since 1970."""
        everybody: list[subprocess.Popen[Any]] = [self._aggregator, *self._sites]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        try:
            yield time.time()
        finally:
            for process in everybody:
                process.send_signal(signal.SIGCONT)


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024 if "VmHWM:" in status else 0.0  # it has ended


async def idle_site(folder: str, name: str, numel: int, out: Sequence[str]) -> None:
    """A site with an idle trainer; the times of its phases go to the file `out`, if there is one."""
    times = phases.Phases()
    if out:
        times.wrap()
    config = Config.load(Path(folder) / "fedtrain.toml")

    async def start(scratch: Path) -> Idle:
        return Idle(config, numel, SITES.index(name))

    await runtime_site.run(config, name, emit=silent, start_trainer=start)
    for each in out:
        times.write(Path(each))


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="which of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--secure", action="store_true", help="with secure aggregation; cases end in -secure")
    parser.add_argument("--phases", action="store_true", help="print where the time goes, and no figures")
    args = parser.parse_args()
    common.begin(args)
    units = {
        "round_s": "s",
        "round_s_worst": "s",
        "copies": "models",
        "rss_mb": "MiB",
        "bare_stream_s": "s",
        "bare_stream_ratio": "x",
    }
    for case in args.cases.split(","):
        figures = deployed(CASES[case], args.rounds, args.secure, timed=args.phases)
        for metric, value in figures.items():
            name = f"{case}-secure" if args.secure else case
            common.emit("deployed_round", name, metric, value, units[metric])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["site", folder, name, numel, *out]:
            asyncio.run(idle_site(folder, name, int(numel), out))
        case _:
            main()
