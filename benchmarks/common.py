"""What every benchmark shares: its output, one JSON object a line, and the machine that it ran on.

    {"machine": {...}}                                                        first
    {"bench": "simulate", "case": ..., "metric": ..., "value": ..., "unit": ...}   then one for each figure

Figures move from machine to machine and with what else runs there: compare those of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import fedtrain

as_json = False


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser that has --json; pass its result to `begin`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for a program")
    return parser


def begin(args: argparse.Namespace) -> None:
    """Say what machine this is."""
    global as_json
    as_json = args.json
    machine = machine_line()
    say({"machine": machine} if as_json else machine)


def machine_line() -> dict[str, object]:
    return {
        "day": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),  # over 0.3 before we begin: somebody else is at work too
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "fedtrain": fedtrain.__version__,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def say(fields: dict[str, object]) -> None:
    """A line that is no figure."""
    text = json.dumps(fields) if as_json else ", ".join(f"{key} {value}" for key, value in fields.items())
    print(text, flush=True)


def emit(bench: str, case: str, metric: str, value: float, unit: str) -> None:
    """One figure."""
    if as_json:
        figure = {"bench": bench, "case": case, "metric": metric, "value": value, "unit": unit}
        print(json.dumps(figure), flush=True)
    else:
        print(f"{bench} {case}: {metric} {value:,.4g} {unit}", flush=True)
