"""Peers that learn over real connections: what 8 bits, slow peers and the agreement at the end are worth.

Each peer is all of `fedtrain peer` (CURVE, commits, audit log), but for a trainer in a process of its own:
all peers of a run are in this process, on loopback, and train one after the other. Accuracy is of the one
model that all agree on, over all held-out examples.

    outer    diloco and noloco, whole models and 8 bits with error feedback, 5 seeds of the digits at 8 peers
             by Dirichlet(0.1): bytes_ratio of the rounds' shares, points between the mean accuracies
    agreed   16 peers, Fashion-MNIST by Dirichlet(0.3): how many SHA-256 there are at the end (it must be
             one), and how many points the worst peer's model is below the mean of all models
    slow     adpsgd and swift, 4 peers that train for 0.1 s, and again with one that takes 1 s: speed_ratio,
             the others' rounds a second / those without the slow one, the median of 3 turns; shares, the
             part of the slow peer's rounds in all

    python benchmarks/real_peers.py [--json] [--case outer] [--seeds 5]
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch

from fedtrain import pki
from fedtrain.arena import Arena
from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.config.policy import changed
from fedtrain.events import Event
from fedtrain.messages import averages
from fedtrain.runtime.peers import peer
from fedtrain.runtime.peers.whole_models import sha256
from fedtrain.runtime.sites.approval import approve
from fedtrain.runtime.trainers import trainer_messages as msg
from fedtrain.runtime.trainers.trainer import Trainer
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import RunStore

EXAMPLES = Path(__file__).parents[1] / "examples"
CASES = ("outer", "agreed", "slow")
PACE_S, SLOW_S, TURNS, PACED_ROUNDS = 0.1, 1.0, 3, 40


class Inline(Trainer):
    """A trainer that is no process. `pace_s`: what a training takes at least, of nobody's CPU."""

    def __init__(self, bench: Workbench, pace_s: float = 0.0) -> None:
        self._bench, self._pace_s, self.description = bench, pace_s, bench.description

    async def _ask(self, message: Any) -> Any:
        if isinstance(message, msg.TrainOne) and self._pace_s:
            await asyncio.sleep(self._pace_s)
        return self._bench.answer(message)

    async def close(self) -> None:
        """There is no process."""


@dataclass
class Run:
    """What is left of one."""

    folders: dict[str, Path]
    events: dict[str, list[tuple[float, Event]]] = field(default_factory=dict)

    def of(self, name: str, kind: str) -> list[tuple[float, dict[str, Any]]]:
        return [(at, event.fields()) for at, event in self.events[name] if event.kind == kind]

    @property
    def bytes_out(self) -> int:
        return sum(
            fields["bytes_out"] for name in self.folders for _, fields in self.of(name, "round_committed")
        )

    def rate(self, name: str) -> float:
        """Rounds a second of one peer."""
        at = [when for when, _ in self.of(name, "round_committed")]
        return (len(at) - 1) / (at[-1] - at[0])


