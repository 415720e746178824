"""An optimizer whose state rests on a disk: read before a parameter is stepped, written after it.

The optimizer's half of ZeRO-Infinity (Rajbhandari et al. 2021). Parameters take their turns in buckets: while
one is stepped, the next one's state is read and that of the one before written. Between steps the state is
files mapped into memory, so checkpoints read and write it as they do any other.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

import torch
from torch import nn

from ...errors import ConfigError, StoreError
from .sharded import local

BUCKET_BYTES = 16 << 20  # of parameters whose state is read together
PAGE = 4096  # a file's bytes are a multiple of it, for a disk that is read past the system's cache
BLOCK = 1 << 20  # bytes of a request of DeepSpeed's
DEPTH = 32  # of these under way
LINE = 64  # a tensor begins at a multiple of it
Wait = Callable[[], object]  # until what was begun is done; StoreError where it failed
NOTHING: Wait = lambda: None  # was begun


class Disk(Protocol):
    """How files come and go. At most one read and one write are under way."""

    def buffer(self, count: int) -> torch.Tensor:
        """Memory of so many bytes, [count] uint8, to read into and write from."""

    def read(self, path: Path, into: torch.Tensor) -> Wait:
        """Begin to fill `into` from the start of a file."""

    def write(self, path: Path, content: torch.Tensor) -> Wait:
        """Begin to write all of it to the start of a file, which is as long."""


def disk_of(offload: str) -> Disk:
    """By what parallel.offload says."""
    return Threads() if offload == "disk" else Nvme()


class Threads:
    """A disk by reads and writes of the system, each in a thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2)

    def buffer(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def read(self, path: Path, into: torch.Tensor) -> Wait:
        return self._threads.submit(_through, path, os.O_RDONLY, os.preadv, into).result

    def write(self, path: Path, content: torch.Tensor) -> Wait:
        return self._threads.submit(_through, path, os.O_WRONLY, os.pwritev, content).result


def _through(
    path: Path, flags: int, move: Callable[[int, list[Any], int], int], memory: torch.Tensor
) -> None:
    """All bytes of `memory` from or to a file, however many the system moves at once."""
    view, at = memoryview(memory.numpy().data), 0
    try:
        file = os.open(path, flags)
        try:
            while at < len(view):
                moved = move(file, [view[at:]], at)
                if moved == 0:
                    raise StoreError(f"{path} ends after {at:,} of {len(view):,} bytes.")
                at += moved
        finally:
            os.close(file)
    except OSError as e:
        raise StoreError(f"{path}, the optimizer's state: {e}.") from e


@dataclass
class ParameterBucket:
    """Parameters stepped together, and the file that holds their state."""

    parameters: list[nn.Parameter]
    path: Path
    slots: list[torch.Tensor] = field(default_factory=list)  # this rank's pieces, in the order of the file
    file: torch.Tensor | None = None  # mapped: [bytes] uint8


class Resting(torch.optim.Optimizer):
    """`inner`, which must step each parameter by itself, as torch's optimizers do. What it keeps of a
    parameter's shape is on the disk between steps; smaller things stay in memory."""

    def __init__(
        self, inner: torch.optim.Optimizer, disk: Disk, where: Path, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`where`: what the folder of its files begins with; others like it, of a run that was killed, are
        removed. The parameters are in CPU memory. ConfigError where nothing can be written."""
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.disk, self.state = inner, disk, inner.state
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            for old in where.parent.glob(f"{where.name}-*"):
                shutil.rmtree(old)
            folder = Path(mkdtemp(dir=where.parent, prefix=f"{where.name}-"))
        except OSError as e:
            raise ConfigError(f"parallel.offload_dir: {e}. Name a folder on a disk of this machine.") from e
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        parameters = [p for group in inner.param_groups for p in group["params"]]
        each = enumerate(_buckets(parameters, bucket_bytes))
        self.buckets = [ParameterBucket(some, folder / f"{i:05d}") for i, some in each]
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 3  # read, stepped, written

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is called
        gradients = {p: p.grad for bucket in self.buckets for p in bucket.parameters}
        due = [b for b in self.buckets if any(gradients[p] is not None for p in b.parameters)]
        for p in gradients:
            p.grad = None
        reading, writing = self._read(due, 0), NOTHING
        for i, bucket in enumerate(due):
            reading()
            if bucket.file is not None:
                _lay(bucket.slots, self._memory(i, bucket.file))
            reading = self._read(due, i + 1)
            for p in bucket.parameters:
                p.grad = gradients[p]
            self.inner.step()
            for p in bucket.parameters:
                p.grad = None
            writing()
            writing = self._write(bucket, i)
        writing()
        for p, gradient in gradients.items():
            p.grad = gradient

    def _read(self, due: list[ParameterBucket], i: int) -> Wait:
        if i >= len(due) or (file := due[i].file) is None:
            return NOTHING
        return self.disk.read(due[i].path, self._memory(i, file))

    def _write(self, bucket: ParameterBucket, i: int) -> Wait:
        slots = [s for p in bucket.parameters for s in _kept(p, self.state.get(p, {}))]
        if [id(s) for s in slots] != [id(s) for s in bucket.slots]:  # some are new, in memory of their own
            held = [slot.clone() for slot in slots]
            bucket.slots, bucket.file = slots, _file(bucket.path, sum(map(_room, slots)))
            _lay(slots, self._memory(i, bucket.file))
            for slot, value in zip(slots, held, strict=True):
                slot.copy_(value)
        if bucket.file is None:
            return NOTHING
        _lay(slots, bucket.file)
        return self.disk.write(bucket.path, self._memory(i, bucket.file))

    def _memory(self, i: int, file: torch.Tensor) -> torch.Tensor:
        """The i-th bucket's buffer, of its file's length."""
        if len(self._buffers[i % 3]) < len(file):
            self._buffers[i % 3] = self.disk.buffer(len(file))
        return self._buffers[i % 3][: len(file)]


def _buckets(parameters: Iterable[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """In their order, each of so many bytes of this rank's pieces; a larger one alone."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for p in parameters:
        nbytes = local(p.detach()).nbytes
        if not found or nbytes > room:
            found.append([])
            room = most
        found[-1].append(p)
        room -= nbytes
    return found


def _kept(parameter: nn.Parameter, state: dict[str, Any]) -> list[torch.Tensor]:
    return [
        local(value)
        for _, value in sorted(state.items())
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]


def _room(slot: torch.Tensor) -> int:
    return -(-slot.nbytes // LINE) * LINE


def _lay(slots: list[torch.Tensor], memory: torch.Tensor) -> None:
    """From here on their values are what `memory` holds, one after the other."""
    at = 0
    for slot in slots:
        where = (memory.storage_offset() + at) // slot.itemsize
        slot.set_(memory.untyped_storage(), where, slot.size(), slot.stride())
        at += _room(slot)


def _file(path: Path, count: int) -> torch.Tensor:
    """A file of so many bytes, or a few more, which the disk has from now on; mapped."""
    count = -(-max(1, count) // PAGE) * PAGE
    try:
        with path.open("wb") as f:
            os.posix_fallocate(f.fileno(), 0, count)
    except OSError as e:
        raise StoreError(
            f"parallel.offload_dir: no {count:,} bytes for the optimizer's state: {e}. Name a larger disk."
        ) from e
    return torch.from_file(str(path), shared=True, size=count, dtype=torch.uint8)


class Nvme:
    """A Disk by DeepSpeed's asynchronous I/O alone (libaio, O_DIRECT, page-locked memory), past the system's
    cache and many requests at once. DeepSpeed compiles it when a machine first uses it, about two minutes. It
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
