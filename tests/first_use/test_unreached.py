"""A parameter that a step's backward pass does not reach is not stepped, as in plain torch: each case is held
against a loop of plain torch in float64."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fedtrain
from fedtrain import Arena, Task
from fedtrain.config import Config, TrainConfig
from fedtrain.errors import TaskError
from fedtrain.training.local import Engine
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.data import Dealt
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.parallel.state import State
from fedtrain.training.stacked import Stacked
from tests.worlds import world

BATCH = 10
SITES = ("a", "b", "c")


def table(site, rows=60):
    g = torch.Generator().manual_seed(ord(site))
    x = torch.randn(rows, 4, generator=g, dtype=torch.float64)
    return x, (x[:, 0] > 0).long(), torch.arange(rows) // BATCH


class Heads(Task):
    """Two heads; a batch has examples of one of them, in an order in which one rests for a while."""

    order = (0, 1, 1, 0, 0, 1)

    def sites(self):
        return list(SITES)

    def model(self):
        torch.manual_seed(1)
        parts = {"first": nn.Linear(6, 2), "body": nn.Linear(4, 6), "second": nn.Linear(6, 2)}
        return nn.ModuleDict(parts).double()

    def data(self, site):
        return DataLoader(TensorDataset(*table(site)), batch_size=BATCH)

    def loss(self, model, batch):
        x, y, number = batch
        head = ("first", "second")[self.order[int(number[0])]]
        return F.cross_entropy(model[head](torch.tanh(model["body"](x))), y)


class Unused(Heads):
    """One head is in no loss."""

    def loss(self, model, batch):
        return F.cross_entropy(model["second"](torch.tanh(model["body"](batch[0]))), batch[1])


class MissingModality(Heads):
    """Half of the batches have no second modality, whose branch then rests."""

    def model(self):
        torch.manual_seed(1)
        parts = {"mri": nn.Linear(2, 6), "ct": nn.Linear(2, 6), "head": nn.Linear(6, 2)}
        return nn.ModuleDict(parts).double()

    def loss(self, model, batch):
        x, y, number = batch
        found = model["ct"](x[:, :2])
        if number[0] % 2:
            found = found + model["mri"](x[:, 2:])
        return F.cross_entropy(model["head"](torch.tanh(found)), y)


class PartialLabels(Heads):
    """An example has labels of some tasks only; a batch without labels of a task leaves its head out."""

    def loss(self, model, batch):
        x, y, number = batch
        body, total = torch.tanh(model["body"](x)), 0.0
        labels = {"first": torch.where((x[:, 1] > 0) & (number < 3), y, -1), "second": y.clone()}
        labels["second"][number == 2] = -1
        for head, label in labels.items():
            if (label >= 0).any():
                total = total + F.cross_entropy(model[head](body), label, ignore_index=-1)
        return total


class EachItsHead(Heads):
    """Each example has a head. The last batch is one example, so that of two ranks one has none there."""

    def data(self, site):
        return DataLoader(TensorDataset(*table(site, 41)), batch_size=BATCH)

    def loss(self, model, batch):
        x, y, number = batch
        body, total = torch.tanh(model["body"](x)), 0.0
        which = torch.where(number == 1, y, (number > 3).long())  # in the second batch it is the label
        for i, head in enumerate(("first", "second")):
            if (which == i).any():
                found = model[head](body[which == i])
                total = total + F.cross_entropy(found, y[which == i], reduction="sum")
        return total, len(y)


TASKS = [Heads, Unused, MissingModality, PartialLabels, EachItsHead]
OPTIMIZERS = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "decay": ({"weight_decay": 0.05}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.05)),
    "both": (
        {"momentum": 0.9, "weight_decay": 0.05},
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.05),
    ),
    "adam": (
        {"optimizer": "adam", "weight_decay": 0.05},
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.05),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.05},
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.05),
    ),
}
OWN = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.05),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
}


def plain(task, model, batches, make, *, accumulate=1, clip=0.0, mu=0.0, epochs=2):
    """Train a model as a tutorial of torch does. `mu`: FedProx's."""
    optimizer, start = make(model.parameters()), [p.detach().clone() for p in model.parameters()]
    for _ in range(epochs):
        for at in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            group = batches[at : at + accumulate]
            for batch in group:
                loss = task.loss(model, batch)
                loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
                (loss / len(group)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for p, first in zip(model.parameters(), start, strict=True):
                if p.grad is not None and mu:
                    p.grad.add_(p.detach() - first, alpha=mu)
            optimizer.step()
    return model


def proximal(gradient, weights, given):
    gradient.add_(weights - given.start, alpha=0.5)


def train(task, engine=None, data=None, **train):
    config = TrainConfig(**{"lr": 0.1, "batch_size": BATCH, "local_epochs": 2} | train)
    engine = engine or Engine(task, config, 1)
    start = engine.initial()
    data = task.data("a") if data is None else data
    return engine, start, engine.train("a", data, 0, start, Arena.zeros(engine.schema))


def check(task, start, update, make, **how):
    """That the update is what plain torch moves the weights by."""
    model = task.model()
    start.load().bind(model)
    begun = Arena.of(model)
    plain(task, model, [*task.data("a")], make, **how)
    for name, view in update.delta.views().items():
        moved = Arena.of(model).views()[name] - begun.views()[name]
        torch.testing.assert_close(view, moved, rtol=0, atol=1e-12)
    assert max(float(view.abs().max()) for view in update.delta.views().values()) > 1e-2


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_no_gradient_reaches_is_not_stepped(kind, name):
    settings, make = OPTIMIZERS[name]
    _, start, update = train(kind(), **settings)
    check(kind(), start, update, make)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("name", OWN)
def test_the_tasks_own_optimizer_does_not_step_it_either(kind, name):
    class Own(kind):
        def optimizer(self, parameters):
            return OWN[name](parameters)

    _, start, update = train(Own())
    check(kind(), start, update, OWN[name])


@pytest.mark.parametrize("name", ["both", "adamw"])
def test_one_batch_of_a_step_that_reaches_a_parameter_is_enough(name):
    settings, make = OPTIMIZERS[name]
    _, start, update = train(Heads(), accumulate=2, **settings)
    check(Heads(), start, update, make, accumulate=2)


@pytest.mark.parametrize("name", ["both", "adam"])
def test_clipping_sees_the_gradients_that_there_are(name):
    settings, make = OPTIMIZERS[name]
    _, start, update = train(Heads(), clip_norm=0.1, **settings)
    check(Heads(), start, update, make, clip=0.1)


def test_a_strategy_corrects_the_gradients_that_there_are():
    settings, make = OPTIMIZERS["both"]
    config = TrainConfig(lr=0.1, batch_size=BATCH, local_epochs=2, **settings)
    _, start, update = train(Heads(), Engine(Heads(), config, 1, proximal))
    check(Heads(), start, update, make, mu=0.5)


def test_parameters_of_two_dtypes_are_left_alone_each_in_its_vector():
    class Mixed(Heads):
        def model(self):
            model = super().model()
            model["first"].float()
            return model

        def loss(self, model, batch):
            x, y, number = batch
            body = torch.tanh(model["body"](x))
            if self.order[int(number[0])]:
                return F.cross_entropy(model["second"](body), y)
            return F.cross_entropy(model["first"](body.float()).double(), y)

    settings, make = OPTIMIZERS["adamw"]
    _, start, update = train(Mixed(), **settings)
    model = Mixed().model()
    start.load().bind(model)
    begun = copy.deepcopy(model)
    plain(Mixed(), model, [*Mixed().data("a")], make)
    for name, view in update.delta.views().items():
        moved = model.get_parameter(name) - begun.get_parameter(name)
        atol = 1e-12 if view.dtype is torch.float64 else 1e-5
        torch.testing.assert_close(view, moved.detach(), rtol=0, atol=atol)


def test_fp16_takes_an_overflowing_step_anew_and_reaches_the_same():
    class Loud(Heads):
        def model(self):
            return super().model().float()

        def loss(self, model, batch):
            x, y, number = batch
            return super().loss(model, (x.float(), y, number)) * 300

    settings = {"momentum": 0.9, "weight_decay": 0.05, "lr": 1e-3, "precision": "fp16"}
    engine, start, update = train(Loud(), **settings)
    assert engine._steps.scale.value < 2.0**16, "no gradient overflowed"
    model = Loud().model()
    start.load().bind(model)
    begun = copy.deepcopy(model)
    make = lambda p: torch.optim.SGD(p, 1e-3, 0.9, weight_decay=0.05)
    plain(Loud(), model, [*Loud().data("a")], make)
    for name, view in update.delta.views().items():
        moved = (model.get_parameter(name) - begun.get_parameter(name)).detach()
        torch.testing.assert_close(view, moved, rtol=0, atol=float(moved.abs().max()) * 2e-2)


def test_an_engine_trains_the_next_site_as_a_new_one_does():
    settings, _ = OPTIMIZERS["adamw"]
    engine, _, first = train(Heads(), **settings)
    for data in (DataLoader(TensorDataset(*table("b")), batch_size=7), Heads().data("a")):
        again = train(Heads(), engine, data)[2]
    assert again.delta.digest == first.delta.digest


# --- Many sites at once


@pytest.mark.parametrize("correct", [None, proximal])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_of_sites_leaves_the_unused_layer_alone(name, correct):
    class InColumns(Unused):
        def data(self, site):
            return table(site, rows={"a": 60, "b": 25, "c": 40}[site])

    settings, _ = OPTIMIZERS[name]
    config = TrainConfig(lr=0.1, batch_size=BATCH, local_epochs=2, accumulate=2, **settings)
    engine = Engine(InColumns(), config, 1, correct)
    start, sites = engine.initial(), [(site, InColumns().data(site)) for site in SITES]
    outs = torch.zeros(len(sites), engine.schema.nbytes, dtype=torch.uint8)
    updates = Stacked(engine).train(sites, 0, start, outs)
    for (site, data), update in zip(sites, updates, strict=True):
        alone = engine.train(site, data, 0, start, Arena.zeros(engine.schema))
        for layer, view in update.delta.views().items():
            torch.testing.assert_close(view, alone.delta.views()[layer], rtol=0, atol=1e-12)
            assert view.any() == (not layer.startswith("first")), layer


# --- Whole runs


class OwnAdam(Heads):
    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, 0.1)


