"""What a strategy is: the server's optimizer and the site's gradient correction, in one frozen dataclass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    Vector = torch.Tensor  # 1-D, float32 or float64: every trained coordinate of one dtype, in arena order
    State = dict[str, torch.Tensor]  # what lives between rounds; {} when nothing does


class Strategy(Protocol):
    """How the global weights move, given the mean of the sites' deltas.

    Its fields are its configuration; all that changes from round to round is in the state, so that a
    checkpoint is (weights, state).
    """

    def init(self, weights: Vector) -> State:
        """The state before round 0."""

    def step(self, weights: Vector, state: State, mean_delta: Vector) -> tuple[Vector, State]:
        """New weights and state; the arguments are left as they are."""

    def correct(self, gradient: Vector, weights: Vector, start: Vector) -> None:
        """The site's half: change `gradient` in place, before each local optimizer step.

        `weights` are the site's present ones, `start` the global ones that the round began with. Only
        called when the class overrides it (`corrects` says so); the base does nothing.
        """
