"""Ranks on GPUs train what one process on a CPU does: one rank by NCCL, two that share a GPU by Gloo."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from fedtrain.config import Config
from fedtrain.training.devices import device_of_rank
from fedtrain.training.local import Engine
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.task import load_task
from tests.equivalence.ranks import launch, run_case
from tests.equivalence.test_evaluation import TASKS, loss
from tests.equivalence.tiny import case, furthest, project
from tests.gpu.on import NO_CPU, gathers, slowly
from tests.pretended import PRESENT
from tests.worlds import world

EXACT = {"cpu": 1e-12, "cuda": 1e-8}  # float64
CLIPPED = {"clip_norm": 0.1}
ONE = {
    "dp": case(train=CLIPPED),
    "zero2": case(zero=2, train=CLIPPED),
    "zero3": case("Padded", zero=3, train=CLIPPED | {"accumulate": 2}),
    "zero3-heavy": case("Heavy", zero=3),
    "zero3-again": case(zero=3, checkpoint_activations=True),
    "offload-cpu": case(zero=3, offload="cpu", train=CLIPPED),
    "offload-disk": case(zero=3, offload="disk", offload_dir="resting", train=CLIPPED),
}
TWO = {
    "dp": case(train=CLIPPED),
    "zero1": case(zero=1, train=CLIPPED),
    "zero3": case("Padded", zero=3, train=CLIPPED),
    "tp": case(tp=2, train=CLIPPED),
    "sp": case(tp=2, sp=True, train=CLIPPED),
    "pp": case(pp=2),  # by Gloo, which sends what lies in memory alone
    "cp": case(cp=2, train=CLIPPED),
    "topk": case(comm_hook="topk", comm_fraction=1.0),
}
HALF = case("Padded", zero=3, train=CLIPPED)  # to be gone on with in other meshes
DROPS = """
class Heavy(Text):  # no device is ever given the whole model
    def model(self):
        model = super().model()
        if torch.distributed.is_initialized():
            model.to = None
        return model

class Drops(Text):
    def loss(self, model, batch):
        logits = F.dropout(model(batch[0]), 0.2)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = project(tmp_path_factory.mktemp("gpu"))
    with (folder / "mesh_task.py").open("a") as f:
        f.write(TASKS + DROPS)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """The same on one rank on a CPU."""

    @cache
    def train(written: str) -> dict[str, torch.Tensor]:
        table = json.loads(written)
        table["run"]["name"] = f"alone-{train.cache_info().currsize}"
        return run_case(Config.of({**table, "parallel": {}}, folder), [], torch.device("cpu"))

    return lambda table: train(json.dumps({**table, "parallel": {}}))


def far(found, alone, cases):
    return {name: furthest(found[name].model, alone(table)) for name, table in cases.items()}


@slowly(6, pretended=6)
def test_nccl_one_rank_every_row(folder, alone, device):
    """Offloaded shards are gathered, installed and evaluated too."""
    cases = {f"{name}-{device}": table | {"evaluate": {"every": 1}} for name, table in ONE.items()}
    if device == "cuda" and not PRESENT:
        cases["compile"] = case(compile=True)
    found = launch(folder, 1, cases, device)
    distances = far(found, alone, cases)
    assert max(distances.values()) < EXACT[device], distances
    assert all(each.of("evaluated") for name, each in found.items() if name != "compile")


def gather_install_evaluate(rank, ranks, folder, device, offload):
    table = case(zero=3, offload=offload, offload_dir="resting")
    config, here = Config.of(table, folder), device_of_rank(device)
    task = load_task(config.run.task, folder)
    engine = MeshEngine(task, config, Mesh(Sizes.of(config.parallel, ranks), here))
    first, data = engine.gather(), task.data("")
    told, other = engine.evaluate(data), first.load()
    for view in other.views().values():
        view.mul_(0.5)
    engine.install(other)
    assert torch.equal(engine.gather().data, other.data)
    assert engine.evaluate(data) != told
    engine.install(first)
    assert engine.evaluate(data) == told


