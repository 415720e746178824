"""Does memory grow with the rounds? Each role for very many of them, in real processes.

    python benchmarks/memory.py [--case open]... [--rounds 10000] [--minutes 10] [--json]

open, masked     an aggregator and three sites, in the open, and under masks as by default; the sites are in
                 one process, and their trainers hand over random numbers
peers            three peers over ZeroMQ, by default settings, each with its trainer
simulate         eight simulated sites in a pool of two workers
gossip           four simulated peers
datacenter       one rank; a round is a step, and a checkpoint is written every 100 steps

rounds                         that were done when the minutes were over
ROLE_mb                        resident memory at the end: of the aggregator; of the process with all three
                               sites; of a peer, and its trainer; of a simulation, and a worker; of a rank
ROLE_mb_at_20%                 the same after a fifth of the rounds
ROLE_mb_per_1000               by how much it grows in 1,000 rounds: least squares over the means of 20 blocks
                               of the rounds after the first fifth
ROLE_mb_per_1000_error         half of its 95 % confidence interval
FILE_bytes                     by how much a file grew in a round, of those that are longer than at round 100
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import common
import numpy as np
import psutil
from scale import project

from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.config.policy import changed
from fedtrain.pki import init, issue
from fedtrain.runtime.sites.approval import approve

SITES, PEERS = 3, ("north", "south", "west")
BLOCKS, T95 = 20, 2.101  # Student's t of 18 degrees of freedom
FIRST = 100  # the round from which files are compared
CHILDREN = {"peer": "trainer", "simulation": "worker"}  # of such a process, the largest of its own is this
TASK = """
import torch
import fedtrain

