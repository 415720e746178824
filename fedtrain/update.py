"""What travels between a site and whoever averages it: models as arenas, and the messages that carry them.

An **arena** is a model in one contiguous block of bytes. Inside it there is one section per dtype; inside
a section first the trained parameters, then buffers, each in state_dict order. So "all trained float32
coordinates" is one slice, a strategy steps on it as one vector, and an optimizer may too. The **schema**
says what lies where; its digest is agreed once, at joining.

Frozen parameters (requires_grad = False) lie in an arena of their own, which is made once, when a run
begins: they travel at most once, not every round.

This file imports torch only where a tensor is really asked for: a site's supervisor process moves
arenas as files and never loads torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import BadUpdate, ConfigError, TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn

SiteId = str
Sum = float | list[float]  # a number, or several of one kind, such as counts by class
Metrics = dict[str, tuple[Sum, float]]  # name -> (sum, count), so that sums over sites are exact

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATS = ("float64", "float32", "bfloat16", "float16")
ALIGN = 64  # bytes; each section starts on a cache line
MAX_TENSORS = 100_000
MAX_RANK = 16
PATCHES = 16  # at most, that lead to a model one after the other
MAX_SUMS = 65_536  # numbers in one evaluation, counts aside


class Digest:
    """The name of a model's bytes: 128 bits of AES-GCM's authenticator under a key that everybody knows.

    It finds truncated, mixed and damaged bytes at 6.5 GB/s, where SHA-256 takes the time of the transfer
    itself (1.5 GB/s). It is no commitment: whoever wants to can make two contents with one digest. On the
    way TLS guards the bytes, at rest each site has an inbox of its own; what must bind (a task's code, an
    exported model) has a SHA-256.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._mac: Any = Cipher(algorithms.AES(bytes(16)), modes.GCM(bytes(12))).encryptor()

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes; releases the GIL."""
        for at in range(0, len(data), 1 << 30):
            self._mac.authenticate_additional_data(data[at : at + (1 << 30)])

    def hexdigest(self) -> str:
        """32 hex digits; ends the digest."""
        self._mac.finalize()
        tag: bytes = self._mac.tag
        return tag.hex()


class PiecewiseDigest:
    """A Digest of bytes that threads write piece by piece, taken of those that are there already."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._end = data, 0  # of what is digested
        self._pieces: dict[int, int] = {}  # start -> stop of written ones beyond that
        self._idle = [Digest()]  # empty while somebody is at it; a list's pop and append are atomic

    def wrote(self, start: int, stop: int) -> None:
        """Bytes that will not change any more. Whoever brings the next one in line digests all that follow;
        nobody waits for that."""
        self._pieces[start] = stop
        while self._end in self._pieces:
            try:
                digest = self._idle.pop()
            except IndexError:
                return  # who has it looks again when it is done
            while (end := self._pieces.pop(self._end, 0)) > self._end:
                digest.update(self._data[self._end : end])
                self._end = end
            self._idle.append(digest)

    def hexdigest(self) -> str:
        """Of all bytes, when nobody writes any more; ends the digest."""
        digest = self._idle.pop()
        digest.update(self._data[self._end :])
        return digest.hexdigest()


def digest_of(data: bytes | memoryview) -> str:
    digest = Digest()
    digest.update(data)
    return digest.hexdigest()


