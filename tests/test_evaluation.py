"""Evaluation in every mode: an unknown metric, a wrong form, and an answer from nobody are told."""

import asyncio
from typing import ClassVar

import pytest
from click.testing import CliRunner

from fedtrain.arena import Arena
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import ConfigError, TaskError
from fedtrain.events import silent
from fedtrain.messages import Evaluate, Evaluation, Failure
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.peers import peer
from fedtrain.runtime.simulations import gossip_simulation, plain_sums, simulation
from fedtrain.runtime.simulations.simulated_masks import SimulatedMasks
from fedtrain.runtime.star import asynchronous
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.transport.memory import LocalCohort
from tests.allowed import allowed
from tests.limits import bounded
from tests.peers import Toy
from tests.peers import village as peers_of
from tests.test_asynchronous import begun
from tests.test_federated import SCHEMA, SITES, Events, config, handlers, pull, run

TASK = """
import torch
import fedtrain

class Good(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(4, 2)

    def data(self, site):
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
        return x, (x.sum(1) > 0).long()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}

class Means(Good):
    def evaluate(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}
"""
MODES = {"simulate": (), "gossip": ("--mode", "gossip"), "datacenter": ()}


def project(tmp_path, monkeypatch, task):
    (tmp_path / "evaluated_task.py").write_text(TASK)
    (tmp_path / "fedtrain.toml").write_text(
        f'[run]\ntask = "evaluated_task:{task}"\nrounds = 3\n[simulate]\nsites = 3\nworkers = 1\n'
    )
    monkeypatch.chdir(tmp_path)
    return Config.load(tmp_path / "fedtrain.toml", env={})


def started(mode, config):
    """The command's work; what it raises is the user's to act on."""
    if mode == "datacenter":
        return datacenter.run(config, emit=silent)
    work = gossip_simulation if mode == "gossip" else simulation
    return asyncio.run(work.simulate(config, emit=silent))


@pytest.mark.slow(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_unknown_metric_ends_the_run_after_its_first_evaluation_with_the_nearest(
    tmp_path, monkeypatch, mode
):
    project(tmp_path, monkeypatch, "Good")
    arguments = [mode if mode == "datacenter" else "simulate", *MODES[mode], "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--set", "evaluate.metric=acuracy"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "fedtrain: evaluate.metric: the task's evaluate() gives no 'acuracy'. Did you mean 'accuracy'? "
        "It gives accuracy, loss."
    )
    rounds = result.stdout.count('"kind":"round_committed"')
    assert rounds == 1


@pytest.mark.slow(2)
def test_a_peer_and_an_asynchronous_run_name_the_nearest_metric_too(tmp_path):
    class Measures(Toy):
        metrics: ClassVar = {"loss": (1.0, 1.0)}

    async def alone():
        async with peers_of(tmp_path, "ab") as village:

            async def start(scratch):
                return Measures(0.0, 0.0)

            cfg = village.config(evaluate={"every": 1, "metric": "los"},
                                 network={"listen": f"127.0.0.1:{village.ports['a']}"})  # fmt: skip
            village.start("b")
            await peer.run(allowed(cfg, "a", masks=False), "a", emit=Events(), start_trainer=start)

    with pytest.raises(ConfigError, match="Did you mean 'loss'"):
        bounded(alone())
    cfg = config(tmp_path, asynchronous={"enabled": True}, secagg={"enabled": False},
                 evaluate={"every": 1, "metric": "los"})  # fmt: skip
    store, strategy = begun(cfg)
    with pytest.raises(ConfigError, match="Did you mean 'loss'"):
        asyncio.run(asynchronous.run(Journal(cfg, store, Events()), LocalCohort(handlers()), strategy))
    store.close()


def test_a_mended_metric_goes_on_with_the_evaluation_that_was_refused(tmp_path):
    cohort, events = LocalCohort(handlers()), Events()
    with pytest.raises(ConfigError, match="gives no 'f1'"):
        run(config(tmp_path, run={"rounds": 2}, evaluate={"metric": "f1"}), cohort)
    run(config(tmp_path, run={"rounds": 2}), cohort, events)
    assert [e["round"] for e in events.of("evaluated")] == [1, 2]
    assert events.of("best")[0]["round"] == 1


def test_a_metric_that_was_there_may_count_nothing_in_a_later_round(tmp_path):
    def seen_once(request):
        if isinstance(request, Evaluate):
            return Evaluation(metrics={"loss": (1.0, 1.0), "recall": (0.5, float(request.round == 1))})
        return pull("a")(request)

    cfg = config(tmp_path, run={"rounds": 3}, strategy={"min_sites": 1}, evaluate={"metric": "recall"})
    assert run(cfg, LocalCohort({"a": seen_once}))[0].rounds == 3


@pytest.mark.slow(2)
@pytest.mark.parametrize("mode", MODES)
def test_plain_means_are_a_task_error_that_shows_sum_and_count(tmp_path, monkeypatch, mode):
    config = project(tmp_path, monkeypatch, "Means")
    form = r"evaluate\(\) gives a Tensor as 'accuracy'. Return {\"accuracy\": \(number right, number seen\)}"
    with pytest.raises(TaskError, match=form):
        started(mode, config)


REFUSES = "evaluate() gives a float"


def at_evaluation(answer, *sites):
    def handler(site):
        return lambda r: answer if isinstance(r, Evaluate) else pull(site)(r)

    return handlers(**{site: handler(site) for site in sites})


@pytest.mark.parametrize("answers", [InTheOpen, plain_sums.FixedPointSums, SimulatedMasks])
def test_an_evaluation_that_fails_at_all_sites_ends_the_run_and_one_that_some_give_does_not(
    tmp_path, answers
):
    cfg, weights = config(tmp_path, strategy={"attempts": 2}), Arena.zeros(SCHEMA)
    failing = LocalCohort(at_evaluation(Failure(reason=REFUSES), *SITES))
    with pytest.raises(TaskError, match=r"round 1: evaluation failed at a, .*, e: .*gives a float"):
        asyncio.run(answers(cfg, failing, Events()).evaluate(1, SITES, weights))
    partly = LocalCohort(at_evaluation(Failure(reason=REFUSES), "a"))
    metrics, _ = asyncio.run(answers(cfg, partly, Events()).evaluate(1, SITES, weights))
    assert metrics["loss"][0] > 0


def test_silence_is_no_failure_ends_no_run_and_counts_for_no_early_stop(tmp_path):
    """As when all sites are restarted at once."""
    lost = LocalCohort(handlers(), lambda site, request: isinstance(request, Evaluate) and request.round > 1)
    events = Events()
    result, _ = run(config(tmp_path, evaluate={"patience": 1}), lost, events)
    assert (result.rounds, result.reason) == (5, "rounds done")
    assert [e["text"] for e in events.of("notice")] == [
        f"round {n}: nobody evaluated the model" for n in (2, 3, 4, 5)
    ]
