"""The base class of strategies: what a method does at the sites and at the server, in one dataclass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..arena import AnyArena, Arena, joined, split_into
from ..config.own import fits, kind_of, wrong_pair
from ..config.values import Settings, require
from ..errors import ConfigError, nearest, some
from ..learning import (
    Bounded,
    Context,
    Contribution,
    Extras,
    Found,
    Local,
    ModelTensor,
    RoundSums,
    Share,
)
from ..schema import TensorSpec

if TYPE_CHECKING:
    import torch

    from ..config import TrainConfig
    from ..learning import State, Vector


WEIGHTS = {"examples": None, "equal": 1.0}  # a value of Strategy.weights -> Update.weight, and its bound


@dataclass(frozen=True, kw_only=True)
class Strategy(Settings):
    """A federated method, in every way of running it.

    The fields of a strategy are its configuration. Everything that changes from round to round is in the
    server's state and in the sites' memories, so a checkpoint is (weights, state), and each site has its own.
    A strategy never sees a contribution, only sums of them, so it runs under secure sums as it is. Most
    strategies are a `step`; a custom one is a frozen dataclass:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Damped(Strategy):
    ...     factor: float = 0.5
    ...     def step(self, weights, state, round):
    ...         return weights + self.factor * round.mean, state
    >>> import torch
    >>> from fedtrain.learning import RoundSums
    >>> Damped().step(torch.zeros(2), {}, RoundSums(torch.tensor([1.0, 2.0])))
    (tensor([0.5000, 1.0000]), {})
    """

    plain_sgd: ClassVar[bool] = False  # whether the formula holds for plain SGD of a constant rate only
    keeps: ClassVar[str] = ""  # what `shares` of its own does, for a message
    trains_local: ClassVar[bool] = False  # whether sites train what is `local` by itself
    one_by_one: ClassVar[bool] = False  # whether a round asks one site, the one that waited longest
    weighs: ClassVar[tuple[str, ...]] = ("examples", "equal")  # values of `weights`; the method's own first

    local: tuple[str, ...] = ()  # tensors that stay at their site, by name with wildcards
    fixed: tuple[str, ...] = ()  # tensors that are not trained, likewise
    # How much a site counts in the mean: as its examples, or all sites alike; auto: as in the paper
    weights: Literal["auto", "examples", "equal"] = "auto"

    # --- what is exchanged

    @property
    def down(self) -> Sequence[str]:
        """Entries of the server's state that go out with the weights."""
        return ()

    @property
    def up(self) -> Sequence[Bounded]:
        """Further vectors that are summed, each as long as the weights."""
        return ()

    @property
    def scalars(self) -> Sequence[Bounded]:
        """Numbers that are summed."""
        return ()

    @property
    def max_weight(self) -> float | None:
        """The bound on a delta's weight; None: the weight is the site's examples."""
        return None

    @property
    def exact(self) -> bool:
        """Whether a site remembers what was summed, so that sums have to be exact, see Local.as_summed."""
        return False

    @property
    def sigma(self) -> float | None:
        """The standard deviation of the noise that `step` adds to the sums, divided by the most by which all
        data of one site can change them; None: there is no noise."""
        return None

    def shares(self, tensor: ModelTensor) -> Share:
        """What becomes of a tensor of the model."""
        if any(fnmatchcase(tensor.name, pattern) for pattern in self.local):
            return "local"
        if tensor.kind == "buffer":
            return "averaged"
        fixed = any(fnmatchcase(tensor.name, pattern) for pattern in self.fixed)
        return "fixed" if fixed or tensor.kind == "frozen" else "shared"

    def check(self, train: TrainConfig) -> None:
        """ConfigError where local training is not what the method's formula assumes."""
        if self.plain_sgd:
            check_plain_sgd(type(self).__name__, train)

    # --- at a site

    def site_init(self, start: Vector) -> State:
        """A site's memory before the first round that it counts in."""
        return {}

    def correct(self, gradient: Vector, weights: Vector, context: Context) -> None:
        """Change `gradient` in place, before each local optimizer step.

        Elementwise, over the last dimension: `weights` and `gradient` are vectors [n], of one dtype or of a
        rank's part of the model, or the rows [sites, n] of many sites. Sites call this method only where a
        class overrides it (see `corrects`).
        """

    def train(self, local: Local) -> Contribution:
        """The site's half of a round. Unless it is overridden an engine may train many sites at once."""
        return self.finish(local.train(), local)

    def finish(self, found: Found, local: Local) -> Contribution:
        """What the site sends and remembers after training."""
        return Contribution(found.delta)

    def personal(self, local: Local) -> Vector:
        """The weights that this site evaluates and exports."""
        return local.start

    # --- at the server

    def init(self, weights: Vector) -> State:
        """The server's state before round 0."""
        return {}

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        """New weights and new state.

        `step` may change `weights`, which is a copy, in place and return it. `step` must leave `state` and
        `round` as they are: until the round commits, the old state counts.
        """
        raise NotImplementedError("a strategy says how it steps")

    def wrong(self, method: str, given: Sequence[Any], found: Any) -> Iterator[str]:
        """What is wrong with what a method of the user's own returned; what is "" is in order."""
        if method in ("train", "finish"):
            names, start = ("delta", *(each.name for each in self.up)), given[-1].start
            one = isinstance(found, Contribution)
            parts = tuple({"delta": found.delta, **found.up}.get(name) for name in names) if one else found
            if not one or not all(fits(part, start) for part in parts):
                what = f"a Contribution with {', '.join(names)} as {kind_of(start)}"
                yield f"return {what}: got {kind_of(parts)}"
        if method == "step":
            yield wrong_pair(found, given[2].mean, "(weights, state)")
            lacks = ", ".join(name for name in self.down if name not in found[1])
            yield lacks and f"the state lacks {lacks}, named by the property `down`"
            for name, value in {"weights": found[0], **found[1]}.items():
                if not value.isfinite().all() and given[2].mean.isfinite().all():
                    yield (
                        f"the strategy {type(self).__name__} returned NaN or Inf in its {name}, "
                        f"though all updates were finite"
                    )


