"""FedAdagrad: Adagrad at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import adaptive
from .base import Strategy

if TYPE_CHECKING:
    from .base import State, Vector


@dataclass(frozen=True)
class FedAdagrad(Strategy):
    """v ← v + Δ² (Reddi et al. 2021, Algorithm 2)."""

    server_lr: float = 0.1
    b1: float = 0.0  # as in the paper's experiments: Adagrad has no momentum
    tau: float = 1e-3  # adaptivity floor, the paper's τ

    def __post_init__(self) -> None:
        adaptive.check(self)

    def init(self, weights: Vector) -> State:
        return adaptive.init(self, weights)

    def step(self, weights: Vector, state: State, mean_delta: Vector) -> tuple[Vector, State]:
        v = state["v"].addcmul(mean_delta, mean_delta)
        return adaptive.step(self, weights, state, mean_delta, v)
