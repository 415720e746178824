"""What robust rules of gossip cost where nobody is hostile and data are uneven.

Sixteen peers share the digits by Dirichlet(0.1) on `regular:4`, 30 rounds, by the code of `simulate`.
Beside them the same peers without communication. Figures are accuracies on all held-out examples, means over
seeds: of the mean of all peers' models, and of the one model that they make of theirs at the end.

    python benchmarks/gossip_rules.py [--json] [--seeds 5] [--rule median]
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

import common
import torch

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.events import silent
from fedtrain.gossip.one_model import mean
from fedtrain.messages import averages
from fedtrain.runtime.simulations import gossip_simulation
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import RunStore

DIGITS = Path(__file__).parents[1] / "examples" / "digits"
RULES = (
    "mean", "self_clip", "multi_krum:f=1", "geometric_median", "trimmed_mean:f=1", "median", "balance",
    "krum:f=1",
)  # fmt: skip
ALONE = "no communication"  # a rule that counts nobody


def run(rule: str, seed: int) -> tuple[float, float]:
    """(accuracy of the mean model, of the one at the end)"""
    table = Config.load(DIGITS / "fedtrain.toml").table()
    with tempfile.TemporaryDirectory() as folder:
        table["run"] |= {"dir": folder, "seed": seed}
        table["simulate"] |= {"sites": 16, "partition": "dirichlet:0.1", "workers": 1}
        table["secagg"] |= {"enabled": False}
        table["evaluate"] |= {"every": 0}
        table["gossip"] |= {"topology": "regular:4", "rule": "balance:gamma=1e-9" if rule == ALONE else rule}
        config = Config.of(table, DIGITS)
        asyncio.run(gossip_simulation.simulate(config, emit=silent))
        bench, store = Workbench(config, simulated=True), RunStore(config.gossip_dir, read_only=True)
        last = store.latest()
        store.close()
        assert last is not None
        schema, names = bench.description.schema, bench.description.sites
        rows = [last.state[f"{name}/model"].view(torch.float32) for name in names]
        middle = Arena(schema, mean(rows, [1.0] * len(rows)).view(torch.uint8))
        return accuracy(bench, middle), accuracy(bench, last.weights.load())


def accuracy(bench: Workbench, model: Arena) -> float:
    sites = bench.description.evaluators
    return averages({site: bench.evaluate(site, 0, model).metrics for site in sites})["accuracy"]


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rule", choices=[*RULES, ALONE], action="append", help="only this; may be repeated")
    args = parser.parse_args()
    common.begin(args)
    torch.set_num_threads(1)
    for rule in args.rule or [*RULES, ALONE]:
        found = [run(rule, seed) for seed in range(1, args.seeds + 1)]
        of_all, of_one = zip(*found, strict=True)
        common.emit("gossip_rules", rule, "mean_of_all", statistics.mean(of_all), "")
        common.emit("gossip_rules", rule, "mean_of_all_spread", statistics.pstdev(of_all), "")
        if rule != ALONE:
            common.emit("gossip_rules", rule, "one_model", statistics.mean(of_one), "")


if __name__ == "__main__":
    main()
