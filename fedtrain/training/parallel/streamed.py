"""A sharded model that is made tensor by tensor: a rank has its shards and, at any time, one whole tensor."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from ...digest import Digest, seed_of
from ...errors import TaskError
from ...malloc import give_back
from ..building import Pretrained, called_model
from ..deferred import Deferred, ModelChanged, Unmade
from ..mesh import is_dtensor
from ..task import Task
from .sharded import local


class StreamedModel:
    """A model whose large tensors are on torch's meta device until `fill` has made this rank's part."""

    def __init__(self, model: nn.Module, deferred: Deferred, pretrained: Pretrained | None) -> None:
        """`pretrained`: takes the place of what model() made."""
        self.model, self._deferred, self._pretrained = model, deferred, pretrained
        self._places: dict[str, tuple[Unmade, torch.Tensor]] = {}  # with the tensor before it was cut
        for name, tensor in named(model):
            if (place := deferred.place(tensor)) is not None:
                self._places[name] = place, tensor
        if pretrained is not None:
            pretrained.fill(model)

    @classmethod
    def of(cls, task: Task, run_seed: int, device: torch.device) -> StreamedModel | None:
        """The task's model; None where model() asks for what its large tensors hold: build it whole."""
        deferred = Deferred()
        try:
            model = called_model(task, run_seed, device, deferred)
            deferred.check()
            found = cls(model, deferred, Pretrained.of(task, model))
        except (TaskError, ModelChanged):
            return None
        lost = [name for name, t in named(model) if t.is_meta and name not in found._places]
        return None if lost else found

    def fill(self, device: torch.device, *, offloaded: bool) -> int:
        """Make this rank's part of each tensor, once the model is sharded. `offloaded`: shards stay in
        memory. The digest of all that was made, the same on all ranks."""
        give_back()
        tensors, digest = dict(named(self.model)), Digest()
        for name in self._places:
            target = tensors[name]
            part = self._part(name, target, device, digest, offloaded=offloaded)
            if isinstance(target, nn.Parameter):
                part = nn.Parameter(part, requires_grad=target.requires_grad)
            # All modules that have it still do.
            torch.utils.swap_tensors(target, part)  # type: ignore[no-untyped-call]
            give_back()
        return seed_of(digest.hexdigest())

    def _part(
        self, name: str, target: torch.Tensor, device: torch.device, digest: Digest, *, offloaded: bool
    ) -> torch.Tensor:
        place, before = self._places[name]
        whole = self._pretrained.read(before) if self._pretrained is not None else None
        if whole is None:
            whole = self._deferred.make(place)
        digest.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return shard(whole, target, device, offloaded=offloaded)


def named(model: nn.Module) -> chain[tuple[str, torch.Tensor]]:
    """Parameters and buffers, also those that are not saved, each once."""
    return chain(model.named_parameters(), model.named_buffers())


def shard(
    whole: torch.Tensor, target: torch.Tensor, device: torch.device, *, offloaded: bool
) -> torch.Tensor:
    """This rank's part of a tensor, in memory of its own, laid out as `target`."""
    if not is_dtensor(target):
        return whole.to(device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    source = distribute_tensor(whole.to(device), target.device_mesh, target.placements, src_data_rank=None)
    found = torch.empty_like(target, device="cpu" if offloaded else device)
    local(found).copy_(local(source))
    return found
