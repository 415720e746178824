"""Dropout and BatchNorm over a mesh: each row trains what plain torch trains, or says what to change."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.schema import unique_tensors
from fedtrain.training.building import build_model
from fedtrain.training.devices import seed_all
from fedtrain.training.parallel.data import pool_of, sites_of
from fedtrain.training.parallel.pipeline import even_cuts
from fedtrain.training.sampler import Sampler
from fedtrain.training.task import load_task
from tests.equivalence.ranks import Outcome, Table, launch, run_case
from tests.equivalence.tiny import case, furthest, project

EXACT = 1e-12  # float64
CPU = torch.device("cpu")
STEPS = 4
TASK = """
import torch
import fedtrain
from mesh_task import Rows, Text
from torch import nn
from torch.nn import functional as F

class Drawn(Rows):  # both in the first half of a pipeline, and in the second
    def model(self):
        first, _, middle, _, last = super().model()
        norms, drops = [nn.BatchNorm1d(16).double() for _ in "12"], [nn.Dropout(0.2) for _ in "12"]
        return nn.Sequential(first, norms[0], nn.Tanh(), drops[0], middle, norms[1], drops[1], last)

class Dropping(Text):  # what each block adds, which each tensor-parallel rank has whole
    where = "feed_forward"

    def model(self):
        model = super().model()
        for block in model.blocks.values():
            block.get_submodule(self.where).register_forward_hook(self.hook)
        return model

    def hook(self, module, inputs, out):
        return F.dropout(out, 0.2, module.training)

class Split(Dropping):  # the columns of a layer, of which each has its own
    where = "feed_forward.up"

class Normed(Dropping):
    def hook(self, module, inputs, out):
        return F.batch_norm(out.transpose(1, 2), None, None, training=True).transpose(1, 2)

class Attention(Text):
    def loss(self, model, batch):
        plain = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *a, **k: plain(*a, dropout_p=0.1, **k)
        try:
            return super().loss(model, batch)
        finally:
            F.scaled_dot_product_attention = plain

class Whole(Text):  # attends in one call of torch's, whose inside nobody sees
    def model(self):
        parts = {"words": nn.Embedding(32, 16), "look": nn.MultiheadAttention(16, 2, batch_first=True)}
        return nn.ModuleDict(parts | {"head": nn.Linear(16, 32)}).double()

    def parallel_plan(self):
        return fedtrain.Plan()

    def attended(self, model, x):
        return model["look"](x, x, x)[0]

    def loss(self, model, batch):
        out = model["head"](self.attended(model, model["words"](batch[0])))
        return F.cross_entropy(out.flatten(0, 1), batch[1].flatten())

class Written(Whole):  # attends by hand
    def attended(self, model, x):
        return (x @ x.mT).softmax(-1) @ x

class Planless(Written):
    def parallel_plan(self):
        return None

