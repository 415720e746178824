"""A site that trains on a GPU: the CPU's update, the same bits again, and what a GPU alone can do wrong."""

from collections import UserDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedtrain import Arena, Task
from fedtrain.errors import TaskError
from fedtrain.training import precision as loss_scales
from fedtrain.training.examples import examples_of
from fedtrain.training.local import Engine
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.parallel.reading import read_once
from tests.gpu.on import EACH, GPU, GPUS_ONLY
from tests.test_batches import Graph, Pair
from tests.test_local import CONFIG, Small, Small32, examples, flat, train
from tests.test_parallel import Rows, config_of

FIRST_GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)
SECOND_GPU = pytest.param("cuda:1", marks=pytest.mark.gpu2)
WIDTHS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}  # how far the narrow one may be, as a part of the update


@EACH
@pytest.mark.parametrize("precision", WIDTHS)
def test_site_update_cuda_equals_cpu(device, precision):
    data = examples(40, dtype=torch.float32)
    exact = flat(train(Small32(), replace(CONFIG, device="cpu"), data).delta)
    found = flat(train(Small32(), replace(CONFIG, precision=precision, device=device), data).delta)
    assert (found - exact).norm() < WIDTHS[precision] * exact.norm()


class Pictures(Task):
    """A convolution, an embedding and dropout: their backward passes add in the order of threads."""

    def model(self):
        words, look = nn.Embedding(7, 16), nn.Conv2d(1, 4, 3, padding=1)
        return nn.ModuleDict({"words": words, "look": look, "head": nn.Linear(64, 3)})

    def loss(self, model, batch):
        seen = model["look"](model["words"](batch[0]).view(-1, 1, 4, 4)).flatten(1)
        return nn.functional.cross_entropy(model["head"](nn.functional.dropout(seen, 0.3)), batch[1])


def pictures(n=64):
    draw = torch.Generator().manual_seed(4)
    return torch.randint(0, 7, (n,), generator=draw), torch.randint(0, 3, (n,), generator=draw)


@EACH
def test_repeated_round_same_bits_deterministic(device):
    config = replace(CONFIG, device=device, deterministic=True, local_epochs=3)
    one, other = (train(Pictures(), config, pictures()).delta.digest for _ in range(2))
    assert one == other


@pytest.mark.parametrize("device", ["cpu", GPU, FIRST_GPU, SECOND_GPU])
def test_seeds_on_current_and_named_device(device):
    engine = Engine(Small(), replace(CONFIG, device=device), 1)

    def mask(*purpose):
        engine.seed(*purpose)
        return nn.functional.dropout(torch.ones(1000, device=engine.device))

    assert torch.equal(mask(1, "a"), mask(1, "a"))
    assert not torch.equal(mask(1, "a"), mask(2, "a"))


