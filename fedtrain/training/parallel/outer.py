"""Between islands: what they moved is averaged, and a strategy steps on the mean, each rank on its shards.

A piece of the model at a time, if wished (Streaming DiLoCo, Douillard et al. 2025): fragment f of F comes
back when a share (f + 1) / F of a round's steps is done, having gone out `overlap` steps before, and an
island then keeps a share `mix` of its own weights. With one fragment, no overlap and no mix this is DiLoCo,
or local SGD with any strategy (Stich 2019); with rounds of one step and FedAvg it is data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...update import FLOATS, Arena, Schema
from ..local import MOVES
from ..mesh import Mesh
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
    weight: float = 0.0  # of what this rank has trained on since
    examples: int = 0  # that the island has
    sent: bool = False  # in this round
    flight: Flight | None = None


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
    ) -> None:
        """`advance` and `begin`: a strategy's server_step and state_init. They see this rank's shards, so the
        strategy must be elementwise. `size`: how many examples the island has."""
        self.engine, self.mesh, self.advance, self.size = engine, mesh, advance, size
        self.overlap, self.mix = overlap, mix
        now = engine.shards()
        self.fragments = []
        for schema in split(now.schema, fragments):
            shared = Arena.zeros(schema, str(mesh.device))
            copy_named(now, shared)
            self.fragments.append(Fragment(schema, shared, begin(shared)))

    def after_step(self, step: int, steps: int | None, weight: float, examples: int) -> None:
        """`step` of a round's `steps` (None: nobody knows) is done, 1 first. It saw so many `examples` in
        this island, of which this rank's weighed `weight`."""
        for index, fragment in enumerate(self.fragments):
            fragment.weight += weight
            fragment.examples += examples
            if steps is None:
                continue
            due = max(1, steps * (index + 1) // len(self.fragments))
            if step == max(1, due - self.overlap):
                self._send(fragment)
            if step == due:
                self._land(fragment)

    def end_round(self) -> None:
        """After a round's last step: what has not been exchanged in it is now."""
        for fragment in self.fragments:
            if not fragment.sent:
                self._send(fragment)
            if fragment.flight is not None:
                self._land(fragment)
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
            for name, view in fragment.shared.views().items():
                found[f"shared/{name}"] = self.engine.as_shard(name, view)
            for name, tensor in fragment.state.items():
                for owner, piece in self._pieces(fragment.schema, name, tensor):
                    found[f"{name}/{owner}"] = self.engine.as_shard(owner, piece)
        return found

    def _pieces(self, schema: Schema, name: str, state: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """A strategy's vector over all trained coordinates of a dtype, as one tensor for each parameter."""
        at = 0
        for spec in schema.tensors:
            if spec.trained and spec.dtype == name.partition("/")[0]:
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
        delta = Arena.zeros(fragment.schema, str(self.mesh.device))
        copy_named(self.engine.shards(), delta)
        mine = self.size() * self.engine.over_ranks(fragment.weight) / max(1, fragment.examples)
        total = torch.tensor(mine, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.islands > 1:
            self.mesh.sum(total, BETWEEN)
        share = mine / float(total) if float(total) else 0.0
        fragment.weight, fragment.examples, fragment.sent = 0.0, 0, True
        sums, works = [], []
        group = self.mesh.group(BETWEEN) if self.mesh.islands > 1 else None
        for section in fragment.schema.sections:
            if section.dtype not in MOVES:
                continue
            flat = delta.flat(section)
            wide = flat.dtype if section.dtype in ("float32", "float64") else torch.float32
            wide = torch.float64 if section.dtype not in FLOATS else wide
            moved = (flat.to(wide) - fragment.shared.flat(section).to(wide)).mul_(share)
            if group is not None:
                works.append(dist.all_reduce(moved, group=group, async_op=True))
            sums.append(moved)
        fragment.flight = Flight(sums, works)

    def _land(self, fragment: Fragment) -> None:
        """Step on the mean; the island takes the new weights, but for `mix` of its own."""
        assert fragment.flight is not None, "nothing is under way"
        for work in fragment.flight.works:
            work.wait()
        mean = Arena.zeros(fragment.schema, str(self.mesh.device))
        moving = (s for s in fragment.schema.sections if s.dtype in MOVES)
        for section, summed in zip(moving, fragment.flight.sums, strict=True):
            whole = summed if section.dtype in FLOATS else summed.round_()
            mean.flat(section).copy_(whole)
        fragment.flight = None
        new, state = self.advance(fragment.shared, fragment.state, mean)
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
