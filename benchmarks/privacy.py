"""What privacy costs and what it gives: accuracy at an epsilon, and an attack that asks who was in the data.

All runs are simulations of `fedtrain simulate` on the handwritten digits of examples/digits.

**Accuracy**: a linear model (650 weights), sites with equal parts of the data, by where the noise is added:

    none          FedAvg without noise, for as many rounds as the noisy ones, and for many
    aggregator    strategy.kind = "dp_fedavg" with a fixed clip: all data of a site
    sum           privacy.where = "sum": all data of a site
    site          privacy.where = "site": all data of a site
    example       privacy.unit = "example": any single example

Clips, rates and rounds were chosen by the accuracy on the test set, in runs with other seeds.

**Membership**: a fifth of the examples have random labels, which only a model that has seen them can know.
The attack says "member" of an example whose loss is low. Its AUC is the probability that the loss of a member
is lower than that of an example which was never seen: 0.5 is chance.

    python benchmarks/privacy.py [--json] [--seeds 3] [--epsilon 8] [--sites 15 100]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import common
import torch
from torch import nn
from torch.nn import functional as F

from fedtrain.config import Config
from fedtrain.events import Event
from fedtrain.privacy import Release, epsilon
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.store import RunStore

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "digits"))
from task import Digits

DELTA = 1e-5
FEW_SITES = {"rounds": 8, "clip": 1.0, "lr": 0.5}  # below 50: the noise of the mean is large
MANY_SITES = {"rounds": 12, "clip": 3.0, "lr": 2.0}
LONG = 40  # rounds
OPEN, MASKS = {"secagg": {"enabled": False}}, {"secagg": {"enabled": True}}


class Linear(Digits):
    def model(self) -> nn.Module:
        return nn.Linear(64, 10)


class Canaries(Digits):
    """A fifth of the examples have random labels; so have those that are held out and never seen."""

    y: torch.Tensor  # of Digits

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.odd = torch.rand(len(self.y), generator=draw) < 0.2
        random = torch.randint(0, 10, (len(self.y),), generator=draw)
        self.random = torch.where(random == self.y, (random + 1) % 10, random)
        self.y = torch.where(self.odd & ~self.held_out, self.random, self.y)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def auc(self, model: nn.Module) -> float:
        """Of the attack by a threshold of the loss."""
        with torch.no_grad():
            losses = F.cross_entropy(model(self.x), self.random, reduction="none")
        members, others = losses[self.odd & ~self.held_out], losses[self.held_out]
        won = (members[:, None] < others).double() + 0.5 * (members[:, None] == others).double()
        return float(won.mean())


def run(task: Any, sites: int, seed: int, rounds: int, **sections: Any) -> tuple[float, float, nn.Module]:
    """The accuracy, the epsilon that was spent, and the model after the last round."""
    spent, accuracy = [0.0], [math.nan]

    def hear(event: Event) -> None:
        if event.kind == "evaluated":
            accuracy.append(event.fields()["metrics"]["accuracy"])
        elif event.kind == "privacy_spent":
            spent.append(event.fields()["epsilon"])

    with tempfile.TemporaryDirectory() as folder:
        table = {
            "run": {"name": "r", "seed": seed, "rounds": rounds, "task": "task:Digits"},
            "strategy": {"min_sites": sites},
            "simulate": {"sites": sites, "workers": 0, "engine": "stacked"},
            "evaluate": {"every": rounds},
        }
        for name, keys in sections.items():
            table[name] = table.get(name, {}) | keys
        (Path(folder) / "task.py").write_text(Path(sys.modules["task"].__file__ or "").read_text())
        config = Config.of(table, folder)
        asyncio.run(simulate(config, emit=hear, task=task))
        with closing(RunStore(config.simulate_dir, read_only=True)) as store:
            model, last = task.model(), store.latest()
            assert last is not None
            views = last.weights.load().views()
            model.load_state_dict({name: view.clone() for name, view in views.items()})
    return accuracy[-1], spent[-1], model


def multiplier(target: float, releases: Any) -> float:
    """The least noise at which `releases(multiplier)` cost `target`."""
    low, high = 0.05, 1000.0
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(releases(middle), DELTA) > target else (low, middle)
    return high


def of_sites(target: float, rounds: int, kind: Any = "gaussian") -> float:
    return multiplier(target, lambda z: [Release(kind, z / 2, steps=rounds)])


def cases(sites: int, target: float) -> dict[str, tuple[int, dict[str, Any]]]:
    """Whose noise -> (rounds, sections of the configuration)."""
    chosen = MANY_SITES if sites >= 50 else FEW_SITES
    rounds, clip = int(chosen["rounds"]), chosen["clip"]
    plain = {"train": {"batch_size": 0, "local_epochs": 30, "lr": chosen["lr"]}}  # 30 steps on all of a site
    loop = {"simulate": {"engine": "loop"}}
    central = {"clip_lr": 0.0, "momentum": 0.0, "clip": clip, "noise_multiplier": of_sites(target, rounds)}
    shared = {"where": "sum", "noise_multiplier": of_sites(target, rounds, "discrete_gaussian")}
    alone = {"noise_multiplier": of_sites(target, rounds)}
    return {
        "none": (rounds, plain | OPEN),
        f"none, {LONG} rounds": (LONG, plain | OPEN),
        "aggregator": (rounds, plain | OPEN | {"strategy": {"kind": "dp_fedavg", "options": central}}),
        "sum": (rounds, plain | MASKS | {"privacy": shared | {"clip": clip, "delta": DELTA}}),
        "site": (rounds, plain | OPEN | loop | {"privacy": alone | {"clip": clip, "delta": DELTA}}),
        "example": of_examples(target, 60, 2.0),
    }


def of_examples(target: float, steps: int, lr: float) -> tuple[int, dict[str, Any]]:
    """A step a round, on all examples of each site."""
    noise = multiplier(target, lambda z: [Release("gaussian", z, steps=steps)])
    privacy = {"unit": "example", "clip": 1.0, "delta": DELTA, "noise_multiplier": noise}
    train = {"batch_size": 0, "local_epochs": 1, "lr": lr}
    return steps, OPEN | {"train": train, "privacy": privacy, "simulate": {"engine": "loop"}}


def accuracies(args: argparse.Namespace) -> None:
    for sites in args.sites:
        for name, (rounds, sections) in cases(sites, args.epsilon).items():
            found = [run(Linear(), sites, 100 + s, rounds, **sections) for s in range(args.seeds)]
            accuracy = [100 * each[0] for each in found]
            case = f"{sites} sites, noise: {name}"
            common.emit("privacy", case, "accuracy", statistics.mean(accuracy), "%")
            if len(accuracy) > 1:
                common.emit("privacy", case, "standard deviation", statistics.stdev(accuracy), "%")
            common.emit("privacy", case, "epsilon", max(each[1] for each in found), "")


def membership(args: argparse.Namespace) -> None:
    task, sites, rounds = Canaries(), 15, 15
    plain = {"train": {"batch_size": 0, "local_epochs": 60, "lr": 1.0}}
    noise = of_sites(args.epsilon, rounds, "discrete_gaussian")
    shared = {"where": "sum", "clip": 1.0, "delta": DELTA, "noise_multiplier": noise}
    found: dict[str, tuple[int, dict[str, Any]]] = {
        "none": (rounds, plain | OPEN),
        "sum": (rounds, plain | MASKS | {"privacy": shared}),
        "example": of_examples(args.epsilon, 40, 1.0),
    }
    for name, (count, sections) in found.items():
        accuracy, spent, model = run(task, sites, 100, count, **sections)
        case = f"membership, {sites} sites, noise: {name}"
        common.emit("privacy", case, "attack's AUC", task.auc(model), "")
        common.emit("privacy", case, "accuracy", 100 * accuracy, "%")
        common.emit("privacy", case, "epsilon", spent, "")


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    parser.add_argument("--epsilon", type=float, default=8.0, help=f"at delta = {DELTA:g}, of all rounds")
    parser.add_argument("--sites", type=int, nargs="+", default=[15, 100])
    args = parser.parse_args()
    common.begin(args)
    accuracies(args)
    membership(args)


if __name__ == "__main__":
    main()
