"""Names of torch that are private, or differ from one release of torch to another: all uses go through here.

fedtrain runs on torch 2.10 to 2.15. Where torch has a public name, the other files use that.
"""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..errors import ConfigError

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

OLDEST, NEWEST = "2.10", "2.15"  # releases of torch that `make matrix` tests
# A name to import from this file -> torch's module, and the names there, of which the first that exists
# is taken.
NAMES = {
    "BatchNorm": "torch.nn.modules.batchnorm:_BatchNorm",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "all_gather": "torch.distributed._functional_collectives:"
    "all_gather_single_autograd|all_gather_tensor_autograd",
    "all_to_all": "torch.distributed._functional_collectives:all_to_all_single_autograd",
    "backend_in": "torch.distributed:ProcessGroup._get_backend",
    "backend_timeout": "torch._C._distributed_c10d:Backend.Options._timeout.fget",
    "concatenate_meshes": "torch.distributed.device_mesh:DeviceMesh._concatenate",
    "ddp_times": "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    "default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "device_types": "torch.distributed:ProcessGroup._device_types.fget",
    "dump_snapshot": "torch.cuda.memory:_dump_snapshot",
    "flatten_mesh": "torch.distributed.device_mesh:DeviceMesh._flatten",
    "foreach_copy_": "torch:_foreach_copy_",
    "foreach_mul_": "torch:_foreach_mul_",
    "foreach_norm": "torch:_foreach_norm",
    "native_multi_head_attention": "torch:_native_multi_head_attention",
    "object_to_tensor": "torch.distributed.distributed_c10d:_object_to_tensor",
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "replicate": "torch.distributed._composable.replicate_with_fsdp:replicate",
    "seed_sharded_draws": "torch.distributed.tensor._random:manual_seed",
    "storage_address": "torch:UntypedStorage._cdata.__get__",
    "tensor_to_object": "torch.distributed.distributed_c10d:_tensor_to_object",
    "transformer_encoder_layer_fwd": "torch:_transformer_encoder_layer_fwd",
    "tree_flatten": "torch.utils._pytree:tree_flatten",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map": "torch.utils._pytree:tree_map",
    "tree_unflatten": "torch.utils._pytree:tree_unflatten",
    "version_of": "torch:Tensor._version.__get__",
}


def __getattr__(name: str) -> Any:
    """What torch has under one of `NAMES`. ConfigError where this torch does not have it."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    module, _, paths = NAMES[name].partition(":")
    for path in paths.split("|"):
        try:
            return attrgetter(path)(import_module(module))
        except (AttributeError, ImportError):
            continue
    raise ConfigError(
        f"torch {torch.__version__} has no {module}.{paths.replace('|', ' or ')}, which fedtrain uses. "
        f"Install a torch that fedtrain is tested with, {OLDEST} to {NEWEST}."
    )


def replace_name(name: str, by: Any) -> None:
    """Put `by` in the place of what torch has under one of `NAMES`. ConfigError as for any use of it."""
    __getattr__(name)
    module, _, path = NAMES[name].partition(":")
    setattr(import_module(module), path, by)


def silent(stage: Any) -> Any:
    """A pipeline stage that sends its neighbours nothing before the first step. Before torch 2.13 it did, to
    its own rank too in a schedule that is a V, which Gloo can't."""
    stage._get_init_p2p_neighbors_ops = list
    return stage


def reduce_unused(root: Any) -> None:
    """Have the ranks of an FSDPModule and of those within it reduce the same gradients in each step: zeros
    for a parameter that a rank's loss did not use. (torch 2.13 has a method for it.)"""
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            cast(nn.Module, module).register_forward_hook(_fill_unused)


def _fill_unused(module: nn.Module, inputs: object, output: Any) -> None:
    """As soon as backward reaches the outputs, and FSDP has gathered the parameters, give those zeros as
    gradients, to which autograd adds; but not those that FSDP gathers with a module within this one."""
    from torch.distributed.fsdp import FSDPModule

    def fill(_: torch.Tensor) -> None:
        within = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
        others = {p for each in within for p in cast(nn.Module, each).parameters()}
        for parameter in set(module.parameters()) - others:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    for tensor in __getattr__("tree_leaves")(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(fill)  # type: ignore[no-untyped-call]  # torch's
