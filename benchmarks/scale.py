"""Many sites at one aggregator: how long it takes them to join, and what a round costs the aggregator.

    python benchmarks/scale.py [--case masked-300]... [--rounds 3] [--json]

The aggregator is `fedtrain aggregator` in a process of its own. The sites are the real ones, with ledgers and
logs, many in a process, over a connection each; their trainers hand over a random payload.

connected-N   N sites that all call at the same moment, and are asked to train once: errors, time, memory
open-N        rounds in the open
masked-N      rounds under masks, as by default

The sites' files are not synced, and neither are their keys as they are made: thousands of sites have as many
disks, and these have one. The aggregator syncs as it does everywhere.

joined_s          from the first call until all have joined
joined_cpu_s      CPU time of the aggregator in that, and as it began
errors            what the aggregator says was refused or lost (on stderr, too), and sites not in a round
round_s           median of the rounds after the first, from one commit to the next; all share the cores
aggregator_cpu_s  CPU time of the aggregator in one, median
sites_cpu_s       CPU time of all sites in one, median
aggregator_mb     resident memory of the aggregator at the end
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
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
import psutil
from deployed_round import TASK, Idle

from fedtrain.config import Config, SitePolicy, keep_policy
from fedtrain.events import silent
from fedtrain.pki import init, issue
from fedtrain.runtime.sites import site as runtime_site
from fedtrain.runtime.sites.approval import Approvals, approve

CASES = ("connected-1000", "connected-5000", "open-300", "masked-300", "masked-1000")
PARAMS = 1000
EACH = 1000  # sites in a process at most: each has seven descriptors
UNITS = {
    "joined_s": "s", "joined_cpu_s": "s", "errors": "", "round_s": "s", "aggregator_cpu_s": "s",
    "sites_cpu_s": "s", "aggregator_mb": "MB",
}  # fmt: skip


def project(root: Path, sites: int, rounds: int, masked: bool) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (root / "task.py").write_text(TASK.format(numel=PARAMS))
    (root / "fedtrain.toml").write_text(
        f'[run]\nname = "bench"\ntask = "task:Payload"\nrounds = {rounds}\n'
        f'[strategy]\nmin_sites = {sites}\nround_deadline = "600s"\n'
        f"[secagg]\nenabled = {str(masked).lower()}\n"
        f'[evaluate]\nevery = 0\n[network]\nlisten = "127.0.0.1:{port}"\nidle = "120s"\n'
    )
    init(root / "certs")
    issue(root / "certs", "aggregator")
    for number in range(sites):
        issue(root / "certs", "site", f"s{number:04}")
    config = Config.load(root / "fedtrain.toml")
    if masked:
        approve(config)  # each pins all
        return
    for folder in sorted((root / "certs" / "sites").iterdir()):  # in the open nobody is pinned
        keep_policy(folder, SitePolicy(secure_sums=False))
        Approvals(folder).approve(config)


async def many(root: Path, first: int, last: int) -> None:
    """These sites, to the end of the run."""
    config = Config.load(root / "fedtrain.toml")
    start_at = asyncio.Event()

    async def one(number: int) -> None:
        async def start(scratch: Path) -> Idle:
            await start_at.wait()  # all are ready, and call at once
            return Idle(config, PARAMS, number)

        await runtime_site.run(config, f"s{number:04}", emit=silent, start_trainer=start)

    tasks = [asyncio.create_task(one(number)) for number in range(first, last)]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    start_at.set()
    await asyncio.gather(*tasks)


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measured(kind: str, sites: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        project(root, sites, rounds, kind == "masked")
        me = [sys.executable, __file__, "sites", folder]
        processes = max(2, -(-sites // EACH))
        parts = [sites * i // processes for i in range(processes + 1)]
        crowd = [
            subprocess.Popen([*me, str(parts[i]), str(parts[i + 1])], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
            for i in range(processes)
        ]  # fmt: skip
        aggregator = subprocess.Popen(
            [sys.executable, "-m", "fedtrain", "aggregator", "--json"],
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            for process in crowd:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            return followed(aggregator, crowd, sites)
        finally:
            for each in (*crowd, aggregator):
                if each.poll() is None:
                    each.kill()
                    each.wait()


def followed(
    aggregator: subprocess.Popen[str], crowd: list[subprocess.Popen[str]], sites: int
) -> dict[str, float]:
    assert aggregator.stdout is not None
    there, theirs = [psutil.Process(aggregator.pid)], [psutil.Process(each.pid) for each in crowd]
    joined, errors, called_s, joined_s, joined_cpu_s, mb = 0, 0, 0.0, 0.0, 0.0, 0.0
    ends, ours_s, sites_s = list[float](), list[float](), list[float]()
    for line in aggregator.stdout:
        event: dict[str, Any] = json.loads(line)
        match event["kind"]:
            case "notice" if "listening" in event["text"]:
                called_s = time.monotonic()
                for each in crowd:
                    assert each.stdin is not None
                    print(file=each.stdin, flush=True)
            case "site_joined":
                joined += 1
                if joined == sites:
                    joined_s, joined_cpu_s = time.monotonic() - called_s, cpu_s(there)
            case "join_refused" | "site_lost" | "update_refused" | "round_failed":
                errors += 1
                print(line, end="", file=sys.stderr)
            case "round_committed":
                errors += sites - event["sites"]
                ends.append(event["time"])
                ours_s.append(cpu_s(there))
                sites_s.append(cpu_s(theirs))
                mb = there[0].memory_info().rss / 1e6
            case "run_finished":
                break

    def median(values: list[float]) -> float:
        return statistics.median(b - a for a, b in pairwise(values)) if values[1:] else 0.0

    return {
        "joined_s": joined_s, "joined_cpu_s": joined_cpu_s, "errors": errors, "round_s": median(ends),
        "aggregator_cpu_s": median(ours_s), "sites_cpu_s": median(sites_s), "aggregator_mb": mb,
    }  # fmt: skip


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--case", action="append", help="which of " + ", ".join(CASES) + ", or of another number"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    common.begin(args)
    for case in args.case or CASES:
        kind, _, sites = case.partition("-")
        for metric, value in measured(kind, int(sites), args.rounds).items():
            common.emit("scale", case, metric, value, UNITS[metric])


if __name__ == "__main__":
    os.fsync = os.fdatasync = lambda fd: None  # see above
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    match sys.argv[1:]:
        case ["sites", folder, first, last]:
            os.chdir(folder)
            asyncio.run(many(Path(folder), int(first), int(last)))
        case _:
            main()
