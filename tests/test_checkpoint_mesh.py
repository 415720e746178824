"""Checkpoints of several ranks, loaded by other numbers of them: FSDP's shards, uneven and empty ones too."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fedtrain.errors import StoreError
from fedtrain.training.checkpoint import Checkpoints
from tests.worlds import world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class State:
    """A model over all ranks by FSDP2 (one rank: plain), SGD's momentum, a count."""

    def __init__(self, ranks):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))  # 5 rows on 2 ranks; 1 row on 3
        if ranks > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (ranks,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.count = 0

    def steps(self, count):
        for _ in range(count):
            x = torch.randn(6, 7, generator=torch.Generator().manual_seed(self.count))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.count += 1
        return self

    def state_dict(self):
        slots = {
            name: self.optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            for name, p in self.model.named_parameters()
        }
        return {"model": self.model.state_dict(), "momentum": slots, "count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def whole(self):
        return {
            name: t.full_tensor() if hasattr(t, "full_tensor") else t
            for name, t in self.model.state_dict().items()
        }


def save_in_every_way(rank, ranks, folder):
    state = State(ranks).steps(3)
    for way, kwargs in {
        "sharded": {"background": False},
        "background": {"background": True},
        "full": {"background": True, "format": "full"},
    }.items():
        checkpoints = Checkpoints(folder / way, **kwargs)
        checkpoints.save(2, state)
        checkpoints.save(3, state)
        checkpoints.close()
        assert checkpoints.last == 3


def load_all_and_go_on(rank, ranks, folder):
    expected = State(1).steps(5).whole()
    for way in ("sharded", "background", "full"):
        state = State(ranks)
        assert Checkpoints(folder / way).load(state) == 3
        state.steps(2)
        for name, tensor in state.whole().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def load_with_one_file_damaged(rank, ranks, folder):
    lines = []
    state = State(ranks)
    assert Checkpoints(folder / "sharded", notice=lines.append).load(state) == 2
    assert len(lines) == (1 if rank == 0 else 0), "one rank speaks"
    assert all("rank-00001.safetensors is damaged" in line for line in lines)


def save_to_a_folder_that_only_one_rank_can_write(rank, ranks, folder):
    lines = []
    checkpoints = Checkpoints(folder / "blocked", background=True, notice=lines.append)
    if rank == 1:
        checkpoints.place.root = folder / "a file" / "below"
    checkpoints.save(1, State(ranks).steps(1))
    with pytest.raises(StoreError, match="Not a directory"):
        checkpoints.wait()
    assert len(lines) == (1 if rank == 0 else 0)


def test_what_two_ranks_saved_one_two_and_three_load(tmp_path):
    folder = tmp_path / "c"
    world(2, save_in_every_way, folder)
    (file,) = (folder / "full" / "step-000000003").glob("*.safetensors")
    assert load_file(file)["model.0.weight"].shape == (5, 7)
    assert len(list((folder / "sharded" / "step-000000003").glob("*.safetensors"))) == 2
    expected, state = State(1).steps(5).whole(), State(1)
    assert Checkpoints(folder / "sharded").load(state) == 3  # without any process group
    state.steps(2)
    for name, tensor in state.whole().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    for ranks in (2, 3):
        world(ranks, load_all_and_go_on, folder)


def test_damage_seen_by_one_rank_is_known_to_all(tmp_path):
    folder = tmp_path / "c"
    world(2, save_in_every_way, folder)
    (file,) = (folder / "sharded" / "step-000000003").glob("*-rank-00001.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    world(2, load_with_one_file_damaged, folder)


def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a file").touch()
    world(2, save_to_a_folder_that_only_one_rank_can_write, tmp_path / "c")
