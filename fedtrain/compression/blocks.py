"""Vectors in blocks with one scale each, processed in chunks of blocks that fit in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..config import require

if TYPE_CHECKING:
    import torch

    from .base import Payload, Vector

CHUNK = 1 << 18  # values processed at a time: fewer cost more calls, more cost more cache misses


def check_block(block: int) -> None:
    """ConfigError unless whole blocks fill a chunk, and whole bytes fill a block."""
    fits = 8 <= block <= CHUNK and CHUNK % block == 0
    require(fits, "compression.block", f"{block} must be a power of two from 8 to {CHUNK}")


def scale_bytes(n: int, block: int) -> int:
    """Bytes of the scales of n values: a float32 for each block; the last block may be short."""
    return 4 * -(-n // block)


def parts(payload: Payload, n: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales as float32, the bytes after them), both views of the payload."""
    import torch

    edge = scale_bytes(n, block)
    return payload[:edge].view(torch.float32), payload[edge:]


def chunks(vector: Vector, block: int) -> Iterator[tuple[int, Vector]]:
    """Chunks as (start, values [blocks, block]); a short last block is filled up with zeros."""
    import torch

    for at in range(0, len(vector), CHUNK):
        part = vector[at : at + CHUNK]
        if short := -len(part) % block:
            part = torch.cat([part, part.new_zeros(short)])
        yield at, part.view(-1, block)


def scale_(vector: Vector, scales: Vector, block: int) -> None:
    """Multiply each block in place by its scale; the last block may be short."""
    whole = len(vector) // block
    vector[: whole * block].view(whole, block).mul_(scales[:whole, None])
    if len(vector) % block:
        vector[whole * block :].mul_(scales[whole])
