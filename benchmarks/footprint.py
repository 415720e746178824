"""What fedtrain adds to a machine that has torch: distributions, megabytes, start-up.

distributions, size_mb   required beside torch and what torch itself requires; fedtrain is in the size
import_ms, help_ms       medians of fresh processes, the interpreter's own start included
build_peak_mib           what the memory of a rank grows by at most while a model of 192 MiB is built for two
                         ranks that shard it (zero = 3): a shard is 96, its largest tensor 16, the bar 131
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distribution
from pathlib import Path

import common
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CASES = ("install", "start", "build")
WIDE = """
import fedtrain, torch
from torch import nn

class Wide(fedtrain.Task):
    def __init__(self, width=2048):
        self.width = width

    def model(self):
        return nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(12)))

    def data(self, site):
        return torch.zeros(4, self.width), torch.zeros(4, self.width)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


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


def build_rank(folder: Path) -> None:
    """One of two ranks, under torchrun: it writes how much more memory it had at most while it built."""
    import torch.distributed as dist

    from fedtrain.config import Config
    from fedtrain.training.mesh import Mesh, Sizes, joined
    from fedtrain.training.parallel.engine import MeshEngine
    from fedtrain.training.task import load_task

    with joined(lambda backend, _: dist.init_process_group(backend), "cpu") as device:
        for spec in ("task:Wide(256)", "task:Wide"):  # the first loads what is no model's
            table = {"run": {"task": spec, "seed": 1}, "parallel": {"zero": 3}, "train": {"device": "cpu"}}
            config = Config.of(table, folder)
            task, mesh = load_task(spec, folder), Mesh(Sizes.of(config.parallel, 2), device)
            before = status_mib("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            MeshEngine(task, config, mesh)
            grown = status_mib("VmHWM") - before
        (folder / f"{mesh.rank}.json").write_text(json.dumps(grown))


def status_mib(name: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024


def build_peak_mib() -> float:
    """The larger of both ranks'."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(WIDE)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([*torchrun, __file__, "--rank", name], check=True, capture_output=True, timeout=300)
        return max(float(json.loads((folder / f"{rank}.json").read_text())) for rank in range(2))


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append", help="one of them; all without it")
    parser.add_argument("--rank", metavar="FOLDER", type=Path, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.rank is not None:
        return build_rank(args.rank)
    common.begin(args)
    cases = args.case or CASES
    if "install" in cases:
        beside = needed("fedtrain") - needed("torch") - {"fedtrain"}
        common.emit("footprint", "install", "distributions", len(beside), "distributions")
        common.emit("footprint", "install", "size_mb", sum(map(size_mb, {*beside, "fedtrain"})), "MB")
    if "start" in cases:
        common.emit("footprint", "start", "import_ms", median_ms("-c", "import fedtrain"), "ms")
        common.emit("footprint", "start", "help_ms", median_ms("-m", "fedtrain", "--help"), "ms")
    if "build" in cases:
        common.emit("footprint", "build", "build_peak_mib", build_peak_mib(), "MiB")


if __name__ == "__main__":
    main()
