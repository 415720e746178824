"""What the security around a session costs a round: the heart example over mutual TLS, under masks.

Two federations of an aggregator and four hospitals, each a process, train the same run: one as users run it,
with policies that pin members, checked sums, the guard of cohorts and the audit log; one without. They go by
turns, a round of the one and a round of the other: who is not at work is stopped, and what a round leaves to
be done beside the next one counts in the next one. Both have mutual TLS, masks and an evaluation each round.

  round_s_with, round_s_without   medians of a round, from when it may go on to its commit
  round_over_without              median over the turns of the one divided by the other
  cpu_ms_with, cpu_ms_without     CPU time of the five processes of a round (not of their trainers)
  syncs_with, syncs_without       waits for the disk of a round, in all five
  accuracy                        after the last round, the same in both
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import psutil

from fedtrain import cli
from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.config.policy import changed
from fedtrain.pki import Credentials, fingerprint, init, issue
from fedtrain.runtime import auditing
from fedtrain.runtime.sites import gate, secure_site, site
from fedtrain.runtime.sites.approval import approve

HEART = Path(__file__).parents[1] / "examples/heart"
SITES = ("cleveland", "hungary", "switzerland", "va-long-beach")
WARM_UP = 3


def project(root: Path, rounds: int, *, guarded: bool) -> None:
    shutil.copytree(HEART, root, ignore=shutil.ignore_patterns("certs", "roster", "runs"))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    toml = (root / "fedtrain.toml").read_text()
    for before, after in (
        ("8440", str(port)),
        ("rounds = 40", f"rounds = {rounds}"),
    ):
        assert before in toml, before
        toml = toml.replace(before, after)
    if not guarded:
        toml += "\n[secagg]\nverify = false\n"
    (root / "fedtrain.toml").write_text(toml)
    certs = root / "certs"
    init(certs)
    for name in ("aggregator", *SITES):
        issue(certs, "aggregator" if name == "aggregator" else "site", name)
    keys = {name: fingerprint(Credentials.load(certs / "sites" / name).chain).hex() for name in SITES}
    for folder in approve(Config.load(root / "fedtrain.toml"))[1]:
        rules: dict[str, Any] = {"members": {k: v for k, v in keys.items() if k != folder.name}}
        if not guarded:
            rules = {"pin_members": False, "cohort_change": 0, "confine": "off", "initial": "any"}
        keep_policy(folder, changed(policy_from(folder), rules | {"rounds": rounds}))


class Federation:
    """The processes of one federation, stopped but in a round."""

    def __init__(self, root: Path, *, guarded: bool) -> None:
        me = [sys.executable, __file__, "run", "with" if guarded else "without"]
        roles = [["aggregator"], *(["site", name] for name in SITES)]
        self._logs = [root / f"{role[-1]}.figures" for role in roles]
        self.processes = [
            subprocess.Popen(
                [*me, str(log), *role, "--json"],
                cwd=root, text=True, stdout=subprocess.DEVNULL if role[1:] else subprocess.PIPE,
            )
            for log, role in zip(self._logs, roles, strict=True)
        ]  # fmt: skip
        self.accuracy = 0.0
        self._stopped = False

    def round(self) -> float | None:
        """Seconds of the next one; None when the run has ended."""
        began = time.perf_counter()
        if self._stopped:
            self._tell(signal.SIGCONT)
        output = self.processes[0].stdout
        assert output is not None
        for line in output:
            event = json.loads(line)
            if event["kind"] == "evaluated":
                self.accuracy = event["metrics"]["accuracy"]
            if event["kind"] == "round_committed":
                took = time.perf_counter() - began
                self._tell(signal.SIGSTOP)
                self._stopped = True
                return took
        for process in self.processes:
            assert process.wait(60) == 0, "a process of the federation failed"
        return None

    def _tell(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def figures(self) -> tuple[float, float]:
        """(CPU seconds, waits for the disk) of all processes together."""
        found = [json.loads(log.read_text()) for log in self._logs]
        return sum(each["cpu_s"] for each in found), sum(each["syncs"] for each in found)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def run(how: str, figures: str, *arguments: str) -> None:
    """One process of a federation."""
    syncs = 0

    def counted(sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def work(file: Any) -> None:
            nonlocal syncs
            syncs += 1
            sync(file)

        return work

    for name in ("fsync", "fdatasync"):
        setattr(os, name, counted(getattr(os, name)))
    if how == "without":
        for where, name, nothing in (
            (auditing.Audit, "emit", lambda audit, event: audit.emit_on(event)),
            (auditing.Audit, "state_after_rounds", lambda audit, state, every_s=0.0: None),
            (secure_site, "Cohorts", lambda *rules: None),
            (site, "gate_of", lambda emit, *rules, **more: gate.Gate()),
        ):
            assert hasattr(where, name), name
            setattr(where, name, nothing)
    sys.argv = ["fedtrain", *arguments]
    try:
        cli.main()
    finally:
        own = psutil.Process().cpu_times()
        Path(figures).write_text(json.dumps({"cpu_s": own.user + own.system, "syncs": syncs}))


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    common.begin(args)
    rounds = args.rounds + WARM_UP
    with tempfile.TemporaryDirectory() as folder:
        both = {}
        try:
            for how in ("with", "without"):
                project(Path(folder) / how, rounds, guarded=how == "with")
                both[how] = Federation(Path(folder) / how, guarded=how == "with")
                both[how].round()
            times: dict[str, list[float]] = {how: [] for how in both}
            for number in range(rounds):
                for how in sorted(both, reverse=bool(number % 2)):
                    if (took := both[how].round()) is not None:
                        times[how].append(took)
        finally:
            for each in both.values():
                each.end()
        assert both["with"].accuracy == both["without"].accuracy > 0
        for how in both:
            common.emit(
                "guarded_round", "heart", f"round_s_{how}", statistics.median(times[how][WARM_UP - 1 :]), "s"
            )
        ratios = [a / b for a, b in zip(times["with"], times["without"], strict=True)][WARM_UP - 1 :]
        common.emit("guarded_round", "heart", "round_over_without", statistics.median(ratios), "×")
        for how, each in both.items():
            cpu_s, syncs = each.figures()
            common.emit("guarded_round", "heart", f"cpu_ms_{how}", cpu_s / rounds * 1000, "ms")
            common.emit("guarded_round", "heart", f"syncs_{how}", syncs / rounds, "")
        common.emit("guarded_round", "heart", "accuracy", both["with"].accuracy, "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:])
    else:
        main()
