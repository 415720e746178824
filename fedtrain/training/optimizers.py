"""The optimizers and learning-rate schedules of [train], for flat vectors and for torch's parameters.

On flat vectors a whole model is stepped in a handful of kernels. All is elementwise over the last dimension,
so a slab of weights [sites, n] steps as well as one vector [n] does. A mesh takes torch's own fused kernels,
which a test holds to these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..config import TrainConfig
from ..errors import ConfigError

State = dict[str, torch.Tensor]  # of one vector
Factor = Callable[[int], float]  # of the learning rate, by how many steps of the run are done
Parameters = list[dict[str, Any]]  # torch's groups of them


@dataclass(frozen=True)
class Sgd:
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, weights: torch.Tensor) -> State:
        return {"velocity": torch.zeros_like(weights)} if self.momentum else {}

    def step(self, weights: torch.Tensor, gradient: torch.Tensor, state: State, step: int, lr: float) -> None:
        """Move `weights` in place; `gradient` is used as scratch. `step` counts from 1."""
        if self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        if self.momentum:
            gradient = state["velocity"].mul_(self.momentum).add_(gradient)
        weights.add_(gradient, alpha=-lr)

    def of_torch(self, groups: Parameters, *, split: bool) -> torch.optim.Optimizer:
        """torch's own. Of tensors that are `split` over ranks it has no fused SGD."""
        more: Any = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        return torch.optim.SGD(groups, self.lr, fused=not split, **more)


@dataclass(frozen=True)
class Adam:
    """Kingma & Ba 2015, Algorithm 1; with `decoupled` weight decay, AdamW (Loshchilov & Hutter 2019)."""

    lr: float
    weight_decay: float = 0.0
    decoupled: bool = False
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def init(self, weights: torch.Tensor) -> State:
        return {"m": torch.zeros_like(weights), "v": torch.zeros_like(weights)}

    def step(self, weights: torch.Tensor, gradient: torch.Tensor, state: State, step: int, lr: float) -> None:
        """Move `weights` in place; `gradient` is used as scratch. `step` counts from 1."""
        if self.weight_decay and self.decoupled:
            weights.mul_(1 - lr * self.weight_decay)
        elif self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        m = state["m"].lerp_(gradient, 1 - self.b1)
        v = state["v"].mul_(self.b2).addcmul_(gradient, gradient, value=1 - self.b2)
        root = torch.sqrt(v, out=gradient).div_((1 - self.b2**step) ** 0.5).add_(self.eps)
        weights.addcdiv_(m, root, value=-lr / (1 - self.b1**step))

    def of_torch(self, groups: Parameters, *, split: bool) -> torch.optim.Optimizer:
        """torch's own."""
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        betas, decay = (self.b1, self.b2), self.weight_decay
        return kind(groups, self.lr, betas, self.eps, decay, fused=True)


def configured(config: TrainConfig) -> Sgd | Adam:
    """As [train] says."""
    if config.optimizer == "sgd":
        return Sgd(config.lr, config.momentum, config.weight_decay)
    return Adam(config.lr, config.weight_decay, decoupled=config.optimizer == "adamw")


def slots(config: TrainConfig) -> int:
    """How many tensors of a parameter's size the optimizer keeps."""
    return len(configured(config).init(torch.empty(0)))


class Optimizer(Protocol):
    """What an engine steps with: one round's, or a whole run's."""

    def step(self, gradients: list[torch.Tensor], factor: float) -> None:
        """Move all weights, with a learning rate of `factor` times that of [train] or of the task."""


class FlatOptimizer:
    """One of [train] over vectors, or slabs of them."""

    def __init__(self, config: TrainConfig, weights: Sequence[torch.Tensor]) -> None:
        self._rule, self._weights, self._steps = configured(config), weights, 0
        self._states = [self._rule.init(vector) for vector in weights]

    def step(self, gradients: list[torch.Tensor], factor: float) -> None:
        self._steps += 1
        for vector, gradient, state in zip(self._weights, gradients, self._states, strict=True):
            self._rule.step(vector, gradient, state, self._steps, self._rule.lr * factor)


class TorchOptimizer:
    """One of torch's, or the task's own, which finds weights and gradients at its parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._rates = [group["lr"] for group in inner.param_groups]
        self._factor = 1.0

    def step(self, gradients: list[torch.Tensor], factor: float) -> None:
        if factor != self._factor:
            self._factor = factor
            for group, rate in zip(self.inner.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        self.inner.step()


def of_parameters(
    own: torch.optim.Optimizer | None,
    parameters: list[nn.Parameter],
    config: TrainConfig,
    shared_by: dist.ProcessGroup | None,
) -> torch.optim.Optimizer:
    """The task's `own`, else torch's as [train] says. `shared_by`: the ranks among which its state is split
    (ZeRO-1), None where each has all of its own."""
    if own is None:
        alike: dict[object, list[nn.Parameter]] = {}  # a fused step wants tensors that are split alike
        for p in parameters:
            alike.setdefault(getattr(p, "device_mesh", None), []).append(p)
        groups: Parameters = [{"params": group} for group in alike.values()]
        own = configured(config).of_torch(groups, split=any(mesh is not None for mesh in alike))
    if shared_by is None:
        return own
    if len(own.param_groups) > 1:
        raise ConfigError(
            "parallel.zero = 1 wants one group of parameters, the task's optimizer() has "
            f"{len(own.param_groups)}. Use parallel.zero = 2."
        )
    from torch.distributed.optim import ZeroRedundancyOptimizer

    known = set(type(own).__init__.__code__.co_varnames) - {"params"}  # what its constructor was given
    options = {name: value for name, value in own.param_groups[0].items() if name in known}
    return ZeroRedundancyOptimizer(parameters, type(own), process_group=shared_by, **options)


def schedule(config: TrainConfig, steps: int | None, *, counted: bool = True) -> Factor | None:
    """Linear warm-up over train.warmup steps of a run, then train.decay to 0 at the last of its `steps`; None
    where the learning rate stays. `counted`: whether it is known how many steps are done."""
    if not config.warmup and config.decay == "none":
        return None
    if steps is None and not (counted and config.decay == "none"):
        raise ConfigError(
            "train.warmup, train.decay: data() is a stream, whose number of steps nobody knows. "
            "Set train.local_steps, or leave both out."
        )

    def factor(done: int) -> float:
        rise = min(1.0, (done + 1) / config.warmup) if config.warmup else 1.0
        if config.decay == "none" or steps is None:
            return rise
        part = min(1.0, max(0, done - config.warmup) / max(1, steps - config.warmup))
        return rise * (1 - part if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * part)))

    return factor
