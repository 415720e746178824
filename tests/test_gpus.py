"""Which trainer of a simulation takes which GPU, by a stand-in for nvidia-smi."""

import os

import pytest

from fedtrain.config import Config, TrainConfig
from fedtrain.runtime.simulations import gpus as of_this_machine
from fedtrain.runtime.simulations.gpus import dealt, gpus_here, workers_on
from fedtrain.runtime.simulations.launchers import OnThisMachine
from fedtrain.runtime.simulations.shared_memory import SharedMemory
from fedtrain.runtime.trainers.trainer_process import environment

TWO = """#!/bin/sh
echo "0, GPU-aaaa, 40000"
echo "1, GPU-bbbb, 9000"
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def has(script):
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    has(TWO)
    return has


def test_trainers_are_shared_out_over_all_gpus(machine, tmp_path):
    gpus = gpus_here("auto")
    assert [dealt(gpus, number) for number in range(5)] == ["0", "1", "0", "1", "0"]
    seen = environment(Config(), tmp_path, dealt(gpus, 1))["CUDA_VISIBLE_DEVICES"]
    assert seen == "1"


def test_a_gpu_takes_as_many_trainers_as_its_free_memory_and_the_cores_allow(machine):
    gpus = gpus_here("cuda")
    assert workers_on(gpus, 64) == 4 + 2
    assert workers_on(gpus, 3) == 3
    assert workers_on({"0": 100}, 8) == 1  # it may do, and an error says so if it does not


@pytest.mark.parametrize(
    ("visible", "found"), [("1", ["1"]), ("GPU-bbbb, 0 ", ["GPU-bbbb", "0"]), ("", []), ("7", [])]
)
def test_only_gpus_that_this_process_may_see_are_dealt(machine, monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [*gpus_here("auto")] == found


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("GPU-bb", {"GPU-bb": 9000}),
        ("MIG-1a2b", {"MIG-1a2b": 0}),
        ("MIG-GPU-aaaa/3/0,1", {"MIG-GPU-aaaa/3/0": 0, "1": 9000}),
    ],
)
def test_a_part_of_a_gpu_takes_one_trainer_and_a_name_may_be_short(machine, monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here("auto") == found


@pytest.mark.parametrize(("device", "trainers"), [("cuda:1", 2), ("cuda:0", 4), ("cpu", 64)])
def test_where_the_device_is_named_nothing_is_dealt_and_its_memory_counts(
    machine, tmp_path, monkeypatch, device, trainers
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    config = Config(train=TrainConfig(device=device))
    launcher = OnThisMachine(config, None, tmp_path, SharedMemory())
    assert launcher.count == trainers
    assert launcher.gpus == {}
    assert "CUDA_VISIBLE_DEVICES" not in environment(Config(), tmp_path, dealt({}, 3))


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/sh\necho 'No devices were found'\nexit 6\n",
        "#!/bin/sh\nexec sleep 60\n",  # hangs
        "#!/no/such/interpreter\n",
    ],
)
def test_a_driver_that_does_not_answer_is_no_gpu(machine, monkeypatch, script):
    monkeypatch.setattr(of_this_machine, "ANSWER_S", 0.2)
    machine(script)
    assert gpus_here("auto") == {}


def test_a_gpu_that_does_not_tell_its_free_memory_takes_one_trainer(machine):
    machine("#!/bin/sh\necho '0, GPU-aaaa, [N/A]'\n")
    assert gpus_here("auto") == {"0": 0}
    assert workers_on(gpus_here("auto"), 8) == 1
