"""What it costs to compress: 10M normal float32, in one thread, beside a copy of them in memory.

    python benchmarks/compression.py [--json] [--values 10000000] [--only quantize:8 topk:0.01]

`encode_ms` and `decode_ms` are CPU time, the best of a few; `..._ratio` is over the copy, measured in turns
with them. Decoding is into memory that is kept, as a neighbour's accumulator is; encoding pays for its fresh
bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import common
import torch

from fedtrain.compression import parse

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


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--only", nargs="*", default=CASES, help="compressors, as in topk:0.01")
    args = parser.parse_args()
    common.begin(args)
    torch.set_num_threads(1)
    vector = torch.randn(args.values, generator=torch.Generator().manual_seed(0))
    room = torch.zeros(args.values)
    for case in args.only:
        measure(case, vector, room)


if __name__ == "__main__":
    main()
