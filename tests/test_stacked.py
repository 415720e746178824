"""Many sites at once, held against the loop in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtrain import Arena, Task
from fedtrain.config import TrainConfig
from fedtrain.errors import ConfigError, TaskError
from fedtrain.training import stacked as stacked_module
from fedtrain.training.local import Engine
from fedtrain.training.stacked import CHUNK, Stacked

CONFIG = TrainConfig(lr=0.1, batch_size=8)


class Small(Task):
    def model(self):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Tokens(Small):
    def loss(self, model, batch):
        weight = 1.0 + batch[1]
        return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weight).sum(), weight.sum()


class Tied(Small):
    def model(self):
        model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}).double()
        model["b"].weight = model["a"].weight
        model["a"].bias.requires_grad_(False)
        return model

    def loss(self, model, batch):
        return F.cross_entropy(model["b"](model["a"](batch[0]).relu()), batch[1])


class Dropped(Small):
    def model(self):
        return nn.Sequential(
            nn.Linear(6, 5), nn.Dropout(0.4), nn.Tanh(), nn.Linear(5, 3), nn.Dropout(0.1)
        ).double()


class Shifted(Small):
    """Two parameters with the same gradient, and one whose gradient is one number."""

    def model(self):
        model = super().model()
        model.shift, model.level = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
        return model

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]) + model.shift, batch[1]) + model.level.mean()


class Contrast(Small):
    """A loss that is no mean over examples."""

    def loss(self, model, batch):
        z = model(batch[0])
        return F.mse_loss(z @ z.T, torch.eye(len(z), dtype=z.dtype))


def examples(n, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(0, 3, (n,), generator=g)


SITES = [(f"site-{i}", examples(n, i)) for i, n in enumerate((5, 8, 21, 8, 5, 1, 21, 8))]


def proximal(gradient, weights, given):
    gradient.add_(weights - given.start, alpha=0.5)


def both(task, config, correct=None, sites=SITES, round=2):
    """The updates of the loop and of the stack, from the same weights."""
    engine = Engine(task, config, 1, correct, rounds=4)
    start = engine.initial()
    looped = [engine.train(site, data, round, start, Arena.zeros(engine.schema)) for site, data in sites]
    return looped, Stacked(engine).train(sites, round, start, slab(engine, sites))


def slab(engine, sites=SITES):
    return torch.zeros(len(sites), engine.schema.nbytes, dtype=torch.uint8)


TASKS = [Small(), Tokens(), Tied(), Dropped(), Shifted(), Contrast()]
WAYS = [
    (CONFIG, None),
    (replace(CONFIG, local_epochs=3, momentum=0.9, weight_decay=0.01), proximal),
    (replace(CONFIG, local_epochs=2, batch_size=3, accumulate=2, clip_norm=0.1, momentum=0.9), proximal),
    (replace(CONFIG, local_epochs=2, batch_size=0, clip_norm=0.1), None),
    (replace(CONFIG, local_steps=4, drop_last=True), None),
    (replace(CONFIG, optimizer="adam", local_epochs=2), None),
    (replace(CONFIG, local_epochs=2, warmup=1, decay="cosine"), None),
    (replace(CONFIG, local_steps=3, batch_size=4, accumulate=3, optimizer="adamw", drop_last=True), None),
]


# Every task in three ways, and two tasks, one of which draws random numbers, in all.
@pytest.mark.parametrize(
    ("task", "config", "correct"),
    [
        (task, *way)
        for task in TASKS
        for number, way in enumerate(WAYS)
        if number < 3 or type(task) in (Small, Dropped)
    ],
)
def test_many_sites_at_once_are_the_loop_one_by_one(task, config, correct):
    for loop, stacked in zip(*both(task, config, correct), strict=True):
        for name, delta in loop.delta.views().items():
            torch.testing.assert_close(stacked.delta.views()[name], delta, rtol=0, atol=1e-12)
        assert stacked.num_examples == pytest.approx(loop.num_examples, abs=1e-12)
        assert stacked.metrics["loss"] == pytest.approx(loop.metrics["loss"], abs=1e-10)


def test_more_sites_than_a_chunk_come_back_in_their_order():
    sites = [(f"site-{i}", examples(3 + i % 2, i)) for i in range(2 * CHUNK + 50)]
    for loop, stacked in zip(*both(Small(), CONFIG, sites=sites), strict=True):
        torch.testing.assert_close(
            stacked.delta.views()["0.weight"], loop.delta.views()["0.weight"], rtol=0, atol=1e-12
        )


def test_a_slab_receives_whole_arenas_and_frozen_parameters_stay_out_of_them():
    engine = Engine(Tied(), CONFIG, 1)
    outs = torch.ones(len(SITES), engine.schema.nbytes, dtype=torch.uint8)
    updates = Stacked(engine).train(SITES, 0, engine.initial(), outs)
    assert all(u.delta.data.data_ptr() == row.data_ptr() for u, row in zip(updates, outs, strict=True))
    before = Arena.of(Engine(Tied(), CONFIG, 1).model, frozen=True).views()
    assert torch.equal(engine.model["a"].bias, before["a.bias"])
    assert all(u.delta.views().keys() == {"a.weight", "b.bias"} for u in updates)
    assert all(u.delta.views()["a.weight"].any() for u in updates)


def test_stacked_data_is_kept_for_the_same_data_only_and_only_so_much_of_it(monkeypatch):
    engine = Engine(Small(), CONFIG, 1)
    start, stacked = engine.initial(), Stacked(engine)
    first = stacked.train(SITES, 0, start, slab(engine))
    kept = stacked._kept_bytes
    again = stacked.train(SITES, 0, start, slab(engine))
    assert [u.delta.digest for u in again] == [u.delta.digest for u in first]
    assert stacked._kept_bytes == kept == sum(x.nbytes + y.nbytes for _, (x, y) in SITES)
    others = [(name, examples(7, 9)) for name, _ in SITES]
    changed = stacked.train(others, 0, start, slab(engine))
    fresh = Stacked(engine).train(others, 0, start, slab(engine))
    assert [u.delta.digest for u in changed] == [u.delta.digest for u in fresh]
    monkeypatch.setattr(stacked_module, "STACKED_BYTES", 100)
    stacked.train(SITES[:3], 0, start, slab(engine, SITES[:3]))
    assert stacked._kept_bytes == 0
    assert not stacked._kept


def test_the_model_has_its_own_parameters_back_whatever_the_loss_does():
    engine = Engine(Reading(), CONFIG, 1)
    own = dict(engine.model.named_parameters())
    with pytest.raises(ConfigError):
        Stacked(engine).train(SITES, 0, engine.initial(), slab(engine))
    assert all(own[name] is p for name, p in engine.model.named_parameters())


def test_which_other_sites_are_trained_beside_it_changes_a_site_by_rounding_only():
    engine = Engine(Small(), CONFIG, 1)
    start, stacked = engine.initial(), Stacked(engine)
    everyone = stacked.train(SITES, 0, start, slab(engine))
    alone = stacked.train(SITES[2:3], 0, start, slab(engine, [0]))
    a, b = (u.delta.views()["0.weight"] for u in (everyone[2], alone[0]))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_sites_of_very_different_sizes_are_the_loop_one_by_one():
    draw = torch.Generator().manual_seed(3)
    sizes = (3.0 + torch.randn(70, generator=draw)).exp().clamp(1, 150).int().tolist()
    sites = [(f"site-{i}", examples(n, i)) for i, n in enumerate(sizes)]
    config = replace(CONFIG, local_epochs=2, momentum=0.9)
    for task in (Small(), Dropped()):
        for loop, stacked in zip(*both(task, config, sites=sites), strict=True):
            for name, delta in loop.delta.views().items():
                torch.testing.assert_close(stacked.delta.views()[name], delta, rtol=0, atol=1e-12)


def test_a_correction_sees_the_memory_of_the_sites_that_still_train():
    """SCAFFOLD-like: each site's own vector is added, in every step that the site takes."""
    engine = Engine(Small(), CONFIG, 1, lambda gradient, _, given: gradient.add_(given.memory["c"]))
    start = engine.initial()
    memories = [{"c": torch.full((53,), float(i), dtype=torch.float64)} for i in range(len(SITES))]
    found = Stacked(engine).train(SITES, 0, start, slab(engine), memories)
    for i, (site, data) in enumerate(SITES):
        alone = Engine(Small(), CONFIG, 1, lambda gradient, _, given, i=i: gradient.add_(float(i)))
        expected = alone.train(site, data, 0, start, Arena.zeros(engine.schema)).delta.views()
        torch.testing.assert_close(found[i].delta.views(), expected, rtol=0, atol=1e-12)


