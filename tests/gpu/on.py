"""On which devices a test runs. Where no GPU is, a CPU stands in, and memory that passes for a GPU's."""

import pytest

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
