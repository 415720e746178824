"""The local optimizers, on flat vectors: a whole model is stepped in a handful of kernels.

Everything is elementwise over the last dimension, so a slab of weights [sites, n] steps as well as one
vector [n] does. The updates are those of torch.optim, held to them by a test.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import TrainConfig

State = dict[str, torch.Tensor]  # one round's; a site starts each round afresh


@dataclass(frozen=True)
class Sgd:
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, weights: torch.Tensor) -> State:
        return {"velocity": torch.zeros_like(weights)} if self.momentum else {}

    def step(self, weights: torch.Tensor, gradient: torch.Tensor, state: State, step: int) -> None:
        """Move `weights` in place; `gradient` is used as scratch. `step` counts from 1."""
        if self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        if self.momentum:
            gradient = state["velocity"].mul_(self.momentum).add_(gradient)
        weights.add_(gradient, alpha=-self.lr)


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

    def step(self, weights: torch.Tensor, gradient: torch.Tensor, state: State, step: int) -> None:
        """Move `weights` in place; `gradient` is used as scratch. `step` counts from 1."""
        if self.weight_decay and self.decoupled:
            weights.mul_(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        m = state["m"].lerp_(gradient, 1 - self.b1)
        v = state["v"].mul_(self.b2).addcmul_(gradient, gradient, value=1 - self.b2)
        root = torch.sqrt(v, out=gradient).div_((1 - self.b2**step) ** 0.5).add_(self.eps)
        weights.addcdiv_(m, root, value=-self.lr / (1 - self.b1**step))


def optimizer_of(config: TrainConfig) -> Sgd | Adam:
    if config.optimizer == "sgd":
        return Sgd(config.lr, config.momentum, config.weight_decay)
    return Adam(config.lr, config.weight_decay, decoupled=config.optimizer == "adamw")


def clip(gradients: list[torch.Tensor], norm: float) -> None:
    """Bound the L2 norm over all `gradients` together, per site where they are slabs; as clip_grad_norm_."""
    norms = [torch.linalg.vector_norm(g, dim=-1, keepdim=True) for g in gradients]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)
    for g in gradients:
        g.mul_((norm / (total + 1e-6)).clamp_(max=1.0).to(g.dtype))
