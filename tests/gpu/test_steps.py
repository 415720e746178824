"""What a step costs beside the task's own kernels: waits for the GPU, arithmetic that is counted, figures."""

import time
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn

from fedtrain import Arena, Task
from fedtrain.config import ParallelConfig, TrainConfig
from fedtrain.runtime.datacenters.profile import WARM_UP, Profile
from fedtrain.training.devices import device_of_rank
from fedtrain.training.local import Engine
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.engine import MeshEngine
from tests.gpu.on import EACH, GPUS_ONLY, Waits, slowly, waits_of
from tests.pretended import PRESENT
from tests.test_parallel import Blocks, Rows, config_of
from tests.worlds import world


@EACH
def test_host_syncs_per_step(device):
    """Neither a site's steps wait, nor a datacenter's, whose kernels look whether a gradient is finite."""
    x, y = Rows().data("")
    rounds = []
    for steps in (3, 8):
        config = TrainConfig(local_steps=steps, batch_size=8, clip_norm=0.1, device=device)
        engine = Engine(
            Rows(), config, 1, lambda gradient, weights, given: gradient.add_(weights - given.start)
        )
        start, out = engine.initial(), Arena.zeros(engine.schema)
        data = x.to(device), y.to(device)
        rounds.append(waits_of(device, partial(engine.train, "a", data, 0, start, out)))
    assert rounds[0] == rounds[1]

    ranks = MeshEngine(Rows(), config_of(clip_norm=0.1), Mesh(Sizes(), torch.device(device)))
    shares = [((x.to(device), y.to(device)), 32)]
    ranks.steps.take(shares)
    assert waits_of(device, partial(ranks.steps.take, shares)) == 0

    counted = MeshEngine(Counted(), config_of(clip_norm=0.1), Mesh(Sizes(), torch.device(device)))
    counted.steps.take(shares)
    assert waits_of(device, partial(counted.steps.take, shares)) == 0
    assert waits_of(device, partial(counted.steps.take, shares * 2)) == 0


class Weighed(Rows):
    """Its loss is a sum, whose weight is known when all ranks have told theirs."""

    def loss(self, model, batch):
        return super().loss(model, batch) * len(batch[1]), len(batch[1])


class Counted(Rows):
    """Its weight is known on the device alone."""

    def loss(self, model, batch):
        weight = (batch[1] >= 0).sum()
        return super().loss(model, batch) * weight, weight


def wait_late(rank, ranks, device, backend):
    here = device_of_rank(device, backend)
    config = config_of(clip_norm=0.1)
    engine = MeshEngine(Weighed(), config, Mesh(Sizes.of(config.parallel, ranks), here))
    shares = [(tuple(column.to(here).chunk(ranks)[rank] for column in Weighed().data("")), 32)]
    engine.steps.take(shares)
    waited = []
    with Waits() as waits:
        engine.trained[-1].register_hook(lambda _: waited.append(waits.count))  # the first to have a gradient
        engine.steps.take(shares)
    assert waited == [0]
    assert waits.count == 0


@slowly(3)
def test_ranks_wait_for_nothing_before_the_backward_pass(device):
    world(2, wait_late, device, "gloo", device=device, backend="gloo")


def leave_out(rank, ranks, device):
    """A weight that only the device knows, and gradients that are not finite in some steps."""
    here = device_of_rank(device, "gloo")
    for zero in (0, 1) if device == "cuda" and not PRESENT else (0, 1, 2, 3):  # see on.gathers
        config = config_of(ParallelConfig(zero=zero), optimizer="adamw", weight_decay=0.1)
        models = []
        for waits in (False, True):
            task = Counted()
            engine = MeshEngine(task, config, Mesh(Sizes.of(config.parallel, ranks), here))
            asks = engine.steps.optimizer._asks
            assert asks is (zero != 1), "torch's ZeRO-1 hands nothing on to the optimizer that it holds"
            engine.steps.optimizer._asks &= not waits
            share = tuple(column.to(here).chunk(ranks)[rank] for column in task.data("")), 32
            for task.poison in (False, True, False, True):
                taken = engine.steps.take([share]).taken
                assert bool(taken) is not task.poison
            assert isinstance(taken, torch.Tensor) is (asks and not waits)
            models.append(engine.gather())
        assert rank or torch.equal(models[0].data, models[1].data)