def settings(example: str, file: str, root: Path, sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """An example's settings, for peers whose keys and runs lie in a folder of their own."""
    table = Config.load(EXAMPLES / example / file).table()
    own = {
        "run": {"dir": str(root / "runs")}, "secagg": {"enabled": False}, "evaluate": {"every": 0},
        "network": {"certs": str(root / "certs"), "heartbeat": "5s", "idle": "60s"},
        "gossip": {"roster": str(root / "roster")},
    }  # fmt: skip
    for part in (own, sections):
        for name, keys in part.items():
            table[name] = table.get(name, {}) | keys
    return Config.of(table, EXAMPLES / example)


async def run(config: Config, bench: Workbench, pace: Mapping[str, float] = {}) -> Run:
    """All peers of a run, to its end."""
    names, certs = list(bench.description.sites), config.root / config.network.certs
    pki.init(certs)
    for name in names:
        pki.issue(certs, "site", name)
    for folder in approve(config, names)[1]:
        keep_policy(folder, changed(policy_from(folder), {"secure_sums": False, "rounds": 10**6}))
    made = Run({name: config.peer_dir(name) for name in names})

    async def live(name: str) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        table = config.table()
        table["network"] |= {"listen": f"127.0.0.1:{port}"}
        heard = made.events.setdefault(name, [])

        async def start(scratch: Path) -> Inline:
            return Inline(bench, pace.get(name, 0.0))

        await peer.run(
            Config.of(table, config.root), name, start_trainer=start,
            emit=lambda event: heard.append((time.perf_counter(), event)),
        )  # fmt: skip

    await asyncio.gather(*map(live, names))
    return made


def models(made: Run) -> dict[str, Arena]:
    """Each peer's at the end."""
    found = {}
    for name, folder in made.folders.items():
        store = RunStore(folder, read_only=True)
        if (last := store.latest()) is not None:
            found[name] = last.weights.load()
        store.close()
    return found


def accuracy(bench: Workbench, model: Arena) -> float:
    sites = bench.description.evaluators
    return averages({site: bench.evaluate(site, 0, model).metrics for site in sites})["accuracy"]


def outer(seeds: int) -> None:
    for kind, graph in (("diloco", "base:1"), ("noloco", "matching")):
        found: dict[str, list[float]] = {"": [], "quantize:8": []}
        sent = dict.fromkeys(found, 0)
        for seed in range(1, seeds + 1):
            for compressor in found:
                with tempfile.TemporaryDirectory() as folder:
                    config = settings("digits", "fedtrain.toml", Path(folder), {
                        "run": {"seed": seed}, "simulate": {"sites": 8, "partition": "dirichlet:0.1"},
                        "gossip": {"algorithm": kind, "topology": graph, "compressor": compressor},
                    })  # fmt: skip
                    bench = Workbench(config, simulated=True)
                    made = asyncio.run(run(config, bench))
                    found[compressor].append(accuracy(bench, next(iter(models(made).values()))))
                    sent[compressor] += made.bytes_out
        whole, coded = (100 * statistics.mean(each) for each in found.values())
        common.emit("real_peers", f"outer/{kind}", "bytes_ratio", sent["quantize:8"] / sent[""], "")
        common.emit("real_peers", f"outer/{kind}", "accuracy_whole", whole, "%")
        common.emit("real_peers", f"outer/{kind}", "accuracy_8_bits", coded, "%")
        common.emit("real_peers", f"outer/{kind}", "points", coded - whole, "points")


def agreed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = settings("fashion_mnist", "gossip.toml", Path(folder), {})
        bench = Workbench(config, simulated=True)
        made = asyncio.run(run(config, bench))
        ends = models(made)
        scores = {name: accuracy(bench, model) for name, model in ends.items()}
        common.emit("real_peers", "agreed", "digests", len({sha256(model) for model in ends.values()}), "")
        common.emit("real_peers", "agreed", "accuracy", 100 * statistics.mean(scores.values()), "%")
        worst = min(scores.values()) - statistics.mean(scores.values())
        common.emit("real_peers", "agreed", "worst_below_mean", 100 * worst, "points")


def slow() -> None:
    for kind in ("adpsgd", "swift"):
        ratios, shares = [], []
        for _ in range(TURNS):
            rates = []
            for last_s in (PACE_S, SLOW_S):
                with tempfile.TemporaryDirectory() as folder:
                    config = settings("digits", "fedtrain.toml", Path(folder), {
                        "run": {"rounds": PACED_ROUNDS}, "simulate": {"sites": 4, "partition": "iid"},
                        "gossip": {"algorithm": kind, "topology": "complete", "agree": False},
                    })  # fmt: skip
                    bench = Workbench(config, simulated=True)
                    *others, slowest = bench.description.sites
                    pace = dict.fromkeys(others, PACE_S) | {slowest: last_s}
                    made = asyncio.run(run(config, bench, pace))
                    rates.append(statistics.median(made.rate(name) for name in others))
            done = {name: len(made.of(name, "round_committed")) for name in made.folders}
            ratios.append(rates[1] / rates[0])
            shares.append(done[slowest] / sum(done.values()))
        common.emit("real_peers", f"slow/{kind}", "speed_ratio", statistics.median(ratios), "")
        common.emit("real_peers", f"slow/{kind}", "shares", statistics.median(shares), "")


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=5, help="of outer")
    args = parser.parse_args()
    common.begin(args)
    torch.set_num_threads(1)
    for case in args.case or CASES:
        if case == "outer":
            outer(args.seeds)
        else:
            {"agreed": agreed, "slow": slow}[case]()


if __name__ == "__main__":
    main()
