"""Ranks on one machine take the mean of their gradients in memory that they share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fedtrain.config import Config, ParallelConfig, TrainConfig
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel import shared_mean
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.parallel.shared_mean import SharedMean
from fedtrain.training.task import Task
from tests.worlds import world

CPU = torch.device("cpu")
SHAPES = [(300, 700), (5,), (), (0, 3), (2, 3, 4, 5)]  # the first is cut among ranks, in several chunks


class Rows(Task):
    poisoned: tuple[int, ...] = ()  # ranks

    def model(self):
        return nn.Sequential(nn.Linear(4, 600), nn.BatchNorm1d(600), nn.Linear(600, 2))

    def data(self, site):
        return torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2

    def loss(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * float("nan") if dist.get_rank() in self.poisoned else loss


def engine(task: Task, ranks: int, **parallel) -> MeshEngine:
    train = TrainConfig(lr=0.1)
    parallel = ParallelConfig(**parallel)
    config = Config(train=train, parallel=parallel)
    return MeshEngine(task, config, Mesh(Sizes.of(parallel, ranks), CPU))


def weights(found: MeshEngine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in found.parts[0].parameters()])


def alone(rank: int, shares: MeshEngine) -> list:
    """A batch's share of this rank."""
    x, y = shares.task.data("")
    return [((x[rank::2], y[rank::2]), 32)]


def take_a_mean(rank: int, ranks: int, folder: Path) -> None:
    drawn = torch.Generator().manual_seed(rank)
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float32, torch.float32]
    parameters = [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(SHAPES, dtypes, strict=True)]
    parameters[-1].data = parameters[-1].data.to(memory_format=torch.channels_last)
    shared = SharedMean.of(DistributedDataParallel(nn.ParameterList(parameters)), parameters, "none")
    assert shared is not None
    for step in range(3):
        wanted = []
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=drawn, dtype=p.dtype) * 10**step
            dist.all_reduce(mean := p.grad.clone())
            wanted.append(mean * (0.5 / ranks))
        assert not shared.take(0.5, {*parameters})
        for p, mean in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(p.grad, mean)
            assert p.grad.stride() == p.stride(), "a fused optimizer takes both in the order of their memory"
            p.grad.mul_(rank + 2)  # a gradient is this rank's own, once it has it
        norm = torch.stack([mean.double().norm() for mean in wanted]).norm()
        torch.testing.assert_close(shared.norm, norm, rtol=1e-6, atol=0)
    (folder / f"norm-{rank}").write_bytes(shared.norm.numpy().tobytes())


@pytest.mark.slow(4)
def test_it_is_the_mean_that_gloo_gives_and_its_norm_has_the_same_bits_at_all_ranks(tmp_path):
    world(3, take_a_mean, tmp_path)
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
    assert len([*tmp_path.iterdir()]) == 3


def train_in_both_ways(rank: int, ranks: int) -> None:
    shares = engine(Rows(), ranks)
    assert shares.shared_mean is not None
    opened = shared_mean.opened
    if rank == 1:
        shared_mean.opened = lambda *_: None
    sends = engine(Rows(), ranks)
    shared_mean.opened = opened
    assert sends.shared_mean is None, "a rank that can't open the others' memory, alone, uses it"
    for step in range(4):
        for each in (shares, sends):
            assert each.steps.take(alone(rank, each), f"step {step}").taken
        assert torch.equal(weights(shares), weights(sends)), step
        torch.testing.assert_close(shares.norm(), sends.norm(), rtol=1e-6, atol=0)
        # Each forward begins with the running statistics of the first rank.
        mine, theirs = (each.parts[0][1].running_mean for each in (shares, sends))
        assert torch.equal(mine, theirs), step
    assert shares.waiting_s() > 0

    before = weights(shares).clone()
    shares.task.poisoned = (1,)
    assert not shares.steps.take(alone(rank, shares), "step 5").taken
    assert torch.equal(weights(shares), before)
    shares.task.poisoned = ()
    assert shares.steps.take(alone(rank, shares), "step 6").taken
    assert not torch.equal(weights(shares), before)


def test_two_ranks_train_to_the_bits_of_ddp_which_takes_over_where_one_cannot_open_the_others_memory():
    world(2, train_in_both_ways)


def test_memory_is_opened_by_its_name_alone():
    with shared_mean.memory_file("fedtrain-a", 4096) as fd:
        assert shared_mean.opened(os.getpid(), fd, "fedtrain-a", 4096) is not None
        assert shared_mean.opened(os.getpid(), fd, "fedtrain-b", 4096) is None
        assert shared_mean.opened(os.getpid(), -1, "fedtrain-a", 4096) is None


def test_a_system_without_such_memory_says_so_by_a_descriptor_that_nobody_can_open(monkeypatch):
    def refused(name):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", refused)
    with shared_mean.memory_file("fedtrain-a", 4096) as fd:
        assert fd == -1
