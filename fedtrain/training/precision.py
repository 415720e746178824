"""Training in 16 bits: what computes in them, and the loss scale that keeps fp16's gradients in range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by train.precision
FIRST = 2.0**16
GROWTH_STEPS = 2000  # without an overflow, after which the scale doubles


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """What a forward pass runs within."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=NARROW[precision])


class LossScale:
    """As torch.amp.GradScaler has it: halved where a gradient overflows, doubled after GROWTH_STEPS steps
    without. But a step that overflows is taken again, not left out."""

    def __init__(self, precision: str) -> None:
        self.moves = precision == "fp16"  # else it is 1, and stays
        self.begin()

    def begin(self) -> None:
        """As before the first step."""
        self.value = self._settled = FIRST if self.moves else 1.0
        self._steps = 0  # since it last changed

    def again(self, finite: bool, loss_finite: Callable[[], bool]) -> bool:
        """After a step's gradient: whether to compute it again, with the scale that is now half.

        Where the loss itself is not finite, or the gradient without any scale, none would help: that step is
        over, and counts as one overflow.
        """
        if not self.moves:
            return False
        if not finite and self.value > 1.0 and loss_finite():
            self.value /= 2
            self._steps = 0
            return True
        if not finite:
            self.value, self._steps = max(1.0, self._settled / 2), 0
        else:
            self._steps += 1
            if self._steps == GROWTH_STEPS:
                self.value, self._steps = self.value * 2, 0
        self._settled = self.value
        return False

    def state_dict(self) -> dict[str, Any]:
        """Nothing where it stays 1."""
        return {"value": self.value, "steps": self._steps} if self.moves else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.moves:
            self.value = self._settled = float(state["value"])
            self._steps = int(state["steps"])
