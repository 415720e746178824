"""Brain floats: the range of float32 with 8 bits of precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .float16 import Float16


@dataclass(frozen=True)
class BFloat16(Float16):
    """2 bytes a value, rounded to the nearest: relative error at most 2⁻⁸ for all values, never to Inf.

    Under secure aggregation it is the identity, because the ring's bits decide the size there.
    """

    dtype: ClassVar[str] = "bfloat16"
    largest: ClassVar[float] = 3.3895313892515355e38  # the largest finite bfloat16
