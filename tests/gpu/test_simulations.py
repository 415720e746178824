"""A simulation on GPUs: many sites in one call, workers that are dealt over the GPUs, a CPU's model."""

import asyncio
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from fedtrain import Arena
from fedtrain.config import Config
from fedtrain.runtime.simulations.gpus import WORKERS, dealt, gpus_here, workers_on
from fedtrain.runtime.trainers.trainer import Trainer
from fedtrain.runtime.trainers.trainer_process import environment
from fedtrain.store import RunStore
from fedtrain.training.local import Engine
from fedtrain.training.stacked import GPU_PART, Stacked
from tests.gpu.on import EACH, GPUS_ONLY, NO_CPU, slowly, waits_of
from tests.inline import federation, project, simulation
from tests.test_stacked import CONFIG, SITES, Dropped, Small, Tokens, examples, proximal, replace, slab


@EACH
@pytest.mark.parametrize("task", [Small(), Tokens()])
def test_vmap_equals_loop_cuda(device, task):
    config = replace(CONFIG, device=device, local_epochs=2, momentum=0.9)
    engine = Engine(task, config, 1, proximal)
    start = engine.initial()
    looped = [engine.train(site, data, 0, start, Arena.zeros(engine.schema)) for site, data in SITES]
    for loop, many in zip(looped, Stacked(engine).train(SITES, 0, start, slab(engine)), strict=True):
        for name, delta in loop.delta.views().items():
            torch.testing.assert_close(many.delta.views()[name], delta, rtol=0, atol=1e-10)


@slowly(1, pretended=1)
@pytest.mark.parametrize("task", [Small(), Tokens(), Dropped()])
def test_a_stack_of_sites_waits_for_no_step(device, task):
    waits = []
    for passes in (1, 3):
        engine = Engine(task, replace(CONFIG, device=device, local_epochs=passes), 1, proximal)
        start, many = engine.initial(), Stacked(engine)
        many.train(SITES, 0, start, slab(engine))  # graphs are traced
        waits.append(waits_of(device, partial(many.train, SITES, 1, start, slab(engine))))
    assert waits[0] == waits[1]


@GPUS_ONLY
@pytest.mark.timed
def test_vmap_chunk_by_free_memory(device):
    """10,000 sites are trained in stacks of what the GPU has room for, and at its memory's pace."""

    class Five(Small):
        def model(self):
            return torch.nn.Sequential(torch.nn.Linear(6, 500), torch.nn.Tanh(), torch.nn.Linear(500, 3))

    data = [(x.float(), y) for x, y in (examples(8, i) for i in range(50))]
    sites = [(f"site-{i}", data[i % 50]) for i in range(10_000)]
    engine = Engine(Five(), replace(CONFIG, device=device), 1)
    start, many, outs = engine.initial(), Stacked(engine), slab(engine, sites)
    many.train(sites, 0, start, outs)
    torch.cuda.synchronize()
    began = time.perf_counter()
    many.train(sites, 1, start, outs)
    torch.cuda.synchronize()
    print(
        f"{len(sites) / (time.perf_counter() - began):,.0f} updates/s of {engine.schema.numel:,} parameters"
    )


@NO_CPU
@pytest.mark.parametrize("room", [1, 100, 1000])
def test_a_stack_has_as_many_sites_as_the_free_memory_takes(device, room, monkeypatch):
    """A CPU's caches, for which 72 are the most, say nothing of a GPU."""
    engine = Engine(Small(), replace(CONFIG, device=device), 1)
    sites = [(f"site-{i}", examples(8, i)) for i in range(150)]
    start, outs, many = engine.initial(), slab(engine, sites), Stacked(engine)
    each = engine.schema.nbytes + sum(column.nbytes for column in sites[0][1])
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room * GPU_PART * each, 80 << 30))
    found = many.train(sites[: 3 if room == 1 else None], 0, start, outs)
    (stacks,) = (stacks for _, stacks in many._kept.values())
    assert max(len(stack.names) for stack in stacks) == min(room, len(sites))
    alone = engine.train(*sites[2], 0, start, Arena.zeros(engine.schema))
    torch.testing.assert_close(
        found[2].delta.views()["0.weight"], alone.delta.views()["0.weight"], rtol=0, atol=1e-10
    )


