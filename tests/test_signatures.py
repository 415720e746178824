"""What a task's model() and optimizer() are told, by what their signatures ask for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedtrain
from fedtrain.arena import Arena
from fedtrain.config import TrainConfig
from fedtrain.errors import ConfigError
from fedtrain.store import RunStore
from fedtrain.training.local import Engine
from fedtrain.training.stacked import Stacked
from fedtrain.training.task import Task

CONFIG = TrainConfig(batch_size=0, lr=0.1)
DATA = torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2), torch.arange(6) % 2
RATES = [0.4, 0.2, 0.1]


class Plain(Task):
    def model(self):
        return nn.Linear(2, 2, dtype=torch.float64)

    def data(self, site):
        return DATA

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Scheduled(Plain):
    def optimizer(self, parameters, round):
        return torch.optim.SGD(parameters, lr=RATES[round])


class Late(Plain):
    def optimizer(self, parameters, *, round):
        return torch.optim.SGD(parameters, lr=0.4) if round == 2 else None


class Seeded(Plain):
    def model(self, seed):
        model = super().model()
        with torch.no_grad():
            model.bias.fill_(float(seed))
        return model


def moved(task, round):
    engine = Engine(task, CONFIG, run_seed=3, rounds=len(RATES))
    update = engine.train("a", DATA, round, engine.initial(), Arena.zeros(engine.schema))
    return torch.cat([view.flatten() for view in update.delta.views().values()])


def test_an_optimizer_that_asks_for_the_round_is_told_it():
    slope = moved(Plain(), 0) / -CONFIG.lr  # one step of plain SGD
    for round, rate in enumerate(RATES):
        torch.testing.assert_close(moved(Scheduled(), round), -rate * slope, rtol=0, atol=1e-15)


def test_a_model_that_asks_for_the_seed_is_told_the_runs_own():
    assert Engine(Seeded(), CONFIG, run_seed=41).initial().views()["bias"].tolist() == [41.0, 41.0]


def test_the_stacked_engine_refuses_an_optimizer_that_comes_in_a_later_round_only():
    Stacked(Engine(Late(), CONFIG, run_seed=3, rounds=2))
    with pytest.raises(ConfigError, match=r"the task has its own optimizer\(\)"):
        Stacked(Engine(Late(), CONFIG, run_seed=3, rounds=3))


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        ("model(self, sede)", r"model\(sede\) can't be called.*model\(self\) or model\(self, seed\)"),
        ("optimizer(self, parameters, epoch)", r"optimizer\(self, parameters, round\)"),
        ("optimizer(self, round)", r"optimizer\(round\) can't be called"),
        ("optimizer(self)", r"optimizer\(self, parameters\)"),
    ],
)
def test_a_signature_that_asks_for_something_else_is_refused_before_anything_is_trained(signature, says):
    space = {"nn": nn, "torch": torch, "Plain": Plain}
    body = "nn.Linear(2, 2)" if "model" in signature else "None"
    exec(f"class Wrong(Plain):\n    def {signature}:\n        return {body}", space)
    with pytest.raises(ConfigError, match=says):
        Engine(space["Wrong"](), CONFIG, run_seed=0)


def test_arguments_with_defaults_and_catch_alls_are_left_alone():
    class Old(Plain):
        def optimizer(self, parameters, lr=0.2, *more, **named):
            assert not more
            assert not named
            return torch.optim.SGD(parameters, lr=lr)

    torch.testing.assert_close(moved(Old(), 1), 2 * moved(Plain(), 1), rtol=0, atol=1e-15)


def test_a_simulation_that_goes_on_tells_the_rounds_that_are_left(tmp_path, monkeypatch):
    """Three rounds of gradient descent, each with its own rate, in one run and in two."""
    monkeypatch.chdir(tmp_path)
    x, y = DATA
    found = []
    for name, parts in (("whole", [3]), ("parts", [1, 3])):
        for rounds in parts:
            settings = {"run.name": name, "run.rounds": rounds, "run.seed": 7, "train.batch_size": 0,
                        "strategy.min_sites": 1, "evaluate.every": 0, "secagg.enabled": False,
                        "simulate.sites": 1, "simulate.workers": 0}  # fmt: skip
            run = fedtrain.simulate(Scheduled, settings)
        store = RunStore(run.path, read_only=True)
        found.append(store.load(3).weights.load())
        store.close()
    model = Engine(Plain(), CONFIG, run_seed=7).model
    for rate in RATES:
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for weight, grad in zip(model.parameters(), grads, strict=True):
                weight -= rate * grad
    for weights in found:
        torch.testing.assert_close(weights.views()["weight"], model.weight.detach(), rtol=0, atol=1e-12)
    assert found[0].digest == found[1].digest