@slowly(5, pretended=5)
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offload_cpu_gather_install_evaluate(folder, device, offload):
    """What rests in memory goes to the arena and comes from it, beside a group that serves GPUs by NCCL."""
    world(1, gather_install_evaluate, folder, device, offload, device=device)


def gather_in_a_pipeline(rank, ranks, folder, device):
    config = Config.of(case("Text", pp=2, zero=3, offload="cpu"), folder)
    here, shown, broadcast = device_of_rank(device, "gloo"), [], torch.distributed.broadcast

    def seen(tensor, *args, **kwargs):
        shown.append(tensor.device)
        broadcast(tensor, *args, **kwargs)

    mesh = Mesh(Sizes.of(config.parallel, ranks), here)
    task = load_task(config.run.task, folder)
    engine = MeshEngine(task, config, mesh, example=task.data(""))
    torch.distributed.broadcast = seen
    engine.gather()
    assert {*shown} == {here}, "by NCCL where one rank calls Gloo, both wait for ever"


@slowly(5, pretended=6)
def test_stages_with_offloaded_shards_show_each_other_tensors_on_one_device(folder, device):
    gathers(device)
    world(4, gather_in_a_pipeline, folder, device, device=device, backend="gloo")


@slowly(9, pretended=12)
def test_two_ranks_one_gpu(folder, alone, device):
    whole = ("dp", "zero1", "pp", "topk") if device == "cuda" and not PRESENT else TWO  # see on.gathers
    cases = {f"two-{name}-{device}": TWO[name] for name in whole}
    found = launch(folder, 2, cases, device, "gloo")
    distances = far(found, alone, cases)
    assert max(distances.values()) < EXACT[device], distances


@slowly(9)
def test_resharding(folder, alone, device):
    """zero3 of two ranks on the device, tp of two on a CPU, one rank on the device: one run."""
    gathers(device)
    name = f"resharded-{device}"
    meshes = [(2, {"zero": 3}, device), (2, {"tp": 2}, "cpu"), (1, {}, device)]
    for rounds, (ranks, parallel, where) in enumerate(meshes, 1):
        table = {**HALF, "run": {**HALF["run"], "rounds": rounds}, "parallel": {"timeout": "30s", **parallel}}
        found = launch(folder, ranks, {name: table}, where, "gloo" if where == "cpu" or ranks > 1 else "auto")
        assert [e["round"] for e in found[name].of("round_committed")] == [rounds]
    whole = {**HALF, "run": {**HALF["run"], "rounds": 3}}
    assert furthest(found[name].model, alone(whole)) < EXACT[device]


@slowly(5)
def test_bf16_zero3(folder, device):
    """Shards that are narrowed as they are gathered, against autocast."""
    tables = [case("Single", train={"precision": "bf16"}, **zero) for zero in ({"zero": 3}, {})]
    names = [f"{kind}-{device}" for kind in ("sharded", "autocast")]
    found = launch(folder, 1, dict(zip(names, tables, strict=True)), device)
    sharded, autocast = (found[name].model for name in names)
    size = sum(float(t.square().sum()) for t in autocast.values()) ** 0.5
    apart = sum(float((sharded[n] - autocast[n]).square().sum()) for n in autocast) ** 0.5
    assert apart < 2e-2 * size


@slowly(5)
def test_batchnorm_evaluation_is_of_the_committed_model(folder, device):
    name = f"normed-{device}"
    table = case("Normed") | {"evaluate": {"every": 1}}
    found = launch(folder, 2, {name: table}, device, "gloo")[name]
    config = Config.of(table, folder)
    task = load_task(config.run.task, folder)
    engine = Engine(task, config.train, config.run.seed)
    committed = engine.initial()
    for tensor, value in committed.views().items():
        value.copy_(found.model[tensor])
    told = found.of("evaluated")[-1]["metrics"]["loss"]
    assert told == pytest.approx(loss(engine.evaluate(task.data(""), committed)), abs=EXACT[device])


