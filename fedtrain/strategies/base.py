"""What a strategy is: the server's optimizer and the site's gradient correction, in one frozen dataclass.

A custom one is a frozen dataclass that derives from Strategy:

    @dataclass(frozen=True)
    class Half(Strategy):
        def step(self, weights, state, mean_delta):
            return weights + 0.5 * mean_delta, state
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arena import AnyArena, Arena, widened

if TYPE_CHECKING:
    import torch

    Vector = torch.Tensor  # 1-D, float32 or float64: every trained coordinate of one dtype, in arena order
    State = dict[str, torch.Tensor]  # what lives between rounds; {} when nothing does


class Strategy:
    """How the global weights move, given the mean of the sites' deltas.

    Its fields are its configuration; all that changes from round to round is in the state, so that a
    checkpoint is (weights, state).
    """

    def init(self, weights: Vector) -> State:
        """The state before round 0."""
        return {}

    def step(self, weights: Vector, state: State, mean_delta: Vector) -> tuple[Vector, State]:
        """New weights and new state.

        `weights` is a copy, the step's own to change in place and return. `state` and `mean_delta` are
        others': until the round commits, the old state is the one that counts.
        """
        raise NotImplementedError("a strategy says how it steps")

    def correct(self, gradient: Vector, weights: Vector, start: Vector) -> None:
        """The site's half: change `gradient` in place, before each local optimizer step.

        `weights` are the site's present ones, `start` the global ones that the round began with. Only
        called when the class overrides it (`corrects` says so); the base does nothing.
        """


def corrects(strategy: Strategy) -> bool:
    """Whether the strategy has a site's half at all; local training skips the call where not."""
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
