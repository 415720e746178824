"""One simulation of fedtrain that takes turns with its peers (peers/work.py), for benchmarks/simulate.py.

    python simulation_by_turns.py NAME WORK.npz SETTINGS

SETTINGS is the table of a fedtrain.toml as JSON. The first turn lasts until the first round is committed, and
so holds the start of the processes, torch and the data.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

from peers.work import Work, turns

from fedtrain.config import Config
from fedtrain.events import Event, Notice, RoundCommitted
from fedtrain.results import Run
from fedtrain.runtime.simulations import on_ranks
from fedtrain.runtime.simulations.simulation import simulate


class Stopped(Exception):
    """Nobody asks for another round."""


def main() -> None:
    name, path, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    config = Config.of(settings, Path(__file__).parent)
    if config.simulate.on == "torchrun" and on_ranks.rank():
        return on_ranks.work(config)
    asked = turns()
    next(asked)

    def emit(event: Event) -> None:
        if isinstance(event, Notice):
            print(event.text, file=sys.stderr, flush=True)
        if not isinstance(event, RoundCommitted):
            return
        following = next(asked, None)  # until then the simulation stands still
        if following is None:
            raise Stopped
        if following == 1:
            work = Work.load(path)
            assert event.sites == work.sizes.shape[1], f"{event.sites} sites"
            model = Run(config.simulate_dir, config).model(1)
            work.done(name, [p.detach().numpy() for p in model.parameters()])

    with suppress(Stopped):
        asyncio.run(simulate(config, emit=emit, fresh=True, data_dir=path.parent))


if __name__ == "__main__":
    main()
