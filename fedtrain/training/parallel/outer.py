"""Between islands: what they moved is averaged, and a strategy steps on the mean, each rank on its shards.

A piece of the model at a time, if wished (Streaming DiLoCo, Douillard et al. 2025): fragment f of F comes
back when a share (f + 1) / F of a round's steps is done, having gone out `overlap` steps before, and an
island then keeps a share `mix` of its own weights. With one fragment, no overlap and no mix this is DiLoCo,
or local SGD with any strategy (Stich 2019); with rounds of one step and FedAvg it is data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...arena import Arena, narrow_into, widened
from ...schema import Schema
from ..engine import Number
from ..mesh import AXES, Mesh
from .engine import MeshEngine

States = dict[str, torch.Tensor]
Advance = Callable[[Arena, States, Arena], tuple[Arena, States]]  # strategies.server_step of one strategy
BETWEEN = ("dp_replicate",)  # the axis along which islands lie


@dataclass
class Fragment:
    """Some tensors: as all islands had them after their last exchange, and the strategy's state."""

    schema: Schema
    shared: Arena
    state: States
    mean: Arena  # what came back of the exchange under way
    weight: Number = 0.0  # of what this rank has trained on since
    examples: int = 0  # that the island has
    sent: bool = False  # in this round
    aloft: bool = False  # between being sent and landing
    flight: Flight | None = None  # as long as it may not have come back


@dataclass
class Flight:
    """An exchange under way."""

    sums: list[torch.Tensor]
    works: list[Any]