class Ready:
    """Batches, as a loader gives them."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


KINDS = {
    "named tuple": (Pair, lambda batch: batch),
    "object": (Graph, lambda batch: (batch.x, batch.y)),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda batch: (batch["x"], batch["y"])),
    "BatchEncoding": (lambda x, y: UserDict(x=x, y=y), lambda batch: (batch["x"], batch["y"])),
    "PackedSequence": (
        lambda x, y: (pack_sequence([*x[:, None, :]]), y),
        lambda batch: (batch[0].data if isinstance(batch[0], PackedSequence) else batch[0], batch[1]),
    ),
}


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_batches_on_device(device, kind):
    make, parts = KINDS[kind]

    class Their(Small32):
        def loss(self, model, batch):
            x, y = parts(batch)
            assert x.device.type == y.device.type == device
            return super().loss(model, (x, y))

    x, y = examples(16, dtype=torch.float32)
    ready = Ready([make(x[at : at + 8], y[at : at + 8]) for at in (0, 8)])
    update = train(Their(), replace(CONFIG, device=device), ready)
    assert flat(update.delta).isfinite().all()


@EACH
def test_pinned_loader_no_race(device):
    x, y = examples(1600, dtype=torch.float32)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, pin_memory=device == "cuda")
    copied = Ready([(x[at : at + 8].clone(), y[at : at + 8].clone()) for at in range(0, 1600, 8)])
    config = replace(CONFIG, device=device, deterministic=True)
    assert train(Small32(), config, loader).delta.digest == train(Small32(), config, copied).delta.digest


class Numbered(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.full((3,), float(i)), i


@EACH
@pytest.mark.parametrize("readers", [1, 0])
def test_each_batch_that_is_read_ahead_comes_once_and_whole(device, readers):
    data = DataLoader(Numbered(), batch_size=4, num_workers=readers)
    found = [*read_once(examples_of(data), 4, 1, 0, 1, readers, torch.device(device))]
    assert all(x.device.type == device for (x, _), _ in found)
    assert [x[:, 0].tolist() for (x, _), _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@EACH
def test_a_loader_may_give_what_lies_on_the_device(device):
    data = DataLoader(TensorDataset(torch.arange(40.0, device=device).view(10, 4)), batch_size=4)
    found = [batch for batch, _ in read_once(examples_of(data), 4, 1, 0, 1, 0, torch.device(device))]
    assert torch.cat([x for (x,) in found]).flatten().tolist() == [*range(40)]


class Wide(Small32):
    def model(self):
        return nn.Sequential(nn.Linear(6, 1 << 12), nn.Linear(1 << 12, 1 << 12), nn.Linear(1 << 12, 3))


@GPUS_ONLY
def test_peak_memory_of_a_round(device):
    """The weights, where the round began, gradients and the difference; an optimizer without state."""
    square = torch.ones(64, 64, device=device, requires_grad=True)
    (square @ square).sum().backward()  # cuBLAS has its workspaces, of this thread and of autograd's
    del square
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = Engine(Wide(), replace(CONFIG, device=device), 1)
    engine.train("a", examples(16, dtype=torch.float32), 0, engine.initial(), Arena.zeros(engine.schema))
    activations = 8 * 3 * (1 << 12) * 4
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.05 * (4 * engine.schema.nbytes + activations) + (32 << 20), "cuBLAS' workspace beside it"


@EACH
def test_oom_at_a_site(device):
    class Greedy(Small32):
        full = True

        def loss(self, model, batch):
            if self.full and device == "cuda":
                torch.empty(1 << 50, dtype=torch.uint8, device=device)
            elif self.full:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().loss(model, batch)

    data, task = examples(16, dtype=torch.float32), Greedy()
    engine = Engine(task, replace(CONFIG, device=device), 1)
    start, out = engine.initial(), Arena.zeros(engine.schema)
    for first in (True, False):
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        with pytest.raises(TaskError, match=r"^out of memory in "):
            engine.train("a", data, 0, start, out)
        if not first and device == "cuda":
            assert torch.cuda.memory_allocated() <= held
    task.full = False
    plain = train(Small32(), replace(CONFIG, device=device), data).delta
    assert engine.train("a", data, 0, start, out).delta.digest == plain.digest


@EACH
def test_fp16_scale_recovers(device, monkeypatch):
    monkeypatch.setattr(loss_scales, "GROWTH_STEPS", 3)
    task = Rows()
    engine = MeshEngine(task, config_of(precision="fp16"), Mesh(Sizes(), torch.device(device)))
    scale, shares = engine.steps.scale, [(task.data(""), 32)]
    task.poison = True
    assert not engine.steps.take(shares).taken
    low, task.poison = scale.value, False
    assert low == loss_scales.FIRST / 2
    assert engine.steps.take(shares).taken
    kept = scale.state_dict()
    engine.steps.scale.begin()
    engine.steps.scale.load_state_dict(kept)
    for _ in range(2):
        assert engine.steps.take(shares).taken
    assert engine.steps.scale.value == 2 * low


class Convolved(Task):
    """Its weights and batches are in channels-last order, as [N, H, W, C]."""

    def model(self):
        layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def data(self, site):
        draw = torch.Generator().manual_seed(2)
        return torch.randn(24, 3, 8, 8, generator=draw), torch.arange(24) % 2

    def loss(self, model, batch):
        seen = batch[0].contiguous(memory_format=torch.channels_last)
        return nn.functional.cross_entropy(model(seen), batch[1])


def proximal(gradient, weights, given):
    gradient.add_(weights - given.start, alpha=0.5)


@EACH
def test_tf32_and_channels_last_options_honoured_in_an_arena(device):
    task, config = Convolved(), replace(CONFIG, device=device, tf32=True)
    here = flat(train(task, config, task.data("a"), correct=proximal).delta)
    if device == "cuda":
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    mesh = Mesh(Sizes(), torch.device(device))
    whole = config_of(tf32=True, batch_size=8)
    whole = replace(whole, run=replace(whole.run, seed=1))
    ranks = MeshEngine(task, whole, mesh, correct=proximal)
    assert ranks.trained[0].is_contiguous(memory_format=torch.channels_last)
    start = ranks.gather()
    ranks.begin_round(0, afresh=True)
    order = torch.Generator().manual_seed(ranks.seed(0, "a"))
    x, y = task.data("a")
    for rows in torch.randperm(24, generator=order).split(8):
        ranks.steps.take([((x[rows], y[rows]), 8)])
    moved = flat(ranks.gather()) - flat(start)
    assert (moved - here).norm() < (1e-5 if device == "cpu" else 1e-2) * here.norm()
