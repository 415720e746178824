"""On which devices a test runs. Where no GPU is, a CPU stands in, and memory that passes for a GPU's."""

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretended import PRESENT

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
PRETENDED = pytest.param("cuda", marks=pytest.mark.pretended, id="pretended")  # see tests/pretended.py
EACH = pytest.mark.parametrize("device", ["cpu", PRETENDED, GPU])
GPUS_ONLY = pytest.mark.parametrize("device", [GPU])
NO_CPU = pytest.mark.parametrize("device", [PRETENDED, GPU])


def slowly(seconds, pretended=0):
    """On each device: the CPU's takes so long, and so does the pretended GPU's, where it is told."""
    devices = [pytest.param("cpu", marks=pytest.mark.slow(seconds)), GPU]
    if pretended:
        marks = pytest.mark.slow(pretended), pytest.mark.pretended
        devices.insert(1, pytest.param("cuda", marks=marks, id="pretended"))
    return pytest.mark.parametrize("device", devices)


def gathers(device):
    """Skip on a real GPU that ranks share by Gloo: fedtrain refuses a mesh whose ranks gather parts of
    tensors (devices.refuse_gathers)."""
    if device == "cuda" and not PRESENT:
        pytest.skip("Gloo ends a process that gathers tensors on a GPU")


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for: each number that Python takes out of a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


def waits_of(device, work):
    """How often `work` waited for the device."""
    if device == "cpu":
        with Waits() as waits:
            work()
        return waits.count
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which itself warns, once, that it is a prototype
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(each.message) for each in told)
