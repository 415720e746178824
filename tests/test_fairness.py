"""What is worked out over sites: right by numpy, the same after a restart, a reason to stop, and short."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

import fedtrain
from fedtrain.arena import Arena
from fedtrain.cli import cli
from fedtrain.config import EvaluateConfig
from fedtrain.errors import ConfigError
from fedtrain.events import Best, Evaluated
from fedtrain.fairness import averaged, over_sites
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.star import asynchronous
from fedtrain.store import Checkpoint
from fedtrain.tracking import log
from fedtrain.tracking.live import averages
from fedtrain.tracking.notebook import picture
from fedtrain.transport.memory import LocalCohort
from tests.test_asynchronous import begun
from tests.test_asynchronous import config as asynchronous_config
from tests.test_federated import SITES, config, handlers, run
from tests.test_journal import SCHEMA
from tests.test_journal import run as journal_of  # noqa: F401  # a fixture

NAMES = [f"site-{i:02d}" for i in range(12)]
HERE = {"run.rounds": 3, "run.seed": 5, "train.lr": 0.2, "simulate.workers": 0, "secagg.enabled": False}


class Uneven(fedtrain.Task):
    """Twelve sites of 3 to 14 examples, whose labels agree less and less."""

    def model(self):
        return torch.nn.Linear(3, 2, dtype=torch.float64)

    def sites(self):
        return NAMES

    def data(self, site):
        number = int(site[-2:])
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(3 + number, 3, generator=draw, dtype=torch.float64)
        noise = 0.2 * number * torch.randn(3 + number, generator=draw, dtype=torch.float64)
        return x, (x.sum(1) + noise > 0).long()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def by_numpy(each, *, lower):
    values = np.array(list(each))
    worst = np.sort(values)[::-1] if lower else np.sort(values)
    return {"uniform": values.mean(), "worst_decile": worst[: -(-len(values) // 10)].mean(),
            "std": values.std()}  # fmt: skip


def expected(by_site):
    """Every metric over sites, of what each site found, by numpy."""
    return {
        f"{name}/{how}": value
        for name in ("accuracy", "loss")
        for how, value in by_numpy((own[name] for own in by_site.values()), lower=name == "loss").items()
    }


def simulated(tmp_path, monkeypatch, **settings):
    monkeypatch.chdir(tmp_path)
    return fedtrain.simulate(Uneven, HERE | {key.replace("__", "."): v for key, v in settings.items()})


@pytest.mark.parametrize("sites", [2, 10, 11, 35])
def test_over_sites_is_what_numpy_says(sites):
    draw = np.random.default_rng(sites)
    table = {name: draw.normal(3, 2, sites) for name in ("score", "loss")}
    by_site = {f"s{i}": {name: float(column[i]) for name, column in table.items()} for i in range(sites)}
    found = over_sites(by_site, EvaluateConfig().lower)
    assert len(found) == 6
    for name in table:
        for how, value in by_numpy(table[name], lower=name == "loss").items():
            assert found[f"{name}/{how}"] == pytest.approx(value, abs=1e-12)


def test_a_site_without_a_number_is_left_out_and_one_alone_has_no_spread():
    odd = {"a": {"f1": 0.5}, "b": {"f1": math.nan}, "c": {"f1": 0.7}, "d": {"other": 1.0}}
    found = over_sites(odd, EvaluateConfig().lower)
    assert found == pytest.approx({"f1/uniform": 0.6, "f1/worst_decile": 0.5, "f1/std": 0.1})
    infinite = over_sites({"a": {"loss": math.inf}, "b": {"loss": -math.inf}}, EvaluateConfig().lower)
    assert all(map(math.isnan, infinite.values()))


def test_the_order_of_the_sites_changes_no_bit():
    draw = np.random.default_rng(1)
    by_site = {f"s{i}": {"loss": float(v)} for i, v in enumerate(draw.normal(0, 1e6, 50))}
    shuffled = {site: by_site[site] for site in draw.permutation(list(by_site))}
    assert over_sites(by_site, EvaluateConfig().lower) == over_sites(shuffled, EvaluateConfig().lower)


@pytest.mark.parametrize(
    ("metric", "mode", "name", "lower"),
    [
        ("loss", "auto", "accuracy/worst_decile", False),
        ("loss", "auto", "test_error/uniform", True),
        ("loss", "auto", "accuracy/std", True),
        ("score", "min", "score/worst_decile", True),
        ("score/worst_decile", "min", "score", True),
        ("score/worst_decile", "min", "other", None),
        ("accuracy/std", "min", "accuracy", False),
        ("accuracy", "max", "accuracy/std", True),
        ("spread/std", "max", "spread/std", False),
        ("dice_loss", "max", "dice_loss/uniform", False),
    ],
)
def test_which_end_is_the_worse_goes_by_mode_and_by_name(metric, mode, name, lower):
    assert EvaluateConfig(metric=metric, mode=mode).lower(name) is lower


def test_a_federation_in_the_open_tells_them_with_every_evaluation(tmp_path):
    cfg, heard = config(tmp_path, secagg={"enabled": False}), []
    run(cfg, LocalCohort(handlers()), events=heard.append)
    found = [event for event in heard if isinstance(event, Evaluated)]
    assert len(found) == cfg.run.rounds
    for event in found:
        losses = [own["loss"] for own in event.by_site.values()]
        for how, value in by_numpy(losses, lower=True).items():
            assert event.metrics[f"loss/{how}"] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("masks", [False, True], ids=["open", "sums of masks"])
def test_natural_sites_of_a_simulation_are_compared(tmp_path, monkeypatch, masks):
    """From the model and the data themselves, by plain numpy."""
    found = simulated(tmp_path, monkeypatch, secagg__enabled=masks)
    task, model, by_site = Uneven(), found.model(), {}
    for site in NAMES:
        x, y = task.data(site)
        with torch.no_grad():
            scores = model(x)
        right = (scores.argmax(1) == y).double().mean()
        by_site[site] = {"accuracy": float(right), "loss": float(F.cross_entropy(scores, y))}
    for name, value in expected(by_site).items():
        assert found.metrics[name] == pytest.approx(value, abs=1e-12), name
    assert found.metrics["accuracy/uniform"] != pytest.approx(found.metrics["accuracy"], abs=1e-3)


def test_a_run_that_goes_on_finds_the_same_numbers(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = simulated(tmp_path / "whole", monkeypatch)
    simulated(tmp_path / "parts", monkeypatch, run__rounds=1)
    parts = simulated(tmp_path / "parts", monkeypatch)
    assert parts.metrics == whole.metrics
    evaluated = [e for e in log.read(parts.path) if isinstance(e, Evaluated)]
    assert [e.metrics for e in evaluated] == [
        e.metrics for e in log.read(whole.path) if isinstance(e, Evaluated)
    ]


def test_peers_and_asynchronous_sites_are_compared_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = HERE | {"gossip.topology": "complete"}
    del settings["secagg.enabled"], settings["simulate.workers"]
    peers = fedtrain.simulate(Uneven, settings, mode="gossip")
    (last,) = [e for e in log.read(peers.path) if isinstance(e, Evaluated)][-1:]
    over = expected(last.by_site)
    assert {name: peers.metrics[name] for name in over} == pytest.approx(over, abs=1e-12)

    cfg, heard = asynchronous_config(tmp_path, evaluate={"every": 1}), []
    store, strategy = begun(cfg)
    journal = Journal(cfg, store, heard.append)
    asyncio.run(asynchronous.run(journal, LocalCohort(handlers()), strategy))
    store.close()
    (last,) = [e for e in heard if isinstance(e, Evaluated)][-1:]
    assert {*last.by_site} == {*SITES}
    losses = [own["loss"] for own in last.by_site.values()]
    assert last.metrics["loss/std"] == pytest.approx(np.std(losses), abs=1e-12)


def test_the_worst_tenth_may_choose_the_best_round_and_end_the_run(journal_of):  # noqa: F811
    journal, heard = journal_of(rounds=9, metric="accuracy/worst_decile", patience=2)
    for number, (one, other) in enumerate([(0.5, 0.5), (0.9, 0.6), (1.0, 0.55), (1.0, 0.6)], start=1):
        assert journal.reason_to_stop(number - 1) is None
        journal.commit(Checkpoint(number, Arena.zeros(SCHEMA)), {})
        by_site = {"a": {"accuracy": one}, "b": {"accuracy": other}}
        journal.keep_evaluation(number, {"accuracy": (one + other) / 2}, by_site)
    assert [(e.round, e.value) for e in heard if isinstance(e, Best)] == [(1, 0.5), (2, 0.6)]
    assert journal.reason_to_stop(4) == "accuracy/worst_decile has not improved for 2 evaluations"
    assert journal.result(4, "").metrics["accuracy/uniform"] == 0.8


def test_a_spread_that_grows_is_no_improvement(journal_of):  # noqa: F811
    journal, heard = journal_of(rounds=9, metric="accuracy/std", patience=1)
    for number, gap in enumerate([0.2, 0.1, 0.3], start=1):
        journal.commit(Checkpoint(number, Arena.zeros(SCHEMA)), {})
        by_site = {"a": {"accuracy": 0.5 + gap}, "b": {"accuracy": 0.5 - gap}}
        journal.keep_evaluation(number, {"accuracy": 0.5}, by_site)
    assert [e.round for e in heard if isinstance(e, Best)] == [1, 2]


def test_a_name_that_is_not_there_is_told_with_those_that_are(journal_of):  # noqa: F811
    journal, _ = journal_of(metric="accuracy/worst")
    both = {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.7}}
    with pytest.raises(ConfigError, match=r"Did you mean 'accuracy/worst_decile'\? It gives accuracy, ac"):
        journal.keep_evaluation(1, {"accuracy": 0.6}, both)
    journal.store.close()
    journal, _ = journal_of(metric="accuracy/std")
    with pytest.raises(ConfigError, match="needs two sites or more whose own metrics are known"):
        journal.keep_evaluation(1, {"accuracy": 0.6}, {})


def test_a_task_that_has_taken_such_a_name_is_told_so(journal_of):  # noqa: F811
    journal, _ = journal_of()
    own = {"loss": 1.0, "loss/std": 3.0}
    with pytest.raises(ConfigError, match="gives a metric 'loss/std', and fedtrain makes one"):
        journal.keep_evaluation(1, own, {"a": own, "b": own})


def test_screens_stay_short_and_json_has_it_all(tmp_path, monkeypatch):
    found = simulated(tmp_path, monkeypatch)
    metrics = found.metrics
    assert averaged(metrics) == ["accuracy", "loss"]
    text = averages(metrics)
    assert text == (
        f"accuracy {metrics['accuracy']:.4f} (worst {metrics['accuracy/worst_decile']:.4f})  "
        f"loss {metrics['loss']:.4f} (worst {metrics['loss/worst_decile']:.4f})"
    )
    assert "uniform" not in repr(found) + picture(found.board)
    assert {"accuracy/uniform", "loss/std"} <= found.history[-1].keys()
    (tmp_path / "fedtrain.toml").touch()
    assert text in CliRunner().invoke(cli, ["runs"], catch_exceptions=False).output
    model = json.loads((found.path / "model" / "model.json").read_text())
    assert model["metrics"] == metrics
    assert "| accuracy/worst_decile |" in (found.path / "model" / "MODEL_CARD.md").read_text()


def test_of_a_secure_sum_the_average_alone_is_known_and_to_the_last_bit_a_simulations(tmp_path, monkeypatch):
    """All the work of the masks; without them, the same numbers and more."""
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    masks = {"secagg__enabled": True, "run__rounds": 2}
    real = simulated(tmp_path / "with", monkeypatch, **masks, simulate__masks=True)
    plain = simulated(tmp_path / "without", monkeypatch, **masks)
    assert real.metrics.keys() == {"accuracy", "loss"}
    assert {name: plain.metrics[name] for name in real.metrics} == real.metrics
    assert {"accuracy/worst_decile", "loss/std"} <= plain.metrics.keys()
    events = [e for e in log.read(real.path) if isinstance(e, Evaluated)]
    assert all(e.by_site == {} for e in events), "no site's own"


@pytest.mark.parametrize("metric", ["accuracy/worst_decile", "loss/std", "loss/uniform"])
def test_what_no_secure_sum_gives_is_refused_before_anything_is_trained(tmp_path, monkeypatch, metric):
    masks = {"secagg__enabled": True, "simulate__masks": True}
    with pytest.raises(ConfigError, match="under masks nobody knows each site's metrics"):
        simulated(tmp_path, monkeypatch, evaluate__metric=metric, **masks)
    assert not (tmp_path / "runs" / "uneven+simulate" / "events.jsonl").exists()


class Pool(Uneven):
    sites = fedtrain.Task.sites

    def data(self, site):
        return super().data("site-11")


def test_one_pool_of_data_has_nothing_over_sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fedtrain.simulate(Pool, HERE | {"simulate.sites": 7}).metrics.keys() == {"accuracy", "loss"}
