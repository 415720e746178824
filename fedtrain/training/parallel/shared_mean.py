"""The mean of the gradients of ranks on one machine, in memory that they share.

Gloo sends a gradient through the kernel's sockets, which takes half of a small model's step. Here each rank
copies its gradient to where all ranks see it, and takes the mean of its own part of the coordinates, for
everyone. Gloo carries two numbers: how many parameters ranks did not reach, by which each rank knows that all
gradients are there, and the sum of the mean's squares, by which it knows the norm, and that the mean is
there. So a rank that fails or hangs is noticed as in any other collective. Which parameters they did not
reach is a third message, where there are any.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from secrets import token_hex
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..collectives import everyones

CHUNK_BYTES = 512 << 10  # of a part at once: what is read again is still in the core's cache
ALIGNED = 64  # bytes: a parameter's gradient begins with a line of the cache


class SharedMean:
    """Of a model's gradients, in place of what DDP itself does about them. Ranks call each method alike."""

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter], memories: list[torch.Tensor]
    ) -> None:
        """`memories`: each rank's, uint8 [2 · room_for(parameters)]: its gradient, then the mean. The mean is
        in the first rank's alone; of the others' second halves no page is ever taken."""
        self.ddp, self.group = ddp, ddp.process_group
        self.norm = torch.zeros((), dtype=torch.float64)  # of the last mean, L2, the same on all ranks
        self.seconds = 0.0  # that the last mean took
        half, rank, ranks = len(memories[0]) // 2, dist.get_rank(self.group), len(memories)
        self._mine, self._mean = memories[rank][:half], memories[0][half:]
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []  # each one's, in this rank's memory
        self._chunks: list[list[torch.Tensor]] = []  # of this rank's part: the mean's, then each gradient's
        at = 0
        for dtype, alike in by_dtype(parameters).items():
            began = at
            for p in alike:
                piece = self._mine[at : at + p.nbytes].view(dtype)
                # The fused optimizers read a gradient in the order in which the parameter lies.
                view = piece.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
                self._gradients.append((p, view))
                at += aligned(p.nbytes)
            same = [m[began:at].view(dtype) for m in (self._mean, *(memory[:half] for memory in memories))]
            low, high = (len(same[0]) * r // ranks for r in (rank, rank + 1))
            for start in range(low, high, step := CHUNK_BYTES // dtype.itemsize):
                self._chunks.append([each[start : min(high, start + step)] for each in same])

    @classmethod
    def of(cls, root: nn.Module, parameters: Sequence[nn.Parameter], comm_hook: str) -> SharedMean | None:
        """None where it isn't DDP that averages whole gradients on a CPU, or some rank can't open another's
        memory, as on another machine or in another container."""
        if not isinstance(root, DistributedDataParallel) or comm_hook != "none":
            return None
        if any(p.device.type != "cpu" for p in parameters):
            return None
        group = root.process_group
        name = f"fedtrain-{token_hex(16)}"  # no other file is called so
        nbytes = 2 * room_for(parameters)
        with memory_file(name, nbytes) as fd:
            places = everyones((os.getpid(), fd, name), tuple[int, int, str], group)
            found = [memory for place in places if (memory := opened(*place, nbytes)) is not None]
            fewest = torch.tensor(len(found))
            dist.all_reduce(fewest, dist.ReduceOp.MIN, group=group)  # after it nobody opens a file any more
        return cls(root, parameters, found) if int(fewest) == len(places) else None

    def take(self, factor: float, reached: set[nn.Parameter]) -> set[nn.Parameter]:
        """Have each parameter's gradient be the mean over the ranks, times the factor. `reached`: those that
        this rank reached. Returns those that no rank did."""
        began = perf_counter()
        for p, view in self._gradients:
            view.zero_() if p.grad is None else view.copy_(p.grad)
            p.grad = view
        missing, unseen = set[nn.Parameter](), float(len(self._gradients) - len(reached))
        if self._summed(torch.tensor(unseen, dtype=torch.float64)).numpy():  # some rank did not reach all
            ranks = self._summed(torch.tensor([p in reached for p, _ in self._gradients], dtype=torch.int32))
            missing = {p for (p, _), n in zip(self._gradients, ranks.tolist(), strict=True) if not n}
        norms = [torch.zeros((), dtype=torch.float64)]
        scale = factor / dist.get_world_size(self.group)
        for mean, first, *others in self._chunks:
            torch.mul(first, scale, out=mean)  # before the sum, which can't overflow then
            for other in others:
                mean.add_(other, alpha=scale)
            norms.append(torch.linalg.vector_norm(mean).double())
        squares = self._summed(torch.stack(norms).square_().sum())
        self._mine.copy_(self._mean)  # others write it again once this rank, too, has its next gradient there
        self.ddp.require_forward_param_sync = True  # else it has only its first forward send rank 0's buffers
        self.norm, self.seconds = squares.sqrt_(), perf_counter() - began
        return missing

    def _summed(self, numbers: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(numbers, group=self.group)
        return numbers


@contextmanager
def memory_file(name: str, nbytes: int) -> Iterator[int]:
    """Its descriptor; -1 where the system has no such thing. It is in no folder: nothing is left behind,
    whatever kills the ranks."""
    fd = -1
    try:
        with suppress(OSError, AttributeError):
            fd = os.memfd_create(name)
            os.ftruncate(fd, nbytes)
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def opened(pid: int, fd: int, name: str, nbytes: int) -> torch.Tensor | None:
    """The memory that a process on this machine shares, uint8; None where there is no such one."""
    path = f"/proc/{pid}/fd/{fd}"
    with suppress(OSError, ValueError):  # ValueError: a file that could not be made so large
        if os.readlink(path) == f"/memfd:{name} (deleted)":
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), nbytes)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=torch.uint8)
    return None


def by_dtype(parameters: Sequence[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    alike: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in parameters:
        alike.setdefault(p.dtype, []).append(p)
    return alike


def room_for(parameters: Sequence[nn.Parameter]) -> int:
    """Bytes, of their gradients."""
    return sum(aligned(p.nbytes) for p in parameters)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
