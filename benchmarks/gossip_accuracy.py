"""What peers learn without a server: accuracy of every gossip algorithm beside FedAvg, on uneven data.

Sixteen peers share a project's data by Dirichlet(0.3). The model that is evaluated is the mean of theirs.
Bytes are those over one peer's line, in and out: FedAvg moves two models a round. FedAvg weighs sites by
their examples, peers count alike.

    accuracy_at_rounds   after as many rounds as FedAvg had
    accuracy_at_bytes    with as many bytes as FedAvg needed, in at most twice its rounds
    bytes_ratio          bytes of a round / FedAvg's
    disagreement         root mean square distance of the models from their mean, relative to it

    python benchmarks/gossip_accuracy.py [--json] [--project examples/fashion_mnist] [--png FILE]
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch

from fedtrain.config import Config
from fedtrain.runtime import gossip, simulation

PEERS = 16
CASES: dict[str, dict[str, Any]] = {
    "dpsgd base:1": {"algorithm": "dpsgd", "topology": "base:1"},
    "dpsgd complete": {"algorithm": "dpsgd", "topology": "complete"},
    "dpsgd ring": {"algorithm": "dpsgd", "topology": "ring"},
    "adpsgd matching": {"algorithm": "adpsgd", "topology": "matching"},
    "sgp one-peer": {"algorithm": "sgp", "topology": "one-peer-exponential"},
    "epidemic:1": {"algorithm": "epidemic", "topology": "epidemic:1"},
    "gradient-tracking torus": {"algorithm": "gradient-tracking", "topology": "torus", "rho": 0.3},
    "choco 8 bits torus": {"algorithm": "choco", "topology": "torus", "compressor": "quantize:8"},
    "choco sign torus": {"algorithm": "choco", "topology": "torus", "compressor": "sign"},
    "diloco base:1": {"algorithm": "diloco", "topology": "base:1", "momentum": 0.5},
    "noloco matching": {"algorithm": "noloco", "topology": "matching"},
    "swift ring": {"algorithm": "swift", "topology": "ring"},
    "periodic ring": {"algorithm": "periodic", "topology": "ring", "every": 5},
}


@dataclass
class Course:
    """A run, round by round."""

    nbytes: list[float] = field(default_factory=list)  # over one peer's line, so far
    accuracy: list[float] = field(default_factory=list)
    disagreement: float = 0.0

    def at_bytes(self, budget: float) -> float:
        return next(
            (a for b, a in zip(self.nbytes[::-1], self.accuracy[::-1], strict=True) if b <= budget), 0.0
        )

    def record(self, round_bytes: float) -> None:
        self.nbytes.append((self.nbytes[-1] if self.nbytes else 0.0) + round_bytes)


def run(project: Path, folder: Path, name: str, rounds: int, **keys: Any) -> Course:
    table = Config.load(project / "fedtrain.toml").table()
    table["run"] |= {"name": name, "rounds": rounds, "dir": str(folder)}
    table["simulate"] |= {"sites": PEERS, "partition": "dirichlet:0.3", "workers": 1}
    table["strategy"] |= {"kind": "fedavg", "fraction": 1.0, "min_sites": 2, "options": {}}
    table["secagg"] |= {"enabled": False}
    if "gossip" in keys:
        own = {"algorithm", "topology", "compressor"}
        options = {k: v for k, v in keys["gossip"].items() if k not in own}
        table["gossip"] |= {k: v for k, v in keys["gossip"].items() if k in own} | {"options": options}
    config, course = Config.of(table, project), Course()

    def emit(kind: str, **event: Any) -> None:
        if kind == "evaluated":
            course.accuracy.append(event["metrics"]["accuracy"])
        elif kind == "round_committed":
            course.record((event["bytes_in"] + event["bytes_out"]) / PEERS)
            course.disagreement = event["metrics"].get("disagreement", 0.0)

    if "gossip" in keys:
        asyncio.run(gossip.simulate(config, emit=emit))
    else:
        asyncio.run(simulation.simulate(config, emit=emit))
    return course


def draw(courses: dict[str, Course], path: Path) -> None:
    """Accuracy against rounds, and against bytes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    by_round, by_bytes = figure.subplots(1, 2, sharey=True)
    for i, (name, course) in enumerate(courses.items()):
        style: dict[str, Any] = {"color": colormaps["tab20"](i), "linewidth": 1.2}
        if name == "fedavg":
            style = {"color": "black", "linewidth": 2.5}
        by_round.plot(range(1, len(course.accuracy) + 1), course.accuracy, label=name, **style)
        by_bytes.plot([b / 1e6 for b in course.nbytes], course.accuracy, **style)
    by_round.set(xlabel="round", ylabel="accuracy of the mean model")
    by_bytes.set(xlabel="MB over one peer's line", xscale="log")
    by_round.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, default=Path(__file__).parents[1] / "examples" / "digits")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    common.begin(args)
    torch.set_num_threads(1)
    project, bench = args.project.resolve(), f"gossip_accuracy/{args.project.name}"
    with tempfile.TemporaryDirectory() as folder:
        fedavg = run(project, Path(folder), "fedavg", args.rounds)
        model = Config.load(project / "fedtrain.toml")
        nbytes = 2.0 * model_bytes(model)
        fedavg.nbytes = [nbytes * (i + 1) for i in range(args.rounds)]  # a simulation moves none
        courses = {"fedavg": fedavg}
        for i, name in enumerate(args.case or CASES):
            courses[name] = run(project, Path(folder), f"case-{i}", 2 * args.rounds, gossip=CASES[name])
    for name, course in courses.items():
        common.emit(bench, name, "accuracy_at_rounds", course.accuracy[args.rounds - 1], "")
        common.emit(bench, name, "accuracy_at_bytes", course.at_bytes(fedavg.nbytes[-1]), "")
        common.emit(bench, name, "bytes_ratio", course.nbytes[-1] / len(course.nbytes) / nbytes, "")
        common.emit(bench, name, "disagreement", course.disagreement, "")
    if args.png:
        draw(courses, args.png)


def model_bytes(config: Config) -> int:
    from fedtrain.runtime.trainer import Workbench

    return Workbench(config, simulated=True).description.schema.nbytes


if __name__ == "__main__":
    main()
