"""The most that this machine's cores multiply together in float32: a "round" is one product of 1024 × 1024.

python -m peers.gemm NAME WORK.npz
"""

from __future__ import annotations

import os

import torch
from peers.work import turns

SIZE = 1024
FLOPS = 2 * SIZE**3  # of a round


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    a, b = torch.randn(2, SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    for _ in turns():
        torch.mm(a, b, out=out)


if __name__ == "__main__":
    main()
