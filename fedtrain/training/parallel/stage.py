"""A pipeline's stage whose ranks tell each other shapes without pickles, and that needs no NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta, _TensorMeta

from ..collectives import receive, send


def _rehearsed(infer: Any) -> Any:
    """torch learns shapes from a run on memory as it finds it: buffers and draws stay as they were."""

    def rehearse(stage: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(module._buffers, dict(module._buffers)) for module in stage.submod.modules()]
        for buffers, kept in before:
            buffers.update({name: t if t is None else t.clone() for name, t in kept.items()})
        with torch.random.fork_rng([stage.device] if stage.device.type == "cuda" else []):
            found = infer(stage, *args, **kwargs)
        for buffers, kept in before:
            buffers.update(kept)
        return found

    return rehearse


class TypedStage(pipelining.PipelineStage):
    """What passes from one stage to the next is described in the first step, by types (collectives.py).

    Gloo sends and receives what lies in memory, and nothing of a GPU: there, tensors pass through memory.
    """

    _forward_metadata_inference = _rehearsed(pipelining.PipelineStage._forward_metadata_inference)
    _backward_metadata_inference = _rehearsed(pipelining.PipelineStage._backward_metadata_inference)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.group is not None, "a stage is told its group"
        gloo = self.group._get_backend(self.device).name() == "gloo"
        self._through_memory = gloo and self.device.type != "cpu"
        self._coming: dict[int, torch.Tensor] = {}  # by the id of the tensor on the GPU that it is for

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._from_memory(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._from_memory(super().get_bwd_send_ops(bwd_chunk_id))

    def _from_memory(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops if self._through_memory else ():
            op.tensor = op.tensor.detach().cpu()
        return ops

    def _get_recv_ops(self, recv_infos: Any) -> list[dist.P2POp]:
        ops: list[dist.P2POp] = super()._get_recv_ops(recv_infos)
        for op in ops if self._through_memory else ():
            self._coming[id(op.tensor)] = host = torch.empty_like(op.tensor, device="cpu")
            op.tensor = host
        return ops

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._arrived(self.args_recv_info[fwd_chunk_id])
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._arrived(self.grad_recv_info[bwd_chunk_id])
        return super()._retrieve_recv_grads(bwd_chunk_id)

    @torch.no_grad()
    def _arrived(self, recv_infos: Sequence[Any]) -> None:
        """What was received is where torch looks for it."""
        for info in recv_infos:
            if (host := self._coming.pop(id(info.buffer), None)) is not None:
                info.buffer.copy_(host)

    @contextmanager
    def _telling(self) -> Iterator[torch.device]:
        """Within it torch's own messages to other stages, which are not the model's, lie on this device."""
        device = self.device
        self.device = torch.device("cpu") if self._through_memory else device
        try:
            yield self.device
        finally:
            self.device = device

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._telling():
            return super()._warmup_forward_vote(*args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._telling():
            return super()._warmup_backward_result(*args, **kwargs)

    def _send_meta(self, meta: _StageForwardMeta | _StageBackwardMeta, dst_stage: int) -> None:
        forward = isinstance(meta, _StageForwardMeta)
        said = forward, meta.forward_metas if isinstance(meta, _StageForwardMeta) else meta.backward_metas
        with self._telling() as device:
            send(said, self._resolve_peer_global_rank(dst_stage), self.group, device)

    def _recv_meta(self, src_stage: int) -> _StageForwardMeta | _StageBackwardMeta:
        source, kind = self._resolve_peer_global_rank(src_stage), tuple[bool, list[_TensorMeta | None]]
        with self._telling() as device:
            forward, metas = receive(kind, source, self.group, device)
        return _StageForwardMeta((*metas,)) if forward else _StageBackwardMeta((*metas,))
