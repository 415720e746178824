"""Every mesh trains the model that one process trains; islands train what a federation of sites does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.events import silent
from fedtrain.fairness import averaged
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.schema import Schema, unique_tensors
from fedtrain.store import RunStore
from fedtrain.training.building import build_model
from fedtrain.training.parallel.data import pool_of, sites_of
from fedtrain.training.parallel.outer import split
from fedtrain.training.partition import SimulatedSites
from fedtrain.training.sampler import Sampler
from fedtrain.training.task import load_task, mean_and_weight
from tests.equivalence.ranks import Outcome, Table, launch, run_case
from tests.equivalence.tiny import by_scikit_learn, case, furthest, project

CPU = torch.device("cpu")
CLIPPED = {"clip_norm": 0.1}
EXACT = 1e-12  # float64
CLOSE = 1e-6  # float32
GENTLY = {"optimizer": "sgd", "lr": 0.5}  # Adam makes much of a gradient's last bits
SGD = {"optimizer": "sgd", "lr": 0.5, "local_steps": 1, "batch_size": 0}

TWO = {
    "dp": case(steps=20),
    "dp-float32": case("Single", steps=20, train=GENTLY),
    "dp-padded-tokens-clipped": case("Padded", train=CLIPPED),
    "zero1": case(zero=1, train=CLIPPED),
    "zero3": case("Padded", zero=3, train=CLIPPED | {"accumulate": 2}),
    "dp-collated": case("Phrases", steps=20) | {"evaluate": {"every": 1, "metric": "auroc"}},
    "dp-frozen": case("Adapted", train=CLIPPED),
    "zero3-frozen": case("Adapted", zero=3, train=CLIPPED),
    "sp": case(tp=2, sp=True, train=CLIPPED),
    "cp": case(cp=2, train=CLIPPED),
    "pp-1f1b": case("Padded", pp=2, schedule="1f1b", train=CLIPPED),
}
TWO_MORE = {
    "dp-mean-loss": case("Rows"),
    "dp-accumulated": case("Padded", train={"accumulate": 2}),
    "zero2": case(zero=2),
    "zero3-activations-again": case(zero=3, checkpoint_activations=True),
    "tp": case(tp=2, train=CLIPPED),
    "cp-zero3": case(cp=2, zero=3),
    "pp-gpipe": case(pp=2, schedule="gpipe"),
    "pp-interleaved": case("Deep", pp=2, schedule="interleaved"),
    "pp-zero-bubble": case("Deep", pp=2, schedule="zero-bubble", checkpoint_activations=True),
    "pp-zbv": case("Deep", pp=2, schedule="zbv", train=CLIPPED),
    "pp-sequential": case("Rows", pp=2),
}
FOUR = {
    "hsdp": case(zero=3, replicate=2, train=CLIPPED),
    "dp-tp": case(tp=2, train=CLIPPED),
    "zero3-tp": case(tp=2, zero=3, train=CLIPPED),
    "zero2-sp": case(tp=2, sp=True, zero=2, train=CLIPPED),
    "dp-pp": case("Padded", pp=2, train=CLIPPED),
    "zero2-pp": case(pp=2, zero=2),
    "zero2-zero-bubble": case("Deep", pp=2, zero=2, schedule="zero-bubble"),
    "zbv-tp": case("Deep", pp=2, tp=2, schedule="zbv"),
    "pp-tp": case(pp=2, tp=2),
    "dp-cp-zero3": case(cp=2, zero=3, train=CLIPPED),
    "cp-sp": case(cp=2, tp=2, sp=True),
}
EIGHT = {
    "pp-dp-tp": case(pp=2, tp=2, train=CLIPPED),
    "pp-zero3-tp": case(pp=2, tp=2, zero=3, train=CLIPPED),
    "hsdp-cp": case(cp=2, zero=3, replicate=2),
    "zero3-cp-tp": case(cp=2, tp=2, zero=3),
}
HOOKS = {
    "fp16": (case("Single", steps=20, comm_hook="fp16"), 0.05),
    "bf16": (case("Single", steps=20, comm_hook="bf16"), 0.1),
    "topk-of-everything": (case("Single", steps=20, comm_hook="topk", comm_fraction=1.0), CLOSE),
    "topk": (case("Single", steps=20, comm_hook="topk"), 1.0),
    "powersgd": (case("Single", steps=20, comm_hook="powersgd"), 1.0),
}  # what goes on the wire in place of float32, and how far it may lead from it
ISLANDS = {
    "one-step-fedavg": case("Natural", sync="local", rounds=20, train=SGD),
    "one-step-dp": case("Natural", rounds=20, train=SGD),
    "one-step-federation": case("Natural", sync="local", carry=False, rounds=20, train=SGD),
    "diloco": case("Rows", sync="local", carry=False, rounds=4, train={"local_steps": 5},
                   strategy={"kind": "diloco"}),
    "fedprox-epochs": case("Natural", sync="local", carry=False, rounds=3, train={"local_steps": 0},
                           strategy={"kind": "fedprox", "mu": 0.1}),
    "collated": case("Phrases", sync="local", carry=False, rounds=3, train={"local_steps": 3})
    | {"evaluate": {"every": 1, "metric": "f1"}},
    "frozen": case("Head", sync="local", carry=False, rounds=3, train={"local_steps": 3}),
    "streaming": case("Rows", sync="local", rounds=4, train={"local_steps": 5}, strategy={"kind": "diloco"},
                      fragments=2, overlap=1, mix=0.25),
    "fedadam": case("Text", sync="local", carry=False, rounds=3, train={"local_steps": 3},
                    strategy={"kind": "fedadam", "server_lr": 0.05}),
}  # fmt: skip


MIXED = {f"mixed-{name}": case("mixed_task:Mixed", train={"accumulate": 2}, zero=zero) for name, zero in
         (("dp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3))}  # fmt: skip
NARROW = {
    f"{name}-{precision}": case("Single", train=GENTLY | {"precision": precision}, **mesh)
    for precision in ("bf16", "fp16")
    for name, mesh in {
        "dp": {}, "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3}, "tp": {"tp": 2},
        "sp": {"tp": 2, "sp": True}, "cp": {"cp": 2}, "pp": {"pp": 2},
    }.items()
}  # fmt: skip
HALF = case("Padded", zero=3, train=CLIPPED)  # to be gone on with, in another mesh


pytestmark = pytest.mark.slow(2)
Told = list[dict[str, object]]


def measured(cases: dict[str, Table]) -> dict[str, Table]:
    """Evaluated before the first step, and after each round."""
    return {name: {**table, "evaluate": {**table["evaluate"], "every": 1}} for name, table in cases.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return project(tmp_path_factory.mktemp("datacenter"))


@pytest.fixture(scope="module")
def two(folder) -> dict[str, Outcome]:
    half = {**HALF, "run": {**HALF["run"], "rounds": 1}}
    return launch(folder, 2, measured(TWO) | ISLANDS | {"half": half})


@pytest.fixture(scope="module")
def alone(folder):
    """The same case on one rank, each trained once."""
    known: dict[str, tuple[dict[str, torch.Tensor], Told]] = {}

    def train(table: Table, events: Told | None = None) -> dict[str, torch.Tensor]:
        """`events`: where it is written what became of it."""
        table = {**table, "parallel": {}, "evaluate": {**table["evaluate"], "every": 1}}
        key = repr(table)
        if key not in known:
            table["run"] = {**table["run"], "name": f"alone-{len(known)}"}
            told: Told = []
            known[key] = run_case(Config.of(table, folder), told, CPU), told
        model, told = known[key]
        if events is not None:
            events += told
        return model

    return train


def furthest_evaluation(outcome: Outcome, told: Told) -> float:
    """How far any metric of any evaluation is from the one alone."""
    alone = [event for event in told if event["kind"] in ("beforehand", "evaluated")]
    found = [event for event in outcome.events if event["kind"] in ("beforehand", "evaluated")]
    assert len(found) == len(alone) > 2

    def numbers(event: dict[str, Any]) -> list[float]:
        metrics = event["metrics"]
        if isinstance(metrics, dict):
            return [metrics[name] for name in averaged(metrics)]
        return np.hstack([part for each in metrics for name in sorted(each) for part in each[name]]).tolist()

    pairs = zip(map(numbers, found), map(numbers, alone), strict=True)
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def by_hand(folder: Path, table: Table, steps: int) -> dict[str, torch.Tensor]:
    """A loop as anyone would write it."""
    config = Config.of(table, folder)
    task = load_task(config.run.task, folder)
    model = build_model(task, config.run.seed, CPU)
    data = pool_of(sites_of(task, config, 1))
    optimizer = torch.optim.AdamW(model.parameters(), config.train.lr, weight_decay=0.0)
    columns = isinstance(data, tuple)
    order = Sampler(len(data[0] if columns else data), 16, seed=seed_of(config.run.seed, "datacenter"))
    for _ in range(steps):
        (share,) = order.take()
        if columns:
            batch = tuple(column[share.mine] for column in data)
        else:
            batch = task.collate([data[i] for i in share.mine.tolist()])
        optimizer.zero_grad()
        mean_and_weight(task.loss(model, batch), batch)[0].backward()
        if config.train.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
        optimizer.step()
    return {name: t.detach().clone() for name, t in unique_tensors(model).items()}


def simulated(folder: Path, table: Table) -> dict[str, torch.Tensor]:
    """What `fedtrain simulate` makes of it with two sites."""
    natural = load_task(table["run"]["task"], folder).sites() is not None
    dealt = {"workers": 1} | ({} if natural else {"sites": 2})
    table = {**table, "parallel": {}, "simulate": dealt, "secagg": {"enabled": False}}
    table |= {"run": {**table["run"], "name": "simulated"}, "strategy": {**table["strategy"], "min_sites": 2}}
    config = Config.of(table, folder)
    result = asyncio.run(simulate(config, emit=silent, fresh=True))
    store = RunStore(result.run_dir, read_only=True)
    last, frozen = store.latest(), store.load_frozen()
    store.close()
    return {n: view.clone() for n, view in (last.weights.load().views() | frozen.views()).items()}


@pytest.mark.parametrize("task", ["Text", "Rows", "Padded", "Phrases", "Adapted"])
def test_one_rank_is_a_loop_written_by_hand(folder, alone, task):
    table = case(task, steps=20, train=CLIPPED)
    assert furthest(alone(table), by_hand(folder, table, 20)) < EXACT


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_the_model_of_one(two, alone, name):
    told: Told = []
    exact = CLOSE if "float32" in name else EXACT
    assert furthest(two[name].model, alone(TWO[name], told)) < exact
    assert furthest_evaluation(two[name], told) < 1000 * exact  # sums over all tokens


def test_a_run_sharded_over_two_ranks_goes_on_alone(folder, two, alone):
    assert len(two["half"].of("round_committed")) == 1
    events: list[dict[str, object]] = []
    config = Config.of({**HALF, "parallel": {}, "run": {**HALF["run"], "name": "half"}}, folder)
    rest = run_case(config, events, CPU)
    assert [e["round"] for e in events if e["kind"] == "round_committed"] == [2]
    assert furthest(rest, alone(HALF)) < EXACT


def test_rounds_of_one_step_with_fedavg_between_islands_are_data_parallel(two):
    for name in ("one-step-dp", "one-step-federation"):
        assert furthest(two["one-step-fedavg"].model, two[name].model) < EXACT


@pytest.mark.parametrize(
    "name", ["one-step-federation", "diloco", "fedprox-epochs", "fedadam", "collated", "frozen"]
)
def test_islands_train_the_model_of_a_simulated_federation(folder, two, name):
    assert furthest(two[name].model, simulated(folder, ISLANDS[name])) < EXACT


@pytest.mark.parametrize(("name", "metric"), [("dp-collated", "auroc"), ("collated", "f1")])
def test_metrics_of_ranks_and_islands_are_scikit_learns_of_the_pooled_data(folder, two, name, metric):
    last = two[name].of("evaluated")[-1]
    shown = last["metrics"]
    assert {*averaged(shown)} == last["by_site"]["a"].keys() == {"loss", "f1", "auroc"}
    assert {n: shown[n] for n in ("f1", "auroc")} == pytest.approx(
        by_scikit_learn(folder, two[name].model), abs=EXACT
    )
    assert two[name].of("best")[0]["metric"] == metric


def test_streaming_diloco_is_the_one_written_by_hand(folder, two):
    """Two islands, two fragments, each under way for one step."""
    config = Config.of(ISLANDS["streaming"], folder)
    task = load_task(config.run.task, folder)
    sites = SimulatedSites(task, replace(config.simulate, sites=2), config.run.seed)
    shared = {n: t.detach().clone() for n, t in build_model(task, 5, CPU).named_parameters()}
    schema = Schema.of(build_model(task, 5, CPU))
    fragments = [[spec.name for spec in part.tensors] for part in split(schema, 2)]
    assert [len(names) for names in fragments] == [3, 3]
    momentum = {name: torch.zeros_like(t) for name, t in shared.items()}
    islands = []
    for name in sites.names:
        model, data = build_model(task, 5, CPU), sites.data(name)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0)
        order = Sampler(len(data[0]), 16, seed=seed_of(5, name))
        islands.append((model, data, optimizer, order))
    for _ in range(4):
        for step in range(1, 6):
            for model, data, optimizer, order in islands:
                (share,) = order.take()
                optimizer.zero_grad()
                task.loss(model, tuple(column[share.mine] for column in data)).backward()
                optimizer.step()
            for names, out, back in ((fragments[0], 1, 2), (fragments[1], 4, 5)):
                for name in names:
                    mine = [model.get_parameter(name) for model, *_ in islands]
                    if step == out:  # the islands have 48 examples each
                        sent = sum(p.detach() - shared[name] for p in mine) / 2
                        momentum[f"sent/{name}"] = sent
                    if step == back:
                        sent = momentum.pop(f"sent/{name}")
                        momentum[name] = 0.9 * momentum[name] + sent
                        shared[name] = shared[name] + 0.7 * (sent + 0.9 * momentum[name])
                        for p in mine:
                            p.data = 0.25 * p.data + 0.75 * shared[name]
    assert furthest(two["streaming"].model, shared) < EXACT


def test_every_round_is_committed_and_told_once(two):
    assert [e["round"] for e in two["diloco"].of("round_committed")] == [1, 2, 3, 4]
    assert [e["step"] for e in two["dp"].of("step")] == [10, 20]
    assert all(e["seconds"] > 0 and e["examples_per_s"] > 0 for e in two["dp"].of("step"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, TWO_MORE), (4, FOUR), (8, EIGHT)], ids=["two", "four", "eight"]
)
def test_more_meshes_train_the_model_of_one(folder, alone, ranks, cases):
    outcomes, far, off = launch(folder, ranks, measured(cases)), {}, {}
    for name, table in cases.items():
        told: Told = []
        far[name] = furthest(outcomes[name].model, alone(table, told))
        off[name] = furthest_evaluation(outcomes[name], told)
    assert max(far.values()) < EXACT, far
    assert max(off.values()) < 1000 * EXACT, off  # sums over all tokens


@pytest.mark.slow
def test_what_sees_more_than_one_example_is_evaluated_as_it_is_committed(folder):
    outcomes = launch(folder, 2, measured(MIXED))
    task = load_task("mixed_task:Mixed", folder)
    for name, outcome in outcomes.items():
        model = task.model()
        model.load_state_dict(outcome.model)
        with torch.no_grad():
            loss = float(task.loss(model.eval(), task.data("")))
        assert outcome.of("evaluated")[-1]["metrics"]["loss"] == pytest.approx(loss, abs=EXACT), name


@pytest.mark.slow
def test_sixteen_bits_lead_ranks_where_they_lead_one(folder, alone):
    outcomes = launch(folder, 2, measured(NARROW))
    wide = alone(case("Single", train=GENTLY))
    for name, table in NARROW.items():
        near = 1e-3 if "bf16" in name else 2e-4
        model = outcomes[name].model
        assert furthest(model, alone(table)) < near, name
        assert 1e-6 < furthest(model, wide) < near, name