def corrects(strategy: Strategy) -> bool:
    """Whether the strategy overrides `correct`; local training skips the call where it does not."""
    return type(strategy).correct is not Strategy.correct


def overrides(strategy: Strategy, *methods: str) -> bool:
    """Whether the strategy has one of these methods of its own."""
    return any(getattr(type(strategy), name) is not getattr(Strategy, name) for name in methods)


def remembers(strategy: Strategy) -> bool:
    """Whether a site has a memory: of the strategy's own, or of tensors that stay there."""
    return bool(strategy.local) or overrides(strategy, "site_init", "shares")


def has_personal(strategy: Strategy) -> bool:
    """Whether a site evaluates another model than the global one."""
    return bool(strategy.local) or overrides(strategy, "personal", "shares")


def extras_of(strategy: Strategy) -> Extras:
    """What sites send for this strategy."""
    most = WEIGHTS.get(strategy.weights, strategy.max_weight)
    return Extras(tuple(strategy.up), tuple(strategy.scalars), most, strategy.exact)


def check_plain_sgd(kind: str, train: TrainConfig) -> None:
    """ConfigError unless local training is plain SGD of a constant rate."""
    plain = train.optimizer == "sgd" and not train.momentum and not train.weight_decay
    require(plain, "train.optimizer", f"{kind}'s formula holds for plain SGD: set it to sgd, without "
            f"train.momentum and train.weight_decay")  # fmt: skip
    require(not train.warmup and train.decay == "none", "train.decay", f"{kind}'s formula holds for a "
            f"constant rate: leave train.warmup and train.decay out")  # fmt: skip


def check_own_steps(strategy: Strategy, train: TrainConfig) -> None:
    """ConfigError for what a strategy would leave out that steps along Local.gradient by itself."""
    kind = type(strategy).__name__
    require(not train.clip_norm, "train.clip_norm", f"{kind} takes its own steps, which nothing clips: leave "
            f"train.clip_norm out")  # fmt: skip
    require(not strategy.local, "strategy.local", f"{kind} steps on what is exchanged, so tensors that stay "
            f"at their site would not be trained: leave strategy.local out")  # fmt: skip


