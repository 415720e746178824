"""What sites gain by training together: each alone, federated, and with all data in one place.

    python examples/beside.py lung           or credit, shuttle

All three are trained by one engine, from the same start, for as many rounds. What is measured is data that
nobody trained on: each site's own where the data has natural sites, else the one held-out part.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fedtrain
from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.messages import summed
from fedtrain.training.local import Engine
from fedtrain.training.partition import SimulatedSites
from fedtrain.training.task import load_task, shown

HERE = Path(__file__).parent
SOME = 10  # sites of a pool that are trained alone


class Beside:
    """An example's project, and what its sites train and test on."""

    def __init__(self, folder: Path, rounds: int | None) -> None:
        self.settings: dict[str, Any] = {"simulate.workers": 0, "secagg.enabled": False}
        self.settings |= {} if rounds is None else {"run.rounds": rounds}
        self.config = Config.load(folder / "fedtrain.toml", settings=self.settings)
        self.task = load_task(self.config.run.task, self.config.root)
        self.engine = Engine(self.task, self.config.train, self.config.run.seed)
        sites = SimulatedSites(self.task, self.config.simulate, self.config.run.seed)
        self.own = {name: sites.data(name) for name in sites.names}
        self.tests = sites.eval_data(None)

    def trained(self, name: str, dataset: Any) -> Arena:
        """The model of one site by itself."""
        weights, delta = self.engine.initial(), Arena.zeros(self.engine.schema)
        for round in range(self.config.run.rounds):
            self.engine.train(name, dataset, round, weights, delta)
            for tensor, change in zip(weights.views().values(), delta.views().values(), strict=True):
                tensor += change
        return weights

    def federated(self) -> Arena:
        with tempfile.TemporaryDirectory() as runs:
            run = fedtrain.simulate(self.config.root, {**self.settings, "run.dir": runs}, progress=False)
            return Arena.of(run.model())

    def measured(self, models: Mapping[str, Arena]) -> Mapping[str, float]:
        """The metrics over all test data, each part of it measured with the model of its name."""
        found = {name: self.engine.evaluate(data, models[name]) for name, data in self.tests.items()}
        return shown(self.task, summed(found), found)[0]

    def everywhere(self, model: Arena) -> Mapping[str, float]:
        return self.measured(dict.fromkeys(self.tests, model))

    def compare(self) -> dict[str, Mapping[str, float]]:
        """Way to train -> metrics."""
        natural = self.tests.keys() == self.own.keys()
        some = self.own if natural else dict(islice(self.own.items(), SOME))
        alone = {name: self.trained(name, data) for name, data in some.items()}
        found = {}
        if natural:
            found["alone, at home"] = self.measured(alone)
        found["alone, at all sites"] = mean([self.everywhere(model) for model in alone.values()])
        found["federated"] = self.everywhere(self.federated())
        pooled = tuple(map(torch.cat, zip(*self.own.values(), strict=True)))
        found["pooled (not allowed)"] = self.everywhere(self.trained("pooled", pooled))
        return found


def mean(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in of) / len(of) for name in of[0]}


def main(name: str, rounds: int | None = None) -> dict[str, Mapping[str, float]]:
    beside = Beside(HERE / name, rounds)
    found = beside.compare()
    names = [*next(iter(found.values()))]
    table = Table(title=f"{name}, {len(beside.own)} sites")
    for heading in ("trained", *names):
        table.add_column(heading, justify="left" if heading == "trained" else "right")
    for way, metrics in found.items():
        table.add_row(way, *(f"{metrics[each]:.3f}" for each in names))
    Console(width=100).print(table)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