def seed_of(*parts: object) -> int:
    """A 63-bit seed from what it is for, as in seed_of(run_seed, round, site): the same on every machine,
    whatever ran before it."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool  # a parameter with requires_grad: strategies step on it; buffers move by plain mean

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}{'' if self.trained else ' (not trained)'}"


@dataclass(frozen=True)
class Section:
    """All coordinates of one dtype: the trained ones first, then the others."""

    dtype: str
    offset: int  # bytes from the start of the arena
    numel: int
    trained: int  # coordinates; 0 unless `floating`

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATS

    @property
    def moves(self) -> bool:
        """Whether a round can change the values: booleans and bytes have no differences, so they stay."""
        return self.dtype not in ("bool", "uint8")


class Schema(msgspec.Struct, frozen=True, dict=True):
    """Names, shapes and dtypes of a model, in arena order. Two models agree when their digests do."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, model: nn.Module, *, frozen: bool = False) -> Schema:
        """The schema of a module: of what it trains and its buffers, or of its frozen parameters. Tied
        weights appear once, under their first name."""
        _check_state(model)
        specs = [
            TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
            for name, t in unique_tensors(model).items()
            if is_frozen(t) == frozen
        ]
        for spec in specs:
            if spec.dtype not in ITEM_BYTES:
                raise ConfigError(
                    f"{spec.name} has dtype {spec.dtype}, which cannot travel. "
                    f"Use one of {', '.join(ITEM_BYTES)}, or keep it out of state_dict (persistent=False)."
                )
        order = list(dict.fromkeys(s.dtype for s in specs))
        return cls(tuple(sorted(specs, key=lambda s: (order.index(s.dtype), not s.trained))))

    def check(self) -> None:
        """Refuse a schema off the wire that could not be a model, before anything is allocated."""
        if len(self.tensors) > MAX_TENSORS:
            raise BadUpdate(f"{len(self.tensors)} tensors, at most {MAX_TENSORS} are allowed")
        for s in self.tensors:
            if s.dtype not in ITEM_BYTES:
                raise BadUpdate(f"{s.name[:80]}: unknown dtype {s.dtype[:20]}")
            if len(s.shape) > MAX_RANK or any(d < 0 for d in s.shape):
                raise BadUpdate(f"{s.name[:80]}: impossible shape {s.shape[:MAX_RANK]}")

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        found: dict[str, list[TensorSpec]] = {}
        for s in self.tensors:
            found.setdefault(s.dtype, []).append(s)
        sections, offset = [], 0
        for dtype, specs in found.items():
            numel = sum(s.numel for s in specs)
            trained = sum(s.numel for s in specs if s.trained) if dtype in FLOATS else 0
            sections.append(Section(dtype, offset, numel, trained))
            offset += -(-numel * ITEM_BYTES[dtype] // ALIGN) * ALIGN
        return tuple(sections)

    @property
    def moving(self) -> list[Section]:
        """The sections that a round can change."""
        return [section for section in self.sections if section.moves]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arena, the padding between sections included."""
        return max((s.offset + -(-s.nbytes // ALIGN) * ALIGN for s in self.sections), default=0)

    @cached_property
    def numel(self) -> int:
        return sum(s.numel for s in self.tensors)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def difference(self, other: Schema) -> str | None:
        """The first thing in which `other` differs, for a person; None when they agree."""
        if self is other or self.digest == other.digest:
            return None
        mine, theirs = ({s.name: s for s in schema.tensors} for schema in (self, other))
        for name in sorted(mine.keys() - theirs.keys()):
            return f"{mine[name]} is missing there"
        for name in sorted(theirs.keys() - mine.keys()):
            return f"{theirs[name]} is not in the model here"
        for name, spec in mine.items():
            if spec != theirs[name]:
                return f"{spec} here is {theirs[name]} there"
        return "the same tensors stand in another order"


def _check_state(model: nn.Module) -> None:
    """ConfigError for state that can't lie in an arena."""
    from torch.nn.parameter import is_lazy

    for name, t in model.state_dict(keep_vars=True).items():
        if is_lazy(t):
            raise ConfigError(
                f"model(): {name} has no shape yet, as in nn.LazyLinear. Give the layer its sizes, or call "
                f"the model on one example before model() returns it."
            )
        if name.rpartition(".")[2] == "_extra_state":
            raise ConfigError(
                f"model(): {name} comes of get_extra_state(), and only parameters and buffers travel. Make "
                f"it a buffer (register_buffer), or leave get_extra_state() out."
            )


def unique_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """state_dict's tensors, in its order, each once."""
    seen: set[int] = set()
    found = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if id(t) not in seen:
            seen.add(id(t))
            found[name] = t
    return found


def is_frozen(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter that training leaves alone; buffers are not, they move."""
    from torch import nn

    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


class AnyArena:
    """A model's bytes, wherever they lie. `chunk` is how aggregation reads them."""

    schema: Schema
    sent_bytes: int | None = None  # as which it travelled, where it was compressed
    patches: tuple[Patch, ...] = ()  # ways to it from the models before it, the nearest last

    @property
    def digest(self) -> str:
        """The bytes' name, see Digest."""
        raise NotImplementedError("a subclass's")

    def chunk(self, section: Section, start: int, stop: int) -> torch.Tensor:
        """Coordinates [start, stop) of one section, 1-D, read-only, and only until the next call."""
        raise NotImplementedError("a subclass's")

    def span(self, section: Section, start: int, stop: int, room: memoryview | None = None) -> memoryview:
        """The bytes of the same coordinates, for those who load no torch; only until the next call.

        `room`: where bytes that must be read are put, at least as many. So threads can read at once.
        """
        raise NotImplementedError("a subclass's")

    @property
    def payload(self) -> memoryview:
        """All bytes, of an arena that has them in memory."""
        raise NotImplementedError("a subclass's")

    def load(self) -> Arena:
        """A copy in memory, the caller's own to change."""
        raise NotImplementedError("a subclass's")


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

        return cls(schema, torch.zeros(schema.nbytes, dtype=torch.uint8, device=device))

    @classmethod
    def empty(cls, schema: Schema) -> Arena:
        """One to be written whole: its numbers may be anything. The padding is zero, as everywhere."""
        import torch

        data, end = torch.empty(schema.nbytes, dtype=torch.uint8), 0
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
    def of(cls, model: nn.Module, *, frozen: bool = False) -> Arena:
        """A copy of what the module trains and its buffers, or of its frozen parameters."""
        import torch

        arena = cls.zeros(Schema.of(model, frozen=frozen))
        with torch.no_grad():
            views, tensors = arena.views(), unique_tensors(model)
            for name, view in views.items():
                view.copy_(tensors[name])
        return arena

    @classmethod
    def pack(cls, tensors: Mapping[str, torch.Tensor]) -> Arena:
        """A copy of named tensors that are no module's, such as a strategy's state."""
        specs = tuple(
            TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), False)
            for name, t in tensors.items()
        )
        order = list(dict.fromkeys(s.dtype for s in specs))
        arena = cls.zeros(Schema(tuple(sorted(specs, key=lambda s: order.index(s.dtype)))))
        for name, view in arena.views().items():
            view.copy_(tensors[name])
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
        return {s.dtype: self.flat(s)[: s.trained] for s in self.schema.sections if s.trained}

    def others(self) -> dict[str, torch.Tensor]:
        """dtype -> all that moves without being trained (buffers, integers), 1-D; views, no copy."""
        found = ((s, self.flat(s)[s.trained :]) for s in self.schema.sections if s.moves)
        return {section.dtype: vector for section, vector in found if len(vector)}

    def views(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, in its shape; views, no copy."""
        found, at = {}, {s.dtype: 0 for s in self.schema.sections}
        flat = {s.dtype: self.flat(s) for s in self.schema.sections}
        for spec in self.schema.tensors:
            start = at[spec.dtype]
            found[spec.name] = flat[spec.dtype][start : start + spec.numel].view(spec.shape)
            at[spec.dtype] = start + spec.numel
        return found

    def bind(self, model: nn.Module) -> None:
        """Make the module's tensors of this schema views of this arena: from here on, training writes here.

        The module keeps its Parameter objects (optimizers and tied weights stay valid) and takes the
        arena's present values.
        """
        tensors = unique_tensors(model)
        for name, view in self.views().items():
            tensors[name].data = view

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
        """Each row's L2 norm over its floats; NaN or Inf where a value is, or where float32 overflows."""
        import torch

        floats = [self.flat(s) for s in self.schema.sections if s.floating]
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

    def __init__(self, schema: Schema, path: Path, digest: str = "") -> None:
        self.schema, self.path, self._digest = schema, path, digest
        self._buffer = bytearray()

    @property
    def digest(self) -> str:
        if not self._digest:
            digest = Digest()
            with self.path.open("rb", buffering=0) as f:
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
        with self.path.open("rb", buffering=0) as f:
            got = os.preadv(f.fileno(), [view], section.offset + start * size)
        if got != nbytes:
            raise BadUpdate(f"{self.path.name}: {got} bytes at coordinate {start}, expected {nbytes}")
        return view

    def load(self) -> Arena:
        import torch

        data = torch.empty(self.schema.nbytes, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as f:
            view, got = data.numpy().data, 0
            while got < len(view) and (n := f.readinto(view[got:])):
                got += n
        if got != self.schema.nbytes:
            raise BadUpdate(f"{self.path.name}: {got} bytes, expected {self.schema.nbytes}")
        return Arena(self.schema, data)


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


def chunks(section: Section, size: int = 1 << 18) -> Iterator[tuple[int, int]]:
    """[start, stop) ranges that cover a section; the default keeps a few of them in a core's cache."""
    for start in range(0, section.numel, size):
        yield start, min(start + size, section.numel)


def chunks_of(schema: Schema, size: int = 1 << 20) -> Iterator[tuple[Section, int, int]]:
    """(section, start, stop) ranges that cover a whole model in its order, without the padding."""
    for section in schema.sections:
        for start, stop in chunks(section, size):
            yield section, start, stop


# --- Messages. An AnyArena in a message travels beside its header as bytes with a digest.


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what is exchanged. On the wire a message is its header; its arenas follow as bytes."""


class Request(Message, frozen=True, kw_only=True, tag=True):
    """From the coordinator. `id` = run/round/attempt/kind: a retry, a replay, a duplicate counts once."""

    id: str


class Train(Request, frozen=True, kw_only=True, tag=True):
    round: int
    weights: AnyArena
    counted: int = -1  # the last round in which an update of this site is in the model; -1: none is


class Evaluate(Request, frozen=True, kw_only=True, tag=True):
    round: int
    weights: AnyArena


class Update(Message, frozen=True, kw_only=True, tag=True):
    """One site's contribution: how far its weights moved, and how much it counts."""

    delta: AnyArena  # local weights - global weights; integers too
    num_examples: float  # examples (or tokens) trained on: the weight in the mean
    metrics: Metrics = {}


class Evaluation(Message, frozen=True, kw_only=True, tag=True):
    metrics: Metrics


class Failure(Message, frozen=True, kw_only=True, tag=True):
    """A site could not do what it was asked; `reason` is one line without data values (S35)."""

    reason: str


Reply = Message  # whatever answers a request
Found = Update | Evaluation | Failure  # what training and evaluation are answered with


def add_metrics(total: Metrics, more: Metrics) -> None:
    """Into `total`, number by number. TaskError unless both have equally many of each name."""
    for name, (value, count) in more.items():
        if name not in total:
            total[name] = value, count
            continue
        have, before = total[name]
        if isinstance(have, list) and isinstance(value, list) and len(have) == len(value):
            total[name] = [a + b for a, b in zip(have, value, strict=True)], before + count
        elif isinstance(have, list) or isinstance(value, list):
            raise TaskError(
                f"evaluate() gives {name} in different sizes: {_size(have)}, then {_size(value)}. Let it be "
                f"the same for each batch and site."
            )
        else:
            total[name] = have + value, before + count


def _size(value: Sum) -> str:
    return f"{len(value)} numbers" if isinstance(value, list) else "one number"


def summed(metrics: Mapping[SiteId, Metrics]) -> Metrics:
    """Σ over sites, each name over those that report it, in site order."""
    total: Metrics = {}
    for site in sorted(metrics):
        add_metrics(total, metrics[site])
    return total


def averages(metrics: Mapping[SiteId, Metrics]) -> dict[str, float]:
    """Exact averages over sites, Σ sum / Σ count, of metrics that are one number."""
    total: dict[str, tuple[float, float]] = {}
    for site in sorted(metrics):
        for name, (value, count) in metrics[site].items():
            if not isinstance(value, list):
                have = total.get(name, (0.0, 0.0))
                total[name] = (have[0] + value, have[1] + count)
    return {name: value / count for name, (value, count) in total.items() if count}


# --- The names of metrics with their sizes: "loss" is one number, "confusion[9]" are nine.

SIZED = re.compile(r"(.*)\[([1-9]\d{0,6})\]", re.S)


def sized_names(metrics: Metrics) -> tuple[str, ...]:
    """Sorted."""
    return tuple(
        sorted(f"{name}[{len(v)}]" if isinstance(v, list) else name for name, (v, _) in metrics.items())
    )


def name_and_size(sized: str) -> tuple[str, int | None]:
    """None: it is one number."""
    found = SIZED.fullmatch(sized)
    return (found[1], int(found[2])) if found else (sized, None)


def numbers_in(names: Iterable[str]) -> int:
    """How many numbers the metrics of these sized names are: the sum or sums of each, and its count."""
    return sum((name_and_size(sized)[1] or 1) + 1 for sized in names)


def misfits(names: Mapping[SiteId, Iterable[str]]) -> dict[SiteId, str]:
    """Sites that give a metric in another size than most sites do, and what they do; `names` are sized."""
    votes: dict[str, Counter[str]] = {}
    for site in sorted(names):
        for sized in names[site]:
            votes.setdefault(name_and_size(sized)[0], Counter())[sized] += 1
    usual = {name: found.most_common(1)[0][0] for name, found in votes.items()}
    return {
        site: f"it evaluates {sized[:80]}, most sites {usual[name_and_size(sized)[0]][:80]}"
        for site in sorted(names)
        for sized in names[site]
        if sized != usual[name_and_size(sized)[0]]
    }
