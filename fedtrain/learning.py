"""What a strategy says to those who train and sum for it, and they to it. Nothing here imports torch.

A vector is 1-D and holds every coordinate of the model that is trained and shared, in arena order; of a model
with several float dtypes all of them, one dtype after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from .errors import BadUpdate
from .schema import Schema, TensorSpec

if TYPE_CHECKING:
    import torch

    Vector = torch.Tensor  # 1-D, float32 or float64
    State = Mapping[str, torch.Tensor]
else:
    Vector = State = Any

# Each round | each round, by the plain mean of what the sites have | at its site, in its memory | once.
Share = Literal["shared", "averaged", "local", "fixed"]
Group = list[Any]  # the batches of one optimizer step: train.accumulate of them
Only = Literal["shared", "local"]  # the tensors that a training moves, where it does not move both
Correct = Callable[[Vector, Vector, "Context"], None]  # changes the gradient, the first, in place
Summed = Callable[[str, Vector], tuple[Vector, int]]  # see Local.as_summed; and how many were clipped


class Bounded(msgspec.Struct, frozen=True, array_like=True):
    """A summed value. A number beyond the bound is refused. A site clips the coordinates of a vector to the
    bound before the site sends and remembers the vector, and says how many coordinates it clipped."""

    name: str
    bound: float


class Extras(msgspec.Struct, frozen=True, array_like=True):
    """What sites send beside a delta and its examples; the default is nothing."""

    up: tuple[Bounded, ...] = ()  # further vectors that are summed
    scalars: tuple[Bounded, ...] = ()  # numbers that are summed
    max_weight: float | None = None  # a delta's weight is in [0, max_weight]; None: it is the site's examples
    exact: bool = False  # sums of deltas and of `up` are exact: a site remembers what was summed

    def update(self, weights: Schema) -> Schema:
        """The schema of an update of these weights: the model's delta, then the vectors of `up`."""
        model = weights.model
        numel = sum(section.trained for section in model.sections)
        wide = any(section.dtype == "float64" for section in model.sections if section.trained)
        dtype = "float64" if wide else "float32"
        return model.with_extras([TensorSpec(each.name, (numel,), dtype, False, True) for each in self.up])


NO_EXTRAS = Extras()


def check_bounds(scalars: Mapping[str, float], weight: float | None, extras: Extras) -> None:
    """BadUpdate unless a site sends the numbers that its strategy has, each within its bound. The site checks
    before the update leaves, and whoever sees the update checks again before it is used."""
    if scalars.keys() != {each.name for each in extras.scalars}:
        names = ", ".join(each.name for each in extras.scalars) or "no numbers"
        raise BadUpdate(f"the strategy has sites send {names} beside the delta, and other names came")
    for each in extras.scalars:
        if not abs(scalars[each.name]) <= each.bound:
            raise BadUpdate(
                f"its {each.name} is beyond the strategy's bound of {each.bound:g}. Raise the bound at the "
                f"aggregator and all sites, or lower train.lr"
            )
    most = extras.max_weight
    if (weight is None) != (most is None):
        wanted = "with" if most is not None else "without"
        raise BadUpdate(f"the strategy has updates {wanted} a weight of their own: its max_weight is {most}")
    if most is not None and weight is not None and not 0 <= weight <= most:
        raise BadUpdate(f"its weight is not in the strategy's bounds, 0 to {most:g}")


def clipped_to(vector: Vector, bound: float) -> tuple[Vector, int]:
    """(the vector with its coordinates clipped to ±bound, how many were beyond). NaN stays NaN."""
    beyond = int((vector.abs() > bound).sum())
    return (vector.clamp(-bound, bound), beyond) if beyond else (vector, 0)


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of the task's model, as `Strategy.shares` is asked about it."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["trained", "buffer", "frozen"]  # a parameter, a buffer, a parameter without requires_grad
    module: str  # the class of the module that has it, "BatchNorm2d" say


@dataclass
class Context:
    """What a site has in a round. A correction sees the part that belongs to the gradient it corrects, which
    is one of a dtype; or, where many sites are trained at once, `memory` of all of them as rows."""

    start: Vector  # the global weights
    down: State = field(default_factory=dict)  # of the server's state, what came with the weights
    memory: State = field(default_factory=dict)  # the site's own, after the last round that it counted in
    lr: float = 0.0  # train.lr


@dataclass(frozen=True)
class Found:
    """What one local training gave."""

    delta: Vector  # weights after it - weights before it
    steps: int  # of the local optimizer


@dataclass(frozen=True)
class Contribution:
    """What a site adds to the round's sums, and what it remembers if those sums are committed."""

    delta: Vector
    weight: float | None = None  # how much the delta counts in the mean; None: as many as the site's examples
    up: State = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    memory: State = field(default_factory=dict)


class Local(Protocol):
    """One site in one round; start, down, memory and lr are those of Context, whole."""

    @property
    def start(self) -> Vector: ...
    @property
    def down(self) -> State: ...
    @property
    def memory(self) -> State: ...
    @property
    def lr(self) -> float: ...
    @property
    def epochs(self) -> int:
        """train.local_epochs."""

    @property
    def seed(self) -> int:
        """Of what the site draws in this round: the same when the round is repeated."""

    @property
    def examples(self) -> float:
        """How many the site has, in units of the loss's weight; known when it has trained."""

    def train(
        self,
        start: Vector | None = None,
        correct: Correct | None = None,
        *,
        lr: float = 0.0,
        epochs: int = 0,
        only: Only | None = None,
    ) -> Found:
        """Train as [train] says, from the global weights, with the strategy's correction, unless told
        otherwise."""

    def loss(self, weights: Vector) -> float:
        """The mean loss over the site's examples."""

    def batches(self, draw: int = 0) -> Iterator[Group]:
        """The batches of each local step that [train] asks for; each `draw` has them in an order of its own.
        `train` takes draw 0."""

    def gradient(self, weights: Vector, batches: Group | None = None) -> Vector:
        """The gradient of the mean loss over these batches; None: over all of the site's examples, in one
        pass."""

    def as_summed(self, name: str, vector: Vector) -> Vector:
        """The vector as the sum will hold it, rounded and clipped: of `up`, or "delta" of a weight of 1. A
        site must remember this and not what it computed, or its memory and the server's drift apart."""


@dataclass(frozen=True)
class RoundSums:
    """What the server knows of a round."""

    mean: Vector  # Σ weight · delta / Σ weight, or what the rule made of the deltas; 0 where nothing weighs
    number: int = 0
    sites: int = 1  # in the sums
    registered: int = 1  # sites that joined before the round began
    weight: float = 1.0  # Σ weight
    sums: State = field(default_factory=dict)  # Σ of each of `up`, float64; of an exact strategy "delta", too
    scalars: Mapping[str, float] = field(default_factory=dict)  # Σ of each
    seed: int = 0  # of what the server draws: the same when the round is repeated
