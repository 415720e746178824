"""fedtrain on one GPU: its speed beside bare torch, a plain loop and pfl, and tests/gpu, in 280 seconds.

    benchmarks/gpu.sh [WHEELS] [--small] [--only SECTION]... [--out FILE]

It needs no network. Each section is a process with a time limit of its own; what a section leaves over, the
next ones may use. Every line is JSON and is written when it is measured, to standard output and to FILE, so
that a run that is cut short keeps what it had. The sections, in the order of their value:

    versions      the device, its driver, torch, CUDA and Python; the speed of large matrix products
    gpt           a training step of a GPT of 124M parameters (163M with the output layer) in bf16 beside bare
                  torch, eager and compiled, by turns: tokens/s, MFU (6 operations a parameter and token),
                  `over_bare` (time of our step / of the bare one) and operations launched in a step
    simulation    updates/s of MLPs of 5k, 50k and 500k parameters and of pfl-research's CIFAR-10 CNN, beside
                  a plain loop on the same device and pfl (or peers/pfl_loop.py where pfl is not installed)
    checkpoint    how long a save of the GPT holds up training: in the background / in the foreground
    tests         tests/gpu, several at a time, then those that measure time one by one; 20 s for each test

--small tries all of it with small models, on a CPU too, where its figures say nothing. The exit status is 1
when a section failed or ran out of time.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import common

TOTAL_S = 280.0
SMALL_S = 1500.0  # of all sections; a shared CPU may be slow
GRACE_S = 5.0  # from SIGTERM to SIGKILL
LIMITS = {"versions": 20.0, "gpt": 95.0, "simulation": 85.0, "checkpoint": 25.0, "tests": 55.0}  # seconds
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small models, for a try on a CPU")
    parser.add_argument("--only", choices=LIMITS, action="append", metavar="SECTION", help="may be repeated")
    parser.add_argument("--out", type=Path, help="a file that gets the same lines")
    parser.add_argument("--section", choices=LIMITS, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.section:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("out of time"))  # context managers end processes
        common.as_json = True
        from gpu_sections import SECTIONS

        SECTIONS[args.section](args.small)
        return
    only = {name: limit for name, limit in LIMITS.items() if name in (args.only or LIMITS)}
    own = [sys.executable, str(Path(__file__).resolve()), *(["--small"] if args.small else []), "--section"]
    with Lines(args.out) as lines:
        total_s = SMALL_S if args.small else TOTAL_S
        sys.exit(0 if run_sections(only, own, lines, total_s) else 1)


@dataclass
class Lines:
    """The output: every line goes to standard output, and to a file where one was named, at once."""

    path: Path | None
    began: float = field(default_factory=time.monotonic)
    _file: TextIO | None = None

    def __enter__(self) -> Lines:
        self._file = self.path.open("w") if self.path else None
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def say(self, section: str, fields: dict[str, Any]) -> None:
        line = json.dumps({"section": section, "at_s": round(time.monotonic() - self.began, 1), **fields})
        print(line, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()


def run_sections(limits: dict[str, float], command: Sequence[str], lines: Lines, total_s: float) -> bool:
    """One process after another: `command` and the section's name. Whether all went well.

    `limits`: seconds of each section, scaled so that together they are `total_s`."""
    began, scale, well, planned = time.monotonic(), total_s / sum(LIMITS.values()), True, 0.0
    for name, limit in limits.items():
        planned += limit * scale
        left_s = max(1.0, planned - (time.monotonic() - began))
        started = time.monotonic()
        ended = run_section(name, [*command, name], lines, left_s)
        well &= ended == "done"
        lines.say(name, {"ended": ended, "seconds": round(time.monotonic() - started, 1)})
    return well


def run_section(name: str, command: Sequence[str], lines: Lines, limit_s: float) -> str:
    """How it ended: "done", or why not. Lines of JSON that it prints are passed on as they come."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    errors: list[str] = []
    deadline = time.monotonic() + limit_s
    try:
        for stream, text in _output(process, deadline):
            if stream == "out" and text.startswith("{"):
                lines.say(name, json.loads(text))
            else:
                errors = [*errors[-20:], text.rstrip()]
        process.wait(max(0.1, deadline - time.monotonic()))
    except TimeoutError:
        return f"cut: {limit_s:.0f} s were over"
    except subprocess.TimeoutExpired:
        return f"cut: it did not exit within {limit_s:.0f} s"
    finally:
        _end(process)
    return "done" if process.returncode == 0 else f"failed: {' | '.join(errors[-4:])}"[:1500]


def _output(process: subprocess.Popen[str], deadline: float) -> Iterator[tuple[str, str]]:
    """(out or err, line) until both streams end. TimeoutError at the deadline."""
    found: queue.Queue[tuple[str, str] | None] = queue.Queue()

    def read(name: str, stream: TextIO) -> None:
        with stream:
            for text in stream:
                found.put((name, text))
        found.put(None)

    assert process.stdout is not None
    assert process.stderr is not None
    for name, stream in (("out", process.stdout), ("err", process.stderr)):
        threading.Thread(target=read, args=(name, stream), daemon=True).start()
    open_streams = 2
    while open_streams:
        try:
            each = found.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if each is None:
            open_streams -= 1
        else:
            yield each


def _end(process: subprocess.Popen[str]) -> None:
    """The section and the processes of its session: first by SIGTERM, so that it ends those of others."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
