"""An optimizer whose state rests on a disk takes the steps of one that keeps it in memory, bit for bit."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fedtrain.config import Config, ParallelConfig
from fedtrain.errors import ConfigError, StoreError
from fedtrain.training.optimizers import with_all_cores
from fedtrain.training.parallel import offload
from fedtrain.training.parallel.offload import Resting, Threads, disk_of
from fedtrain.training.parallel.state import State
from tests.equivalence.ranks import launch, run_case
from tests.equivalence.tiny import case, furthest, project

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.001, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm, self.linear = nn.BatchNorm1d(12), nn.Linear(12, 5)
        self.late = nn.Linear(5, 5)  # takes part from the third step on

    def forward(self, x, step):
        y = self.linear(self.norm(self.convolution(x).flatten(1)))
        return self.late(y) if step >= 2 else y


def train(model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(7, 2, 4, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x, step).square().sum().backward()
        optimizer.step()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("bucket", [1, 100, 1 << 20])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_on_a_disk_is_state_in_memory(tmp_path, kind, bucket):
    ours, theirs = Net(), Net()
    plain = OPTIMIZERS[kind](theirs.parameters())
    resting = Resting(OPTIMIZERS[kind](ours.parameters()), Threads(), tmp_path / "rank", bucket)
    train(ours, resting, 0, 5)
    train(theirs, plain, 0, 5)
    assert same(ours, theirs)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert resting.state[p].keys() == plain.state[q].keys()
        assert all(torch.equal(resting.state[p][name], plain.state[q][name]) for name in plain.state[q])


def test_between_steps_the_state_is_in_the_files_and_they_go_with_the_optimizer(tmp_path):
    left = tmp_path / "rank-killed"  # by a run that had no time to
    left.mkdir()
    model = Net()
    resting = Resting(OPTIMIZERS["adamw"](model.parameters()), Threads(), tmp_path / "rank", 100)
    assert not left.exists()
    train(model, resting, 0, 3)
    slot = resting.state[model.linear.weight]["exp_avg"]
    (folder,) = tmp_path.iterdir()
    content = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    assert slot.contiguous().numpy().tobytes() in content
    del resting, slot
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_of_state_on_a_disk_goes_on_in_memory_and_back(tmp_path):
    class NoData:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    def run(model, optimizer):
        return State([model], optimizer, NoData())

    whole, first, second, third = Net(), Net(), Net(), Net()
    train(whole, OPTIMIZERS["adamw"](whole.parameters()), 0, 6)
    resting = Resting(OPTIMIZERS["adamw"](first.parameters()), Threads(), tmp_path / "a", 100)
    train(first, resting, 0, 3)
    saved = copy.deepcopy(run(first, resting).state_dict())
    plain = OPTIMIZERS["adamw"](second.parameters())
    run(second, plain).load_state_dict(saved)
    train(second, plain, 3, 5)
    saved = copy.deepcopy(run(second, plain).state_dict())
    again = Resting(OPTIMIZERS["adamw"](third.parameters()), Threads(), tmp_path / "b", 100)
    run(third, again).load_state_dict(saved)
    train(third, again, 5, 6)
    assert same(third, whole)


def test_steps_on_offloaded_weights_take_all_cores_and_nothing_else_does(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    optimizer = OPTIMIZERS["adamw"](Net().parameters())
    with_all_cores(optimizer, 1)
    optimizer.step()
    assert asked == [3, 1]


def test_a_disk_that_is_gone_is_named(tmp_path):
    model = Net()
    resting = Resting(OPTIMIZERS["adamw"](model.parameters()), Threads(), tmp_path / "rank", 100)
    train(model, resting, 0, 1)
    (folder,) = tmp_path.iterdir()
    sorted(folder.iterdir())[0].write_bytes(b"")
    with pytest.raises(StoreError, match="ends after 0 of 4,096 bytes"):
        train(model, resting, 1, 2)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"parallel\.offload_dir: .*Name a folder on a disk"):
        Resting(OPTIMIZERS["sgd"](Net().parameters()), Threads(), tmp_path / "file" / "rank")


def test_a_disk_needs_a_folder_and_shards():
    with pytest.raises(ConfigError, match=r"offload_dir: parallel\.offload = nvme needs a folder"):
        ParallelConfig(zero=3, offload="nvme")
    with pytest.raises(ConfigError, match=r"offload: needs parallel\.zero = 2 or 3"):
        ParallelConfig(offload="disk", offload_dir="x")


def test_without_deepspeed_nvme_says_what_to_install(monkeypatch):
    monkeypatch.setattr(offload, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs DeepSpeed: pip install fedtrain\[deepspeed\]"):
        disk_of("nvme")


def offloaded(kind):
    train = {"clip_norm": 0.1, "accumulate": 2}
    return case("Padded", zero=3, train=train, offload=kind, offload_dir="disk")


@pytest.mark.slow  # ranks; where DeepSpeed's I/O was never used it is compiled first
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra [deepspeed] is not installed")
def test_ranks_with_their_state_on_nvme_train_what_they_do_without_and_stop_and_go_on_alone(tmp_path):
    folder = project(tmp_path / "project")
    half = offloaded("nvme")
    half["run"] |= {"rounds": 1}
    found = launch(folder, 2, {"memory": offloaded("none"), "nvme": offloaded("nvme"), "half": half})
    assert furthest(found["memory"].model, found["nvme"].model) == 0
    alone = Config.of({**offloaded("none"), "parallel": {}}, folder)
    rest = replace(alone, run=replace(alone.run, name="half"))
    assert furthest(run_case(rest, [], torch.device("cpu")), found["memory"].model) < 1e-12