class Shifted(Text):  # labels are the next tokens; those of a part's last positions lie in another part
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0])[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

class Padded(Text):  # the same, where the last label of each part does not count
    def loss(self, model, batch):
        labels = F.pad(batch[0], (0, 1), value=-100)[:, 1:]
        total = F.cross_entropy(model(batch[0]).flatten(0, 1), labels.flatten(), reduction="sum")
        return total, (labels >= 0).sum()

class Numbered(Text):  # positions by the length of what is seen
    def model(self):
        model = super().model()
        model.forward = lambda ids: type(model).forward(self.numbered(model, ids), ids)
        return model

    def numbered(self, model, ids):
        model.embedding.positions = torch.arange(ids.shape[1])
        return model

class Uneven(Text):  # a mean over some labels, of which parts have unequal numbers
    def loss(self, model, batch):
        labels = torch.where(torch.arange(batch[1].shape[1]) + batch[1] < 20, batch[1], -100)
        return F.cross_entropy(model(batch[0]).flatten(0, 1), labels.flatten())

class Noisy(Text):  # its loss draws, so that it can't be asked
    def loss(self, model, batch):
        total, weight = super().loss(model, batch)
        return total * (1 + torch.rand(()) / 10), weight

class Parts(Whole):  # nothing says which parts repeat
    def attended(self, model, x):
        return x
"""


def drawn(task: str, **parallel) -> Table:
    train = {"optimizer": "sgd", "lr": 0.1}  # Adam makes steps of a bias before BatchNorm, which has none
    return case(f"drawn_task:{task}", steps=STEPS, train=train, **parallel)


APART = {f"zero{zero}": drawn("Drawn", zero=zero) for zero in range(4)}  # each rank draws for its examples
AS_ONE = {
    "tp": drawn("Dropping", tp=2),
    "tp-norm": drawn("Normed", tp=2),
    "cp": drawn("Dropping", cp=2),
    "cp-activations-again": drawn("Dropping", cp=2, checkpoint_activations=True),
    "cp-drawn-loss": drawn("Noisy", cp=2),
}
PIPELINE = {"pp": drawn("Drawn", pp=2), "pp-gpipe": drawn("Drawn", pp=2, schedule="gpipe")}
REFUSED = {
    "tp-columns": (drawn("Split", tp=2), "parallel.tp: dropout draws for"),
    "tp-heads": (drawn("Attention", tp=2), "parallel.tp: scaled_dot_product_attention draws for"),
    "sp": (drawn("Dropping", tp=2, sp=True), "parallel.tp: dropout draws for"),
    "sp-norm": (drawn("Normed", tp=2, sp=True), "parallel.tp: batch_norm draws for, or averages over"),
    "cp-norm": (drawn("Normed", cp=2), "parallel.cp: batch_norm draws for, or averages over"),
    "cp-attention": (drawn("Attention", cp=2), "parallel.cp: scaled_dot_product_attention draws for"),
}

UNSEEN = {  # what would train something else, and say nothing
    "cp-whole": (drawn("Whole", cp=2), "multi_head_attention_forward attends to a rank's part alone"),
    "cp-written": (drawn("Written", cp=2), "the model never called F.scaled_dot_product_attention"),
    "cp-planless": (drawn("Planless", cp=2), "nothing says along which dimension sequences lie"),
    "again": (
        drawn("Parts", checkpoint_activations=True),
        "parallel.checkpoint_activations: it is done block",
    ),
}
BEYOND = {  # what a rank's part of the sequences would have another loss for
    "cp-shifted": drawn("Shifted", cp=2),
    "cp-shifted-zero3": drawn("Shifted", cp=2, zero=3),
    "cp-padded": drawn("Padded", cp=2),
    "cp-numbered": drawn("Numbered", cp=2),
    "cp-uneven": drawn("Uneven", cp=2),
}

pytestmark = pytest.mark.slow(15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = project(tmp_path_factory.mktemp("drawing"))
    (folder / "drawn_task.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def two(folder) -> dict[str, Outcome]:
    refused = {name: table for name, (table, _) in (REFUSED | UNSEEN).items()}
    return launch(folder, 2, APART | AS_ONE | PIPELINE | refused | BEYOND)


def begun(folder: Path, ranks: int):
    """(the model, the examples, an optimizer, each rank's order of them), as a loop by hand has them."""
    config = Config.of(drawn("Drawn"), folder)
    task = load_task(config.run.task, folder)
    model = build_model(task, config.run.seed, CPU).train()
    x, y = pool_of(sites_of(task, config, 1))
    seed = seed_of(config.run.seed, "datacenter")
    orders = [Sampler(len(x), 16, seed=seed, rank=r, ranks=ranks) for r in range(ranks)]
    return model, x, y, torch.optim.SGD(model.parameters(), config.train.lr), orders


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in unique_tensors(model).items()}


@pytest.mark.parametrize("name", APART)
def test_each_data_parallel_rank_draws_and_normalizes_as_a_loop_over_its_examples_does(folder, two, name):
    model, x, y, optimizer, orders = begun(folder, 2)
    # Each with buffers of its own.
    replicas = [
        model,
        copy.deepcopy(model, {id(p): p for p in model.parameters()}),
    ]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, (order, replica) in enumerate(zip(orders, replicas, strict=True)):
            (share,) = order.take()
            seed_all(seed_of(5, "step", step, 0, rank), CPU)
            loss = nn.functional.cross_entropy(replica(x[share.mine]), y[share.mine])
            (loss * len(share.mine) / share.total).backward()
        optimizer.step()
    assert furthest(two[name].model, tensors(model)) < EXACT


@pytest.mark.parametrize("name", AS_ONE)
def test_tensor_and_context_parallel_ranks_drop_what_one_rank_drops(folder, two, name):
    alone = {**AS_ONE[name], "parallel": {}}
    alone["run"] = {**alone["run"], "name": f"alone-{name}"}
    one = run_case(Config.of(alone, folder), [], CPU)
    assert furthest(two[name].model, one) < EXACT


@pytest.mark.parametrize("name", PIPELINE)
def test_a_pipelines_stages_draw_and_normalize_as_a_loop_over_microbatches_does(folder, two, name):
    model, x, y, optimizer, (order,) = begun(folder, 1)
    children = list(model)
    cuts = even_cuts([sum(p.numel() for p in child.parameters()) for child in children], 2)
    stages = [nn.Sequential(*children[low:high]) for low, high in pairwise(cuts)]
    assert all(any(isinstance(child, nn.Dropout) for child in stage) for stage in stages)
    for step in range(STEPS):
        (share,) = order.take()
        states = []
        for last in ([], ["stage 1"]):
            seed_all(seed_of(5, "step", step, 0, 0, *last), CPU)
            states.append(torch.get_rng_state())
        optimizer.zero_grad()
        for micro in share.mine.chunk(4):
            out = x[micro]
            for i, stage in enumerate(stages):
                torch.set_rng_state(states[i])
                out = stage(out)
                states[i] = torch.get_rng_state()
            (nn.functional.cross_entropy(out, y[micro]) / 4).backward()
        optimizer.step()
    assert furthest(two[name].model, tensors(model)) < EXACT


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_can_not_draw_or_average_as_one_is_refused_with_what_to_change(two, name):
    error = two[name].error
    assert error is not None
    assert REFUSED[name][1] in error
    assert "Set this dropout to 0, " in error


@pytest.mark.parametrize("name", UNSEEN)
def test_what_would_be_cut_or_saved_without_effect_is_refused_with_what_to_change(two, name):
    error = two[name].error
    assert error is not None
    assert UNSEEN[name][1] in error
    assert re.search(r"or leave (it )?out|parallel_plan\(\)", error)


@pytest.mark.parametrize("name", BEYOND)
def test_a_loss_that_looks_beyond_a_part_by_other_than_attention_is_refused(two, name):
    error = two[name].error
    assert error is not None
    assert "parallel.cp: of 16 positions in 2 parts the loss is" in error
    assert "shift labels in data(), not in loss()" in error
