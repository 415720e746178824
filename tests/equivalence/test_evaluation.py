"""What ranks evaluate together is the model that they commit, whatever they were asked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedtrain.config import Config
from fedtrain.errors import TaskError
from fedtrain.training.local import Engine
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.data import Dealt
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.task import load_task
from tests.equivalence.tiny import case, project
from tests.worlds import world

CPU = torch.device("cpu")
EXACT = 1e-12  # float64
TASKS = """
import os

class Normed(Rows):
    def model(self):
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)
        return nn.Sequential(*layers).double()

class Lucky(Rows):
    def model(self):
        model = super().model()
        with torch.no_grad():
            model[0].bias[0] = int.from_bytes(os.urandom(2), "big")
        return model
"""
MESHES = {
    **{f"{task}-zero{zero}": case(task, zero=zero) for task in ("Text", "Normed") for zero in range(4)},
    "Normed-islands": case("Normed", sync="local"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = project(tmp_path_factory.mktemp("evaluation"))
    with (folder / "mesh_task.py").open("a") as f:
        f.write(TASKS)
    return folder


def loss(metrics) -> float:
    return metrics["loss"][0] / metrics["loss"][1]


def evaluate_train_evaluate(rank: int, ranks: int, folder: Path) -> None:
    """Rank 0 writes down each mesh's losses, and those of one process for the same models."""
    found = {}
    for name, table in MESHES.items():
        config = Config.of(table, folder)
        islands = config.parallel.sync == "local"
        mesh = Mesh(Sizes.of(config.parallel, ranks), CPU, islands=islands)
        task = load_task(config.run.task, folder)
        alone = Engine(task, config.train, config.run.seed)
        initial = alone.initial()
        engine = MeshEngine(task, config, mesh)
        data = task.data("")
        dealt = Dealt(data, config.train, 5, "a", mesh.data_rank, mesh.data_ranks)
        engine.install(initial)
        losses = [loss(engine.evaluate(data))]
        for step in range(3):
            engine.steps.take(dealt.take(), f"step {step}")
        committed = engine.gather()
        losses.append(loss(engine.evaluate(data)))
        engine.install(initial)
        losses.append(loss(engine.evaluate(data)))
        if committed is not None:
            models = initial, committed, initial
            found[name] = losses, [loss(alone.evaluate(data, model)) for model in models]
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))


@pytest.mark.slow(15)  # nine meshes
def test_what_is_evaluated_is_the_committed_model_also_before_the_first_step(folder):
    world(2, evaluate_train_evaluate, folder)
    for name, (ours, alone) in json.loads((folder / "losses.json").read_text()).items():
        assert ours == pytest.approx(alone, rel=EXACT), name
        assert abs(ours[1] - ours[0]) > 1e-3, name


def build_with_luck(rank: int, ranks: int, folder: Path) -> None:
    config = Config.of(case("Lucky"), folder)
    mesh = Mesh(Sizes.of(config.parallel, ranks), CPU)
    with pytest.raises(TaskError, match=r"model\(\) builds other weights on one rank than on another"):
        MeshEngine(load_task(config.run.task, folder), config, mesh)


@pytest.mark.slow(4)
def test_a_model_that_is_not_built_from_the_seeds_alone_is_refused_by_all_ranks(folder):
    world(2, build_with_luck, folder)
