"""What it costs to compress: 10M normal float32, in one thread, beside a copy of them in memory.

    python benchmarks/compression.py [--json] [--values 10000000] [--only quantize:8 topk:0.01]
    python benchmarks/compression.py --federation [--json] [--data FOLDER] [--rounds 60] [--seeds 3]

`encode_ms` and `decode_ms` are CPU time, the best of a few; `..._ratio` is over the copy, measured in turns
with them. Decoding is into memory that is kept, as a neighbour's accumulator is; encoding pays for its fresh
bytes.

With --federation: Fashion-MNIST by Dirichlet(0.3) at ten sites, all of them in each round, a small model
(784-64-10; --task FashionMNIST: the CNN), trained by the code of `fedtrain simulate`. Bytes are those of all
models, updates and patches, both ways, as they would travel over a network; the first model does not travel
where `down` is set, for model() gives it, and is counted where it is not.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import common
import torch

from fedtrain.compression import parse
from fedtrain.config import Config
from fedtrain.events import Event
from fedtrain.runtime.simulations.simulation import simulate

CASES = [
    "float16", "bfloat16", "quantize:8", "quantize:8,unbiased=false", "quantize:4", "sign", "topk:0.01",
    "topk:0.1", "randomk:0.1", "randomk:0.01", "lowrank:4", "powersgd:4", "error_feedback:topk:0.01",
    "error_feedback:quantize:8",
]  # fmt: skip
REPEATS = 7


def cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def measure(case: str, vector: torch.Tensor, room: torch.Tensor) -> None:
    compressor, n = parse(case), len(vector)
    state = compressor.init(n)
    payload, _ = compressor.encode(vector, 0, state)
    error = float((compressor.decode(payload, 0, n, room) - vector).norm() / vector.norm())
    works = {
        "copy": lambda: room.copy_(vector),
        "encode": lambda: compressor.encode(vector, 0, state),
        "decode": lambda: compressor.decode(payload, 0, n, room),
    }
    best = dict.fromkeys(works, float("inf"))
    for _ in range(REPEATS):
        for name, work in works.items():
            best[name] = min(best[name], cpu_ms(work))
    for name in ("encode", "decode"):
        common.emit("compression", case, f"{name}_ms", best[name], "ms")
        common.emit("compression", case, f"{name}_ratio", best[name] / best["copy"], "copies")
    common.emit("compression", case, "bytes_per_value", payload.numel() / n, "bytes")
    common.emit("compression", case, "error", error, "of the norm")


WAYS = [
    ("", ""),
    ("quantize:8", "quantize:8"),
    ("sign", "sign"),
    ("topk:0.0275,values=bfloat16", "topk:0.0275,values=bfloat16"),
]


def federate(folder: Path, task: str, up: str, down: str, rounds: int, seed: int) -> tuple[float, int]:
    """(accuracy of the last model, bytes that it took)."""
    root = Path(__file__).parents[1] / "examples" / "fashion_mnist"
    with tempfile.TemporaryDirectory() as scratch:
        for file in (root / "task.py", root / "fedtrain.toml"):
            shutil.copy(file, scratch)
        sets = [
            f"run.rounds={rounds}", f"run.seed={seed}", f"run.task=task:{task}",
            "simulate.sites=10", "strategy.fraction=1",
            "secagg.enabled=false", f"evaluate.every={rounds}", f"compression.up={up!r}",
            f"compression.down={down!r}", "train.lr=0.01",
        ]  # fmt: skip
        config, nbytes, accuracy = Config.load(Path(scratch) / "fedtrain.toml", sets), 0, float("nan")

        def emit(event: Event) -> None:
            kind, fields = event.kind, event.fields()
            nonlocal nbytes, accuracy
            if kind == "round_committed":
                nbytes += fields["bytes_in"] + fields["bytes_out"]
            if kind == "evaluated":
                accuracy = fields["metrics"]["accuracy"]

        asyncio.run(simulate(config, emit=emit, data_dir=folder))
        return accuracy, nbytes


def federations(folder: Path, task: str, rounds: int, seeds: int) -> None:
    dense = 0
    for up, down in WAYS:
        accuracies, sizes = zip(
            *(federate(folder, task, up, down, rounds, seed) for seed in range(seeds)), strict=True
        )
        nbytes = median(sizes)
        dense, case = dense or nbytes, f"{up or 'none'} up, {down or 'none'} down"
        common.emit("compression", case, "accuracy", 100 * median(accuracies), "%")
        common.emit("compression", case, "lowest_accuracy", 100 * min(accuracies), "%")
        common.emit("compression", case, "megabytes", nbytes / 1e6, "MB")
        common.emit("compression", case, "fewer", dense / nbytes, "times")


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--only", nargs="*", default=CASES, help="compressors, as in topk:0.01")
    parser.add_argument("--federation", action="store_true", help="accuracy at so many bytes instead")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of Fashion-MNIST's files")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way; medians are printed")
    parser.add_argument("--task", default="Small", help="of examples/fashion_mnist/task.py")
    args = parser.parse_args()
    common.begin(args)
    if args.federation:
        federations(args.data.resolve(), args.task, args.rounds, args.seeds)
        return
    torch.set_num_threads(1)
    vector = torch.randn(args.values, generator=torch.Generator().manual_seed(0))
    room = torch.zeros(args.values)
    for case in args.only:
        measure(case, vector, room)


if __name__ == "__main__":
    main()
