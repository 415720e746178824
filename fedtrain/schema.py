"""What a model consists of: names, shapes and dtypes of its tensors, and where each lies in an arena.

An arena has one section per dtype; inside a section the trained parameters come first, then the buffers,
each in state_dict order. After the model come the extras: vectors of the strategy that travel with the model,
again a section per dtype. The schema's digest is agreed once, when a site joins.

Frozen parameters (requires_grad = False) have a schema of their own: they travel at most once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from .errors import BadUpdate, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATS = ("float64", "float32", "bfloat16", "float16")
ALIGN = 64  # bytes; each section starts on a cache line
MAX_TENSORS = 100_000
MAX_RANK = 16


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a model, and whether an optimizer trains it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool  # a parameter with requires_grad: strategies step on it; buffers move by plain mean
    extra: bool = False  # no tensor of the model, but one of the strategy's

    @property
    def numel(self) -> int:
        """The number of values."""
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
    extra: bool = False  # of no tensor of the model

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without padding."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def floating(self) -> bool:
        """Whether the values are floats, the only dtypes that are trained."""
        return self.dtype in FLOATS

    @property
    def moves(self) -> bool:
        """Whether a round's mean can change the values: booleans and bytes have no differences, so they stay;
        extras are the strategy's own affair."""
        return self.dtype not in ("bool", "uint8") and not self.extra


class Schema(msgspec.Struct, frozen=True, dict=True):
    """Names, shapes and dtypes of a model, in arena order. Two models agree when their digests do."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, model: nn.Module, *, frozen: bool = False, without: Collection[str] = ()) -> Schema:
        """The schema of a module: of what it trains and its buffers, `without` the tensors of these names; or
        of its frozen parameters. Tied weights appear once, under their first name."""
        check_state(model)
        tensors = unique_tensors(model).items()
        return cls.of_tensors({n: t for n, t in tensors if is_frozen(t) == frozen and n not in without})

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Schema:
        """The schema of named tensors; those that require a gradient are trained."""
        specs = [
            TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
            for name, t in tensors.items()
        ]
        for spec in specs:
            if spec.dtype not in ITEM_BYTES:
                raise ConfigError(
                    f"{spec.name} has dtype {spec.dtype}, which cannot travel. "
                    f"Use one of {', '.join(ITEM_BYTES)}, or keep it out of state_dict (persistent=False)."
                )
        return cls.ordered(specs)

    @classmethod
    def ordered(cls, specs: Sequence[TensorSpec]) -> Schema:
        """The specs as they lie in an arena: by dtype, trained ones first."""
        order = list(dict.fromkeys(s.dtype for s in specs))
        return cls(tuple(sorted(specs, key=lambda s: (s.extra, order.index(s.dtype), not s.trained))))

    def with_extras(self, specs: Sequence[TensorSpec]) -> Schema:
        """The same model, followed by these."""
        return Schema.ordered([*self.tensors, *specs]) if specs else self

    @cached_property
    def model(self) -> Schema:
        """Without the extras. It is the beginning of an arena of this schema."""
        own = tuple(s for s in self.tensors if not s.extra)
        return self if len(own) == len(self.tensors) else Schema(own)

    @property
    def extras(self) -> tuple[TensorSpec, ...]:
        return self.tensors[len(self.model.tensors) :]

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
        """One section for each dtype, in the order in which the tensors first have the dtypes; of the model,
        then of extras."""
        found: dict[tuple[bool, str], list[TensorSpec]] = {}
        for s in self.tensors:
            found.setdefault((s.extra, s.dtype), []).append(s)
        sections, offset = [], 0
        for (extra, dtype), specs in found.items():
            numel = sum(s.numel for s in specs)
            trained = sum(s.numel for s in specs if s.trained) if dtype in FLOATS else 0
            sections.append(Section(dtype, offset, numel, trained, extra))
            offset += -(-numel * ITEM_BYTES[dtype] // ALIGN) * ALIGN
        return tuple(sections)

    @property
    def moving(self) -> list[Section]:
        """The sections that a round can change."""
        return [section for section in self.sections if section.moves]

    @cached_property
    def places(self) -> dict[str, tuple[Section, int, int]]:
        """Name -> section, and from which of its coordinates up to which the tensor lies there."""
        found, after = {}, {(s.extra, s.dtype): (s, 0) for s in self.sections}
        for spec in self.tensors:
            section, start = after[spec.extra, spec.dtype]
            after[spec.extra, spec.dtype] = section, start + spec.numel
            found[spec.name] = section, start, start + spec.numel
        return found

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arena, the padding between sections included."""
        return max((s.offset + -(-s.nbytes // ALIGN) * ALIGN for s in self.sections), default=0)

    @cached_property
    def numel(self) -> int:
        """The number of values of the whole model."""
        return sum(s.numel for s in self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes and what is trained, as hex digits."""
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


def check_state(model: nn.Module) -> None:
    """ConfigError for state that can't lie in an arena."""
    from torch.nn.parameter import is_lazy

    for name, t in named_state(model):
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


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile() made of a module."""
    return "dynamo_ctx" in vars(module)


def named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """state_dict's tensors, in its order, by the names that they have where nothing is compiled: the wrapper
    that torch.compile() puts around a module has the module as `_orig_mod`, and a module that a user named
    so keeps its name."""
    modules = model.named_modules(remove_duplicate=False)
    wrappers = [f"{name}.".lstrip(".") for name, module in modules if is_compiled(module)]
    for name, t in model.state_dict(keep_vars=True).items():
        for wrapper in reversed(wrappers):  # inner ones first
            if name.startswith(f"{wrapper}_orig_mod."):
                name = wrapper + name.removeprefix(f"{wrapper}_orig_mod.")
        yield name, t


def unique_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of named_state, in its order, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, t in named_state(model):
        found.setdefault(id(t), (name, t))
    return dict(found.values())


def is_frozen(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter that training leaves alone; buffers are not, they move."""
    from torch import nn

    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def chunks(section: Section, size: int = 1 << 18) -> Iterator[tuple[int, int]]:
    """[start, stop) ranges that cover a section; the default keeps a few of them in a core's cache."""
    for start in range(0, section.numel, size):
        yield start, min(start + size, section.numel)


def chunks_of(schema: Schema, size: int = 1 << 20) -> Iterator[tuple[Section, int, int]]:
    """(section, start, stop) ranges that cover a whole model in its order, without the padding."""
    for section in schema.sections:
        for start, stop in chunks(section, size):
            yield section, start, stop
