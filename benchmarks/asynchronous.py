"""What is gained without rounds when one of 4 sites is slow: a real federation over mutual TLS on loopback.

    python benchmarks/asynchronous.py [--json] [--pace 0.1] [--slow 10] [--seconds 10]

Sites hand over a payload after a pause of `--pace` seconds, the last one after `--slow` times that; all else
is what users run (see deployed_round.py). The same sites work in rounds of all four, and then without rounds,
with a buffer of four: both ways four updates make a model.

updates_per_s    updates in the model a second, from the first commit to the last
share_of_ideal   of what the sites could give if nothing but their pauses took time: in rounds, 4 in a pause
                 of the slowest; without, each at its own pace
gain             updates_per_s without rounds / in rounds
staleness_mean, staleness_worst   versions that the model had moved while the update was made
slow_site_share  of the updates that count, those of the slow site; at its own pace, 1 / (1 + 3 · slow)
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from deployed_round import SITES, Idle, project

from fedtrain.arena import ArenaFile
from fedtrain.config import Config
from fedtrain.events import silent
from fedtrain.messages import Update
from fedtrain.runtime.sites import site as runtime_site

PARAMETERS = 10_000
BUFFER = len(SITES)
WITHOUT_ROUNDS = (
    "asynchronous.enabled=true",
    f"asynchronous.buffer={BUFFER}",
    "asynchronous.max_staleness=1000",
)


class Paced(Idle):
    """A trainer that takes its time and trains nothing."""

    def __init__(self, config: Config, seed: int, pace_s: float) -> None:
        super().__init__(config, PARAMETERS, seed)
        self._pace_s = pace_s

    async def train(self, site: str, round: int, weights: ArenaFile, out: Path, counted: int = -1) -> Update:
        await asyncio.sleep(self._pace_s)
        return await super().train(site, round, weights, out)


@dataclass(frozen=True)
class Found:
    """Of the updates that came between the first commit and the last."""

    updates_per_s: float
    staleness: list[int]
    slow_site_share: float


async def paced_site(folder: str, name: str, pace_s: float, sets: list[str]) -> None:
    config = Config.load(Path(folder) / "fedtrain.toml", sets)

    async def start(scratch: Path) -> Paced:
        return Paced(config, SITES.index(name), pace_s)

    await runtime_site.run(config, name, emit=silent, start_trainer=start)


def measured(paces_s: dict[str, float], versions: int, sets: tuple[str, ...]) -> Found:
    """One run of real processes."""
    with tempfile.TemporaryDirectory() as folder:
        project(Path(folder), PARAMETERS, versions)
        options = [word for item in sets for word in ("--set", item)]
        processes: list[subprocess.Popen[Any]] = [
            subprocess.Popen(
                [sys.executable, "-m", "fedtrain", "aggregator", "--json", *options],
                cwd=folder, stdout=subprocess.PIPE, text=True,
            ),
            *(
                subprocess.Popen([sys.executable, __file__, "site", folder, name, str(pace_s), *sets])
                for name, pace_s in paces_s.items()
            ),
        ]  # fmt: skip
        try:
            assert processes[0].stdout is not None
            events = [json.loads(line) for line in processes[0].stdout]
            assert [process.wait(60) for process in processes] == [0] * len(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    commits = [at for at, event in enumerate(events) if event["kind"] == "round_committed"]
    first, last = events[commits[0]], events[commits[-1]]
    received = [e for e in events[commits[0] : commits[-1]] if e["kind"] == "update_received"]
    return Found(
        BUFFER * (len(commits) - 1) / (last["time"] - first["time"]),
        [event.get("staleness", 0) for event in received],
        sum(event["site"] == SITES[-1] for event in received) / len(received),
    )


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of a fast site's training")
    parser.add_argument("--slow", type=float, default=10.0, help="times that at the slow site")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run, about")
    args = parser.parse_args()
    common.begin(args)
    paces_s = {name: args.pace * (args.slow if name == SITES[-1] else 1) for name in SITES}
    in_rounds, without = len(SITES) / max(paces_s.values()), sum(1 / pace for pace in paces_s.values())
    case, found = f"4-sites-one-{args.slow:g}x-slower", dict[str, Found]()
    for name, ideal, sets in (("rounds", in_rounds, ()), ("asynchronous", without, WITHOUT_ROUNDS)):
        one = measured(paces_s, 1 + max(3, round(ideal * args.seconds / BUFFER)), sets)
        common.emit("asynchronous", f"{case}-{name}", "updates_per_s", one.updates_per_s, "updates/s")
        common.emit("asynchronous", f"{case}-{name}", "share_of_ideal", one.updates_per_s / ideal, "")
        common.emit("asynchronous", f"{case}-{name}", "slow_site_share", one.slow_site_share, "")
        found[name] = one
    stale = found["asynchronous"].staleness
    gain = found["asynchronous"].updates_per_s / found["rounds"].updates_per_s
    common.emit("asynchronous", case, "gain", gain, "×")
    common.emit("asynchronous", case, "staleness_mean", sum(stale) / len(stale), "versions")
    common.emit("asynchronous", case, "staleness_worst", max(stale), "versions")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["site", folder, name, pace_s, *sets]:
            asyncio.run(paced_site(folder, name, float(pace_s), sets))
        case _:
            main()
