"""How a model may be split: what a task's parallel_plan() returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...errors import ConfigError

Cut = Callable[[nn.Module, range, bool, bool], nn.Module]


@dataclass(frozen=True)
class Plan:
    """Everything is optional: data parallelism needs none of it."""

    blocks: str = ""  # where the repeated blocks are, as in "transformer.h": units of FSDP and checkpointing
    tensor: Mapping[str, Any] = field(default_factory=dict)  # "blocks.*.up": ColwiseParallel(), for tp
    sequence: Mapping[str, Any] = field(default_factory=dict)  # takes the place of `tensor` with parallel.sp
    stage: Cut | None = None  # (model, its blocks, first?, last?) -> one stage of a pipeline, names kept
    length: int = 1  # the dimension of a batch's tensors that is the sequence, for cp
    positions: Sequence[str] = ()  # buffers along the sequence, such as "positions", cut for cp too

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks; of a Sequential without any its own children that have parameters."""
        if self.blocks:
            try:
                return list(model.get_submodule(self.blocks).children())
            except AttributeError:
                raise ConfigError(
                    f"parallel_plan(): blocks = {self.blocks!r} is not in the model, which has "
                    f"{', '.join(name for name, _ in model.named_children())}."
                ) from None
        if isinstance(model, nn.Sequential):
            return [child for child in model.children() if any(True for _ in child.parameters())]
        return []