def test_nan_at_one_site_stays_there():
    sites = [(f"site-{i}", examples(n, i)) for i, n in enumerate((5, 30, 8, 1))]
    sites[1][1][0][:] = float("nan")
    engine = Engine(Small(), CONFIG, 1)
    found = Stacked(engine).train(sites, 0, engine.initial(), slab(engine, sites))
    finite = [bool(u.delta.views()["0.weight"].isfinite().all()) for u in found]
    assert finite == [True, False, True, True]


def test_one_trace_serves_all_rounds_of_the_same_shape_and_only_so_many_are_kept(monkeypatch):
    engine = Engine(Small(), replace(CONFIG, batch_size=0), 1)
    start, stacked = engine.initial(), Stacked(engine)
    sites = [(name, examples(9, i)) for i, (name, _) in enumerate(SITES)]
    for round in range(3):
        stacked.train(sites, round, start, slab(engine))
        assert len(stacked._traces) == 1
    monkeypatch.setattr(stacked_module, "TRACES", 2)
    for size in range(1, 6):
        sites = [(name, examples(size, i)) for i, (name, _) in enumerate(SITES)]
        stacked.train(sites, 0, start, slab(engine))
    assert len(stacked._traces) == 2


class Normed(Small):
    def model(self):
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()


class Recurrent(Small):
    def model(self):
        return nn.ModuleList([nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)]).double()

    def loss(self, model, batch):
        lstm, head = model
        return F.cross_entropy(head(lstm(batch[0].view(-1, 3, 2))[0][:, -1]), batch[1])


