"""Every byte that a run moves is in one event."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

import fedtrain
from fedtrain import events as e
from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.contrib.dashboard.history import History
from fedtrain.runtime.journal import Journal, Lap
from fedtrain.store import Checkpoint, RunStore
from fedtrain.tracking.board import Board
from fedtrain.tracking.log import read
from tests.test_journal import SCHEMA

PROJECT = """
import torch
import fedtrain

class Task(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return torch.nn.Linear(4, 2)

    def data(self, site):
        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(ord(site)))
        return x, (x.sum(1) > 0).long()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
MODEL_BYTES = Arena.of(torch.nn.Linear(4, 2)).schema.nbytes


@pytest.mark.parametrize(("every", "evaluations"), [(1, 4), (2, 2), (0, 0)])
def test_bytes_out_are_all_models_that_sites_got(tmp_path, every, evaluations):
    (tmp_path / "task.py").write_text(PROJECT)
    (tmp_path / "fedtrain.toml").write_text('[run]\nname = "r"\ntask = "task:Task"\nrounds = 4\n')
    settings = {"simulate.workers": 0, "evaluate.every": every, "evaluate.metric": "loss"}
    fedtrain.simulate(tmp_path, settings, progress=False)
    found = [*read(tmp_path / "runs" / "r+simulate")]
    evaluated = [event.bytes_out for event in found if isinstance(event, e.Evaluated)]
    committed = [event.bytes_out for event in found if isinstance(event, e.RoundCommitted)]
    models = 4 + (every != 0)  # of each round, and that of the last one where it is evaluated
    assert len(evaluated) == evaluations
    assert sum(evaluated) + sum(committed) == 3 * models * MODEL_BYTES
    assert sum(row.bytes_out for row in Board.of(found).history.values()) == sum(evaluated) + sum(committed)


def test_each_byte_is_in_one_event_also_of_a_failed_attempt(tmp_path):
    config = Config.of({"run": {"task": "t:T", "rounds": 2}, "evaluate": {"metric": "loss"}}, tmp_path)
    heard = []
    with closing(RunStore(config.run_dir)) as store:
        store.begin(SCHEMA, {}, task_digest="")
        journal = Journal(config, store, heard.append)
        journal.traffic = moved = SimpleNamespace(bytes_in=0, bytes_out=0)
        for number in (0, 1):
            moved.bytes_out += 100
            journal.round_failed(number, 0, ValueError("no sites"))
            moved.bytes_in += 7
            moved.bytes_out += 10
            journal.commit(Checkpoint(number + 1, Arena.zeros(SCHEMA)), Lap().record({"loss": 1.0}, 3))
            moved.bytes_out += 1
            journal.keep_evaluation(number + 1, {"loss": 1.0}, {})
    counted = [(x.bytes_in, x.bytes_out) for x in heard if isinstance(x, e.RoundCommitted | e.Evaluated)]
    assert counted == [(7, 110), (0, 1)] * 2
    page = History("r")
    page.add(e.RunStarted(run="r", mode="federated", rounds=2))
    for event in heard:
        page.add(event)
    assert [(row["in"], row["out"]) for row in page.rounds.rows] == [(7, 111)] * 2
