"""The optimizer of a run on a mesh: torch's own, as [train] says, or the task's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config import TrainConfig
from ...errors import ConfigError
from ..mesh import is_dtensor
from ..task import Task


def optimizer_of(
    task: Task, parameters: list[nn.Parameter], train: TrainConfig, shared_by: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    """`shared_by`: the ranks among which its state is split (ZeRO-1), None where each has all of its own."""
    own = task.optimizer(parameters)
    if own is None:
        own = _configured(parameters, train)
    if shared_by is None:
        return own
    if len(own.param_groups) > 1:
        raise ConfigError(
            "parallel.zero = 1 wants one group of parameters, the task's optimizer() has "
            f"{len(own.param_groups)}. Use parallel.zero = 2."
        )
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        parameters, optimizer_class=type(own), process_group=shared_by, **_options(own)
    )


def _configured(parameters: list[nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """fused: one pass over memory, where torch's own loop makes ten. It wants a group's tensors all alike,
    and beside tp some parameters are split and others are not."""
    alike: dict[object, list[nn.Parameter]] = {}
    for p in parameters:
        alike.setdefault(p.device_mesh if is_dtensor(p) else None, []).append(p)
    groups = [{"params": group} for group in alike.values()]
    common: dict[str, Any] = {"lr": train.lr, "weight_decay": train.weight_decay}
    if train.optimizer == "sgd":
        whole = not any(is_dtensor(p) for p in parameters)  # of pieces torch has no fused SGD
        return torch.optim.SGD(groups, momentum=train.momentum, fused=whole, **common)
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, fused=True, **common)


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What its constructor was given."""
    (group,) = optimizer.param_groups
    known = optimizer.__init__.__code__.co_varnames  # type: ignore[misc]  # a class of torch's
    return {name: value for name, value in group.items() if name != "params" and name in known}


def schedule_of(
    optimizer: torch.optim.Optimizer, config: TrainConfig, steps: int | None
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Linear warm-up over train.warmup steps, then train.decay to 0 at the last of `steps`."""
    if not config.warmup and config.decay == "none":
        return None
    if config.decay != "none" and steps is None:
        raise ConfigError(
            "train.decay: data() is a stream, whose number of steps nobody knows. "
            "Set train.local_steps, or train.decay = none."
        )

    def factor(step: int) -> float:
        rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
        if config.decay == "none" or steps is None:
            return rise
        done = min(1.0, max(0, step - config.warmup) / max(1, steps - config.warmup))
        return rise * (1 - done if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
