"""What a task's model() and optimizer() are told, by what their signatures ask for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedtrain
from fedtrain.arena import Arena
from fedtrain.config import Config, TrainConfig
from fedtrain.errors import ConfigError
from fedtrain.store import RunStore
from fedtrain.training.local import Engine
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.signatures import check_methods
from fedtrain.training.stacked import Stacked
from fedtrain.training.task import Task, load_task

CPU = torch.device("cpu")
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


# --- methods that nobody would call


def with_method(signature, base=Plain):
    space = {"base": base}
    exec(f"class Mine(base):\n    def {signature}:\n        return None", space)
    return space["Mine"]()


@pytest.mark.parametrize(
    ("signature", "meant"),
    [
        ("eval_dta(self, site)", "eval_data"),
        ("val_data(self, site)", "eval_data"),
        ("test_dataset(self, site)", "test_data"),
        ("metric(self, sums)", "metrics"),
        ("optimiser(self, parameters)", "optimizer"),
        ("optimizers(self, parameters)", "optimizer"),
        ("evaluat(self, model, batch)", "evaluate"),
        ("colate(self, examples)", "collate"),
        ("site(self)", "sites"),
        ("weight(self)", "weights"),
        ("paralel_plan(self)", "parallel_plan"),
    ],
)
def test_a_method_whose_name_is_nearly_a_tasks_is_refused_with_both_names(signature, meant):
    name = signature.partition("(")[0]
    with pytest.raises(ConfigError, match=rf"Mine\.{name}\(\): nobody calls it\. Did you mean {meant}\(\)\?"):
        check_methods(with_method(signature), Task)


@pytest.mark.parametrize(
    "signature",
    [
        "train_data(self, site)", "load_data(self, site)", "make_model(self)", "accuracy(self, model, batch)",
        "validate(self, model, batch)", "normalize(self, x)", "class_weights(self, y)", "transform(self, x)",
        "weight(self, y)", "column(self, site, name)", "_eval_dta(self, site)",
        "get_optimizer(self, parameters)",
        "evaluate_batch(self, model, batch)", "sitename(self, site)",
    ],
)  # fmt: skip
def test_a_helper_of_the_users_own_is_left_alone(signature):
    check_methods(with_method(signature), Task)


def test_a_near_name_is_a_helper_where_the_method_itself_is_there():
    class Both(Plain):
        def val_data(self, site):
            return DATA

        def eval_data(self, site):
            return self.val_data(site)

    check_methods(Both(), Task)


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        ("data(self)", r"data\(\) can't be called: .*Write data\(self, site\); any other argument needs"),
        ("loss(self, batch)", r"loss\(batch\) can't be called: .*Write loss\(self, model, batch\)"),
        ("eval_data(self)", r"Write eval_data\(self, site\)"),
        ("evaluate(self, model, batch, site)", r"Write evaluate\(self, model, batch\)"),
        ("metrics(self)", r"Write metrics\(self, sums\)"),
        ("sites(self, n)", r"Write sites\(self\)"),
    ],
)
def test_a_method_that_can_not_be_called_is_refused_when_the_task_is_loaded(tmp_path, signature, says):
    with pytest.raises(ConfigError, match=says):
        Engine(with_method(signature), CONFIG, run_seed=0)
    methods = {"model": "model(self)", "data": "data(self, site)", "loss": "loss(self, model, batch)"}
    methods[signature.partition("(")[0]] = signature
    body = "".join(f"    def {each}: ...\n" for each in methods.values())
    (tmp_path / "signed.py").write_text(f"import fedtrain\nclass Signed(fedtrain.Task):\n{body}")
    with pytest.raises(ConfigError, match=says):
        load_task("signed:Signed", tmp_path)


class Closing(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (torch.optim.LBFGS, r"LBFGS, whose step\(\) wants a closure"),
        (lambda p: Closing(p, lr=0.1), r"Closing, whose step\(\) wants a closure"),
        (lambda p: torch.optim.SparseAdam([*p]), "SparseAdam, and gradients are dense"),
        (lambda p: (torch.optim.SGD(p, lr=0.1), "a schedule"), r"returned a tuple.*train\.warmup"),
    ],
)
def test_an_optimizer_that_a_gradient_is_not_enough_for_is_refused_with_what_to_return(made, said):
    class Own(Plain):
        def optimizer(self, parameters):
            return made(parameters)

    for go in (lambda: moved(Own(), 0), lambda: MeshEngine(Own(), Config(train=CONFIG), Mesh(Sizes(), CPU))):
        with pytest.raises(ConfigError, match=said) as told:
            go()
        assert "train.optimizer" in str(told.value)
