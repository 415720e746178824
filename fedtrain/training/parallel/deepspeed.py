"""The disk of `offload = "nvme"`: DeepSpeed's asynchronous I/O, past the system's cache and many requests at
once (libaio, O_DIRECT, from page-locked memory). `pip install fedtrain[deepspeed]`.

Nothing else of DeepSpeed is used: model, backward pass, optimizer, checkpoints are what they are without it.
"""

from __future__ import annotations

import os
import resource
import sys
import weakref
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ConfigError, StoreError

if TYPE_CHECKING:
    from .offload import Wait

BLOCK = 1 << 20  # bytes of a request
DEPTH = 32  # requests under way


class Nvme:
    """A Disk, see offload.py. DeepSpeed compiles its I/O when a machine first uses it, about two minutes. It
    says when a file can't be opened, but not when a request fails."""

    def __init__(self) -> None:
        module = _compiled()
        self._reader, self._writer = (module.aio_handle(BLOCK, DEPTH, False, True, 1) for _ in range(2))

    def buffer(self, count: int) -> torch.Tensor:
        most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if os.geteuid() and most != resource.RLIM_INFINITY and count * 3 > most:
            raise ConfigError(
                f"parallel.offload = nvme locks {count * 3:,} bytes of memory, and {most:,} are allowed. "
                f"Raise that (ulimit -l), or set parallel.offload = disk."
            )
        memory: torch.Tensor = self._reader.new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.uint8))
        weakref.finalize(memory, self._reader.free_cpu_locked_tensor, memory[:])  # nobody else frees it
        return memory

    def read(self, path: Path, into: torch.Tensor) -> Wait:
        return _begun(self._reader, self._reader.async_pread(into, str(path)), path)

    def write(self, path: Path, content: torch.Tensor) -> Wait:
        return _begun(self._writer, self._writer.async_pwrite(content, str(path)), path)


def _begun(handle: Any, status: int, path: Path) -> Wait:
    if status:
        raise StoreError(
            f"{path}, the optimizer's state, can't be opened past the system's cache (O_DIRECT). "
            f"Name a folder on a local disk as parallel.offload_dir, or set parallel.offload = disk."
        )
    wait: Wait = handle.wait
    return wait


def _compiled() -> Any:
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "parallel.offload = nvme needs DeepSpeed: pip install fedtrain[deepspeed]. "
            "parallel.offload = disk does without."
        )
    with redirect_stdout(sys.stderr):  # where it logs from now on: our stdout is events
        from deepspeed.ops.op_builder import AsyncIOBuilder

        builder = AsyncIOBuilder()
        try:
            if not builder.is_compatible():
                raise RuntimeError("io_submit, of libaio, can't be compiled and linked")
            return builder.load(verbose=False)
        except (RuntimeError, ImportError) as e:
            raise ConfigError(
                f"parallel.offload = nvme: DeepSpeed's I/O can't be built: {e}. It needs a C++ compiler, "
                f"ninja and libaio (Debian: apt-get install g++ ninja-build libaio-dev); or set it to disk."
            ) from e
