"""What fedtrain adds to a machine that has torch: distributions, megabytes, start-up.

distributions, size_mb   required beside torch and what torch itself requires; fedtrain is in the size
import_ms, help_ms       medians of fresh processes, the interpreter's own start included
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from importlib.metadata import distribution
from pathlib import Path

import common
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(name: str) -> set[str]:
    """A distribution and all that it requires here, by canonical name."""
    found: set[str] = set()
    todo = [canonicalize_name(name)]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for line in distribution(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(requirement.name))
    return found


def size_mb(name: str) -> float:
    files = (Path(file.locate()) for file in distribution(name).files or [])
    return float(sum(path.stat().st_size for path in files if path.is_file()) / 1e6)


def median_ms(*command: str) -> float:
    times = []
    for _ in range(11):
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def main() -> None:
    common.begin(common.arguments(__doc__.splitlines()[0]).parse_args())
    beside = needed("fedtrain") - needed("torch") - {"fedtrain"}
    common.emit("footprint", "install", "distributions", len(beside), "distributions")
    common.emit("footprint", "install", "size_mb", sum(map(size_mb, {*beside, "fedtrain"})), "MB")
    common.emit("footprint", "start", "import_ms", median_ms("-c", "import fedtrain"), "ms")
    common.emit("footprint", "start", "help_ms", median_ms("-m", "fedtrain", "--help"), "ms")


if __name__ == "__main__":
    main()