def model_of(run_dir):
    store = RunStore(run_dir, read_only=True)
    last = store.latest().weights.load().data.view(torch.float32).clone()
    store.close()
    return last


@EACH
def test_simulate_cuda_equals_cpu(device, tmp_path, inline):
    models = []
    for where in ("cpu", device):
        config = project(tmp_path / where, train={"device": where}, secagg={"enabled": False})
        asyncio.run(simulation(config))
        models.append(model_of(config.simulate_dir))
    cpu, gpu = models
    assert (gpu - cpu).norm() <= 1e-4 * cpu.norm()


MANY = """
import torch
import fedtrain
from torch import nn


class Many(fedtrain.Task):
    def sites(self):
        return [f"site{i:03}" for i in range(160)]

    def model(self):
        return nn.Linear(6, 3)

    def data(self, site):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(int(site[4:])))
        return x, (x[:, 0] > 0).long()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@EACH
def test_a_simulation_on_a_gpu_trains_a_whole_cohort_in_one_call(device, tmp_path, inline, monkeypatch):
    """A CPU's calls are of 48 sites, whose deltas its caches hold."""
    trains, calls, models = Stacked.train, [], []

    def train(stacked, sites, *args, **kwargs):
        calls.append(len(sites))
        return trains(stacked, sites, *args, **kwargs)

    monkeypatch.setattr(Stacked, "train", train)
    for where, engine in (("cpu", "loop"), (device, "stacked")):
        config = project(
            tmp_path / engine, MANY, run={"task": "many_task:Many", "rounds": 2}, train={"device": where},
            simulate={"engine": engine}, strategy={"min_sites": 160}, secagg={"enabled": False},
        )  # fmt: skip
        asyncio.run(simulation(config))
        models.append(model_of(config.simulate_dir))
    assert calls == ([48, 48, 64] * 2 if device == "cpu" else [160] * 2)
    loop, stacked = models
    assert (stacked - loop).norm() <= 1e-5 * loop.norm()


@slowly(4)
def test_federation_gpu(device, tmp_path, inline):
    """An aggregator and three sites over mutual TLS, with masked sums, on one GPU."""
    models = []
    for where in ("cpu", device):
        config = project(tmp_path / where, train={"device": where})
        asyncio.run(federation(config))
        models.append(model_of(config.run_dir))
    cpu, gpu = models
    assert (gpu - cpu).norm() <= 1e-4 * cpu.norm()


@GPUS_ONLY
def test_simulate_workers_pinned(device, tmp_path):
    """Each worker is shown one GPU, all GPUs have workers, none more than its memory takes."""
    gpus = gpus_here("auto")
    count = workers_on(gpus, 64)
    taken = [dealt(gpus, number) for number in range(count)]
    assert {*taken} == {*gpus}
    assert max(map(taken.count, gpus)) <= WORKERS
    shown = environment(Config(), tmp_path, taken[-1])
    say = "import torch; print(torch.cuda.device_count())"
    told = subprocess.run([sys.executable, "-c", say], env=shown, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "1"


@slowly(4)
def test_trainer_is_exec_not_fork(device, tmp_path):
    """A process that has CUDA already starts a trainer, which has a CUDA of its own."""
    torch.ones(1, device=device).add_(1)
    config = project(tmp_path, train={"device": device})

    async def round_of_one() -> bool:
        async with await Trainer.start(config, scratch=tmp_path) as trainer:
            initial = await trainer.initial(tmp_path / "initial")
            update = await trainer.train("a", 0, initial, tmp_path / "delta")
            return bool(update.delta.load().data.any())

    assert asyncio.run(round_of_one())
