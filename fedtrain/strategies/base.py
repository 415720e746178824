"""The base class of strategies: a server optimizer and a site's gradient correction, in one dataclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arena import AnyArena, Arena, widened
from ..config.values import Settings

if TYPE_CHECKING:
    import torch

    Vector = torch.Tensor  # 1-D, float32 or float64: every trained coordinate of one dtype, in arena order
    State = dict[str, torch.Tensor]  # kept between rounds; {} for a strategy without state


class Strategy(Settings):
    """How the global weights move, given the mean of the sites' deltas.

    The fields of a strategy are its configuration. Everything that changes from round to round is in the
    state, so a checkpoint is (weights, state). A custom strategy is a frozen dataclass:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Damped(Strategy):
    ...     factor: float = 0.5
    ...     def step(self, weights, state, mean_delta):
    ...         return weights + self.factor * mean_delta, state
    >>> import torch
    >>> Damped().step(torch.zeros(2), {}, torch.tensor([1.0, 2.0]))
    (tensor([0.5000, 1.0000]), {})
    """

    def init(self, weights: Vector) -> State:
        """The state before round 0."""
        return {}

    def step(self, weights: Vector, state: State, mean_delta: Vector) -> tuple[Vector, State]:
        """New weights and new state.

        `step` may change `weights`, which is a copy, in place and return it. `step` must leave `state` and
        `mean_delta` as they are: until the round commits, the old state counts.
        """
        raise NotImplementedError("a strategy says how it steps")

    def correct(self, gradient: Vector, weights: Vector, start: Vector) -> None:
        """The site's half: change `gradient` in place, before each local optimizer step.

        `weights` are the site's present weights, `start` the global weights that the round began with.
        Sites call this method only where a class overrides it (see `corrects`).
        """


def corrects(strategy: Strategy) -> bool:
    """Whether the strategy overrides `correct`; local training skips the call where it does not."""
    return type(strategy).correct is not Strategy.correct


def state_init(strategy: Strategy, weights: Arena) -> State:
    """The whole model's state before round 0: the strategy's own, named "<dtype>/<name>"."""
    return {
        f"{dtype}/{name}": tensor
        for dtype, vector in weights.trained().items()
        for name, tensor in strategy.init(widened(vector)).items()
    }


def server_step(strategy: Strategy, weights: AnyArena, state: State, mean: Arena) -> tuple[Arena, State]:
    """The next global model and state; the arguments stay as they are.

    The strategy steps on the trained coordinates; 16-bit floats are stepped in float32 and rounded once.
    Frozen parameters, BatchNorm's statistics and integers move by the plain mean delta; booleans and bytes,
    which have no differences, stay as they are.
    """
    new, new_state = weights.load(), dict[str, "torch.Tensor"]()
    for vector, delta in zip(new.others().values(), mean.others().values(), strict=True):
        vector.add_(delta)
    deltas = mean.trained()
    for dtype, vector in new.trained().items():
        own = f"{dtype}/"
        before = {name.removeprefix(own): t for name, t in state.items() if name.startswith(own)}
        stepped, after = strategy.step(widened(vector), before, widened(deltas[dtype]))
        if stepped.data_ptr() != vector.data_ptr():
            vector.copy_(stepped)
        new_state |= {own + name: t for name, t in after.items()}
    return new, new_state
