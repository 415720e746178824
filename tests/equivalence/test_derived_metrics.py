"""Metrics that are no averages are scikit-learn's on the pooled data, in every mode; ranks and islands are in
test_datacenter.py."""

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fedtrain.config import Config
from fedtrain.fairness import averaged
from fedtrain.runtime.simulations import gossip_simulation, simulation
from fedtrain.runtime.trainers.trainer_messages import Description, Show, Showing
from fedtrain.store import RunStore
from fedtrain.training.task import load_task
from tests import peers
from tests.equivalence.tiny import by_scikit_learn, case, project
from tests.processes import SITES, Project

EXACT = 1e-12
MODES = {
    "sums that masks would give": {},
    "in the open": {"secagg": {"enabled": False}},
    "under masks": {"simulate": {"masks": True, "workers": 1}},
    "asynchronous": {"secagg": {"enabled": False}, "asynchronous": {"enabled": True, "buffer": 2}},
    "gossip": {"gossip": {"topology": "complete"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return project(tmp_path_factory.mktemp("derived"))


def simulated(folder: Path, name: str, **tables) -> tuple[list[dict], dict[str, torch.Tensor], Path]:
    """(events, the last model, the run's directory)."""
    table = case("Phrases3", steps=6) | {"parallel": {}, "simulate": {"workers": 1}, "secagg": {}}
    table |= {"evaluate": {"metric": "f1"}, **tables}
    table["run"] |= {"name": name.replace(" ", "-")}
    events: list[dict] = []
    mode = gossip_simulation if name == "gossip" else simulation
    config = Config.of(table, folder)
    result = asyncio.run(
        mode.simulate(config, emit=lambda event: events.append({"kind": event.kind, **event.fields()}))
    )
    store = RunStore(result.run_dir, read_only=True)
    weights = store.latest().weights.load()
    store.close()
    return events, {name: view.clone() for name, view in weights.views().items()}, result.run_dir


@pytest.mark.slow(6)
@pytest.mark.parametrize("name", MODES)
def test_f1_and_auroc_of_a_simulation_are_scikit_learns_on_the_pooled_data(folder, name):
    events, model, run = simulated(folder, name, **MODES[name])
    shown = [e for e in events if e["kind"] == "evaluated"][-1]["metrics"]
    expected = by_scikit_learn(folder, model, "mesh_task:Phrases3")
    assert {metric: shown[metric] for metric in expected} == pytest.approx(expected, abs=EXACT)
    assert {*averaged(shown)} == {"loss", "f1", "auroc"}
    assert next(e["metric"] for e in events if e["kind"] == "best") == "f1"
    assert "confusion" not in (run / "model" / "MODEL_CARD.md").read_text()
    assert "| auroc |" in (run / "model" / "MODEL_CARD.md").read_text()


@pytest.mark.slow(2)
def test_a_peer_shows_what_its_trainer_makes_of_its_own_sums(tmp_path):
    class Scorer(peers.Toy):
        metrics: ClassVar = {"loss": (3.0, 2.0), "hits": ([1.0, 2.0], 4.0)}

        def __init__(self, *toy):
            super().__init__(*toy)
            self.description = Description(peers.SCHEMA, "t", derives=True)

        async def _ask(self, message):
            if not isinstance(message, Show):
                return await super()._ask(message)
            assert message.by_site == {}
            hits, of = message.total["hits"]
            return Showing({"recall": hits[1] / of}, {})

    async def main():
        async with peers.village(tmp_path, "ab", rounds=1) as v:
            change = {"evaluate": {"every": 1, "metric": "recall"}}
            tasks = [v.start(name, toy=Scorer, **change) for name in "ab"]
            assert [(await task).metrics for task in tasks] == [{"recall": 0.5}] * 2
            assert [e["by_site"] for e in v.of("a", "evaluated")] == [{"a": {"recall": 0.5}}]

    asyncio.run(main())


@pytest.mark.slow(15)
@pytest.mark.parametrize("masks", [True, False], ids=["under masks", "in the open"])
def test_padded_text_and_its_metrics_over_mtls_are_the_simulations_to_the_last_bit(tmp_path, masks):
    with Project(tmp_path, rounds=2, secagg=masks, task="Phrases") as project:
        simulated = project.simulate()
        aggregator = project.start_all()
        assert aggregator.wait(120) == 0, project.log("aggregator")
        assert [p.wait(30) for p in project.processes] == [0] * 5
        assert project.final() == simulated
        told, foretold = (
            [e for e in project.events(run) if e["kind"] == "evaluated"] for run in ("r", "r+simulate")
        )
        for one, other in zip(
            told, foretold, strict=True
        ):  # a simulation knows each site's own, masks or not
            assert {name: other["metrics"][name] for name in one["metrics"]} == one["metrics"]
            more = other["metrics"].keys() - one["metrics"].keys()
            assert not more & {*averaged(other["metrics"])}
            assert masks or not more
        assert len(told) == 2
        from safetensors.torch import load_file
        from sklearn.metrics import f1_score, roc_auc_score

        task = load_task("task:Phrases", tmp_path)
        model = task.model()
        model.load_state_dict(load_file(tmp_path / "runs" / "r" / "model" / "model.safetensors"))
        batch = task.collate([each for site in SITES for each in task.data(site)])
        with torch.no_grad():
            logits = task.logits(model, batch)
        assert told[-1]["metrics"]["f1"] == pytest.approx(
            f1_score(batch[2], logits.argmax(1), average="macro"), abs=EXACT
        )
        assert told[-1]["metrics"]["auroc"] == pytest.approx(
            roc_auc_score(batch[2] == 1, task.scores(logits)), abs=EXACT
        )
