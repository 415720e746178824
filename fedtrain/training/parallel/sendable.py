"""A batch on its way from the process that read it to the one that trains with it: a DataLoader's queue."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from ..batches import Batch, rebuilt

SMALL = 1 << 18  # bytes; from here on shared memory costs less than two copies through a pipe


def sendable(batch: Batch) -> Batch:
    """The batch, whose small tensors are sent by their bytes. An error says why it can't be sent.

    torch sends each tensor as a file descriptor, by a connection of its own with a handshake: 1.8 ms of both
    processes' time for two small tensors, where their bytes take 0.45 ms. And what can't be sent it drops, in
    the thread behind the queue, so that whoever waits for the batch would wait for ever.
    """
    DryPickler(BytesIO()).dump(batch)
    return by_bytes(batch)


def by_bytes(batch: Batch) -> Batch:
    """Small tensors as TensorBytes; larger ones, and those that are not plain, as they are."""
    if type(batch) is not torch.Tensor:
        # What moves itself, such as a PackedSequence, need not take anything else for its tensors.
        moves = callable(getattr(batch, "to", None)) and not isinstance(batch, Mapping)
        return batch if moves else rebuilt(batch, by_bytes)
    if batch.layout is not torch.strided or batch.device.type != "cpu":
        return batch
    whole = batch.resolve_conj().resolve_neg()  # torch would send what is yet to be conjugated or negated
    if whole.requires_grad or whole.is_quantized or not whole.is_contiguous():
        return whole
    return TensorBytes(whole) if 0 < whole.numel() * whole.element_size() <= SMALL else whole


class TensorBytes:
    """A tensor's bytes in place of it; where they are unpickled, they are the tensor again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._parts = bytes(tensor.view(-1).view(torch.uint8).numpy()), tensor.dtype, tuple(tensor.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return tensor_of, self._parts


def tensor_of(held: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of these bytes, in memory of torch's own alignment."""
    return torch.frombuffer(bytearray(held), dtype=dtype).clone().view(shape)


class DryPickler(ForkingPickler):
    """Sees whether something can be pickled, and leaves its tensors alone."""

    def reducer_override(self, part: Any) -> Any:
        return (bool, ()) if isinstance(part, torch.Tensor) else NotImplemented
