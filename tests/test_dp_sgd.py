"""DP-SGD at a site: held against a loop over examples in float64, its noise and samples by statistics."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

from fedtrain import Arena
from fedtrain.cli.output import plan_lines
from fedtrain.config import TrainConfig
from fedtrain.errors import ConfigError, TaskError
from fedtrain.keystream import Keystream
from fedtrain.learning import Context
from fedtrain.privacy import Release, epsilon
from fedtrain.runtime.plan import round_plan
from fedtrain.runtime.simulations import gossip_simulation
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.training.dp_sgd import PrivateEngine
from fedtrain.training.examples import examples_of
from fedtrain.training.partition import SimulatedSites
from fedtrain.training.task import load_task

from .test_gossip_peers import Log
from .test_local import Columns, Normed, Small, examples
from .test_privacy import private
from .test_stacked import Tied, Tokens

CONFIG = TrainConfig(lr=0.5, batch_size=8, local_epochs=3)
KEY = bytes(range(16))
OPEN = {"secagg": {"enabled": False}}


class Looping(Small):
    """Its loss asks for a number, which torch.func can't give."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        assert found.item() >= 0
        return found


class Dropped(Small):
    def model(self):
        return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()


class Named(Small):
    """Batches with a part that is no tensor."""

    def collate(self, items):
        x, y = (torch.stack(column) for column in zip(*items, strict=True))
        return {"x": x, "y": y, "names": [f"patient {i}" for i in range(len(items))]}

    def loss(self, model, batch):
        assert len(batch["names"]) == len(batch["x"])
        return F.cross_entropy(model(batch["x"]), batch["y"])


def engine_of(task=Small(), config=CONFIG, clip=0.7, noise=1.3, key=KEY, correct=None, pieces=None):
    engine = PrivateEngine(
        task, config, 1, correct, 4, clip=clip, noise_multiplier=noise, streams=lambda *about: Keystream(key)
    )
    if pieces:
        engine._room = pieces
    return engine


def trained(engine, data=None, round=2):
    data = examples(30) if data is None else data
    start, out = engine.initial(), Arena.zeros(engine.schema)
    update = engine.train("a", data, round, start, out)
    return update, torch.cat([v.flatten() for v in out.views().values()])


def naive(task, config, data, clip, noise, key=KEY, correct=None):
    """Abadi et al. 2016, Algorithm 1, with one backward pass an example and plain SGD."""
    engine, draws, count = engine_of(task, config), Keystream(key), len(data[0])
    model = engine.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, start in zip(
            parameters,
            first := [p.clone() for p in engine_of(task, config).model.parameters() if p.requires_grad],
            strict=True,
        ):
            p.copy_(start)
    expected = min(config.batch_size or count, count)
    for _ in range(config.local_epochs * math.ceil(count / expected)):
        chosen = draws.sample(count, expected / count)
        total = [torch.zeros_like(p) for p in parameters]
        for i in chosen:
            loss = task.loss(model, tuple(column[i : i + 1] for column in data))
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            gradients = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            for t, g in zip(total, gradients, strict=True):
                t += g * min(1.0, clip / norm)
        noises = torch.from_numpy(draws.normals(sum(p.numel() for p in parameters)))
        with torch.no_grad():
            for p, t, begun in zip(parameters, total, first, strict=True):
                own, noises = noises[: p.numel()].view(p.shape), noises[p.numel() :]
                g = (t + noise * clip * own) / expected
                if correct is not None:
                    correct(g, p, Context(begun))
                p -= config.lr * g
    return torch.cat([(p - begun).detach().flatten() for p, begun in zip(parameters, first, strict=True)])


def proximal(gradient, weights, given):
    gradient.add_(weights - given.start, alpha=0.5)


@pytest.mark.parametrize("task", [Small(), Tokens(), Looping(), Tied()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, batch_size=0), replace(CONFIG, batch_size=99)])
def test_dp_sgd_is_the_papers_algorithm(task, config):
    engine = engine_of(task, config)
    _, found = trained(engine)
    torch.testing.assert_close(found, naive(task, config, examples(30), 0.7, 1.3), rtol=0, atol=1e-10)
    assert engine._differentiates is not isinstance(task, Looping)


