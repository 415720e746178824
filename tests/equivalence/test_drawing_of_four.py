"""Dropout and BatchNorm where a mesh has two axes of more than one rank: what each of its axes does alone.

Four ranks, held to loops by hand over the data-parallel ranks; eight are for `make soak`.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.training.building import build_model
from fedtrain.training.devices import seed_all
from fedtrain.training.parallel.data import pool_of, sites_of
from fedtrain.training.parallel.pipeline import even_cuts
from fedtrain.training.sampler import Sampler
from fedtrain.training.task import load_task
from tests.equivalence.ranks import Outcome, Table, launch
from tests.equivalence.test_drawing import CPU, EXACT, STEPS, TASK, drawn, tensors
from tests.equivalence.tiny import furthest, project

Held = dict[str, tuple[Table, int]]  # with how many data-parallel ranks
FOUR: Held = {
    "fsdp-cp": (drawn("Dropping", zero=3, cp=2), 2),
    "fsdp-cp-activations-again": (drawn("Dropping", zero=3, cp=2, checkpoint_activations=True), 2),
    "dp-cp": (drawn("Dropping", cp=2), 2),
    "hsdp": (drawn("Drawn", zero=3, replicate=2), 4),
    "hsdp-dropping": (drawn("Dropping", zero=3, replicate=2), 4),
    "dp-tp": (drawn("Dropping", tp=2), 2),
    "dp-tp-norm": (drawn("Normed", tp=2), 2),
    "fsdp-tp": (drawn("Dropping", zero=3, tp=2), 2),
    "cp-tp": (drawn("Dropping", cp=2, tp=2), 1),
}
PIPELINES: Held = {
    "pp-dp": (drawn("Drawn", pp=2), 2),
    "pp-fsdp": (drawn("Drawn", pp=2, zero=3), 2),
    "pp-gpipe-dp": (drawn("Drawn", pp=2, schedule="gpipe"), 2),
}
WITHIN = {  # as "pp" of two
    "pp-tp": drawn("Dropping", pp=2, tp=2),
    "pp-cp": drawn("Dropping", pp=2, cp=2),
    "pp-cp-activations-again": drawn("Dropping", pp=2, cp=2, checkpoint_activations=True),
}
REFUSED = {
    "cp-tp-columns": (drawn("Split", cp=2, tp=2), "parallel."),
    "fsdp-cp-norm": (drawn("Normed", zero=3, cp=2), "parallel.cp: batch_norm draws for, or averages over"),
    "dp-sp": (drawn("Dropping", tp=2, sp=True), "parallel.tp: dropout draws for"),
}
EIGHT: Held = {
    "fsdp-cp-tp": (drawn("Dropping", zero=3, cp=2, tp=2), 2),
    "hsdp-cp": (drawn("Dropping", zero=3, replicate=2, cp=2), 4),
    "hsdp-tp": (drawn("Dropping", zero=3, replicate=2, tp=2), 4),
}
PIPELINE_OF_EIGHT = drawn("Dropping", pp=2, tp=2)  # as of four without tp


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = project(tmp_path_factory.mktemp("drawing"))
    (folder / "drawn_task.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def four(folder) -> dict[str, Outcome]:
    held = {name: table for name, (table, _) in (FOUR | PIPELINES).items()}
    return launch(folder, 4, held | WITHIN | {name: table for name, (table, _) in REFUSED.items()})


def by_hand(folder: Path, table: Table, ranks: int, stages: int = 1) -> dict[str, torch.Tensor]:
    """The model after a loop in which each data-parallel rank draws for its examples; and each stage, for one
    microbatch after the other."""
    config = Config.of({**table, "parallel": {}}, folder)
    task = load_task(config.run.task, folder)
    model = build_model(task, config.run.seed, CPU).train()
    columns = pool_of(sites_of(task, config, 1))
    optimizer = torch.optim.SGD(model.parameters(), config.train.lr)
    seed, kept = seed_of(config.run.seed, "datacenter"), {id(p): p for p in model.parameters()}
    replicas = [model, *(copy.deepcopy(model, dict(kept)) for _ in range(ranks - 1))]  # own buffers each
    orders = [Sampler(len(columns[0]), 16, seed=seed, rank=r, ranks=ranks) for r in range(ranks)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, (order, replica) in enumerate(zip(orders, replicas, strict=True)):
            (share,) = order.take()
            staged = Staged(replica, [seed_of(5, "step", step, 0, rank, *last) for last in LAST[:stages]])
            for micro in share.mine.chunk(2 * stages if stages > 1 else 1):
                found = task.loss(staged, [column[micro] for column in columns])
                mean = found[0] / found[1] if isinstance(found, tuple) else found
                (mean * len(micro) / share.total).backward()
        optimizer.step()
    return tensors(model)


LAST: list[list[str]] = [[], ["stage 1"]]


class Staged(nn.Module):
    """A model, or a Sequential in stages, each of which draws from a seed of its own."""

    def __init__(self, model: nn.Module, seeds: list[int]) -> None:
        super().__init__()
        cuts = [0, 1]
        if len(seeds) > 1:
            children = list(model.children())
            cuts = even_cuts([sum(p.numel() for p in child.parameters()) for child in children], len(seeds))
        self.parts = (
            [nn.Sequential(*list(model)[a:b]) for a, b in pairwise(cuts)] if len(seeds) > 1 else [model]
        )
        self.states = []
        for seed in seeds:
            seed_all(seed, CPU)
            self.states.append(torch.get_rng_state())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, part in enumerate(self.parts):
            torch.set_rng_state(self.states[i])
            x = part(x)
            self.states[i] = torch.get_rng_state()
        return x


@pytest.mark.slow(25)
@pytest.mark.parametrize("name", FOUR | PIPELINES)
def test_two_axes_draw_and_normalize_as_a_loop_over_the_data_parallel_ranks_does(folder, four, name):
    table, ranks = (FOUR | PIPELINES)[name]
    wanted = by_hand(folder, table, ranks, stages=2 if name in PIPELINES else 1)
    assert furthest(four[name].model, wanted) < EXACT


@pytest.mark.slow(5)
def test_a_stage_that_is_split_again_draws_as_it_does_whole(folder, four):
    pipeline = launch(folder, 2, {"pp-whole": drawn("Dropping", pp=2)})["pp-whole"].model
    apart = {name: furthest(four[name].model, pipeline) for name in WITHIN}
    assert max(apart.values()) < EXACT, apart


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_one_axis_refuses_two_refuse(four, name):
    error = four[name].error
    assert error is not None
    assert REFUSED[name][1] in error
    assert "Set this dropout to 0, " in error


@pytest.mark.soak
def test_three_axes_draw_as_a_loop_over_the_data_parallel_ranks_does(folder):
    eight = launch(folder, 8, {name: table for name, (table, _) in EIGHT.items()})
    apart = {
        name: furthest(eight[name].model, by_hand(folder, table, ranks))
        for name, (table, ranks) in EIGHT.items()
    }
    assert max(apart.values()) < EXACT, apart


@pytest.mark.soak
def test_a_pipeline_of_eight_draws_as_that_of_four(folder):
    whole = launch(folder, 4, {"pp-dp-whole": drawn("Dropping", pp=2)})["pp-dp-whole"].model
    split = launch(folder, 8, {"pp-dp-tp": PIPELINE_OF_EIGHT})["pp-dp-tp"].model
    assert furthest(split, whole) < EXACT
