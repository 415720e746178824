"""What ranks would train otherwise than one process does, and is refused with what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedtrain.config import Config
from tests.equivalence.ranks import Outcome, Table, launch, run_case
from tests.equivalence.tiny import case, furthest, project

TASK = """
import os

import numpy as np
import torch
from mesh_task import Deep, Rows, Text
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fedtrain


def rank():
    return int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0

class TiedText(Text):
    def model(self):
        model = super().model()
        model.head.weight = model.embedding.token.weight
        return model

class TiedRows(Rows):
    def model(self):
        first, act, last = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
        model = nn.Sequential(first, act, nn.Linear(6, 6), act, last).double()
        model[2].weight = model[0].weight
        return model

class Kept(Text):  # the last stage has the embedding, too
    def parallel_plan(self):
        plan = super().parallel_plan()
        return fedtrain.Plan(blocks=plan.blocks, stage=lambda model, *where: model)

class Lost(Rows):  # no stage has the first layer
    def parallel_plan(self):
        return fedtrain.Plan(stage=lambda model, blocks, first, last: model[2:4] if first else model[4:])

class Fewer(Rows):
    def data(self, site):
        x, y = super().data(site)
        return x[: 96 - rank()], y[: 96 - rank()]

class Part(Rows):
    def data(self, site):
        x, y = super().data(site)
        return x[rank() :: 2], y[rank() :: 2]

class Items(Rows):  # the same, read one by one
    def data(self, site):
        return Subset(TensorDataset(*super().data(site)), range(rank(), 96, 2))

class Parts(IterableDataset):
    def __init__(self, x, y):
        self.rows = list(zip(x, y))

    def __iter__(self):
        return iter(self.rows[rank() :: 2])

class Stream(Rows):
    def data(self, site):
        return Parts(*super().data(site))

class Loader(Rows):
    options = {"batch_size": 16}

    def data(self, site):
        dataset = TensorDataset(*super().data(site))
        return DataLoader(dataset, **self.options)

class Sampled(Rows):
    def data(self, site):
        dataset = TensorDataset(*super().data(site))
        return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, 2, rank()))

class Ones(Loader):
    options = {"batch_size": 1}

class Nothing(Loader):
    options = {"batch_size": 100, "drop_last": True}

class One(Rows):
    def data(self, site):
        x, y = super().data(site)
        return x[:1], y[:1]

class EvalPart(Rows):
    def eval_data(self, site):
        return Part().data(site)

class EvalStream(Rows):
    def eval_data(self, site):
        return Stream().data(site)

class Odd(Text):
    def data(self, site):
        return tuple(column[:, :15] for column in super().data(site))

class Noisy(Rows):  # draws by a generator of its own whatever it reads, which is nobody's concern
    def data(self, site):
        return Shaken(TensorDataset(*super().data(site)))

class Traced(Text):  # its plan has no stage()
    def parallel_plan(self):
        return fedtrain.Plan(blocks="blocks")

class TracedDeep(Deep):
    parallel_plan = Traced.parallel_plan

class Penalized(Text):
    def loss(self, model, batch):
        total, weight = super().loss(model, batch)
        return total / weight + sum(p.pow(2).sum() for p in model.parameters()) / 20

class Sometimes(Rows):  # one part for a few examples only, which not every rank has in a step
    def model(self):
        class Parts(nn.Module):
            def __init__(self, usual, seldom):
                super().__init__()
                self.usual, self.seldom = usual, seldom

            def forward(self, x):
                out, far = self.usual(x), (x[:, 0] > 1.5).nonzero()[:, 0]
                return out.index_add(0, far, self.seldom(x[far])) if len(far) else out

        return Parts(super().model(), nn.Linear(6, 3).double())

class Sparse(Text):
    def model(self):
        model = super().model()
        model.embedding.token.sparse = True
        return model

