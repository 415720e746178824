"""Where the time of a round goes: seconds in named functions of the product, of one process.

    python benchmarks/phases.py OUT aggregator --json      `fedtrain aggregator`, whose phases go to OUT

Functions are wrapped from outside, in this process only; their time is that of the wall, and of the CPU that
their own thread used. What waits (for bytes, for a site) is in none of them.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

PHASES = {  # what a person calls it -> where it is
    "send: read a chunk": "fedtrain.transport.streams:read_chunk",
    "receive: open": "fedtrain.store.spool:Spool.receive",
    "receive: digest and write": "fedtrain.store.spool:Arriving.write",
    "receive: finish": "fedtrain.store.spool:Arriving.finish",
    "check values": "fedtrain.runtime.star.checks:inspect",
    "fold": "fedtrain.runtime.star.answers:aggregate",
    "step": "fedtrain.runtime.star.federated:server_step",
    "check the model": "fedtrain.runtime.star.checks:flaw",
    "plan": "fedtrain.store.runs:RunStore.set_plan",
    "model: write and sync": "fedtrain.store.runs:RunStore.prepare",
    "commit": "fedtrain.store.runs:RunStore.commit",
    "inbox cleared": "fedtrain.store.folder:RunFolder.clear_inbox",
    "events": "fedtrain.tracking.log:EventLog.emit",
    "ledger: look": "fedtrain.store.ledger:Ledger.get",
    "ledger: put": "fedtrain.store.ledger:Ledger.put",
    "ledger: sum kept": "fedtrain.store.ledger:Ledger.keep_sum",
    "masks: step 0": "fedtrain.runtime.sites.secure_site:SecureSite.offer",
    "masks: steps 1 to 4": "fedtrain.runtime.sites.secure_site:SecureSite.answer",
    "fsync": "os:fsync",
}


class Phases:
    """The times of this process's phases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, list[float]] = {}  # phase -> calls, wall seconds, CPU seconds

    def wrap(self) -> None:
        """From here on the phases are timed."""
        for phase, place in PHASES.items():
            module, _, path = place.partition(":")
            owner: Any = import_module(module)
            *outer, name = path.split(".")
            for each in outer:
                owner = getattr(owner, each)
            setattr(owner, name, self._timed(phase, getattr(owner, name)))

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                with self._lock:
                    found = self._found.setdefault(phase, [0, 0.0, 0.0])
                    found[:] = [found[0] + 1, found[1] + wall, found[2] + cpu]

        return timed

    def write(self, out: Path) -> None:
        """The times, and the CPU seconds of the whole process."""
        whole = [1, time.perf_counter(), time.process_time()]
        out.write_text(json.dumps(self._found | {"process": whole}))


def show(files: dict[str, Path], rounds: int) -> None:
    """A line a phase and process, in milliseconds a round; sites together."""
    total: dict[tuple[str, str], list[float]] = {}
    for who, file in files.items():
        for phase, times in json.loads(file.read_text()).items():
            have = total.setdefault((who.partition(" ")[0], phase), [0.0, 0.0, 0.0])
            have[:] = [a + b for a, b in zip(have, times, strict=True)]
    for (who, phase), times in total.items():
        calls, wall, cpu = (each / rounds for each in times)
        line = f"{calls:8.1f} calls {1e3 * wall:9.2f} ms  CPU {1e3 * cpu:9.2f} ms"
        print(f"  {who:10} {phase:26} {line}")


if __name__ == "__main__":
    phases = Phases()
    phases.wrap()
    out, sys.argv = Path(sys.argv[1]), ["fedtrain", *sys.argv[2:]]
    from fedtrain.cli import main

    try:
        main()
    finally:
        phases.write(out)
