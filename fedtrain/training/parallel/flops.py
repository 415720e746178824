"""How much arithmetic a step takes, and how much a device could do: their quotient is MFU (PaLM, 2022)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

# Dense bf16, from the makers' data sheets, by words of the device's name, the first row that fits; MFU is
# against this whatever the precision.
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 NVL": 835,
    "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L40": 181, "L4": 121,
}  # fmt: skip


def peak_flops(device: torch.device) -> float:
    """Operations a second that a device could do; 0 where nobody knows."""
    if device.type != "cuda":
        return 0.0
    words = set(re.split(r"[\s-]+", torch.cuda.get_device_name(device)))
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if {*name.split()} <= words), 0.0)


class Flops:
    """Counts the operations of one step. What is computed again to save memory is not among them."""

    def __init__(self) -> None:
        self.of_step: int | None = None  # at this rank, once counted
        self._counter: FlopCounterMode | None = None
        self._again = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within it a step is taken."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as self._counter:
            yield
        self.of_step = self._counter.get_total_flops() - self._again
        self._counter = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it activations are computed a second time, in the backward pass."""
        before = self._counter.get_total_flops() if self._counter is not None else 0
        try:
            yield
        finally:
            if self._counter is not None:
                self._again += self._counter.get_total_flops() - before
