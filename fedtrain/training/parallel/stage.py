"""A pipeline's stage whose ranks tell each other shapes without pickles."""

from __future__ import annotations

from typing import Any

import torch
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
    """What passes from one stage to the next is described in the first step, by types (collectives.py)."""

    _forward_metadata_inference = _rehearsed(pipelining.PipelineStage._forward_metadata_inference)
    _backward_metadata_inference = _rehearsed(pipelining.PipelineStage._backward_metadata_inference)

    def _send_meta(self, meta: _StageForwardMeta | _StageBackwardMeta, dst_stage: int) -> None:
        forward = isinstance(meta, _StageForwardMeta)
        said = forward, meta.forward_metas if isinstance(meta, _StageForwardMeta) else meta.backward_metas
        send(said, self._resolve_peer_global_rank(dst_stage), self.group, self.device)

    def _recv_meta(self, src_stage: int) -> _StageForwardMeta | _StageBackwardMeta:
        source, kind = self._resolve_peer_global_rank(src_stage), tuple[bool, list[_TensorMeta | None]]
        forward, metas = receive(kind, source, self.group, self.device)
        return _StageForwardMeta((*metas,)) if forward else _StageBackwardMeta((*metas,))