class Outer:
    """The exchange between islands. Every rank calls each method after the same step."""

    def __init__(
        self,
        engine: MeshEngine,
        mesh: Mesh,
        advance: Advance,
        begin: Callable[[Arena], States],
        *,
        size: Callable[[], int],
        fragments: int = 1,
        overlap: int = 0,
        mix: float = 0.0,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        """`advance` and `begin`: a strategy's server_step and first state. They see the rank's shards, so the
        strategy must be elementwise. `size`: how many examples the island has. `meet`: called before islands
        wait for each other; may raise, and nothing was sent then."""
        self.engine, self.mesh, self.advance, self.size, self.meet = engine, mesh, advance, size, meet
        self.overlap, self.mix = overlap, mix
        now = engine.shards()
        self.fragments = []
        for schema in split(now.schema, fragments):
            shared = Arena.zeros(schema, str(mesh.device))
            copy_named(now, shared)
            mean = Arena.zeros(schema, str(mesh.device))
            self.fragments.append(Fragment(schema, shared, begin(shared), mean))

    def after_step(self, step: int, steps: int | None, weight: Number, examples: int) -> None:
        """`step` of a round's `steps` (None: nobody knows) is done, 1 first. It saw so many `examples` in
        this island, of which this rank's weighed `weight`."""
        for fragment in self.fragments:
            fragment.weight = fragment.weight + weight
            fragment.examples += examples
        self.catch_up(step, steps)

    def catch_up(self, step: int, steps: int | None) -> None:
        """Send and land what is due after that step and was not yet; a resumed round begins with it."""
        for index, fragment in enumerate(self.fragments):
            if steps is None:
                continue
            due = max(1, steps * (index + 1) // len(self.fragments))
            if step >= max(1, due - self.overlap) and not fragment.sent:
                self._send(fragment)
            if step >= due and fragment.aloft:
                self._land(fragment)

    def end_round(self) -> None:
        """After a round's last step: what has not been exchanged in it is now."""
        self.meet()
        for fragment in self.fragments:
            if not fragment.sent:
                self._send(fragment)
            if fragment.aloft:
                self._land(fragment)
        for fragment in self.fragments:
            fragment.sent = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within it, the model is what the islands share; afterwards this island's own again."""
        own = self.engine.shards()
        self.engine.load_shards(self._shared(own))
        yield
        self.engine.load_shards(own)

    def tensors(self) -> States:
        """What belongs in a checkpoint, by names that hold in any mesh; they change in place."""
        found: States = {}
        for fragment in self.fragments:
            kept = {"shared": fragment.shared} | ({"mean": fragment.mean} if self.overlap else {})
            for what, arena in kept.items():
                for name, view in arena.views().items():
                    found[f"{what}/{name}"] = self.engine.as_shard(name, view)
            for name, tensor in fragment.state.items():
                for owner, piece in self._pieces(fragment.schema, tensor):
                    found[f"{name}/{owner}"] = self.engine.as_shard(owner, piece)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The rest of it: plain numbers, of this island. What is under way has come back afterwards."""
        for fragment in self.fragments:
            self._receive(fragment)
        return {
            "weight": [self.engine.over_ranks(fragment.weight) for fragment in self.fragments],
            "examples": [fragment.examples for fragment in self.fragments],
            "sent": [fragment.sent for fragment in self.fragments],
            "aloft": [fragment.aloft for fragment in self.fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """In any mesh: what the island's ranks had trained on is the first one's now."""
        first = not any(self.mesh.at[axis] for axis in AXES if axis not in (*BETWEEN, "tp"))
        for index, fragment in enumerate(self.fragments):
            fragment.weight = float(state["weight"][index]) if first else 0.0
            fragment.examples = int(state["examples"][index])
            fragment.sent, fragment.aloft = bool(state["sent"][index]), bool(state["aloft"][index])
            fragment.flight = None

    def _pieces(self, schema: Schema, state: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """A strategy's vector over all trained coordinates, as one tensor for each parameter."""
        at = 0
        for spec in schema.tensors:
            if spec.trained:
                yield spec.name, state[at : at + spec.numel].view(spec.shape)
                at += spec.numel

    def _shared(self, like: Arena) -> Arena:
        whole = like.load()
        for fragment in self.fragments:
            copy_named(fragment.shared, whole)
        return whole

    def begin_anew(self) -> None:
        """The model was replaced: from here on that is what the islands share."""
        now = self.engine.shards()
        for fragment in self.fragments:
            copy_named(now, fragment.shared)

    def _send(self, fragment: Fragment) -> None:
        """What the island moved, weighted by its examples (or tokens), as a site's update is."""
        self.meet()
        delta = Arena.zeros(fragment.schema, str(self.mesh.device))
        copy_named(self.engine.shards(), delta)
        mine = self.size() * self.engine.over_ranks(fragment.weight) / max(1, fragment.examples)
        total = torch.tensor(mine, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.islands > 1:
            self.mesh.sum(total, BETWEEN)
        share = mine / float(total) if float(total) else 0.0
        fragment.weight, fragment.examples, fragment.sent, fragment.aloft = 0.0, 0, True, True
        sums, works = [], []
        group = self.mesh.group(BETWEEN) if self.mesh.islands > 1 else None
        for section in fragment.schema.moving:
            moved = widened(delta.flat(section)) - widened(fragment.shared.flat(section))
            moved.mul_(share)
            if group is not None:
                works.append(dist.all_reduce(moved, group=group, async_op=True))
            sums.append(moved)
        fragment.flight = Flight(sums, works)

    def _receive(self, fragment: Fragment) -> None:
        if fragment.flight is None:
            return
        for work in fragment.flight.works:
            work.wait()
        for section, summed in zip(fragment.schema.moving, fragment.flight.sums, strict=True):
            narrow_into(fragment.mean.flat(section), summed)
        fragment.flight = None

    def _land(self, fragment: Fragment) -> None:
        """Step on the mean; the island takes the new weights, but for `mix` of its own."""
        self._receive(fragment)
        fragment.aloft = False
        new, state = self.advance(fragment.shared, fragment.state, fragment.mean)
        fragment.shared.copy_(new)  # in place: a checkpoint names these tensors
        for name, tensor in state.items():
            fragment.state[name].copy_(tensor)
        own = self.engine.shards()
        mine, views = own.views(), fragment.shared.views()
        for name, view in views.items():
            if self.mix and view.is_floating_point():
                mine[name].lerp_(view, 1 - self.mix)
            else:
                mine[name].copy_(view)
        self.engine.load_shards(own)


def split(schema: Schema, parts: int) -> list[Schema]:
    """Runs of tensors of about the same size, in order."""
    if parts <= 1:
        return [schema]
    total, seen = sum(t.numel for t in schema.tensors), 0
    groups: list[list[Any]] = [[] for _ in range(parts)]
    for spec in schema.tensors:
        groups[min(parts - 1, seen * parts // max(1, total))].append(spec)
        seen += spec.numel
    return [Schema(tuple(group)) for group in groups if group]


def copy_named(source: Arena, target: Arena) -> None:
    """The tensors that both have."""
    theirs = target.views()
    for name, view in source.views().items():
        if name in theirs:
            theirs[name].copy_(view)
