"""What a site of one process trains, a site of two ranks trains, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedtrain import Arena, Task
from fedtrain.config import Config
from fedtrain.training.local import Engine
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.data import Dealt
from fedtrain.training.parallel.engine import MeshEngine
from tests.worlds import world

CPU = torch.device("cpu")
ROUNDS = 3


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, 6, generator=draw, dtype=torch.float64), torch.randint(
        3, (count,), generator=draw
    )


class Rows(Task):
    def model(self):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def data(self, site):
        return rows(48)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Shuffled(Rows):
    def data(self, site):
        return DataLoader(TensorDataset(*rows(48)), batch_size=10, shuffle=True)


class InOrder(IterableDataset):
    def __init__(self, *columns):
        self.columns = columns

    def __iter__(self):
        return iter(zip(*self.columns, strict=True))


class Streamed(Rows):
    def data(self, site):
        return InOrder(*rows(48))


class Words(Rows):
    """Examples that count differently; those of class 0 do not, and a batch may have no others."""

    def loss(self, model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * batch[1]).sum(), batch[1].sum()


class Weightless(Words):
    def data(self, site):
        x, y = rows(48)
        y[16:24] = 0  # the third batch of eight
        return InOrder(x, y)


class Apart(Rows):
    """One layer takes part in no loss, and stays as it is."""

    def model(self):
        return nn.ModuleList([nn.Linear(6, 3), nn.Linear(2, 2)]).double()

    def loss(self, model, batch):
        return F.cross_entropy(model[0](batch[0]), batch[1])


class Own(Rows):
    def optimizer(self, parameters):
        return torch.optim.Adagrad(parameters, lr=0.05)


class Narrow(Rows):
    """Autocast narrows float32 alone."""

    def model(self):
        return super().model().float()

    def data(self, site):
        x, y = rows(48)
        return x.float(), y


class Loud(Narrow):
    """In fp16 its first gradients overflow."""

    def loss(self, model, batch):
        return super().loss(model, batch) * 300


def flat(arena):
    (vector,) = arena.trained().values()
    return vector.double()


def proximal(gradient, weights, given):
    gradient.add_(weights - given.start, alpha=0.5)


MOMENTUM = {"momentum": 0.9, "weight_decay": 0.02, "clip_norm": 0.3}
ADAMW = {"optimizer": "adamw", "weight_decay": 0.1, "lr": 0.02}
ADAM = {"optimizer": "adam", "lr": 0.02, "warmup": 2, "decay": "linear"}
SCHEDULE = {"warmup": 4, "decay": "cosine"}
CASES: dict[str, tuple[type[Task], dict, dict]] = {  # task, [train], [parallel]
    "sgd-scheduled": (Rows, MOMENTUM | SCHEDULE, {}),
    "adam-scheduled-accumulated": (
        Rows,
        {"optimizer": "adam", "accumulate": 3, "warmup": 2, "decay": "linear"},
        {},
    ),
    "adamw-zero3-scheduled": (Rows, ADAMW | SCHEDULE, {"zero": 3}),
    "own-optimizer-scheduled": (Own, SCHEDULE, {}),
    "shuffled-loader": (Shuffled, MOMENTUM, {}),
    "shuffled-loader-accumulated-steps": (
        Shuffled,
        {"accumulate": 2, "local_steps": 5, "local_epochs": 1},
        {},
    ),
    "iterable-steps-scheduled": (Streamed, {"local_steps": 9, "decay": "linear"}, {}),
    "words-accumulated": (Words, ADAMW | {"accumulate": 2, "drop_last": True, "batch_size": 10}, {}),
    "weightless-batch": (Weightless, ADAMW, {}),
    "unused-layer": (Apart, ADAMW, {"find_unused": True}),
    "unused-layer-zero2": (Apart, ADAMW, {"zero": 2}),
    "fp16": (Loud, {"precision": "fp16", "lr": 1e-3}, {}),
    "bf16-accumulated": (Narrow, {"precision": "bf16", "accumulate": 2}, {}),
}
ALMOST = {"fp16": 2e-2, "bf16-accumulated": 2e-2}  # 16 bits round what a rank sums otherwise


def both(rank: int, ranks: int, folder: Path) -> None:
    """Rank 0 writes down how far the two are apart, and how far they moved, in each case."""
    found = {}
    for name, (kind, train, parallel) in CASES.items():
        table = {"batch_size": 8, "lr": 0.1, "local_epochs": 2, **train}
        config = Config.of(
            {"run": {"seed": 3, "rounds": ROUNDS}, "train": table, "parallel": parallel}, folder
        )
        task = kind()
        alone = Engine(task, config.train, 3, proximal, ROUNDS)
        mesh = Mesh(Sizes.of(config.parallel, ranks), CPU)
        engine = MeshEngine(task, config, mesh, correct=proximal)
        data = Dealt(task.data("a"), config.train, 3, "a", rank, ranks)
        apart, moved = [], []
        for round in range(ROUNDS):
            weights = alone.initial()
            update = alone.train("a", task.data("a"), round, weights, Arena.zeros(alone.schema))
            engine.install(weights if rank == 0 else None)
            seen = engine.train(data, round, ROUNDS)
            loss, weight = map(engine.over_ranks, seen.total())
            if (gathered := engine.gather()) is not None:
                delta, theirs = flat(gathered) - flat(weights), flat(update.delta)
                apart.append(float((delta - theirs).abs().max()))
                moved.append(float(theirs.abs().max()))
                assert weight == pytest.approx(update.metrics["loss"][1])
                assert loss == pytest.approx(update.metrics["loss"][0], rel=ALMOST.get(name, 1e-12))
        found[name] = apart, moved, engine.steps.scale.value, alone._steps.scale.value
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.slow(20)
def test_two_ranks_train_a_site_as_one_process_does_whatever_train_says(tmp_path):
    world(2, both, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == CASES.keys()
    for name, (apart, moved, scale, other) in found.items():
        far = ALMOST.get(name, 1e-12)
        assert max(apart) < far * (min(moved) if name in ALMOST else 1), (name, apart, moved)
        assert min(moved) > 1e-3, name
        assert scale == other, name
    assert found["fp16"][2] < 2.0**16, "no gradient overflowed"
