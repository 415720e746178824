"""What becomes of each tensor of a model: which ones stay at their site, and which are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..learning import ModelTensor, Share
from ..schema import check_state, is_frozen, unique_tensors

Shares = Callable[[ModelTensor], Share]  # as Strategy.shares


def kept_at_a_site(model: nn.Module, shares: Shares | None) -> set[str]:
    """Names of the tensors that stay at their site. Parameters that are to be fixed are frozen here."""
    if shares is None:
        return set()
    check_state(model)
    own, tensors = set(), unique_tensors(model)
    for tensor in model_tensors(model):
        share = shares(tensor)
        if share == "local" and tensor.kind != "frozen":
            own.add(tensor.name)
        elif share == "fixed" and tensor.kind == "trained":
            tensors[tensor.name].requires_grad_(False)
    return own


def model_tensors(model: nn.Module) -> Iterator[ModelTensor]:
    """The tensors of a model, each once, as a strategy is asked about them."""
    owners = {
        id(tensor): type(module).__name__
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    }
    for name, t in unique_tensors(model).items():
        kind: Any = "frozen" if is_frozen(t) else "trained" if t.requires_grad else "buffer"
        yield ModelTensor(name, tuple(t.shape), kind, owners[id(t)])
