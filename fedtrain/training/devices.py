"""The device that a process trains on, in one place: chosen, made current, made as exact as asked, seeded.

A site of one process and a worker of a simulation take `device_of`, a rank of several `device_of_rank`; every
engine makes its arithmetic what [train] says and seeds the device that it has.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

from ..config import ParallelConfig
from ..errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # by which products of matrices give the same bits each time
COLLECTIVES = 2000  # the last ones, that a rank remembers
NAMES = "auto, cpu, cuda or cuda:1"


def device_of(name: str) -> torch.device:
    """train.device as torch knows it; "auto" is the first GPU, or else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device: {name!r} is not a device. Use {NAMES}.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"train.device: {name} is not here; this machine has {torch.cuda.device_count()} GPUs. "
            f"Set it to auto or cpu, or install a torch that sees the GPU."
        )
    return device


def device_of_rank(name: str, backend: str = "auto") -> torch.device:
    """train.device for this rank, made the current one. "auto" and "cuda" are the GPU of its local rank; or
    the only GPU that this process sees, where each rank is shown its own; under Gloo, by turns."""
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if name.startswith("cuda:") and ranks > 1 and backend != "gloo":
        raise ConfigError(
            f"train.device: {ranks} ranks of this machine can't share {name}, for NCCL wants a GPU for each. "
            f"Set train.device = cuda, and each takes its own; or parallel.backend = gloo, and they share it."
        )
    device = device_of(name)
    if device.type != "cuda":
        return device
    if device.index is None:
        here = torch.cuda.device_count()
        if rank >= here and here > 1 and backend != "gloo":
            raise ConfigError(
                f"train.device: rank {rank} of this machine has no GPU, there are {here}. Start fewer ranks, "
                f"set parallel.backend = gloo, by which ranks share GPUs, or train.device = cpu."
            )
        device = torch.device("cuda", rank % here)
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device, backend: str = "auto") -> str:
    """parallel.backend as torch.distributed takes it. NCCL moves what lies on GPUs and nothing else: Gloo
    beside it moves what lies in memory, such as offloaded shards."""
    if device.type != "cuda":
        if backend == "nccl":
            raise ConfigError("parallel.backend: nccl is for GPUs, and train.device is none. Set it to auto.")
        return "gloo"
    return "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"


def refuse_shared(store: Store, device: torch.device, backend: str) -> None:
    """ConfigError where NCCL is to serve two ranks on one GPU, which it refuses later and with fewer words.
    `store`: all ranks', of this meeting alone."""
    if "nccl" not in backend:
        return
    gpu = torch.cuda.get_device_properties(device)
    if store.add(f"ranks on {gpu.uuid}", 1) > 1:
        raise ConfigError(
            f"train.device: two ranks have the same GPU, {gpu.name} {gpu.uuid}, and NCCL wants one for each. "
            f"Start fewer ranks, show each its own by CUDA_VISIBLE_DEVICES, or set parallel.backend = gloo."
        )


def refuse_gathers(config: ParallelConfig, ranks: int, device: torch.device, backend: str) -> None:
    """ConfigError where Gloo is to gather what lies on GPUs, in which torch ends the process (SIGSEGV)."""
    axes = {"tp": config.tp, "cp": config.cp, "zero": config.zero if config.zero > 1 else 1}
    asked = ", ".join(f"parallel.{name} = {value}" for name, value in axes.items() if value > 1)
    if asked and ranks > 1 and device.type == "cuda" and backend == "gloo":
        raise ConfigError(
            f"{asked}: ranks gather parts of tensors, and Gloo can't gather tensors on a GPU. "
            f"Set parallel.backend = auto with one GPU for each rank, or train.device = cpu."
        )


def record_collectives(backend: str, folder: Path) -> None:
    """Have NCCL write down, when a collective hangs, which ones each rank was in: `folder`/nccl-RANK, for
    torch's `torchfrtrace`; and start collectives of several groups in the program's order, which is every
    rank's: else an island's sum beside its shards' can hang. What the environment says already stays."""
    if "nccl" in backend:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(COLLECTIVES))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "nccl-"))


def set_arithmetic(device: torch.device, *, deterministic: bool, tf32: bool) -> None:
    """Hold a GPU's arithmetic to train.deterministic and train.tf32, for this whole process. A CPU's is the
    same each time as it is, and has no TF32."""
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        os.environ.setdefault(WORKSPACE, ":4096:8")  # read when the first product makes its workspace
        torch.backends.cudnn.benchmark = False  # which would choose by the clock
    # else a pass over all new memory, for nothing
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch's
    torch.use_deterministic_algorithms(deterministic)


def seed_all(seed: int, device: torch.device) -> None:
    """Every generator that a task may draw from without naming it."""
    # Not torch.manual_seed: it looks for every kind of accelerator, and takes 194 µs of a 400 µs round.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # Not torch.cuda.manual_seed, which is for the device that is current.
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)  # the legacy one, which datasets and augmentations draw from


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the generators that a task may draw from, and torch's number of threads, as they are here: in a
    process that is not fedtrain's own."""
    python, legacy, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_num_threads(threads)


def generator_states(device: torch.device | None = None) -> object:
    """What changes when somebody draws from Python's or numpy's generator; with a device, from torch's."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    states = [random.getstate(), state["state"]["pos"], state["state"]["key"].tobytes()]
    if device is not None:
        states.append(torch.get_rng_state().tolist())
        states += [torch.cuda.get_rng_state(device).tolist()] if device.type == "cuda" else []
    return states