def test_a_strategys_correction_comes_after_the_noise():
    _, found = trained(engine_of(correct=proximal))
    expected = naive(Small(), CONFIG, examples(30), 0.7, 1.3, correct=proximal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_pieces_of_a_batch_give_what_the_whole_gives():
    _, whole = trained(engine_of())
    _, pieces = trained(engine_of(pieces=3))
    torch.testing.assert_close(whole, pieces, rtol=0, atol=1e-12)


def test_examples_one_at_a_time_give_what_columns_give():
    assert torch.equal(trained(engine_of())[1], trained(engine_of(), Columns(*examples(30)))[1])


def test_a_batch_with_names_is_differentiated_one_by_one():
    engine = engine_of(Named())
    _, found = trained(engine, Columns(*examples(30)))
    assert engine._differentiates is False
    torch.testing.assert_close(found, trained(engine_of())[1], rtol=0, atol=1e-12)


def test_without_noise_and_with_a_wide_clip_all_examples_at_once_are_plain_gradient_descent():
    config = replace(CONFIG, batch_size=0)
    _, found = trained(engine_of(config=config, clip=1e9, noise=0.0))
    assert torch.allclose(found, naive(Small(), config, examples(30), 1e9, 0.0), atol=1e-12)


def test_no_example_moves_the_sum_by_more_than_the_clip():
    """One of them is worth a thousand; without noise its trace stays within lr · clip / expected."""
    x, y = examples(30)
    loud = x.clone()
    loud[4] *= 1000
    config = replace(CONFIG, batch_size=0, local_epochs=1)
    moved = [trained(engine_of(config=config, noise=0.0), (some, y))[1] for some in (x, loud)]
    assert 0 < float((moved[0] - moved[1]).norm()) <= 0.5 * 2 * 0.7 / 30 + 1e-12


def test_what_it_tells_is_the_size_of_the_data_and_nothing_that_was_seen():
    update, _ = trained(engine_of())
    assert (update.num_examples, update.metrics) == (30.0, {})


def test_dropout_draws_the_same_whatever_was_trained_before():
    fresh, used = engine_of(Dropped()), engine_of(Dropped())
    trained(used, round=0)
    assert torch.equal(trained(fresh)[1], trained(used)[1])
    assert fresh._differentiates


def test_a_step_with_an_empty_sample_is_noise_alone():
    config = replace(CONFIG, batch_size=1, local_epochs=1)

    class Nobody(Keystream):
        def sample(self, count, probability):
            return np.zeros(0, np.intp)

    engine = engine_of(config=config)
    engine._streams = lambda *about: Nobody(KEY)
    _, found = trained(engine)
    draws = Keystream(KEY)
    noise = sum(draws.normals(len(found)) for _ in range(30)) * 1.3 * 0.7 * -0.5
    np.testing.assert_allclose(found.numpy(), noise, atol=1e-12)


def test_noise_has_the_standard_deviation_that_is_paid_for():
    """Of one step on nothing but zeros: the bias alone moves, by its clipped gradient and noise."""
    config = replace(CONFIG, batch_size=0, local_epochs=1, lr=1.0)
    moved = torch.stack([trained(engine_of(config=config, key=bytes([i]) * 16))[1] for i in range(200)])
    noise = (moved - moved.mean(0)) * math.sqrt(200 / 199)
    n = noise.numel()
    assert float(noise.std()) == pytest.approx(1.3 * 0.7 / 30, abs=5 * 1.3 * 0.7 / 30 / math.sqrt(2 * n))


def test_samples_are_poisson():
    draws = Keystream(KEY)
    sizes = np.array([len(draws.sample(200, 0.1)) for _ in range(4000)])
    assert sizes.mean() == pytest.approx(20, abs=5 * math.sqrt(18 / 4000))
    assert sizes.var() == pytest.approx(18, rel=5 * math.sqrt(2 / 4000))  # a binomial's: each by itself
    assert list(draws.sample(5, 1.0)) == [0, 1, 2, 3, 4]


def test_models_and_data_that_can_not_be_protected_are_refused():
    with pytest.raises(ConfigError, match=r'privacy.unit: "example", but 1 is a BatchNorm1d.*GroupNorm'):
        engine_of(Normed())

    class Endless(IterableDataset):
        def __iter__(self):
            return zip(*examples(5), strict=True)

    with pytest.raises(TaskError, match=r"let data\(\) return tensors or a Dataset"):
        trained(engine_of(), Endless())
    with pytest.raises(TaskError, match="empty"):
        trained(engine_of(), examples(0))
    x, y = examples(30)
    x[3] = math.nan
    with pytest.raises(TaskError, match="the gradient of an example is not finite"):
        trained(engine_of(), (x, y))


# --- with the settings of a run


def settings(root, **keys):
    privacy = {"unit": "example", "noise_multiplier": 1.0, "clip": 0.5} | keys.pop("privacy", {})
    train = {"local_epochs": 1, "batch_size": 8} | keys.pop("train", {})
    return private(root, privacy=privacy, train=train, **keys)


@pytest.mark.slow(2)
def test_a_simulation_pays_for_the_steps_of_the_smallest_site_and_repeats_itself(tmp_path):
    found = []
    for root in (tmp_path / "1", tmp_path / "2"):
        root.mkdir()
        log = Log()
        asyncio.run(simulate(settings(root, simulate={"sites": 7, "workers": 0}), emit=log))
        told = log.of("privacy_spent")
        assert [e["round"] for e in told] == list(range(1, len(log.of("round_committed")) + 1))
        assert told[-1]["epsilon"] == epsilon([Release("gaussian", 1.0, 8 / 34, 5 * len(told))], 1e-5)
        assert all("loss" not in e["metrics"] for e in log.of("round_committed"))
        found.append([e["weights"] for e in log.of("round_committed") if "weights" in e])
    assert found[0] == found[1]


def test_simulated_peers_tell_the_price_of_the_one_with_the_fewest_examples(tmp_path):
    cfg = settings(tmp_path, simulate={"sites": 7})
    log = Log()
    asyncio.run(gossip_simulation.simulate(cfg, emit=log))
    told = log.of("privacy_spent")
    assert told[-1]["epsilon"] == epsilon([Release("gaussian", 1.0, 8 / 34, 5 * len(told))], 1e-5)


def test_the_plan_says_what_each_site_will_have_spent(tmp_path):
    run, dealt = {"rounds": 5, "task": "task:Linear"}, {"sites": 4, "partition": "quantity:0.5"}
    cfg = settings(tmp_path, run=run, simulate=dealt, **OPEN)
    plan = round_plan(cfg).privacy
    dealt = SimulatedSites(load_task(cfg.run.task, cfg.root), cfg.simulate, cfg.run.seed)
    sizes = {name: examples_of(dealt.data(name)).count for name in plan.by_site}
    assert len(set(sizes.values())) > 1
    for name, size in sizes.items():
        release = Release("gaussian", 1.0, min(1.0, 8 / size), 5 * math.ceil(size / min(8, size)))
        assert plan.by_site[name] == epsilon([release], 1e-5)
    assert plan.epsilon == max(plan.by_site.values())
    assert (plan.unit, plan.updates, plan.delta) == ("example", 5, 1e-5)
    lines = dict(plan_lines(round_plan(cfg), "round"))
    said = lines["epsilon of any example of a site"]
    assert said == f"{plan.epsilon:.3g} at delta = 1e-05, after 5 updates"
    assert sum(name.startswith("  at site-") for name in lines) == 4


@pytest.mark.parametrize("where", ["site", "sum"])
def test_the_plan_says_what_all_sites_will_have_spent(tmp_path, where):
    privacy = {"unit": "site", "where": where, "noise_multiplier": 4.0}
    own = {"run": {"rounds": 5, "task": "task:Linear"}, "strategy": {"min_sites": 3}}
    own["secagg"] = {"enabled": True}
    cfg = settings(tmp_path, privacy=privacy, **own)
    plan = round_plan(cfg).privacy
    kind = "gaussian" if where == "site" else "discrete_gaussian"
    assert plan.epsilon == epsilon([Release(kind, 2.0, steps=5)], 1e-5)
    assert plan.by_site == {}
    assert "epsilon of all data of a site" in dict(plan_lines(round_plan(cfg), "round"))
    assert round_plan(settings(tmp_path, privacy={"noise_multiplier": 0.0}, **own)).privacy is None


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"train": {"accumulate": 2}}, "train.accumulate: .* must be 1"),
        ({"train": {"precision": "fp16"}}, "train.precision: .* must be bf16"),
        ({"simulate": {"engine": "stacked"}}, "stacked"),
        ({"parallel": {"ranks": 2}}, "parallel.ranks: .* must be 1"),
    ],
)
def test_what_can_not_protect_examples_is_refused(tmp_path, keys, text):
    with pytest.raises(ConfigError, match=text):
        Workbench(settings(tmp_path, **keys), simulated=True)
