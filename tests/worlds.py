"""Processes that are forked from one that has torch, for to load it takes longer than most of what they are
there for: worlds of ranks, above all. What starts real ranks, by torchrun, is in torchrun.py.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=120)  # of one collective
LOADED = [
    "fedtrain.runtime.datacenter",
    "fedtrain.training.checkpoint",
    "fedtrain.training.parallel.pipeline",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(LOADED)


def world(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """`work(rank, ranks, *arguments)` in so many processes of one Gloo group, to the end; where one of them
    raises, the others are ended and its traceback is raised here."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank, (ranks, Path(folder) / "meeting", work, arguments), ranks, start_method="forkserver"
        )


def _rank(
    rank: int, ranks: int, meeting: Path, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(meeting), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    work(rank, ranks, *arguments)
    dist.barrier()
    dist.destroy_process_group()
