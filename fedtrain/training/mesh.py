"""Who stands where among the ranks: one DeviceMesh (pp, dp_replicate, dp_shard, cp, tp), one process each.

Ranks that differ only in pp, cp and tp work on the same examples. Ranks that differ in dp have their own;
with sync = "local" the dp_replicate axis is the islands, between which nothing passes within a round.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import ParallelConfig
from ..errors import ConfigError
from ..malloc import large_pages
from .compat import backend_in, backend_timeout, device_types, flatten_mesh
from .devices import backend_of, device_of_rank
from .elastic import Left

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
LEAVE_S = 0.3  # torch's threads need so long after the groups are gone, or the process may abort


@dataclass(frozen=True)
class Sizes:
    """Ranks along each axis."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, world: int) -> Sizes:
        """As [parallel] says for a world of so many ranks; ConfigError where they don't multiply to it."""
        others = config.pp * config.cp * config.tp
        dp = config.dp or max(1, world // others)
        product = f"pp {config.pp} × dp {dp} × cp {config.cp} × tp {config.tp} = {others * dp}"
        if others * dp != world:
            raise ConfigError(
                f"parallel: {product}, but there are {world} ranks. Start {others * dp} "
                f"(torchrun --nproc-per-node {others * dp}), or let parallel.dp = 0 take what is left."
            )
        replicate = config.replicate or (1 if config.sync == "step" else dp)
        if dp % replicate:
            raise ConfigError(
                f"parallel.replicate: {dp} data-parallel ranks can't form {replicate} equal copies. "
                f"Use a divisor of {dp}."
            )
        return cls(config.pp, replicate, dp // replicate, config.cp, config.tp)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return math.prod((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    def __str__(self) -> str:
        return " × ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "1"


class Mesh:
    """This rank's place, and the groups of ranks that it works with."""

    def __init__(self, sizes: Sizes, device: torch.device, *, islands: bool = False) -> None:
        """`islands`: dp_replicate ranks train apart. Needs a process group unless there is one rank."""
        self.sizes, self.device = sizes, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.islands = sizes.dp_replicate if islands else 1
        self.at = dict.fromkeys(AXES, 0)
        self._whole: DeviceMesh | None = None
        self._flats: dict[tuple[str, ...], DeviceMesh] = {}
        self._limit_s = 0.0
        if dist.is_initialized():
            shape = tuple(getattr(sizes, axis) for axis in AXES)
            self._whole = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
            self.at |= zip(AXES, self._whole.get_coordinate() or (), strict=True)
            everyone = backends_of(dist.group.WORLD)
            self.limit(min(backend_timeout(each.options).total_seconds() for each in everyone))

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh along some axes, through this rank."""
        assert self._whole is not None, "one rank has no mesh"
        return self._whole[axes]

    @property
    def alone(self) -> bool:
        """Whether it is a group of one rank, such as `torchrun --nproc-per-node 1` starts."""
        return self._whole is not None and self.sizes.world == 1

    def limit(self, seconds: float) -> None:
        """From here on a collective of any group counts as hanging after so many seconds. At first it is as
        the world's; torch gives all other groups half an hour."""
        self._limit_s = seconds
        if self._whole is None:
            return
        groups = {dist.group.WORLD, *(mesh.get_group() for mesh in self._flats.values())}
        for group in filter(None, groups | {self[axis].get_group() for axis in AXES}):
            group.set_timeout(timedelta(seconds=seconds))

    # --- data

    @property
    def island(self) -> int:
        return self.at["dp_replicate"] if self.islands > 1 else 0

    @property
    def data_ranks(self) -> int:
        """How many ranks of this island have examples of their own."""
        return self.sizes.dp // self.islands

    @property
    def data_rank(self) -> int:
        within = self.at["dp_replicate"] * self.sizes.dp_shard if self.islands == 1 else 0
        return within + self.at["dp_shard"]

    # --- groups

    @property
    def averaging(self) -> int:
        """How many ranks the gradient of one parameter is averaged over."""
        return self.data_ranks * self.sizes.cp

    @property
    def averaging_axes(self) -> tuple[str, ...]:
        """The axes that they lie along, those of one rank left out."""
        return self.axes("pp", "tp")

    def axes(self, *without: str) -> tuple[str, ...]:
        """The axes of one island: pp, cp, tp and the dp ones that are not islands; those of one rank, and
        those in `without`, left out."""
        between = ("dp_replicate",) if self.islands > 1 else ()
        return tuple(a for a in AXES if a not in (*between, *without) and getattr(self.sizes, a) > 1)

    def flat(self, axes: tuple[str, ...]) -> DeviceMesh:
        """Some axes as one, in the mesh's own order."""
        axes = tuple(axis for axis in AXES if axis in axes)
        if axes not in self._flats:
            self._flats[axes] = self[axes[0]] if len(axes) == 1 else flatten_mesh(self[axes])
            self._flats[axes].get_group().set_timeout(timedelta(seconds=self._limit_s))
        return self._flats[axes]

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along these axes only; None where that is itself alone."""
        if not axes:
            return None
        if math.prod(getattr(self.sizes, axis) for axis in axes) == self.sizes.world:
            return dist.group.WORLD
        return self.flat(axes).get_group()

    def sum(self, values: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """In place, over the ranks along these axes."""
        group = self.group(axes)
        if group is not None:
            dist.all_reduce(values, group=group)
        return values

    def from_first(self, number: int) -> int:
        """What rank 0 has, on all ranks."""
        if not dist.is_initialized():
            return number
        box = torch.tensor(number, device=self.device)
        dist.broadcast(box, 0)
        return int(box)

    def alike(self, number: int) -> bool:
        """Whether it is the same on all ranks."""
        if not dist.is_initialized():
            return True
        box = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return int(box.sum()) == 0


def backends_of(group: dist.ProcessGroup | None) -> list[Any]:
    """Of each kind of device that it works with."""
    return [backend_in(group, device) for device in device_types(group)] if group is not None else []


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """isinstance(tensor, DTensor), without loading what makes them: that takes as long as torch itself, and
    plain data parallelism can do without."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


# --- joining and leaving


@contextmanager
def joined(
    meet: Callable[..., None], device: str, backend: str = "auto", done: Path | None = None
) -> Iterator[torch.device]:
    """This process among those that torchrun started, in the group that `meet` makes of torch's backends and
    this rank's GPU (devices.py). Alone without torchrun. `device`, `backend`: train.device, parallel.backend.
    `done` is a folder: each rank that got to the end writes `rank-N` there, for whoever judges by more
    than exit codes. After an error the group is left as it is: to leave it in good order, a rank would wait
    for others, which wait for this one. So the process is to end at once (os._exit).
    """
    large_pages()  # a step reads and writes all of model, gradient and optimizer: a tenth less time
    here = device_of_rank(device, backend)
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        yield here
        return
    meet(backend_of(here, backend), here if here.type == "cuda" else None)
    try:
        yield here
    except Left:
        shutdown()
        raise
    shutdown(done)


def shutdown(done: Path | None = None) -> None:
    """Leave the process group so that the process then ends well.

    Exit soon after destroy_process_group() aborts (SIGABRT) now and then, for torch's threads are still at
    it: hence the pause, and the marker, by which a finished rank is known whatever its exit status.
    """
    if not dist.is_initialized():
        return
    rank = dist.get_rank()
    dist.barrier()
    if done is not None:
        (done / f"rank-{rank}").touch()
    dist.destroy_process_group()
    sys.stdout.flush()
    time.sleep(LEAVE_S)
