"""A model that lies in parts at the ranks of a mesh: whole on rank 0, and this rank's shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...arena import Arena
from ...digest import Digest, seed_of
from ...errors import TaskError
from ...schema import Schema, TensorSpec, is_frozen, unique_tensors
from ..engine import FROZEN_CHANGED, checksum
from ..mesh import Mesh, is_dtensor


class ShardedModel:
    """The parts at this rank. Every rank calls each method alike."""

    def __init__(
        self, mesh: Mesh, parts: Sequence[nn.Module], schema: Schema, frozen: Schema, *, sharded: bool
    ) -> None:
        """`parts`: the model, or this rank's stages of it. `schema`, `frozen`: of the whole model, as a
        federation knows it. `sharded`: whether ranks of one stage hold different pieces of parameters."""
        self.mesh, self.parts, self.schema, self.frozen = mesh, list(parts), schema, frozen
        self._sharded = sharded
        self._frozen_sums: dict[str, int] = {}  # when the round began

    def note_frozen(self) -> None:
        """What gather() holds frozen parameters against."""
        self._frozen_sums = self._sums_of_frozen()

    def gather(self, *, frozen: bool = False) -> Arena | None:
        """What is trained, and the buffers, or the frozen parameters: whole on rank 0, None on others. One
        tensor at a time: nobody holds a second model."""
        schema = self.frozen if frozen else self.schema
        now = self._sums_of_frozen()
        if any(value != now.get(name, value) for name, value in self._frozen_sums.items()):
            raise TaskError(FROZEN_CHANGED)
        out = Arena.zeros(schema) if self.mesh.rank == 0 else None
        views = out.views() if out is not None else {}
        mine = {name: t for part in self.parts for name, t in unique_tensors(part).items()}
        with torch.no_grad():
            for spec in schema.tensors:
                whole = self._whole(spec, mine.get(spec.name))
                if out is not None and whole is not None:
                    views[spec.name].copy_(whole)
        return out

    def _sums_of_frozen(self) -> dict[str, int]:
        """Of each frozen parameter, as it rests at this rank: in a shard, where it is sharded."""
        return {
            name: checksum(local(tensor.detach()))
            for part in self.parts
            for name, tensor in unique_tensors(part).items()
            if is_frozen(tensor) and (is_dtensor(tensor) or not self._sharded)
        }

    def _whole(self, spec: TensorSpec, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if is_dtensor(tensor):
            tensor = tensor.full_tensor()
        if self.mesh.sizes.pp == 1:
            return tensor
        # A pipeline's ranks have different tensors: the one that has it shows it to the others.
        group = self.mesh["pp"].get_group()
        owner = torch.tensor(self.mesh.rank if tensor is not None else -1, device=self.mesh.device)
        dist.all_reduce(owner, op=dist.ReduceOp.MAX, group=group)
        if int(owner) < 0:
            raise TaskError(f"{spec.name} is in no stage of the pipeline; is it shared between stages?")
        if tensor is None:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.mesh.device)
        else:
            tensor = tensor.detach().to(self.mesh.device).contiguous()  # an offloaded one is in memory
        dist.broadcast(tensor, int(owner), group=group)
        return tensor

    def install(self, weights: Arena | None, *, frozen: bool = False) -> None:
        """What is trained, and the buffers, or the frozen parameters, as rank 0 has them, into every rank's
        part of the model, one tensor at a time."""
        views = weights.views() if weights is not None else {}
        mine = {name: t for part in self.parts for name, t in unique_tensors(part).items()}
        with torch.no_grad():
            for spec in (self.frozen if frozen else self.schema).tensors:
                if spec.name in views and self.mesh.rank == 0:
                    whole = views[spec.name].to(self.mesh.device).clone()
                else:
                    whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.mesh.device)
                if dist.is_initialized():
                    dist.broadcast(whole, 0)
                target = mine.get(spec.name)
                if is_dtensor(target):
                    from torch.distributed.tensor import distribute_tensor

                    source = distribute_tensor(
                        whole, target.device_mesh, target.placements, src_data_rank=None
                    )
                    local(target).copy_(local(source))
                elif target is not None:
                    target.copy_(whole)

    def shards(self) -> Arena:
        """A copy of this rank's own part of what moves, as an arena: all of it where nothing is sharded."""
        arena = Arena.zeros(self._shard_schema(), str(self.mesh.device))
        tensors = self._local_tensors()
        with torch.no_grad():
            for name, view in arena.views().items():
                view.copy_(tensors[name])
        return arena

    def load_shards(self, arena: Arena) -> None:
        """What `shards` gave, changed, back into the model."""
        tensors = self._local_tensors()
        with torch.no_grad():
            for name, view in arena.views().items():
                tensors[name].copy_(view)

    def as_shard(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """A tensor that belongs to this rank's part of the one of that name, as a part of such a whole."""
        like = next(t for part in self.parts for n, t in unique_tensors(part).items() if n == name)
        if not is_dtensor(like):
            return piece
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _local_tensors(self) -> dict[str, torch.Tensor]:
        return {name: local(t.detach()) for part in self.parts for name, t in unique_tensors(part).items()}

    def _shard_schema(self) -> Schema:
        mine = self._local_tensors()
        specs = [
            TensorSpec(spec.name, tuple(mine[spec.name].shape), spec.dtype, spec.trained)
            for spec in self.schema.tensors
            if spec.name in mine
        ]
        return Schema(tuple(specs))


def digest_of_model(model: nn.Module) -> int:
    """Of all weights and buffers that travel and are made, tensor by tensor: nobody holds a second model."""
    digest = Digest()
    for tensor in unique_tensors(model).values():
        if tensor.is_meta:
            continue
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return seed_of(digest.hexdigest())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece: the same object each time it is asked for."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def pieces(tensor: torch.Tensor) -> int:
    """Into how many different pieces a tensor is cut over the ranks."""
    if not is_dtensor(tensor):
        return 1
    return math.prod(
        tensor.device_mesh.size(i)
        for i, place in enumerate(tensor.placements)
        if not (place.is_replicate() or place.is_partial())  # a strided shard is not is_shard()
    )
