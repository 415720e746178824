"""What a round of many simulated peers costs: `fedtrain simulate --mode gossip`, all peers in one process.

    python benchmarks/simulated_peers.py [--json] [--peers 1024] [--rounds 6] [--turns 3] [--engine loop]...

Each peer has 18 made-up examples, trains an MLP of 5,000 parameters by one step, and averages with its
neighbours of the default topology. The engines take turns, each time in a process of its own.

    cpu_s     CPU seconds of a round, all threads: median over all turns' rounds but the first two
    round_s   the same by the clock
    memory    most that is resident, in the end
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import common
import numpy as np
from simulation_cases import HERE, MLP5K

from fedtrain.config import Config
from fedtrain.events import Event
from fedtrain.runtime.simulations import gossip_simulation

ENGINES = ("loop", "stacked")
WARM = 2  # rounds before those that are measured


def run(engine: str, peers: int, rounds: int) -> dict[str, list[float]]:
    """(CPU seconds, seconds) of each round."""
    with tempfile.TemporaryDirectory() as folder:
        case = replace(MLP5K, sites=peers, engine=engine, rounds=WARM + rounds)
        np.savez(Path(folder) / "pictures.npz", **case.pictures())  # type: ignore[arg-type]  # numpy's stubs
        table = case.settings(Path(folder), 1)
        times = []

        def emit(event: Event) -> None:
            if event.kind == "round_committed":
                times.append((time.process_time(), time.perf_counter()))

        config = Config.of(table | {"gossip": {"agree": False}}, HERE)
        asyncio.run(gossip_simulation.simulate(config, emit=emit, data_dir=Path(folder)))
    cpu, clock = (np.diff(each)[WARM - 1 :].tolist() for each in zip(*times, strict=True))
    return {"cpu_s": cpu, "round_s": clock, "mb": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]}


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="only this one; may be repeated")
    parser.add_argument("--one", help="one turn of this engine, in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args.one, args.peers, args.rounds)))
        return
    common.begin(args)
    engines = args.engine or ENGINES
    found: dict[str, dict[str, list[float]]] = {engine: {} for engine in engines}
    for _ in range(args.turns):
        for engine in engines:
            sizes = [f"--peers={args.peers}", f"--rounds={args.rounds}"]
            one = [sys.executable, __file__, "--one", engine, *sizes]
            done = subprocess.run(one, stdout=subprocess.PIPE, text=True, check=True)
            for metric, values in json.loads(done.stdout.splitlines()[-1]).items():
                found[engine].setdefault(metric, []).extend(values)
    for engine, figures in found.items():
        for metric, values in figures.items():
            unit = "MB" if metric == "mb" else "s"
            name = {"mb": "memory"}.get(metric, metric)
            common.emit("simulated_peers", f"{args.peers}/{engine}", name, statistics.median(values), unit)


if __name__ == "__main__":
    main()
