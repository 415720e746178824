"""What peers learn without a server: accuracy of every gossip algorithm beside FedAvg, on uneven data.

Each is trained by the code of `fedtrain simulate`: by default sixteen peers that share Fashion-MNIST by
Dirichlet(0.3), ten steps of a small model a round (examples/fashion_mnist/gossip.toml). Bytes are those over
one peer's line, in and out: FedAvg moves two models a round. FedAvg weighs sites by their examples, peers
count alike. In a simulation all peers go through round t before any begins round t + 1: of `adpsgd` and
`swift`, made for peers of different speed, one sees what not waiting costs, and not what it saves.

    accuracy_at_rounds   of the mean of all peers' models, after as many rounds as FedAvg had
    worst_peer           of the worst peer's own model, then
    disagreement         root mean square distance of the models from their mean, relative to it, then
    accuracy_at_bytes    of the mean model, with as many bytes as FedAvg needed, in at most twice its rounds
    bytes_ratio          bytes of a round / FedAvg's

    python benchmarks/gossip_accuracy.py [--json] [--rounds 30] [--config FILE] [--case NAME] [--png FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.events import Event
from fedtrain.messages import averages
from fedtrain.runtime.simulations import gossip_simulation, simulation
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import RunStore

ROOT = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    "dpsgd complete": {"algorithm": "dpsgd", "topology": "complete"},
    "dpsgd base:1": {"algorithm": "dpsgd", "topology": "base:1"},
    "dpsgd ring": {"algorithm": "dpsgd", "topology": "ring"},
    "gradient-tracking torus": {"algorithm": "gradient-tracking", "topology": "torus"},
    "choco 8 bits torus": {"algorithm": "choco", "topology": "torus", "compressor": "quantize:8"},
    "choco sign torus": {"algorithm": "choco", "topology": "torus", "compressor": "sign"},
    "diloco base:1": {"algorithm": "diloco", "topology": "base:1", "compressor": ""},
    "diloco 8 bits base:1": {"algorithm": "diloco", "topology": "base:1"},
    "streaming-diloco base:1": {"algorithm": "streaming-diloco", "topology": "base:1"},
    "noloco matching": {"algorithm": "noloco", "topology": "matching", "compressor": ""},
    "noloco 8 bits matching": {"algorithm": "noloco", "topology": "matching"},
    "sgp one-peer": {"algorithm": "sgp", "topology": "one-peer-exponential"},
    "epidemic:1": {"algorithm": "epidemic", "topology": "epidemic:1"},
    "dpsgd matching": {"algorithm": "dpsgd", "topology": "matching", "options": {"overlap": True}},
    "adpsgd ring": {"algorithm": "adpsgd", "topology": "ring"},
    "swift ring": {"algorithm": "swift", "topology": "ring"},
    "periodic ring": {"algorithm": "periodic", "topology": "ring", "options": {"every": 5}},
}
EVERY = 5  # rounds between looks at each peer's own model


@dataclass
class Course:
    """A run, round by round."""

    nbytes: list[float] = field(default_factory=list)  # over one peer's line, so far
    accuracy: list[float] = field(default_factory=list)  # of the mean model
    disagreement: list[float] = field(default_factory=list)
    worst: dict[int, float] = field(default_factory=dict)  # round -> accuracy of the worst peer's model

    def at_bytes(self, budget: float) -> float | None:
        """The accuracy that so many bytes buy, a percent more or less; None where they don't last a round."""
        rounds = sum(nbytes <= 1.01 * budget for nbytes in self.nbytes)
        return self.accuracy[rounds - 1] if rounds else None


