"""How many sites a second a simulation trains: a digits MLP of 4,810 parameters, 100 sites in every round.

    python benchmarks/simulate.py [--json] [--rounds 60]

Rounds go through all that a real run has: checks, the float64 fold, a committed checkpoint each round.
`speedup_2_over_1` is drawn from runs that take turns, since the machine may change its pace. Beside it
`machine_2_over_1`: how much more two processes train here than one when each only trains, with nobody to
report to. No pool can do better than that.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

from fedtrain.config import Config
from fedtrain.runtime.simulation import PoolCohort, simulate
from fedtrain.runtime.trainer import Trainer

SITES = 100
TASK = """
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import fedtrain


class Digits(fedtrain.Task):
    def model(self):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, site):
        path = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
        rows = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
        return rows[:, :64] / 16, rows[:, 64].long()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""


@dataclass(frozen=True)
class Timing:
    first_round_s: float  # from the call until a round is committed: processes, torch, data, all of it
    updates_per_s: float  # of the rounds after it


def settings(folder: Path, engine: str, workers: int, rounds: int, secure: bool = False) -> Config:
    return Config.of(
        {
            "run": {"task": "digits_task:Digits", "rounds": rounds, "seed": 1},
            "train": {"batch_size": 32, "lr": 0.1},
            "evaluate": {"every": 0},
            "secagg": {"enabled": secure},
            "simulate": {"sites": SITES, "workers": workers, "engine": engine},
        },
        folder,
    )


def run(folder: Path, engine: str, workers: int, rounds: int, secure: bool = False) -> Timing:
    config = settings(folder, engine, workers, rounds, secure)
    committed: list[float] = []

    def emit(kind: str, **fields: Any) -> None:
        if kind == "round_committed":
            assert fields["sites"] == SITES, fields
            committed.append(time.perf_counter())

    began = time.perf_counter()
    asyncio.run(simulate(config, emit=emit, fresh=True))
    return Timing(committed[0] - began, SITES * (rounds - 1) / (committed[-1] - committed[0]))


async def alone(config: Config, workers: int, batches: int = 60) -> float:
    """Sites a second that so many trainers train side by side, in batches of 50, when nobody looks at what
    they found."""
    async with await PoolCohort.start(config, workers, config.root) as pool:
        weights = pool._publish(await pool.initial())
        sites = pool.description.sites[:50]

        async def busy(trainer: Trainer, batches: int) -> None:
            offset, block = pool._memory.take(len(sites) * weights.schema.nbytes)
            for batch in range(batches):
                await trainer.train_many(sites, batch, weights, pool._memory.slab, offset)
            del block

        await asyncio.gather(*(busy(trainer, 10) for trainer in pool._trainers))
        began = time.perf_counter()
        await asyncio.gather(*(busy(trainer, batches) for trainer in pool._trainers))
        return workers * batches * len(sites) / (time.perf_counter() - began)


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    common.begin(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digits_task.py").write_text(TASK)
        for engine in ("vmap", "loop"):
            timings: dict[int, list[Timing]] = {1: [], 2: []}
            for _ in range(args.repeat):
                for workers, found in timings.items():
                    found.append(run(folder, engine, workers, args.rounds))
            case = "digits-mlp5k" if engine == "vmap" else f"digits-mlp5k-{engine}"
            rates = {w: statistics.median(t.updates_per_s for t in found) for w, found in timings.items()}
            ratios = [
                two.updates_per_s / one.updates_per_s for one, two in zip(*timings.values(), strict=True)
            ]
            machine = [
                asyncio.run(alone(settings(folder, engine, 2, 1), 2))
                / asyncio.run(alone(settings(folder, engine, 1, 1), 1))
                for _ in range(args.repeat)
            ]
            first = statistics.median(t.first_round_s for t in timings[2])
            common.emit("simulate", case, "updates_per_s", rates[2], "updates/s")
            common.emit("simulate", case, "updates_per_s_1_worker", rates[1], "updates/s")
            common.emit("simulate", case, "speedup_2_over_1", statistics.median(ratios), "×")
            common.emit("simulate", case, "machine_2_over_1", statistics.median(machine), "×")
            common.emit("simulate", case, "first_round_s", first, "s")
            secure = [run(folder, engine, 2, args.rounds, secure=True) for _ in range(args.repeat)]
            rate = statistics.median(t.updates_per_s for t in secure)
            common.emit("simulate", f"{case}-secure", "updates_per_s", rate, "updates/s")


if __name__ == "__main__":
    main()
