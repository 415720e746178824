"""Does memory grow with the rounds? An aggregator and three sites for very many of them, in real processes.

    python benchmarks/memory.py [--case open]... [--rounds 10000] [--minutes 10] [--json]

open, masked     rounds in the open, and under masks as by default; the sites are in one process

rounds                         that were done when the minutes were over
aggregator_mb                  resident memory at the end
aggregator_mb_at_20%           the same after a fifth of the rounds
aggregator_mb_per_1000         by how much it grows in 1,000 rounds: least squares over the means of 20 blocks
                               of the rounds after the first fifth
aggregator_mb_per_1000_error   half of its 95 % confidence interval
sites_...                      the same of the process with all three sites
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import numpy as np
import psutil
from scale import project

from fedtrain.config import keep_policy, policy_from
from fedtrain.config.policy import changed

CASES = ("open", "masked")
SITES = 3
BLOCKS, T95 = 20, 2.101  # Student's t of 18 degrees of freedom
ROLES = ("aggregator", "sites")


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


def measured(masked: bool, rounds: int, until_s: float) -> dict[str, list[float]]:
    """Resident memory of each role after each round, in MB."""
    mb: dict[str, list[float]] = {role: [] for role in ROLES}
    with tempfile.TemporaryDirectory() as folder:
        project(Path(folder), SITES, rounds, masked)
        for own in (Path(folder) / "certs" / "sites").iterdir():
            keep_policy(own, changed(policy_from(own), {"rounds": rounds}))
        sites = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("scale.py"), "sites", folder, "0", str(SITES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        aggregator = subprocess.Popen(
            [sys.executable, "-m", "fedtrain", "aggregator", "--json"],
            cwd=folder, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        roles = dict(zip(ROLES, map(psutil.Process, (aggregator.pid, sites.pid)), strict=True))
        try:
            assert sites.stdin is not None
            assert aggregator.stdout is not None
            print(file=sites.stdin, flush=True)
            for line in aggregator.stdout:
                kind = json.loads(line)["kind"]
                if kind == "round_committed":
                    for role, process in roles.items():
                        mb[role].append(process.memory_info().rss / 1e6)
                if kind == "run_finished" or time.monotonic() > until_s:
                    break
        finally:
            for each in (sites, aggregator):
                each.kill()
                each.wait()
    return mb


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each case, at most")
    args = parser.parse_args()
    common.begin(args)
    for case in args.case or CASES:
        mb = measured(case == "masked", args.rounds, time.monotonic() + 60 * args.minutes)
        common.emit("memory", case, "rounds", len(mb["aggregator"]), "")
        for role in ROLES:
            fit, error = slope(mb[role])
            common.emit("memory", case, f"{role}_mb", mb[role][-1] if mb[role] else 0.0, "MB")
            for part in (0, 20, 50) if mb[role] else ():
                there = mb[role][len(mb[role]) * part // 100]
                common.emit("memory", case, f"{role}_mb_at_{part}%", there, "MB")
            common.emit("memory", case, f"{role}_mb_per_1000", fit, "MB")
            common.emit("memory", case, f"{role}_mb_per_1000_error", error, "MB")


if __name__ == "__main__":
    os.fsync = os.fdatasync = lambda fd: None  # as in scale.py: of the keys
    main()
