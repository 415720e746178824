"""The optimizers and learning-rate schedules of [train], for flat vectors and for torch's parameters.

On flat vectors a whole model is stepped in a handful of kernels. All is elementwise over the last dimension,
so a slab of weights [sites, n] steps as well as one vector [n] does. A mesh takes torch's own fused kernels,
which a test holds to these.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import TrainConfig
from ..errors import ConfigError

Factor = Callable[[int], float]  # of the learning rate, by how many steps of the run are done
Parameters = list[dict[str, Any]]  # torch's groups of them
Coordinates = tuple[int, int, int]  # (vector, start, stop), along the vector's last dimension


class FlatOptimizer(ABC):
    """One of [train] over vectors, or slabs of them, which it changes in place. Gradients are its scratch."""

    skips = False  # see TorchOptimizer

    def __init__(self, config: TrainConfig, weights: Sequence[torch.Tensor]) -> None:
        self.config, self.weights = config, weights
        self.states = [[torch.zeros_like(vector) for _ in range(self.slots(config))] for vector in weights]
        # How often each range of coordinates was stepped. A vector is one range as long as all of it is.
        self.taken: dict[Coordinates, int] = {(i, 0, v.shape[-1]): 0 for i, v in enumerate(weights)}

    def step(
        self,
        gradients: list[torch.Tensor],
        factor: float,
        taken: object = True,
        unreached: Sequence[Coordinates] = (),
    ) -> None:
        """Move the weights, at `factor` times the learning rate. A step that comes here is `taken`. The
        coordinates in `unreached` keep their weights, state and count of steps."""
        for vector, *edges in unreached:
            for edge in edges:
                self._cut(vector, edge)
        for part in self.taken:
            i, start, stop = part
            if any(i == vector and low <= start < high for vector, low, high in unreached):
                continue
            self.taken[part] += 1
            tensors = [self.weights[i], gradients[i], *self.states[i]]
            if tensors[0].shape != (*gradients[i].shape[:-1], stop - start):
                # Of a slab, the rows of the sites that still train.
                at = *map(slice, gradients[i].shape[:-1]), slice(start, stop)
                tensors = [tensor[at] for tensor in tensors]
            self.move(self.config.lr * factor, self.taken[part], *tensors)

    def _cut(self, vector: int, edge: int) -> None:
        for i, start, stop in [*self.taken]:
            if i == vector and start < edge < stop:
                count = self.taken.pop((i, start, stop))
                self.taken[i, start, edge] = self.taken[i, edge, stop] = count

    @classmethod
    @abstractmethod
    def slots(cls, config: TrainConfig) -> int:
        """How many tensors of a parameter's size it keeps."""

    @abstractmethod
    def move(
        self, lr: float, taken: int, weights: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor
    ) -> None:
        """The `taken`-th step of a vector, or of a range of it."""

    @classmethod
    @abstractmethod
    def of_torch(cls, config: TrainConfig, groups: Parameters, *, split: bool) -> torch.optim.Optimizer:
        """torch's own. `split`: whether ranks have pieces of the parameters."""


class Sgd(FlatOptimizer):
    @classmethod
    def slots(cls, config: TrainConfig) -> int:
        return 1 if config.momentum else 0

    def move(
        self, lr: float, taken: int, weights: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor
    ) -> None:
        if self.config.weight_decay:
            gradient.add_(weights, alpha=self.config.weight_decay)
        if state:
            gradient = state[0].mul_(self.config.momentum).add_(gradient)
        weights.add_(gradient, alpha=-lr)

    @classmethod
    def of_torch(cls, config: TrainConfig, groups: Parameters, *, split: bool) -> torch.optim.Optimizer:
        fused: Any = {"fused": not split}  # of pieces torch has no fused SGD
        return torch.optim.SGD(groups, config.lr, config.momentum, 0, config.weight_decay, **fused)


class Adam(FlatOptimizer):
    """Kingma & Ba 2015, Algorithm 1."""

    decoupled = False
    b1, b2, eps = 0.9, 0.999, 1e-8

    @classmethod
    def slots(cls, config: TrainConfig) -> int:
        return 2

    def move(
        self, lr: float, taken: int, weights: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor
    ) -> None:
        decay, (m, v) = self.config.weight_decay, state
        if decay and self.decoupled:
            weights.mul_(1 - lr * decay)
        elif decay:
            gradient.add_(weights, alpha=decay)
        m.lerp_(gradient, 1 - self.b1)
        v.mul_(self.b2).addcmul_(gradient, gradient, value=1 - self.b2)
        root = torch.sqrt(v, out=gradient).div_((1 - self.b2**taken) ** 0.5).add_(self.eps)
        weights.addcdiv_(m, root, value=-lr / (1 - self.b1**taken))

    @classmethod
    def of_torch(cls, config: TrainConfig, groups: Parameters, *, split: bool) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if cls.decoupled else torch.optim.Adam
        return kind(groups, config.lr, (cls.b1, cls.b2), cls.eps, config.weight_decay, fused=True)