class Transposed(Small):
    def loss(self, model, batch):
        return F.cross_entropy(F.dropout(model(batch[0]).T, 0.3).T, batch[1])


class Noisy(Small):
    def loss(self, model, batch):
        return super().loss(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))


class Mixing(Small):
    def loss(self, model, batch):
        return super().loss(model, batch) * np.random.beta(1, 1)


class Counting(Small):
    def __init__(self):
        self.calls = torch.zeros(())

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) / self.calls


class Reading(Small):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss * loss.item()


class Own(Small):
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)


class Unreduced(Small):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Weightless(Tokens):
    def loss(self, model, batch):
        return super().loss(model, batch)[0] * 0, torch.zeros(())


@pytest.mark.parametrize(
    ("task", "config", "why"),
    [
        (Small(), replace(CONFIG, precision="bf16"), "bf16"),
        (Normed(), CONFIG, "buffers"),
        (Own(), CONFIG, "its own optimizer"),
        (Transposed(), CONFIG, "dropout layer's first dimension"),
        (Recurrent(), CONFIG, "in loss.*LSTM"),
        (Noisy(), CONFIG, "RuntimeError in .*Random numbers"),
        (Mixing(), CONFIG, "numpy.random"),
        (Counting(), CONFIG, "a tensor that outlives it"),
        (Reading(), CONFIG, "RuntimeError in .*, in loss"),
        (Unreduced(), CONFIG, "not a scalar"),
        (Weightless(), CONFIG, "without weight"),
    ],
)
def test_what_cannot_be_stacked_is_refused_with_the_reason_and_the_way_out(task, config, why):
    engine = Engine(task, config, 1)
    with pytest.raises(ConfigError, match=f'{why}.*simulate.engine = "loop"'):
        Stacked(engine).train(SITES, 0, engine.initial(), slab(engine))


def test_data_that_cannot_be_stacked_is_refused_and_a_site_without_any_is_named():
    engine = Engine(Small(), CONFIG, 1)
    with pytest.raises(ConfigError, match="only tensors can be stacked"):
        Stacked(engine).train([("a", [1, 2])], 0, engine.initial(), slab(engine, [0]))
    with pytest.raises(TaskError, match="site a has no examples"):
        Stacked(engine).train([("a", examples(0, 0))], 0, engine.initial(), slab(engine, [0]))
