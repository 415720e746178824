"""Arenas: a model in one contiguous block of bytes, in memory or in a file.

All trained float32 coordinates are one slice of an arena, so a strategy steps on them as one vector, and an
optimizer may too. What lies where is said by the arena's schema (schema.py).

This file imports torch only where a tensor is really asked for: a site's supervisor process moves arenas as
files and never loads torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .digest import Digest, digest_of
from .errors import BadUpdate
from .malloc import blocks
from .schema import ITEM_BYTES, Schema, Section, TensorSpec, unique_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

PATCHES = 16  # at most, that lead to a model one after the other


class AnyArena:
    """A model's bytes, wherever they lie. `chunk` is how aggregation reads them."""

    schema: Schema
    sent_bytes: int | None = None  # as which it travelled, where it was compressed
    patches: tuple[Patch, ...] = ()  # ways to it from the models before it, the nearest last

    def _lacks(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {what}")

    @property
    def digest(self) -> str:
        """The bytes' name, see Digest."""
        raise self._lacks("digest")

    def chunk(self, section: Section, start: int, stop: int) -> torch.Tensor:
        """Coordinates [start, stop) of one section, 1-D, read-only, and only until the next call."""
        raise self._lacks("chunk")

    def span(self, section: Section, start: int, stop: int, room: memoryview | None = None) -> memoryview:
        """The bytes of the same coordinates, for those who load no torch; only until the next call.

        `room`: where bytes that must be read are put, at least as many. So threads can read at once.
        """
        raise self._lacks("span")

    @property
    def payload(self) -> memoryview:
        """All bytes, of an arena that has them in memory."""
        raise self._lacks("payload")

    def load(self) -> Arena:
        """A copy in memory, the caller's own to change."""
        raise self._lacks("load")


@dataclass(frozen=True)
class Patch:
    """What makes the next model out of one that whoever fetches may have."""

    base: str  # the digest of that one
    arena: AnyArena  # a compressed difference, see compression.DeltaCodec


def patches_to(weights: AnyArena, has: Callable[[str], bool]) -> tuple[Patch, ...]:
    """The fewest patches that lead to these weights from a model that is there; none when none do."""
    for at in reversed(range(len(weights.patches))):
        if has(weights.patches[at].base):
            return weights.patches[at:]
    return ()


class Arena(AnyArena):
    """A model's bytes in memory: `data` is a torch uint8 tensor [schema.nbytes]."""

    def __init__(self, schema: Schema, data: torch.Tensor) -> None:
        assert data.numel() == schema.nbytes, (data.numel(), schema.nbytes)
        self.schema, self.data = schema, data
        self._digest: str | None = None

    @classmethod
    def zeros(cls, schema: Schema, device: str = "cpu") -> Arena:
        import torch

        if device == "cpu" and blocks.most:
            return cls(schema, blocks.tensor(schema.nbytes).zero_())
        return cls(schema, torch.zeros(schema.nbytes, dtype=torch.uint8, device=device))

    @classmethod
    def empty(cls, schema: Schema) -> Arena:
        """One to be written whole: its numbers may be anything. The padding is zero, as everywhere."""
        data, end = blocks.tensor(schema.nbytes), 0
        for section in schema.sections:
            data[end : section.offset].zero_()
            end = section.offset + section.nbytes
        data[end:].zero_()
        return cls(schema, data)

    @classmethod
    def wrap(cls, schema: Schema, buffer: Any) -> Arena:
        """Look at bytes that somebody else owns (a memory map, a shared block), without a copy."""
        import torch

        if schema.nbytes == 0:
            return cls.zeros(schema)
        return cls(schema, torch.frombuffer(buffer, dtype=torch.uint8, count=schema.nbytes))

    @classmethod
    def of(cls, model: nn.Module, *, frozen: bool = False, without: Collection[str] = ()) -> Arena:
        """A copy of a module's tensors, see Schema.of."""
        return cls._filled(Schema.of(model, frozen=frozen, without=without), unique_tensors(model))

    @classmethod
    def pack(cls, tensors: Mapping[str, torch.Tensor]) -> Arena:
        """A copy of named tensors that are no module's, such as a strategy's state."""
        return cls._filled(Schema.of_tensors(tensors), tensors)

    @classmethod
    def _filled(cls, schema: Schema, tensors: Mapping[str, torch.Tensor]) -> Arena:
        arena = cls.zeros(schema)
        for section in schema.sections:  # one split is cheaper than views of thousands
            own = [s for s in schema.tensors if s.dtype == section.dtype]
            pieces = arena.flat(section).split_with_sizes([s.numel for s in own])
            for spec, piece in zip(own, pieces, strict=True):
                piece.copy_(tensors[spec.name].detach().reshape(-1))
        return arena

    def flat(self, section: Section) -> torch.Tensor:
        """One section as a 1-D tensor of its dtype; a view."""
        import torch

        return self.data[section.offset : section.offset + section.nbytes].view(getattr(torch, section.dtype))

    def chunk(self, section: Section, start: int, stop: int) -> torch.Tensor:
        flat = self.flat(section)
        return flat if stop - start == section.numel else flat[start:stop]

    def trained(self) -> dict[str, torch.Tensor]:
        """dtype -> all trained coordinates of that dtype, 1-D; views, no copy."""
        found = [(s, self.flat(s)) for s in self.schema.sections if s.trained]
        return {s.dtype: flat if s.trained == s.numel else flat[: s.trained] for s, flat in found}

    def others(self) -> dict[str, torch.Tensor]:
        """dtype -> all that moves without being trained (buffers, integers), 1-D; views, no copy."""
        other = [s for s in self.schema.sections if s.trained < s.numel and s.moves]
        return {s.dtype: self.flat(s)[s.trained :] for s in other}

    @property
    def model(self) -> Arena:
        """The same without extras; a view."""
        own = self.schema.model
        return self if own is self.schema else Arena(own, self.data[: own.nbytes])

    def views(self) -> dict[str, torch.Tensor]:
        """Every tensor of the model by name, in its shape; views, no copy."""
        return self._views(self.schema.model.tensors)

    def extras(self) -> dict[str, torch.Tensor]:
        """Every tensor of the strategy's by name; views, no copy."""
        return self._views(self.schema.extras)

    def _views(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        flat = {s: self.flat(s) for s in self.schema.sections}
        places = ((spec, *self.schema.places[spec.name]) for spec in specs)
        return {s.name: flat[section][start:stop].view(s.shape) for s, section, start, stop in places}

    def bind(self, model: nn.Module) -> None:
        """Make the module's tensors of this schema views of this arena: from here on, training writes here.

        The module keeps its Parameter objects (optimizers and tied weights stay valid) and takes the
        arena's present values.
        """
        tensors = unique_tensors(model)
        for name, view in self.views().items():
            tensors[name].data = view

    def to(self, device: torch.device) -> Arena:
        """The same on a device; itself where it is there."""
        return self if self.data.device == device else Arena(self.schema, self.data.to(device))

    def copy_(self, other: Arena) -> Arena:
        self.data.copy_(other.data)
        self.changed()
        return self

    def changed(self) -> None:
        """Whoever writes into an arena says so: its digest is another one now."""
        self._digest = None

    def span(self, section: Section, start: int, stop: int, room: memoryview | None = None) -> memoryview:
        size = ITEM_BYTES[section.dtype]
        return self.payload[section.offset + start * size : section.offset + stop * size]

    def load(self) -> Arena:
        return Arena(self.schema, self.data.clone())

    @property
    def payload(self) -> memoryview:
        """The bytes themselves, for a socket or a file; no copy (CPU only)."""
        return memoryview(self.data.numpy().data)

    @property
    def digest(self) -> str:
        # An arena is written once (by training or a strategy's step) and then only read, so this is kept.
        if self._digest is None:
            self._digest = digest_of(self.payload)
        return self._digest


class Slab:
    """Arenas of one schema, one after the other in memory: uint8 [rows, schema.nbytes].

    Thousands of small models are checked and folded a slab at a time; each is an arena all the same.
    """

    def __init__(self, schema: Schema, data: torch.Tensor) -> None:
        assert data.shape[1:] == (schema.nbytes,), (data.shape, schema.nbytes)
        self.schema, self.data, self.rows = schema, data, len(data)

    def arenas(self) -> list[Row]:
        """The rows, each of which keeps the slab; nothing here keeps them."""
        return [Row(self, i) for i in range(self.rows)]

    def flat(self, section: Section) -> torch.Tensor:
        """One section of all rows, [rows, numel] of its dtype; a view."""
        import torch

        flat = self.data[:, section.offset : section.offset + section.nbytes]
        return flat.view(getattr(torch, section.dtype))

    @cached_property
    def norms(self) -> list[float]:
        """The L2 norm of each row's model over its floats; NaN or Inf where a value is, or where float32
        overflows."""
        return self._norms(self.schema.model.sections)

    @cached_property
    def extra_norms(self) -> list[float]:
        """The same of what comes after the model."""
        return self._norms(self.schema.sections[len(self.schema.model.sections) :])

    def _norms(self, sections: Sequence[Section]) -> list[float]:
        import torch

        floats = [self.flat(s) for s in sections if s.floating]
        squares = sum(torch.linalg.vector_norm(rows, dim=1).double().square() for rows in floats)
        norms: list[float] = squares.sqrt().tolist() if floats else [0.0] * self.rows
        return norms


class Row(Arena):
    """An arena in a slab."""

    def __init__(self, slab: Slab, index: int) -> None:
        self.schema, self._digest = slab.schema, None
        self.slab, self.index = slab, index

    @cached_property
    def data(self) -> torch.Tensor:  # type: ignore[override]  # whole slabs are looked at far more often
        return self.slab.data[self.index]

    @property
    def last(self) -> bool:
        return self.index == self.slab.rows - 1

    def follows(self, other: AnyArena) -> bool:
        return isinstance(other, Row) and other.slab is self.slab and other.index == self.index - 1


class ArenaFile(AnyArena):
    """A model's bytes in a file, read chunk by chunk, so that a hundred of them need no memory."""

    def __init__(self, schema: Schema, path: str | Path, digest: str = "") -> None:
        self.schema, self.file, self._digest = schema, os.fspath(path), digest
        self._buffer = bytearray()

    @property
    def path(self) -> Path:
        """For looks at the file itself. A Path leaves its name in Python's table of names for ever, or a hole
        where it was, and a run has names without end: what is done in each round uses `file`."""
        return Path(self.file)

    @property
    def digest(self) -> str:
        if not self._digest:
            digest = Digest()
            with open(self.file, "rb", buffering=0, opener=no_link) as f:
                while block := f.read(1 << 20):
                    digest.update(block)
            self._digest = digest.hexdigest()
        return self._digest

    def chunk(self, section: Section, start: int, stop: int) -> torch.Tensor:
        import torch

        if stop <= start:
            return torch.empty(0, dtype=getattr(torch, section.dtype))
        return torch.frombuffer(self.span(section, start, stop), dtype=getattr(torch, section.dtype))

    def span(self, section: Section, start: int, stop: int, room: memoryview | None = None) -> memoryview:
        size = ITEM_BYTES[section.dtype]
        nbytes = (stop - start) * size
        if room is None:
            if len(self._buffer) < nbytes:  # kept: a fresh one costs more in page faults than the read
                self._buffer = bytearray(nbytes)
            room = memoryview(self._buffer)
        view = room[:nbytes]
        with open(self.file, "rb", buffering=0, opener=no_link) as f:
            got = os.preadv(f.fileno(), [view], section.offset + start * size)
        if got != nbytes:
            raise BadUpdate(
                f"{os.path.basename(self.file)}: {got} bytes at coordinate {start}, expected {nbytes}"
            )
        return view

    def load(self) -> Arena:
        data = blocks.tensor(self.schema.nbytes)
        with open(self.file, "rb", buffering=0, opener=no_link) as f:
            view, got = data.numpy().data, 0
            while got < len(view) and (n := f.readinto(view[got:])):
                got += n
        if got != self.schema.nbytes:
            raise BadUpdate(f"{self.path.name}: {got} bytes, expected {self.schema.nbytes}")
        return Arena(self.schema, data)


def no_link(path: str, flags: int) -> int:
    """Open a file, and no link that a task's code left in place of it; of /dev/fd all are links."""
    own = 0 if path.startswith("/dev/fd/") else os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags | own)


class Frozen(msgspec.Struct, frozen=True):
    """What names a model's frozen parameters; the default is that of a model without any."""

    schema: Schema = Schema(())
    digest: str = ""  # of their arena
    sha256: str = ""  # of the same bytes, for what has to bind

    @classmethod
    def of(cls, arena: Arena) -> Frozen:
        """Of these bytes, on the CPU."""
        if not arena.schema.tensors:
            return cls()
        return cls(arena.schema, arena.digest, hashlib.sha256(arena.payload).hexdigest())


def subtract(local: Arena, start: Arena, out: Arena) -> None:
    """out = local - start, on whatever device each of them lies; 0 for what has no differences."""
    import torch

    for section in local.schema.sections:
        now, delta = local.flat(section), out.flat(section)
        if not section.moves:
            delta.zero_()
        elif delta.device == now.device:
            torch.sub(now, start.flat(section), out=delta)
        else:
            delta.copy_(now - start.flat(section))
    out.changed()


def widened(vector: torch.Tensor) -> torch.Tensor:
    """The vector itself where it is float32 or float64; 16-bit floats as float32, integers as float64."""
    if not vector.is_floating_point():
        return vector.double()
    return vector if vector.element_size() >= 4 else vector.float()


def narrow_into(out: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor of a narrower dtype; integers become the nearest, halves the even one."""
    out.copy_(values if out.is_floating_point() else values.round())


def joined(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One vector of the trained coordinates of each dtype: those of the only dtype themselves where it is
    float32 or float64; else new ones, of float64 if one of the dtypes is."""
    import torch

    wide = [widened(part) for part in parts.values()]
    if len(wide) == 1:
        return wide[0]
    widest = torch.float64 if any(part.dtype == torch.float64 for part in wide) else torch.float32
    return torch.cat([part.to(widest) for part in wide]) if wide else torch.zeros(0)


def split_into(parts: Mapping[str, torch.Tensor], vector: torch.Tensor) -> None:
    """Write the values of a vector of `joined` back, rounded once to each dtype."""
    at = 0
    for part in parts.values():
        if part.data_ptr() != vector.data_ptr() or part.dtype != vector.dtype:
            part.copy_(vector[at : at + len(part)])
        at += len(part)