class Shaken(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows, self.draw = rows, np.random.default_rng()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        x, y = self.rows[at]
        return x + self.draw.normal() / 10, y
"""


def of(task: str, **more) -> Table:
    return case(f"refused_task:{task}", **more)


EVALUATED = {"evaluate": {"every": 1}}
INSTEAD = "give all ranks the same, in the same order: without a DistributedSampler, parts by rank"
FEWER = "or start fewer ranks"
REFUSED = {
    "tied-text": (
        of("TiedText", pp=2),
        "embedding.token.weight and head.weight are one parameter, which 2 stages",
        "or use parallel.zero or tp",
    ),
    "tied-rows": (
        of("TiedRows", pp=2, schedule="gpipe"),
        "0.weight and 2.weight are one parameter, which 2 stages",
        "layers parameters of their own",
    ),
    "in-two-stages": (of("Kept", pp=2), "is one parameter, which 2 stages", "have one stage hold them all"),
    "in-no-stage": (of("Lost", pp=2), "no stage has 0.weight, 0.bias", "Let the plan's stage() keep names"),
    "fewer": (of("Fewer"), "data() gives rank 0 96 examples, and rank 1 95 examples", INSTEAD),
    "fewer-pp": (of("Fewer", pp=2), "data() gives rank 0 96 examples, and rank 1 95 examples", INSTEAD),
    "part": (of("Part"), "data() gives rank 1 other examples than rank 0", INSTEAD),
    "part-islands": (of("Part", sync="local"), "data() gives rank 1 other examples than rank 0", INSTEAD),
    "items": (of("Items", zero=3), "data() gives rank 1 other examples than rank 0", INSTEAD),
    "stream": (of("Stream"), "data() gives rank 1 other examples than rank 0", INSTEAD),
    "sampled": (of("Sampled"), "data() gives a DataLoader with a DistributedSampler", INSTEAD),
    "evaluated": (of("EvalPart") | EVALUATED, "the data to evaluate on gives rank 1 other", INSTEAD),
    "evaluated-stream": (of("EvalStream") | EVALUATED, "the data to evaluate on gives rank 1 other", INSTEAD),
    "loader-of-ones": (of("Ones"), "a DataLoader whose batches have 1 example at most", FEWER),
    "loader-of-none": (of("Nothing"), "a DataLoader whose batches have 0 examples at most", FEWER),
    "one": (of("One"), "data() gives 1 example in all", FEWER),
    "zero3-weights": (
        of("Penalized", zero=3),
        "parallel.zero = 3: loss() or evaluate() computes",
        "use zero = 2",
    ),
    "tp-weights": (of("Penalized", tp=2), "parallel.tp = 2: loss() or evaluate() computes", "without tp"),
    "cp-odd": (of("Odd", cp=2), "sequences of length 15 along dimension 1", "a multiple of 2"),
}
GOOD = {
    "loader": of("Loader"),
    **{f"sometimes-{zero}": of("Sometimes", zero=zero, find_unused=zero < 2) for zero in range(4)},
    **{f"sparse-{zero}": of("Sparse", zero=zero) for zero in (0, 2)},
    "traced": of("Traced", pp=2) | EVALUATED,
    "traced-interleaved": of("TracedDeep", pp=2, schedule="interleaved") | EVALUATED,
    "weights": of("Penalized", zero=2),
    "weights-cp": of("Penalized", cp=2),
    "loader-pp": of("Loader", pp=2),
    "loader-decayed": of("Loader", train={"decay": "linear", "local_steps": 0}),
}
OTHERS = {"noisy": of("Noisy"), "natural": case("Natural", sync="local")}

pytestmark = pytest.mark.slow(15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = project(tmp_path_factory.mktemp("refused"))
    (folder / "refused_task.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def two(folder) -> dict[str, Outcome]:
    return launch(folder, 2, {name: table for name, (table, *_) in REFUSED.items()} | GOOD | OTHERS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_would_train_otherwise_is_refused_with_what_to_change(two, name):
    _, cause, change = REFUSED[name]
    error = two[name].error
    assert error is not None
    assert cause in error
    assert change in error


@pytest.mark.parametrize("name", GOOD)
def test_what_they_train_as_one_process_does_is_not(folder, two, name):
    alone = {**GOOD[name], "parallel": {}}
    alone["run"] = {**alone["run"], "name": f"alone-{name}"}
    events: list[dict[str, Any]] = []
    one = run_case(Config.of(alone, folder), events, torch.device("cpu"))
    assert furthest(two[name].model, one) < 1e-12
    evaluated = [e["metrics"]["loss"] for e in events if e["kind"] == "evaluated"]
    assert [e["metrics"]["loss"] for e in two[name].of("evaluated")] == pytest.approx(evaluated, abs=1e-9)


@pytest.mark.parametrize("name", OTHERS)
def test_data_that_draw_for_themselves_and_each_islands_own_are_not(two, name):
    assert two[name].error is None
