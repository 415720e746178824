"""Each test's body is proven on a CPU where one can run it, and runs on a GPU where one is."""

import os

import pytest
import torch

from fedtrain.training.devices import WORKSPACE
from tests.pretended import PretendedGPU

os.environ.setdefault(WORKSPACE, ":4096:8")  # read once in a process, when the first product is made


@pytest.fixture(autouse=True)
def pretended(request):
    """The GPU of a test that is marked so; where a real one is, that one is enough."""
    if request.node.get_closest_marker("pretended") is None:
        yield None
        return
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with PretendedGPU() as gpu:
        yield gpu


@pytest.fixture(autouse=True)
def arithmetic():
    """Back to what it was: a process has one for all its tests."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    yield
    torch.use_deterministic_algorithms(False)
    for flag, allowed in zip(flags, before, strict=True):
        flag.allow_tf32 = allowed
