"""All that a run on a mesh needs to go on: one object, saved and loaded in any mesh.

Random numbers are no part of it: every step is seeded anew from (run, step, rank of the data), so a
resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import nn

from ...schema import named_state, unique_tensors
from ..batches import Batch
from ..optimizers import make_slots
from ..precision import LossScale


class Data(Protocol):
    """The batches of one data-parallel rank, step by step. Made with (rank, ranks) of the data.

    What all ranks take together in a step does not depend on how many ranks there are, and `state_dict` is
    the same on every rank: so a run goes on in another world with no example skipped or seen twice.
    """

    def take(self) -> list[tuple[Batch | None, int]]:
        """The batches of the next optimizer step: this rank's share of each, None where it has none, and
        how many examples all ranks' shares hold together. The last step of an epoch may have fewer."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next take() begins: plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, whatever was taken before."""


class IslandsState(Protocol):
    """What islands share, and how far they are with it."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """By names that hold in any mesh; they change in place."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and tensors that change in place, of this island."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class FoundSoFar(Protocol):
    """What the round under way has found so far."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on each rank of an island; all of them call it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class State:
    """Model, optimizer, loss scale, place in the data, the outer optimizer's state, the steps taken,
    what the round has found and what the last one had.

    A torch.distributed.checkpoint.stateful.Stateful: tensors of `state_dict` are DTensors where a mesh
    shards them, and every key is the same whatever the mesh, so dcp.save from one and dcp.load into another
    reshard. dcp.load writes into the tensors that state_dict() gave; load_state_dict() then takes the rest.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        data: Data,
        outer: IslandsState | None = None,
        island: int | None = None,
        loss_scale: LossScale | None = None,
        meter: FoundSoFar | None = None,
    ) -> None:
        """`parts`: the model, or this rank's stages of it; names in them are those of the whole model.
        `island`: which one this rank is of, where islands train apart: each then keeps its own."""
        self.parts, self.optimizer, self.data = list(parts), optimizer, data
        self.outer, self.loss_scale = outer, loss_scale or LossScale("fp32")
        self.meter = meter
        self._shared = outer.tensors() if outer is not None else {}
        self._own = "" if island is None else f"island-{island}"
        self.step = 0  # optimizer steps taken
        self.round = 0  # rounds done
        self.begun = 0  # the steps taken when the present round began
        self.record: dict[str, Any] = {}  # of the last round, as RunStore.commit takes it
        self._made: object = None  # the optimizer that has all its slots

    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "loss_scale", "data", "step", "begun", "outer", "measured"}, of an island
        under its name, and {"shared": what islands share, "round", "record"}."""
        self._init_optimizer()
        own = {
            "model": self.model(),
            "optimizer": self._slots(),
            "loss_scale": self.loss_scale.state_dict(),
            "data": self.data.state_dict(),
            "step": self.step,
            "begun": self.begun,
            "outer": {} if self.outer is None else self.outer.state_dict(),
            "measured": {} if self.meter is None else self.meter.state_dict(),
        }
        record = msgspec.json.encode(self.record).decode()  # as text: which entries it has is its own affair
        shared = {"shared": self._shared, "round": self.round, "record": record}
        return shared | ({self._own: own} if self._own else own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Tensors are copied into ours (nothing is copied where they are ours already)."""
        own = state[self._own] if self._own else state
        _copy(self.model(), own["model"])
        self._init_optimizer()
        _copy(self._slots(), own["optimizer"])
        _copy(self._shared, state["shared"])
        if self.outer is not None:
            self.outer.load_state_dict(own["outer"])
        self.loss_scale.load_state_dict(own["loss_scale"])
        self.data.load_state_dict(dict(own["data"]))
        if self.meter is not None:
            self.meter.load_state_dict(own["measured"])
        self.record = msgspec.json.decode(state["record"])
        self.step, self.begun, self.round = int(own["step"]), int(own["begun"]), int(state["round"])

    def model(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers of the parts on this rank, by the whole model's names."""
        return {name: t.detach() for part in self.parts for name, t in named_state(part)}

    def _names(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from ((n, t) for n, t in unique_tensors(part).items() if isinstance(t, nn.Parameter))

    def _slots(self) -> dict[str, torch.Tensor]:
        """What the optimizer keeps of each parameter, as "<parameter>/<slot>"."""
        optimizer = cast(torch.optim.Optimizer, getattr(self.optimizer, "optim", self.optimizer))  # ZeRO-1
        kept = optimizer.state
        return {
            f"{name}/{slot}": value
            for name, parameter in self._names()
            for slot, value in sorted(kept.get(parameter, {}).items())
            if isinstance(value, torch.Tensor)
        }

    def _init_optimizer(self) -> None:
        """An optimizer makes its slots in its first step of a parameter, and a checkpoint has all of them."""
        optimizer = cast(torch.optim.Optimizer, getattr(self.optimizer, "optim", self.optimizer))
        if self._made is not optimizer and (optimizer.state or not self.step):
            self._made = optimizer
            make_slots(optimizer)


def no_optimizer() -> torch.optim.Optimizer:
    """One without state, for a run whose rounds each make their own."""
    return torch.optim.SGD([torch.zeros(1)], lr=0.0)


def _copy(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in ours.items():
            if tensor is not theirs[name]:
                tensor.copy_(theirs[name])