class Bench:
    """What all runs have in common: the data, a model to evaluate with, the bytes of FedAvg's round."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.config = Config.load(path)
        self._folder, self._desk = folder, Workbench(self.config, simulated=True)
        self.peers = self._desk.description.sites
        self.round_bytes = 2.0 * self._desk.description.schema.nbytes

    def fedavg(self, rounds: int) -> Course:
        course, config = Course(), self._config("fedavg", rounds, {})
        asyncio.run(simulation.simulate(config, emit=self._recorder(course, config.simulate_dir)))
        course.nbytes = [self.round_bytes * (i + 1) for i in range(rounds)]  # a simulation moves none
        course.worst = {rounds: course.accuracy[-1]}  # all have the same
        return course

    def gossip(self, name: str, rounds: int, keys: dict[str, Any]) -> Course:
        """`rounds` rounds, and up to as many again while they cost no more bytes than FedAvg's."""
        course = Course()
        while len(course.nbytes) < 2 * rounds:
            config = self._config(name, len(course.nbytes) + rounds, keys)
            asyncio.run(gossip_simulation.simulate(config, emit=self._recorder(course, config.gossip_dir)))
            if course.nbytes[-1] > self.round_bytes * (rounds - 1):
                break
        return course

    def _config(self, name: str, rounds: int, gossip_keys: dict[str, Any]) -> Config:
        table = self.config.table()
        table["run"] |= {"name": name, "rounds": rounds, "dir": str(self._folder)}
        table["simulate"] |= {"workers": 1}
        table["secagg"] |= {"enabled": False}
        table["gossip"] |= gossip_keys
        return Config.of(table, self.config.root)

    def _recorder(self, course: Course, folder: Path) -> Any:
        def emit(event: Event) -> None:
            kind, fields = event.kind, event.fields()
            if kind == "evaluated":
                course.accuracy.append(fields["metrics"]["accuracy"])
            elif kind == "round_committed":
                before = course.nbytes[-1] if course.nbytes else 0.0
                course.nbytes.append(before + (fields["bytes_in"] + fields["bytes_out"]) / len(self.peers))
                course.disagreement.append(fields["metrics"].get("disagreement", 0.0))
                if "disagreement" in fields["metrics"] and fields["round"] % EVERY == 0:
                    course.worst[fields["round"]] = self._worst(folder, fields["round"])

        return emit

    def _worst(self, folder: Path, number: int) -> float:
        """Of the models that the peers have after the last committed round."""
        store = RunStore(folder, read_only=True)
        try:
            state = store.load(number).state
        finally:
            store.close()
        models = [Arena(self._desk.description.schema, state[f"{peer}/model"]) for peer in self.peers]
        return min(self._accuracy(number, model) for model in models)

    def _accuracy(self, number: int, model: Arena) -> float:
        sites = self._desk.description.evaluators
        return averages({s: self._desk.evaluate(s, number, model).metrics for s in sites})["accuracy"]


def draw(courses: dict[str, Course], path: Path) -> None:
    """Accuracy of the mean model against rounds, and against bytes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    by_round, by_bytes = figure.subplots(1, 2, sharey=True)
    for i, (name, course) in enumerate(courses.items()):
        style: dict[str, Any] = {"color": colormaps["tab20"](i), "linewidth": 1.2}
        if name == "fedavg":
            style = {"color": "black", "linewidth": 2.5}
        by_round.plot(range(1, len(course.accuracy) + 1), course.accuracy, label=name, **style)
        by_bytes.plot([b / 1e6 for b in course.nbytes], course.accuracy, **style)
    best = max(course.accuracy[-1] for course in courses.values())
    by_round.set(xlabel="round", ylabel="accuracy of the mean model", ylim=(best - 0.3, best + 0.02))
    by_bytes.set(xlabel="MB over one peer's line", xscale="log")
    for panel in (by_round, by_bytes):
        panel.grid(alpha=0.3)
    by_round.legend(fontsize=8, loc="lower right", ncols=2)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "fashion_mnist" / "gossip.toml")
    parser.add_argument("--rounds", type=_rounds, default=30, help=f"of FedAvg, a multiple of {EVERY}")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    common.begin(args)
    torch.set_num_threads(1)
    name, rounds = "gossip_accuracy", args.rounds
    common.say({"example": args.config.resolve().parent.name, "rounds": rounds})
    courses: dict[str, Course] = {}

    def record(case: str, course: Course) -> None:
        courses[case] = course
        common.emit(name, case, "accuracy_at_rounds", course.accuracy[rounds - 1], "")
        common.emit(name, case, "worst_peer", course.worst[rounds], "")
        common.emit(name, case, "disagreement", course.disagreement[rounds - 1], "")
        if (bought := course.at_bytes(bench.round_bytes * rounds)) is not None:
            common.emit(name, case, "accuracy_at_bytes", bought, "")
        common.emit(name, case, "bytes_ratio", course.nbytes[-1] / len(course.nbytes) / bench.round_bytes, "")

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.config, Path(folder))
        record("fedavg", bench.fedavg(rounds))
        for i, case in enumerate(args.case or CASES):
            record(case, bench.gossip(f"case-{i}", rounds, CASES[case]))
    if args.png:
        draw(courses, args.png)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < EVERY or int(text) % EVERY:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {EVERY}")
    return int(text)


if __name__ == "__main__":
    main()
