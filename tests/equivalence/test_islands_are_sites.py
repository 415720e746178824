"""Strategies with a half of their own at the sites, where the sites are islands of a datacenter: the model,
what islands remember and what they find are those of a simulation of the same sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.runtime.datacenters.datacenter import Datacenter
from fedtrain.runtime.personal import personal
from fedtrain.store import RunStore
from fedtrain.store.memories import Memories
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.task import load_task
from tests import toy
from tests.inprocess import Events, simulated
from tests.worlds import world

pytestmark = pytest.mark.slow(20)
TASK = """
from tests import toy

class Two(toy.Toy):
    def sites(self):
        return ["site1", "site3"]

class Three(toy.Toy):
    def sites(self):
        return ["site0", "site1", "site3"]

class Normed(toy.Normed):
    def sites(self):
        return ["site0", "site1", "site3"]
"""
METHODS: dict[str, dict[str, Any]] = {
    "scaffold": {"clip": 4.0},
    "feddyn": {},
    "fednova": {"max_examples": 64.0, "max_steps": 16.0},
    "ditto": {"penalty": 0.5, "personal_lr": 0.05},
    "fedbn": {},
    "fedper": {"local": ["head.*"]},
    "fedrep": {"local": ["head.*"], "head_epochs": 2},
    "fedprox": {"mu": 0.5, "local": ["norm.*"], "fixed": ["head.*"]},
    "ifca": {"spread": 0.5},
    "qfedavg": {"max_loss": 4.0, "max_h": 64.0},
    "mimelite": {"momentum": 0.8},
    "fedsgd": {},
    "per_fedavg": {"alpha": 0.05, "weights": "examples"},
    "fedavg": {"weights": "equal"},
    # So little noise that it is of no account: it is another one where a sum differs in its last bit.
    "dp_fedavg": {"noise_multiplier": 1e-6, "clip_lr": 0.0, "clip": 0.3},
}
BATCH_NORM = ("scaffold", "fedbn", "mimelite")
ON_TWO_RANKS = ("scaffold", "fedrep", "qfedavg", "mimelite", "fedsgd", "per_fedavg")
MOVED = "feddyn"  # its islands have one rank in the first round, and two from then on
EXACT, CLOSE = 1e-12, 1e-6  # float64, float32
NOISY = 1e-5
ROUNDS = 3
SITES = {"Two": ["site1", "site3"]}
THREE = ["site0", "site1", "site3"]


def table(folder: Path, kind: str, task: str, **parallel: Any) -> dict[str, Any]:
    sites = len(SITES.get(task, THREE))
    found = toy.config(folder, kind, {**METHODS[kind], "min_sites": sites, "fraction": 1.0}).table()
    found["run"] |= {"task": f"toy_task:{task}", "rounds": ROUNDS, "name": f"{kind}-{task}"}
    found["train"] |= {"batch_size": 0 if kind == "fedsgd" else 8}
    found["evaluate"] |= {"every": 1}
    found["checkpoint"] |= {"every": 0, "background": False}
    found["parallel"] |= {"sync": "local", "carry": False, "timeout": "30s", **parallel}
    (folder / "toy_task.py").write_text(TASK)
    return found


def train(rank: int, ranks: int, tables: dict[str, dict[str, Any]], folder: Path) -> None:
    """On each rank. Each run leaves NAME.safetensors, with what islands share, and NAME-SITE.safetensors."""
    for name, each in tables.items():
        config = Config.of(each, folder)
        mesh = Mesh(Sizes.of(config.parallel, ranks), torch.device("cpu"), islands=True)
        store = RunStore(config.datacenter_dir, durable=False) if rank == 0 else None
        events = Events()
        room = Datacenter(config, load_task(config.run.task, folder), mesh, store, events)
        if store is not None:
            local = sorted(room.engine.kept)
            store.begin(room.schema, {}, run=name, task_digest="", local=local)
        room.run(None)
        methods = room.methods
        assert methods is not None
        assert mesh.alike(seed_of(methods.weights.digest)), "all ranks step alike"
        save_file(methods.state_dict(), folder / f"{name}-{methods.name}-{mesh.data_rank}.safetensors")
        if store is not None:
            numbers = {
                f"{e['round']}/{site}/{metric}": torch.tensor(value)
                for e in events.of("evaluated")
                for site, metrics in e["by_site"].items()
                for metric, value in metrics.items()
            }
            save_file(methods.tensors() | numbers, folder / f"{name}.safetensors")
            store.close()
        dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("islands")


@pytest.fixture(scope="module")
def three(folder) -> Path:
    """Three islands of a rank each."""
    tables = {f"Three-{kind}": table(folder, kind, "Three") for kind in METHODS}
    world(3, train, tables | {f"Normed-{kind}": table(folder, kind, "Normed") for kind in BATCH_NORM}, folder)
    return folder


@pytest.fixture(scope="module")
def two(folder) -> Path:
    """Two islands of two ranks each."""
    tables = {f"Two-{kind}": table(folder, kind, "Two", replicate=2) for kind in ON_TWO_RANKS}
    moved = table(folder, MOVED, "Two", replicate=2) | {"evaluate": {"every": 0}}
    world(2, train, {f"Two-{MOVED}": moved | {"run": moved["run"] | {"rounds": 1}}}, folder)
    world(4, train, tables | {f"Two-{MOVED}": moved}, folder)
    return folder


def compared(folder: Path, task: str, kind: str) -> float:
    """The furthest that anything of the islands is from the same of a simulation."""
    config = Config.of(table(folder, kind, task), folder)
    events = simulated(config, pytest.MonkeyPatch())
    store = RunStore(config.simulate_dir, read_only=True)
    last, counted = store.latest(), store.counted()
    store.close()
    assert last is not None
    whole = last.weights.load()
    wanted = {f"shared/{n}": view for n, view in whole.views().items()}
    wanted |= {f"down/{n}": view for n, view in whole.extras().items()}
    wanted |= {f"state/{n}": value for n, value in last.state.items()}
    evaluated = events.of("evaluated")
    assert len(evaluated) == ROUNDS
    for e in evaluated if (task, kind) != ("Two", MOVED) else ():
        for site, metrics in e["by_site"].items():
            wanted |= {f"{e['round']}/{site}/{n}": torch.tensor(value) for n, value in metrics.items()}
    name, sites = f"{task}-{kind}", SITES.get(task, THREE)
    far = [furthest(load_file(folder / f"{name}.safetensors"), wanted)]
    for site in sites:
        there = (config.simulate_dir / "memory").exists()
        memory = Memories(config.simulate_dir / "memory", read_only=True).of(site) if there else None
        kept = {} if memory is None or memory.empty else memory.load(counted[site]).views()
        found = sorted(folder.glob(f"{name}-{site}-*.safetensors"))
        assert len(found) == (2 if task == "Two" else 1)
        far += [furthest(load_file(path), kept) for path in found]
    return max(far)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((float((one[n].double() - other[n].double()).abs().max()) for n in one), default=0.0)


@pytest.mark.parametrize("kind", METHODS)
def test_islands_of_one_rank_are_the_sites_of_a_simulation(three, kind):
    assert compared(three, "Three", kind) < (NOISY if kind == "dp_fedavg" else EXACT)


@pytest.mark.parametrize("kind", BATCH_NORM)
def test_so_are_the_buffers_of_their_models(three, kind):
    assert compared(three, "Normed", kind) < CLOSE


@pytest.mark.parametrize("kind", [*ON_TWO_RANKS, MOVED])
def test_islands_of_two_ranks_are_the_sites_of_a_simulation(two, kind):
    assert compared(two, "Two", kind) < EXACT


@pytest.mark.parametrize(("ranks", "task"), [("three", "Three"), ("two", "Two")])
def test_scaffolds_c_is_exactly_the_mean_of_what_islands_remember(request, ranks, task):
    folder = request.getfixturevalue(ranks)
    shared = load_file(folder / f"{task}-scaffold.safetensors")
    sites = SITES.get(task, THREE)
    kept = [load_file(folder / f"{task}-scaffold-{site}-0.safetensors")["c"] for site in sites]
    assert torch.equal(shared["state/sum"], sum(kept))
    assert torch.equal(shared["down/c"], sum(kept) / len(sites))


@pytest.mark.parametrize("kind", ["fedbn", "ditto", "per_fedavg"])
def test_an_islands_own_model_can_be_exported(three, kind):
    config = Config.of(table(three, kind, "Three"), three)
    simulated(config, pytest.MonkeyPatch())
    for site in THREE:
        wanted, round = personal(config, config.simulate_dir, site)
        found, its_round = personal(config, config.datacenter_dir, site)
        assert its_round == round == ROUNDS
        assert furthest(found, wanted) < EXACT