class FirstHead(Heads):
    order = (0,) * 6


class OwnMomentum(FirstHead):
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, 0.1, 0.9)


IN_PROCESS = {"simulate.workers": 0, "secagg.enabled": False}


def simulate(task, settings, **how):
    table = {"run.rounds": 2, "train.batch_size": BATCH, "evaluate.every": 0}
    return fedtrain.simulate(task, table | settings, **how)


def fedavg(task, make):
    """Two rounds of FedAvg in plain torch; the sites have equally many examples."""
    model = task.model()
    for _ in range(2):
        found = []
        for site in SITES:
            local = plain(task, copy.deepcopy(model), [*task.data(site)], make, epochs=1)
            found.append(local.state_dict())
        model.load_state_dict({n: sum(each[n] for each in found) / len(found) for n in found[0]})
    return model.state_dict()


@pytest.mark.parametrize("mode", ["federated", "gossip"])
@pytest.mark.parametrize("name", ["both", "adam", "own"])
def test_a_run_is_fedavg_of_plain_torch(name, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, make = OPTIMIZERS.get(name, ({}, OWN["adam"]))
    settings = {f"train.{key}": value for key, value in settings.items()} | {"train.lr": 0.1}
    settings |= IN_PROCESS if mode == "federated" else {"gossip.topology": "complete"}
    run = simulate(OwnAdam if name == "own" else Heads, settings, mode=mode)
    right = fedavg(Heads(), make)
    for key, value in run.model().state_dict().items():
        torch.testing.assert_close(value, right[key], rtol=0, atol=1e-12)


def test_fedrep_trains_head_and_body_apart_by_the_tasks_own_optimizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"strategy.kind": "fedrep", "strategy.local": ["first.*"], "train.lr": 0.1, **IN_PROCESS}
    ours = simulate(FirstHead, settings | {"train.momentum": 0.9})
    theirs = simulate(OwnMomentum, settings | {"run.name": "own"})
    right = ours.model(site="a").state_dict()
    for key, value in theirs.model(site="a").state_dict().items():
        torch.testing.assert_close(value, right[key], rtol=0, atol=1e-12)


