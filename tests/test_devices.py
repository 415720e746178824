"""Which device a process takes, by which backend ranks speak, how exact a GPU is, what is seeded. GPUs are
stand-ins, so this runs everywhere; tests/gpu has what needs real ones."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fedtrain.config import Config, ParallelConfig
from fedtrain.errors import ConfigError
from fedtrain.runtime.meeting import meet
from fedtrain.training import devices
from fedtrain.training.devices import (
    backend_of,
    device_of_rank,
    record_collectives,
    refuse_gathers,
    refuse_shared,
    seed_all,
    set_arithmetic,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def gpus(monkeypatch):
    """Makes this machine have so many GPUs; the list of those that were made current."""

    def here(count: int) -> list[torch.device]:
        chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return here


def rank(monkeypatch, number: int, ranks: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(number))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


# --- which one


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_rank_of_a_machine_takes_the_gpu_of_its_number(monkeypatch, gpus, name):
    chosen = gpus(2)
    rank(monkeypatch, 1, 3)
    assert [device_of_rank(name)] == chosen == [torch.device("cuda:1")]
    rank(monkeypatch, 2, 3)
    with pytest.raises(ConfigError, match=r"rank 2 of this machine has no GPU, there are 2\. Start"):
        device_of_rank(name)


def test_a_rank_that_is_shown_its_own_gpu_alone_takes_it(monkeypatch, gpus):
    chosen = gpus(1)
    rank(monkeypatch, 3, 4)
    assert [device_of_rank("auto")] == chosen == [torch.device("cuda:0")]


def test_under_gloo_ranks_share_gpus_by_turns(monkeypatch, gpus):
    gpus(2)
    rank(monkeypatch, 3, 4)
    assert device_of_rank("auto", "gloo") == torch.device("cuda:1")
    assert device_of_rank("cuda:0", "gloo") == torch.device("cuda:0")


def test_several_ranks_on_one_named_gpu_are_refused(monkeypatch, gpus):
    gpus(2)
    rank(monkeypatch, 0, 2)
    with pytest.raises(ConfigError, match=r"2 ranks of this machine can't share cuda:0.*device = cuda,"):
        device_of_rank("cuda:0")
    assert device_of_rank("cpu") == CPU


def test_two_ranks_that_are_shown_one_gpu_are_told_before_nccl_begins(monkeypatch):
    store, gpu = dist.HashStore(), SimpleNamespace(uuid="GPU-1", name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    refuse_shared(store, CUDA, "cpu:gloo,cuda:nccl")
    with pytest.raises(ConfigError, match=r"two ranks have the same GPU, H200 GPU-1.*CUDA_VISIBLE_DEVICES"):
        refuse_shared(store, CUDA, "cpu:gloo,cuda:nccl")
    refuse_shared(store, CUDA, "gloo")
    gpu.uuid = "GPU-2"
    refuse_shared(store, CUDA, "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(
    ("parallel", "named"), [({"tp": 2, "zero": 2}, "tp = 2, parallel.zero = 2"), ({"cp": 2}, "cp = 2")]
)
def test_gloo_on_gpus_is_refused_where_ranks_gather_parts(parallel, named):
    config = ParallelConfig(**parallel)
    with pytest.raises(ConfigError, match=rf"parallel\.{named}: .*backend = auto with one GPU for each"):
        refuse_gathers(config, 2, CUDA, "gloo")
    refuse_gathers(config, 2, CUDA, "cpu:gloo,cuda:nccl")
    refuse_gathers(config, 2, CPU, "gloo")
    refuse_gathers(config, 1, CUDA, "gloo")
    refuse_gathers(ParallelConfig(zero=1, pp=2), 2, CUDA, "gloo")


def test_a_mesh_that_gloo_would_end_is_refused_before_ranks_meet(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = Config.of({"parallel": {"tp": 2, "backend": "gloo"}}, tmp_path)
    with pytest.raises(ConfigError, match=r"^parallel\.tp = 2: "):
        meet(config, "gloo", CUDA)


# --- the backend


@pytest.mark.parametrize(
    ("device", "backend", "torchs"),
    [
        (CPU, "auto", "gloo"),
        (CPU, "gloo", "gloo"),
        (CUDA, "auto", "cpu:gloo,cuda:nccl"),
        (CUDA, "nccl", "cpu:gloo,cuda:nccl"),
        (CUDA, "gloo", "gloo"),
    ],
)
def test_what_lies_in_memory_has_a_backend_beside_what_lies_on_gpus(device, backend, torchs):
    assert backend_of(device, backend) == torchs


def test_nccl_writes_down_what_hangs_and_the_environment_comes_first(monkeypatch, tmp_path):
    for name in (
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ):
        monkeypatch.setenv(name, "7")
        monkeypatch.delenv(name)
    record_collectives("gloo", tmp_path / "hangs")
    assert not {"TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_LAUNCH_ORDER_IMPLICIT"} & os.environ.keys()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    record_collectives("cpu:gloo,cuda:nccl", tmp_path / "hangs")
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == str(tmp_path / "hangs" / "nccl-")
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "50"
    assert (tmp_path / "hangs").is_dir()


def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.backend: nccl is for GPUs"):
        backend_of(CPU, "nccl")


# --- how exact it is


@pytest.fixture
def arithmetic(monkeypatch):
    """What is asked of torch's arithmetic, in place of asking for it."""
    asked = SimpleNamespace(deterministic=None)
    matmul, cudnn = SimpleNamespace(allow_tf32=None), SimpleNamespace(allow_tf32=None, benchmark=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", partial(setattr, asked, "deterministic"))
    monkeypatch.delenv(devices.WORKSPACE, raising=False)
    asked.matmul, asked.cudnn = matmul, cudnn
    return asked


def test_a_gpu_is_exact_unless_tf32_is_asked_for(arithmetic):
    set_arithmetic(CUDA, deterministic=False, tf32=False)
    assert not arithmetic.matmul.allow_tf32
    assert not arithmetic.cudnn.allow_tf32
    set_arithmetic(CUDA, deterministic=False, tf32=True)
    assert arithmetic.matmul.allow_tf32
    assert arithmetic.cudnn.allow_tf32


def test_deterministic_asks_torch_cublas_and_cudnn(arithmetic):
    set_arithmetic(CUDA, deterministic=False, tf32=False)
    assert arithmetic.deterministic is False
    assert devices.WORKSPACE not in os.environ
    set_arithmetic(CUDA, deterministic=True, tf32=False)
    assert arithmetic.deterministic
    assert not arithmetic.cudnn.benchmark
    assert os.environ.pop(devices.WORKSPACE) == ":4096:8"


def test_the_arithmetic_of_a_cpu_is_left_alone(arithmetic):
    set_arithmetic(CPU, deterministic=True, tf32=True)
    assert arithmetic.deterministic is None
    assert arithmetic.matmul.allow_tf32 is None


# --- what is seeded


@pytest.mark.parametrize(("device", "seeded"), [("cuda:1", 1), ("cuda", 2)])
def test_seeds_are_those_of_the_device_that_trains(monkeypatch, device, seeded):
    generators = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    before = [generator.initial_seed() for generator in generators]
    seed_all(7, torch.device(device))
    after = [generator.initial_seed() for generator in generators]
    assert after == [7 if i == seeded else seed for i, seed in enumerate(before)]