@slowly(4, pretended=5)
def test_ranks_leave_out_the_same_steps_whether_or_not_they_wait_to_know(device):
    world(2, leave_out, device, device=device, backend="gloo")


class Deep(Rows):
    def model(self):
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16))
        return nn.Sequential(*blocks)

    def data(self, site):
        return torch.ones(32, 64), torch.arange(32)


@EACH
@pytest.mark.parametrize("again", [False, True])
def test_mfu_known_model(device, again):
    """Six operations for each parameter and example, whatever is computed again."""
    task = Deep()
    parallel = ParallelConfig(peak_tflops=1.0, checkpoint_activations=again)
    engine = MeshEngine(task, config_of(parallel), Mesh(Sizes(), torch.device(device)))
    engine.steps.take([(task.data(""), 32)])
    parameters = sum(p.numel() for p in engine.trained)
    assert engine.flops.of_step == pytest.approx(6 * parameters * 32, rel=0.05)


@GPUS_ONLY
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # which train.tf32 leaves off
def test_compile_fullgraph(device):
    """One graph for a block and full batches, one more for the last batch."""
    from torch._dynamo.utils import counters  # which takes long to load

    task = Blocks()
    engine = MeshEngine(task, config_of(ParallelConfig(compile=True)), Mesh(Sizes(), torch.device(device)))
    x, y = task.data("")
    before = counters["stats"]["unique_graphs"]
    for size in (32, 32, 20, 32, 20):
        engine.steps.take([((x[:size], y[:size]), size)])
    blocks = len(engine.plan.units(engine.parts[0]))
    assert counters["stats"]["unique_graphs"] - before <= 2 * blocks
    assert not counters["graph_break"]


def gpt():
    path = Path(__file__).parents[2] / "examples" / "shakespeare" / "gpt.py"
    spec = spec_from_file_location("gpt", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(vocabulary=50304, length=1024, width=768, heads=12, layers=12)


class Words(Task):
    def model(self):
        return gpt()

    def data(self, site):
        text = torch.randint(0, 50304, (8, 1025), generator=torch.Generator().manual_seed(1))
        return text[:, :-1], text[:, 1:]

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def seconds_a_step(step, count=20):
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


@GPUS_ONLY
@pytest.mark.timed
def test_step_overhead(device):
    """A GPT of 124M parameters in bf16, beside a loop that has nothing but the same optimizer."""
    task = Words()
    config = config_of(precision="bf16", optimizer="adamw", lr=1e-4, tf32=True)
    engine = MeshEngine(task, config, Mesh(Sizes(), torch.device(device)))
    batch = tuple(column.to(device) for column in task.data(""))
    ours = seconds_a_step(lambda: engine.steps.take([(batch, 8)]))
    model = gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def bare():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()

    theirs = seconds_a_step(bare)
    peak = engine.peak or 1.0
    used = 6 * sum(p.numel() for p in model.parameters()) * batch[0].numel() / ours / peak
    print(f"{batch[0].numel() / ours:,.0f} tokens/s, MFU {used:.2f}, {ours / theirs:.3f} of bare torch")
    assert ours <= 1.03 * theirs


@EACH
def test_profile_has_a_snapshot_of_the_memory(device, tmp_path, monkeypatch):
    """Without a GPU: torch is asked for one, where the mesh's device is a GPU."""
    mesh = Mesh(Sizes(), torch.device(device))
    if device == "cpu":
        mesh.device = torch.device("cuda")
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).touch())
    with Profile(2, tmp_path, mesh) as profile:
        for _ in range(WARM_UP + 2):
            torch.ones(8, device=device).sum()
            profile.step()
    names = {"rank-00000.json.gz", "memory-00000.pickle"}
    assert {file.name for file in (tmp_path / "profile").iterdir()} == names
