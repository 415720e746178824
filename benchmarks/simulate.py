"""How many sites a second a simulation trains: a digits MLP of 4,810 parameters, 100 sites in every round,
and a small CNN, whose sites take tens of milliseconds each, 24 of them.

    python benchmarks/simulate.py [--json] [--case NAME]

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

import common

from fedtrain.config import Config
from fedtrain.events import Event
from fedtrain.runtime.simulations.pool import PoolCohort
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.trainers.trainer import Trains
from fedtrain.store.memory import NEVER

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


class Pictures(Digits):
    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )

    def data(self, site):
        draw, count = torch.Generator().manual_seed(0), 24 * 128
        return torch.randn(count, 1, 28, 28, generator=draw), torch.randint(10, (count,), generator=draw)
"""


@dataclass(frozen=True)
class Case:
    name: str
    task: str
    engine: str
    sites: int
    rounds: int
    at_once: int  # sites in a request, where a trainer is timed alone

    def settings(self, folder: Path, workers: int, secure: bool = False) -> Config:
        return Config.of(
            {
                "run": {"task": f"benchmark_task:{self.task}", "rounds": self.rounds, "seed": 1},
                "train": {"batch_size": 32, "lr": 0.1},
                "evaluate": {"every": 0},
                "secagg": {"enabled": secure},
                "simulate": {"sites": self.sites, "workers": workers, "engine": self.engine},
            },
            folder,
        )


CASES = (
    Case("digits-mlp5k", "Digits", "stacked", sites=100, rounds=100, at_once=48),
    Case("digits-mlp5k-loop", "Digits", "loop", sites=100, rounds=100, at_once=50),
    Case("cnn-46k-loop", "Pictures", "loop", sites=24, rounds=12, at_once=4),
)


@dataclass(frozen=True)
class Timing:
    first_round_s: float  # from the call until a round is committed: processes, torch, data, all of it
    updates_per_s: float  # of the rounds after it


def run(case: Case, folder: Path, workers: int, secure: bool = False) -> Timing:
    committed: list[float] = []

    def emit(event: Event) -> None:
        kind, fields = event.kind, event.fields()
        if kind == "round_committed":
            assert fields["sites"] == case.sites, fields
            committed.append(time.perf_counter())

    began = time.perf_counter()
    asyncio.run(simulate(case.settings(folder, workers, secure), emit=emit, fresh=True))
    updates = case.sites * (case.rounds - 1)
    return Timing(committed[0] - began, updates / (committed[-1] - committed[0]))


async def alone(case: Case, folder: Path, workers: int, requests: int = 60) -> float:
    """Sites a second that so many trainers train side by side when nobody looks at what they found."""
    async with await PoolCohort.start(case.settings(folder, workers), workers, folder) as pool:
        weights = pool._publish(await pool.initial())
        sites = pool.description.sites[: case.at_once]

        async def busy(trainer: Trains, requests: int) -> None:
            offset, block = pool._memory.take(len(sites) * weights.schema.nbytes)
            for number in range(requests):
                await trainer.train_many(
                    sites, number, weights, pool._memory.slab, offset, [NEVER] * len(sites)
                )
            del block

        await asyncio.gather(*(busy(trainer, 10) for trainer in pool._trainers))
        began = time.perf_counter()
        await asyncio.gather(*(busy(trainer, requests) for trainer in pool._trainers))
        return workers * requests * len(sites) / (time.perf_counter() - began)


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    common.begin(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "benchmark_task.py").write_text(TASK)
        for case in CASES:
            if args.case and case.name not in args.case:
                continue
            timings: dict[int, list[Timing]] = {1: [], 2: []}
            machine = []
            for _ in range(args.repeat):
                for workers, found in timings.items():
                    found.append(run(case, folder, workers))
                one, two = (asyncio.run(alone(case, folder, workers)) for workers in (1, 2))
                machine.append(two / one)
            rates = {w: statistics.median(t.updates_per_s for t in found) for w, found in timings.items()}
            ratios = [b.updates_per_s / a.updates_per_s for a, b in zip(*timings.values(), strict=True)]
            first = statistics.median(t.first_round_s for t in timings[2])
            common.emit("simulate", case.name, "updates_per_s", rates[2], "updates/s")
            common.emit("simulate", case.name, "updates_per_s_1_worker", rates[1], "updates/s")
            common.emit("simulate", case.name, "speedup_2_over_1", statistics.median(ratios), "×")
            common.emit("simulate", case.name, "machine_2_over_1", statistics.median(machine), "×")
            common.emit("simulate", case.name, "first_round_s", first, "s")
            secure = [run(case, folder, 2, secure=True).updates_per_s for _ in range(args.repeat)]
            rate = statistics.median(secure)
            common.emit("simulate", f"{case.name}-secure", "updates_per_s", rate, "updates/s")


if __name__ == "__main__":
    main()