def check_parts(strategy: Strategy, tensors: Sequence[ModelTensor]) -> None:
    """ConfigError for a pattern of `local` or `fixed` that does nothing, for a method whose `shares` does
    nothing, or where nothing is left to train.

    `tensors`: those of the model, in which what is `fixed` is frozen already.
    """
    never = {"local": ("frozen", "frozen parameters, which stay as they are everywhere. Leave it out"),
             "fixed": ("buffer", "buffers, which no optimizer trains. Put the layer that has them into "
                       "evaluation mode in the task, or name them in strategy.local")}  # fmt: skip
    names = [tensor.name for tensor in tensors]
    for key, (kind, why) in never.items():
        for pattern in getattr(strategy, key):
            found = [tensor.kind for tensor in tensors if fnmatchcase(tensor.name, pattern)]
            require(found, f"strategy.{key}", f"no tensor of the model is named like {pattern!r}."
                    f"{_near(pattern, names)}")  # fmt: skip
            require({*found} != {kind}, f"strategy.{key}", f"{pattern!r} matches only {why}")
    kind, usual = type(strategy).__name__, [Strategy.shares(strategy, tensor) for tensor in tensors]
    if overrides(strategy, "shares") and usual == [strategy.shares(tensor) for tensor in tensors]:
        modules = some(sorted({tensor.module for tensor in tensors}))
        raise ConfigError(
            f"strategy.kind: {kind} {strategy.keeps or 'has a shares() of its own'}, and this model has no "
            f"such tensor, so it would do nothing: its modules are {modules}. Use fedavg; or name what stays "
            f"at a site by fedper and strategy.local."
        )
    if strategy.trains_local:
        head = any(t.kind == "trained" and strategy.shares(t) == "local" for t in tensors)
        require(head, "strategy.local", f"{kind} trains them first, by themselves, and none of them is a "
                f"parameter: name the head's weights, as in [\"head.*\"]")  # fmt: skip
    left_out = strategy.local or strategy.fixed or overrides(strategy, "shares")
    if left_out and not any(t.kind == "trained" and strategy.shares(t) == "shared" for t in tensors):
        raise ConfigError(
            "strategy.local, strategy.fixed: nothing is left that sites would train together. Name fewer "
            "tensors; to train each site alone is no federation."
        )


def _near(pattern: str, names: Sequence[str]) -> str:
    """A sentence with names that the pattern may have meant."""
    words = pattern.replace("*", "").strip(".")
    like = [name for name in names if words and words.lower() in name.lower()]
    if like:
        return f" Did you mean {like[0]}? A pattern is for the whole name: * stands for the rest of it."
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    return nearest(words, {*names, *parts})


# --- vectors and arenas


def beginning(strategy: Strategy, model: Arena) -> tuple[Arena, dict[str, torch.Tensor]]:
    """(what goes out before round 0, the server's state): the strategy's state without what goes out."""
    state = dict(strategy.init(joined(model.trained())))
    return _with_down(strategy, model, state), state


def _with_down(strategy: Strategy, model: Arena, state: dict[str, torch.Tensor]) -> Arena:
    """The model with the state's entries that go out, which are taken from the state."""
    going = {name: state.pop(name) for name in strategy.down}
    if not going:
        return model
    specs = [
        TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), False, True)
        for n, t in going.items()
    ]
    weights = Arena.zeros(model.schema.model.with_extras(specs))
    weights.data[: model.schema.model.nbytes] = model.model.data
    for name, view in weights.extras().items():
        view.copy_(going[name])
    return weights


def server_step(
    strategy: Strategy, weights: AnyArena, state: Mapping[str, torch.Tensor], mean: Arena, **known: Any
) -> tuple[Arena, dict[str, torch.Tensor]]:
    """The next global model and state; the arguments stay as they are. `known`: what else a RoundSums has.

    The strategy steps on the trained coordinates; 16-bit floats are stepped in float32 and rounded once.
    BatchNorm's statistics and integers move by the plain mean delta; booleans and bytes, which have no
    differences, stay as they are.
    """
    new = weights.load()
    for vector, delta in zip(new.others().values(), mean.others().values(), strict=True):
        vector.add_(delta)
    parts = new.trained()
    whole = {**state, **new.extras()}
    stepped, after = strategy.step(joined(parts), whole, RoundSums(joined(mean.trained()), **known))
    split_into(parts, stepped)
    left = dict(after)
    new = _with_down(strategy, new, left)
    new.changed()
    return new, left