# --- Ranks


class OfEachHead(EachItsHead):
    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, 0.1)


RANKS = {  # task, [train], [parallel]
    "momentum": (EachItsHead, OPTIMIZERS["both"][0], {"find_unused": True}),
    "accumulated": (EachItsHead, OPTIMIZERS["adamw"][0] | {"accumulate": 2}, {"find_unused": True}),
    "own": (OfEachHead, {}, {"find_unused": True}),
    "unused": (Unused, OPTIMIZERS["adam"][0], {"find_unused": True}),
    "zero-1": (EachItsHead, OPTIMIZERS["both"][0], {"zero": 1, "find_unused": True}),
    "zero-1-adam": (EachItsHead, OPTIMIZERS["adam"][0], {"zero": 1, "find_unused": True}),
    "zero-2": (EachItsHead, OPTIMIZERS["both"][0], {"zero": 2}),
    "zero-2-accumulated": (EachItsHead, OPTIMIZERS["adamw"][0] | {"accumulate": 2}, {"zero": 2}),
    "zero-3": (EachItsHead, OPTIMIZERS["adamw"][0] | {"clip_norm": 0.1}, {"zero": 3}),
    "zero-3-unused": (Unused, OPTIMIZERS["both"][0], {"zero": 3}),
    "zero-3-own": (OfEachHead, {}, {"zero": 3}),
}