class AdamW(Adam):
    """With decoupled weight decay (Loshchilov & Hutter 2019)."""

    decoupled = True


OPTIMIZERS: dict[str, type[FlatOptimizer]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW}  # train.optimizer


class TorchOptimizer:
    """One of torch's, or the task's own, which finds weights and gradients at its parameters."""

    def __init__(self, inner: torch.optim.Optimizer, *, here: bool = True) -> None:
        """`here`: whether the weights lie where gradients are judged."""
        self.inner, self._factor = inner, 1.0
        self._rates = [group["lr"] for group in inner.param_groups]
        self._asks = here and getattr(inner, "_step_supports_amp_scaling", False)  # torch's fused ones
        # torch's fused SGD takes the momentum of all parameters that it steps, or of none.
        self._lacks = any(group.get("fused") for group in inner.param_groups)
        self._begun = False  # leaving out a first step, torch's SGD would keep unwritten memory as momentum

    @property
    def skips(self) -> bool:
        """Whether the next step may be one that nobody has yet seen to be taken."""
        return self._asks and self._begun

    def step(
        self,
        gradients: list[torch.Tensor],
        factor: float,
        taken: bool | torch.Tensor = True,
        unreached: Sequence[Coordinates] = (),
    ) -> None:
        """`taken`: where it is a scalar on the device, the kernels look whether to change anything. It steps
        no parameter that has .grad = None: the `unreached` ones."""
        if self._lacks and unreached:
            self._lacks = False
            make_slots(self.inner)
        if factor != self._factor:
            self._factor = factor
            for group, rate in zip(self.inner.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        if isinstance(taken, torch.Tensor):
            # As torch.amp's GradScaler does.
            found = torch.logical_not(taken, out=torch.empty((), device=taken.device))
            self.inner.found_inf = found  # type: ignore[attr-defined]  # fused ones read it
        self.inner.step()
        self._begun = True


Optimizer = FlatOptimizer | TorchOptimizer  # a round long, or a run


def make_slots(optimizer: torch.optim.Optimizer) -> None:
    """Have it make what it keeps of parameters that it never stepped, as 0: by a step that moves nothing."""
    optimizer = getattr(optimizer, "optim", optimizer)  # ZeRO-1
    every = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not (parameters := [p for p in every if not optimizer.state.get(p)]):
        return
    lent, rates = [p.grad for p in every], [g["lr"] for g in optimizer.param_groups]
    before = [p.detach().clone() for p in parameters]
    for p in every:
        p.grad = None
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate := group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    with torch.no_grad():
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
            for slot in optimizer.state[p].values():
                if isinstance(slot, torch.Tensor):
                    slot.zero_()
    for p, gradient in zip(every, lent, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def of_parameters(
    own: torch.optim.Optimizer | None, parameters: list[nn.Parameter], config: TrainConfig,
    shared_by: dist.ProcessGroup | None,
) -> torch.optim.Optimizer:  # fmt: skip
    """The task's `own`, else torch's as [train] says. `shared_by`: the ranks among which its state is split
    (ZeRO-1), None where each has all of its own."""
    if own is None:
        alike: dict[object, list[nn.Parameter]] = {}  # a fused step wants tensors that are split alike
        for p in parameters:
            alike.setdefault(getattr(p, "device_mesh", None), []).append(p)
        groups: Parameters = [{"params": group} for group in alike.values()]
        split = any(mesh is not None for mesh in alike)
        own = OPTIMIZERS[config.optimizer].of_torch(config, groups, split=split)
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


def with_all_cores(optimizer: torch.optim.Optimizer, threads: int) -> None:
    """Have its steps, on weights in memory, take this rank's share of the cores; else there are `threads`.
    Each weight is stepped by itself: so the bits are the same."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    optimizer.register_step_pre_hook(lambda *_: torch.set_num_threads(max(threads, share)))
    optimizer.register_step_post_hook(lambda *_: torch.set_num_threads(threads))


def schedule(config: TrainConfig, steps: int | None, *, counted: bool = True) -> Factor | None:
    """Linear warm-up over train.warmup steps of a run, then train.decay to 0 at the last of its `steps`; None
    where the learning rate stays. `counted`: whether it is known how many steps are done."""
    if not config.warmup and config.decay == "none":
        return None
    if steps is None and not (counted and config.decay == "none"):
        raise ConfigError(
            "train.warmup, train.decay: data() is a stream, whose number of steps nobody knows. "
            "Set train.local_steps, let data() give a Dataset or a DataLoader over one, or leave both out."
        )

    def factor(done: int) -> float:
        rise = min(1.0, (done + 1) / config.warmup) if config.warmup else 1.0
        if config.decay == "none" or steps is None:
            return rise
        part = min(1.0, max(0, done - config.warmup) / max(1, steps - config.warmup))
        return rise * (1 - part if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * part)))

    return factor
