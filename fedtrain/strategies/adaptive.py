"""The common part of FedAdagrad, FedAdam and FedYogi: Reddi et al. 2021, Algorithm 2, but the line for v."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from ..config import require

if TYPE_CHECKING:
    from .base import State, Vector


class Adaptive(Protocol):
    """The options that FedAdagrad, FedAdam and FedYogi share."""

    @property
    def server_lr(self) -> float: ...
    @property
    def b1(self) -> float: ...
    @property
    def tau(self) -> float: ...


def check(strategy: Adaptive) -> None:
    """ConfigError for an option outside its range."""
    lr, b1, tau = strategy.server_lr, strategy.b1, strategy.tau
    require(0 < lr < math.inf, "strategy.server_lr", f"{lr} must be positive")
    require(0 <= b1 < 1, "strategy.b1", f"{b1} must be in [0, 1)")
    require(0 < tau < math.inf, "strategy.tau", f"{tau} must be positive")


def init(strategy: Adaptive, weights: Vector) -> State:
    """m₋₁ = 0, and v₋₁ = τ², the smallest value that the paper allows."""
    return {"m": weights.new_zeros(weights.shape), "v": weights.new_full(weights.shape, strategy.tau**2)}


def step(strategy: Adaptive, weights: Vector, state: State, delta: Vector, v: Vector) -> tuple[Vector, State]:
    """m ← β₁m + (1 − β₁)Δ, w ← w + η m / (√v + τ), given the new v."""
    m = (state["m"] * strategy.b1).add_(delta, alpha=1 - strategy.b1)
    return weights.addcdiv_(m, v.sqrt().add_(strategy.tau), value=strategy.server_lr), {"m": m, "v": v}
