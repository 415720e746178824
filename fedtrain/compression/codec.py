"""Model differences in fewer bytes: a compressor encodes the trained coordinates, the rest stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..arena import AnyArena, Arena
from ..errors import BadUpdate
from ..schema import Schema, Section, TensorSpec
from .base import Compressor, sized

if TYPE_CHECKING:
    from .base import State


@dataclass(frozen=True)
class DeltaCodec:
    """Encodes arenas of `schema` as arenas of the schema `coded`, which is sent and stored like any other.

    The trained coordinates of each dtype are one vector for the compressor, as float32. Buffers and integers
    are copied whole. State names begin with the dtype, as in "float32/residual".
    """

    schema: Schema
    compressor: Compressor

    @cached_property
    def coded(self) -> Schema:
        """The schema of an encoded arena: for each dtype the payload's bytes, and the rest."""
        specs = [
            TensorSpec(f"{section.dtype}/payload", (compressor.bytes_for(section.trained),), "uint8", False)
            for section, compressor in self._trained()
        ]
        specs += [
            TensorSpec(f"{section.dtype}/rest", (section.numel - at,), section.dtype, False)
            for section, at in self._rest()
        ]
        return Schema.ordered(specs)

    @property
    def stateful(self) -> bool:
        """Whether the compressor has a state, which the sender keeps from one call to the next."""
        return bool(self.compressor.init(0))

    def init(self) -> State:
        """The sender's state before the first call."""
        return {
            f"{section.dtype}/{name}": tensor
            for section, compressor in self._trained()
            for name, tensor in compressor.init(section.trained).items()
        }

    def encode(self, delta: Arena, seed: int, state: State, out: Arena | None = None) -> tuple[Arena, State]:
        """(the encoded arena, in `out` where given; the next state). `delta` and `state` are not changed.
        BadUpdate for NaN and Inf."""
        out = Arena.zeros(self.coded) if out is None else out
        views, after = out.views(), dict(state)
        for section, compressor in self._trained():
            own = f"{section.dtype}/"
            before = {name.removeprefix(own): t for name, t in state.items() if name.startswith(own)}
            vector = delta.flat(section)[: section.trained].float()
            payload, kept = compressor.encode(vector, seed, before)
            sized(payload, compressor, section.trained)
            views[f"{own}payload"].copy_(payload)
            after |= {own + name: tensor for name, tensor in kept.items()}
        for section, at in self._rest():
            views[f"{section.dtype}/rest"].copy_(delta.flat(section)[at:])
        out.changed()
        return out, after

    def decode(self, coded: AnyArena, seed: int) -> Arena:
        """The decoded difference, an approximation. BadUpdate for malformed bytes; nothing larger than the
        model is allocated for them."""
        if difference := self.coded.difference(coded.schema):
            raise BadUpdate(f"the compressed update does not fit the model: {difference}")
        views, out = coded.load().views(), Arena.zeros(self.schema)
        for section, compressor in self._trained():
            payload = views[f"{section.dtype}/payload"].clone()  # aligned in memory for its numbers
            vector, narrow = out.flat(section)[: section.trained], section.dtype != "float32"
            found = compressor.decode(payload, seed, section.trained, None if narrow else vector)
            if narrow:
                vector.copy_(found)
        for section, at in self._rest():
            out.flat(section)[at:].copy_(views[f"{section.dtype}/rest"])
        return out

    def _trained(self) -> Iterator[tuple[Section, Compressor]]:
        for section in self.schema.sections:
            if section.trained:
                shapes = [s.shape for s in self.schema.tensors if s.dtype == section.dtype and s.trained]
                yield section, self.compressor.shaped(shapes)

    def _rest(self) -> Iterator[tuple[Section, int]]:
        """(section, start) of the coordinates that are not compressed."""
        for section in self.schema.sections:
            if section.moves and section.trained < section.numel:
                yield section, section.trained
