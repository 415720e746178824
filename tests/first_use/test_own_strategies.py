"""Strategies of one's own: data as a stream, and what a Contribution may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fedtrain
from fedtrain.errors import FedtrainError, TaskError
from fedtrain.learning import Bounded, Contribution, Local
from fedtrain.strategies.fedavg import FedAvg
from fedtrain.training.examples import examples_of
from tests.first_use.crossed import Crossed, FedSAM

HERE = {"simulate.workers": 0, "run.rounds": 2, "train.lr": 0.05, "train.batch_size": 4}


@dataclass(frozen=True)
class Up(FedAvg):
    """Sends what the test says beside the delta."""

    what: str = ""

    @property
    def up(self) -> tuple[Bounded, ...]:
        return (Bounded("moment", 1.0),)

    def train(self, local: Local) -> Contribution:
        delta = local.train().delta
        up: Any = {
            "short": {"moment": torch.ones(7)},
            "a matrix": {"moment": delta[None]},
            "whole numbers": {"moment": delta.long()},
            "a list": {"moment": delta.tolist()},
            "another name": {"momentum": delta},
            "nothing": {},
        }
        return Contribution(
            delta[:5] if self.what == "a short delta" else delta, up=up.get(self.what, {"moment": delta})
        )


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("form", ["batches", "loader"])
def test_own_steps_without_a_change_are_those_of_fedavg(form):
    runs = [
        fedtrain.simulate(
            Crossed(form, "group"), HERE | {"run.name": name, "secagg.enabled": False} | settings
        )
        for name, settings in {
            "plain": {"strategy.kind": "fedavg"},
            "own": {"strategy.kind": FedSAM, "strategy.rho": 0.0},
        }.items()
    ]
    plain, own = (run.model().state_dict() for run in runs)
    for name, tensor in plain.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("what", "words"),
    {
        "short": "got (float32 [34], float32 [7])",
        "a matrix": "got (float32 [34], float32 [1, 34])",
        "whole numbers": "got (float32 [34], int64 [34])",
        "a list": "got (float32 [34], list)",
        "another name": "got (float32 [34], None)",
        "nothing": "got (float32 [34], None)",
        "a short delta": "got (float32 [5], float32 [34])",
    }.items(),
)
def test_a_contribution_that_does_not_fit_is_an_error_in_words(what, words):
    with pytest.raises(FedtrainError) as found:
        fedtrain.simulate(Crossed(), HERE | {"strategy.kind": Up, "strategy.what": what})
    assert f"return a Contribution with delta, moment as float32 [34]: {words}" in str(found.value)


def test_a_generator_is_refused_with_what_to_return_instead():
    with pytest.raises(TaskError, match=r"a generator, which can be read only once.*return a DataLoader"):
        examples_of(batch for batch in [torch.zeros(2)])


def test_what_reads_itself_anew_may_be_its_own_iterator():
    class Anew:
        def __iter__(self):
            self.left = 2
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            self.left -= 1
            return torch.zeros(3)

    examples = examples_of(Anew())
    assert [len([*examples.batches(0, False, None)]) for _ in range(2)] == [2, 2]
    assert examples.count == 6