@slowly(8)
def test_tp_sp_dropout_pp_no_deadlock(folder, device):
    """The first dropout of a sharded tensor is reached by one stage before the other."""
    axes = ("pp",) if device == "cuda" and not PRESENT else ("tp", "pp")  # see on.gathers
    cases = {f"drops-{axis}-{device}": case("Drops", **{axis: 2}) for axis in axes}
    for found in launch(folder, 2, cases, device, "gloo").values():
        assert found.error is None
        assert all(t.isfinite().all() for t in found.model.values())


@pytest.mark.gpu2
@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd", "topk"])
def test_comm_hooks(folder, alone, hook):
    """By NCCL, over several buckets; how far each may lead is what Gloo's test has."""
    cases = {f"hook-{hook}": case("Single", steps=20, comm_hook=hook)}
    assert max(far(launch(folder, 2, cases, "cuda"), alone, cases).values()) < 1.0


@pytest.mark.gpu2
def test_topk_hook_side_stream(folder, alone):
    """With a fraction of 1 nothing is left out: 500 steps are those without a hook."""
    cases = {"topk-whole": case(steps=500, comm_hook="topk", comm_fraction=1.0)}
    assert max(far(launch(folder, 2, cases, "cuda"), alone, cases).values()) < 1e-6


@pytest.mark.gpu2
def test_diloco_overlap_nccl(folder):
    """Fragments under way beside training for 200 rounds."""
    table = case("Rows", sync="local", rounds=200, train={"local_steps": 5}, strategy={"kind": "diloco"},
                 fragments=2, overlap=1, mix=0.25)  # fmt: skip
    one, other = (launch(folder, 2, {"overlap": table}, where)["overlap"] for where in ("cuda", "cpu"))
    assert furthest(one.model, other.model) < 1e-6


@pytest.mark.gpu2
def test_cp_nccl(folder, alone):
    cases = {"cp-causal": case(cp=2, train=CLIPPED)}
    assert max(far(launch(folder, 2, cases, "cuda"), alone, cases).values()) < 1e-3


MEMORY = """
class Large(fedtrain.Task):
    def model(self):
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))

    def data(self, site):
        return torch.ones(32, 1024), torch.ones(32, 1024)

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def parallel_plan(self):
        return fedtrain.Plan(blocks="")
"""


@NO_CPU
@pytest.mark.slow(6)
def test_offload_saves_memory(folder, device):
    """What a GPU holds at most, with and without offloaded shards."""
    with (folder / "mesh_task.py").open("a") as f:
        f.write(MEMORY)
    tables = {kind: case("Large", zero=3, offload=kind, log_every=1) for kind in ("none", "cpu")}
    peaks = {kind: launch(folder, 1, {kind: table}, device)[kind].of("step")[-1]["memory_bytes"]
             for kind, table in tables.items()}  # fmt: skip
    assert peaks["cpu"] < 0.6 * peaks["none"]


ROOM = 256 << 20  # of the GPU's memory, that a rank may take
HUGE = f"""
class Huge(Large):  # one and a half times that
    def model(self):
        if torch.cuda.is_available():
            of = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction({ROOM} / of)
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))

    def data(self, site):
        return torch.ones(8, 2048), torch.ones(8, 2048)
"""


@NO_CPU
@pytest.mark.slow(12)
def test_zero3_meta_init(folder, device):
    """A model that the GPU has no room for is made and trained there, a layer of 16 MiB at a time."""
    with (folder / "mesh_task.py").open("a") as f:
        f.write(MEMORY + HUGE)
    table = case("Huge", zero=3, offload="cpu", log_every=1, steps=2, rounds=1, train={"optimizer": "sgd"})
    found = launch(folder, 1, {"huge": table}, device)["huge"]
    assert found.error is None
    assert all(e["loss"] < 2 for e in found.of("step"))
    peak = found.of("step")[-1]["memory_bytes"]
    print(f"at most {peak >> 20} MiB")
    assert peak < ROOM