def on_ranks(rank, ranks, folder):
    """Rank 0 writes down how far each case is from the same training in one process."""
    apart = {}
    for name, (kind, train, parallel) in RANKS.items():
        table = {"lr": 0.1, "batch_size": BATCH, "local_epochs": 2, **train}
        parallel = {"dp": ranks, **parallel}
        config = Config.of({"run": {"seed": 1}, "train": table, "parallel": parallel}, folder)
        task, mesh = kind(), Mesh(Sizes.of(config.parallel, ranks), torch.device("cpu"))
        alone = Engine(task, config.train, 1, proximal)
        weights = alone.initial()
        update = alone.train("a", task.data("a"), 0, weights, Arena.zeros(alone.schema))
        engine = MeshEngine(task, config, mesh, correct=proximal)
        engine.install(weights if rank == 0 else None)
        engine.train(Dealt(task.data("a"), config.train, 1, "a", rank, ranks), 0, 1)
        if (gathered := engine.gather()) is not None:
            moved = {n: view - weights.views()[n] for n, view in gathered.views().items()}
            apart[name] = {n: float((d - update.delta.views()[n]).abs().max()) for n, d in moved.items()}
    if ranks > 1:
        refuses_unreached_parameters(rank, ranks, folder)
    if rank == 0:
        (folder / "apart.json").write_text(json.dumps(apart))


def refuses_unreached_parameters(rank, ranks, folder):
    """Without parallel.find_unused, in the first step already, where DDP itself would not notice."""
    config = Config.of({"run": {"seed": 1}, "train": {"batch_size": BATCH, "local_steps": 1}}, folder)
    engine = MeshEngine(Unused(), config, Mesh(Sizes.of(config.parallel, ranks), torch.device("cpu")))
    with pytest.raises(TaskError, match=r"^parallel.find_unused: some parameters"):
        engine.train(Dealt(Unused().data("a"), config.train, 1, "a", rank, ranks), 0, 1)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_checkpoint_has_the_state_of_parameters_that_were_never_stepped(name):
    def made():
        model = Unused().model()
        return model, State([model], OWN[name](model.parameters()), SimpleNamespace(state_dict=dict))

    model, state = made()
    Unused().loss(model, next(iter(Unused().data("a")))).backward()
    state.optimizer.step()
    state.step = 1
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    slots = state.state_dict()["optimizer"]
    assert slots.keys() == made()[1].state_dict()["optimizer"].keys()
    assert all(not slot.any() for key, slot in slots.items() if key.startswith("first"))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [p.grad for p in model.parameters()] == gradients


@pytest.mark.slow(20)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_leave_alone_what_none_of_them_reached(ranks, tmp_path):
    world(ranks, on_ranks, tmp_path)
    apart = json.loads((tmp_path / "apart.json").read_text())
    assert {name: max(far.values()) for name, far in apart.items() if max(far.values()) > 1e-12} == {}
    assert apart.keys() == RANKS.keys()