class Line(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(100, 2)

    def data(self, site):
        return torch.ones(64, 100), torch.arange(64) % 2

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
SETTINGS = """[run]
name = "bench"
task = "task:Line"
rounds = {rounds}
[train]
local_steps = 1
[secagg]
enabled = false
[evaluate]
every = 0
[simulate]
sites = {sites}
workers = 2
"""
Commands = dict[str, list[str]]  # of processes: the first tells of rounds, those of ROLES are measured
ROLES = ("aggregator", "sites", "peer", "simulation", "rank")


def star(folder: Path, rounds: int, masked: bool) -> Commands:
    project(folder, SITES, rounds, masked)
    allow(folder, rounds=rounds)
    sites = [sys.executable, str(Path(__file__).with_name("scale.py")), "sites", str(folder), "0", str(SITES)]
    return {"aggregator": fedtrain("aggregator", "--json"), "sites": sites}


def peers(folder: Path, rounds: int) -> Commands:
    with_task(folder, rounds)
    init(folder / "certs")
    for name in PEERS:
        issue(folder / "certs", "site", name)
    approve(Config.load(folder / "fedtrain.toml"), PEERS)
    allow(folder, rounds=rounds, secure_sums=False)
    with ExitStack() as taken:  # all at once, so that they are three
        sockets = [taken.enter_context(socket.socket()) for _ in PEERS]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    return {
        role: fedtrain("peer", name, "--json", "--set", f"network.listen=127.0.0.1:{port}")
        for role, name, port in zip(("peer", *PEERS[1:]), PEERS, ports, strict=True)
    }


def alone(folder: Path, rounds: int, role: str, *arguments: str, sites: int = 1) -> Commands:
    with_task(folder, rounds, sites)
    return {role: fedtrain(*arguments, "--json")}


CASES: dict[str, Callable[[Path, int], Commands]] = {
    "open": partial(star, masked=False),
    "masked": partial(star, masked=True),
    "peers": peers,
    "simulate": lambda folder, rounds: alone(folder, rounds, "simulation", "simulate", sites=8),
    "gossip": lambda folder, rounds: alone(
        folder, rounds, "simulation", "simulate", "--mode", "gossip", sites=4
    ),
    "datacenter": lambda folder, rounds: alone(folder, rounds, "rank", "datacenter"),
}


def fedtrain(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fedtrain", *arguments]


def with_task(folder: Path, rounds: int, sites: int = 1) -> None:
    (folder / "task.py").write_text(TASK)
    (folder / "fedtrain.toml").write_text(SETTINGS.format(rounds=rounds, sites=sites))


def allow(folder: Path, **rules: object) -> None:
    """All sites' policies say so."""
    for own in (folder / "certs" / "sites").iterdir():
        keep_policy(own, changed(policy_from(own), rules))


def slope(mb: list[float]) -> tuple[float, float]:
    """MB for each 1,000 rounds, and half of the 95 % confidence interval; NaN of too few rounds."""
    settled = np.array(mb[len(mb) // 5 :])
    if len(settled) < 2 * BLOCKS:
        return float("nan"), float("nan")
    blocks = np.array_split(settled, BLOCKS)
    y = np.array([block.mean() for block in blocks])
    x = np.arange(BLOCKS) * (len(settled) / BLOCKS / 1000)
    fit, off = np.polyfit(x, y, 1)
    spread = np.sum((y - fit * x - off) ** 2) / (BLOCKS - 2)
    return float(fit), float(T95 * np.sqrt(spread / np.sum((x - x.mean()) ** 2)))


def measured(case: str, rounds: int, until_s: float) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Resident memory of each role after each round, in MB; bytes by which each file grew in a round."""
    mb: dict[str, list[float]] = {}
    done, before = 0, dict[str, int]()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        running: dict[str, subprocess.Popen[str]] = {}
        for role, command in CASES[case](folder, rounds).items():
            out = subprocess.DEVNULL if running else subprocess.PIPE
            running[role] = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, text=True
            )
            stack.callback(running[role].wait)
            stack.callback(running[role].kill)
        followed = next(iter(running.values()))
        roles = {role: psutil.Process(each.pid) for role, each in running.items() if role in ROLES}
        assert followed.stdout is not None
        for line in followed.stdout:
            kind = json.loads(line)["kind"]
            if kind == "round_committed":
                done += 1
                if done == 1:
                    roles |= {CHILDREN[role]: largest_child(each) for role, each in roles.items()
                              if role in CHILDREN and each.children()}  # fmt: skip
                for role, process in roles.items():
                    mb.setdefault(role, []).append(process.memory_info().rss / 1e6)
                if done == FIRST:
                    before = sizes(folder / "runs")
            if kind == "run_finished" or time.monotonic() > until_s:
                break
        after = sizes(folder / "runs")
    grew = {file: (after[file] - size) / (done - FIRST) for file, size in before.items() if file in after}
    return mb, {file: nbytes for file, nbytes in sorted(grew.items()) if nbytes >= 1}


def largest_child(process: psutil.Process) -> psutil.Process:
    return max(process.children(recursive=True), key=lambda child: child.memory_info().rss)


def sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.*") if path.is_file()
    }


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each case, at most")
    args = parser.parse_args()
    common.begin(args)
    for case in args.case or CASES:
        mb, grew = measured(case, args.rounds, time.monotonic() + 60 * args.minutes)
        common.emit("memory", case, "rounds", max(map(len, mb.values()), default=0), "")
        for role, found in mb.items():
            fit, error = slope(found)
            common.emit("memory", case, f"{role}_mb", found[-1], "MB")
            for part in (0, 20, 50):
                common.emit("memory", case, f"{role}_mb_at_{part}%", found[len(found) * part // 100], "MB")
            common.emit("memory", case, f"{role}_mb_per_1000", fit, "MB")
            common.emit("memory", case, f"{role}_mb_per_1000_error", error, "MB")
        for file, nbytes in grew.items():
            common.emit("memory", case, f"{file}_bytes", nbytes, "B")


if __name__ == "__main__":
    os.fsync = os.fdatasync = lambda fd: None  # as in scale.py: of the keys
    main()
