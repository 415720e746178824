"""Which of a machine's GPUs each trainer of a simulation takes."""

from __future__ import annotations

import os
import shutil
import subprocess

WORKERS = 4  # of one GPU, at most: small models leave it idle while one process prepares their batches
ANSWER_S = 60.0  # for nvidia-smi, which wakes the driver
WORKER_MIB = 4096  # of its free memory for each of them, at least; a process alone takes 500


def gpus_here(device: str) -> dict[str, int]:
    """The GPUs that trainers may take by train.device, as CUDA_VISIBLE_DEVICES names them, with their free
    memory in MiB (0: not known); none where none is here or answers."""
    if device == "cpu" or (command := shutil.which("nvidia-smi")) is None:
        return {}
    asked = [command, "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError):  # a driver that does not answer has no GPU for anybody
        return {}
    free: dict[str, int] = {}
    for line in told.stdout.splitlines():
        index, uuid, mib = line.split(", ")
        free |= dict.fromkeys((index, uuid), int(mib) if mib.isdigit() else 0)  # [N/A] where RAM is shared
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in free if name.isdigit()] if visible is None else visible.split(",")
    known = {name: memory_of(name, free) for name in map(str.strip, names)}
    found = {name: mib for name, mib in known.items() if mib is not None}
    _, _, index = device.partition(":")
    return dict([*found.items()][int(index) : int(index) + 1]) if index.isdigit() else found


def memory_of(name: str, free: dict[str, int]) -> int | None:
    """MiB of the GPU that CUDA_VISIBLE_DEVICES calls so, 0 of a part of one; None of what is no GPU."""
    if name in free:
        return free[name]
    whole = (mib for uuid, mib in free.items() if name.startswith("GPU-") and uuid.startswith(name))
    return next(whole, 0 if name.startswith("MIG-") else None)


def workers_on(gpus: dict[str, int], cores: int) -> int:
    """How many trainers these GPUs and cores keep busy."""
    return min(cores, sum(max(1, min(WORKERS, free // WORKER_MIB)) for free in gpus.values()))


def dealt(gpus: dict[str, int], number: int) -> str | None:
    """The GPU of trainer `number`; None where there are none."""
    return [*gpus][number % len(gpus)] if gpus else None
