"""A slow peer among seven others: what it costs them, and how often its model counts.

All peers are in this process, on a virtual clock (transport/memory.py): couriers, algorithms and the rule
for the next round are those of `fedtrain peer`, and a training is a pause. gossip.round_deadline is 10 s;
a peer trains 0.3 to 0.7 s, the slow one as many times the deadline as a row says. Of a row it prints

    edges     part of the models of neighbours that are not slow that a peer which is not slow has averaged
    round_s   mean time of a round of the peers that are not slow
    longest_s the longest of these rounds
    counted   part of the slow peer's trainings after which a neighbour averaged its model

    python benchmarks/gossip_slow.py [--json] [--algorithm dpsgd] [--topology ring] [--case 1.5]

`--case`: a multiple of the deadline; "three", of three slow peers, 1.1, 1.5 and 3 deadlines; "every-other", a
peer that is slow in every second training; "two-speeds", four peers that train 0.6 of the deadline.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedtrain import gossip
from fedtrain.arena import Arena
from fedtrain.compression.quantize import Quantize
from fedtrain.exchange import Neighborhood
from fedtrain.messages import Update
from fedtrain.runtime.peers.gossip import Peer
from fedtrain.runtime.peers.keeping_up import catch_up, meeting
from fedtrain.runtime.peers.parcels import share_of_model, trained_part
from fedtrain.runtime.peers.pledges import Pledges
from fedtrain.schema import Schema, TensorSpec
from fedtrain.topology import names, parse
from fedtrain.transport.memory import Faults, LocalNetwork

PEERS, DEADLINE_S, QUICK_S = 8, 10.0, (0.3, 0.7)
SCHEMA = Schema((TensorSpec("w", (4,), "float64", True),))
ROUNDS = 1_000_000
UNITS = {"edges": "", "round_s": "s", "longest_s": "s", "counted": "", "sum_error": ""}
TRAININGS, LEAST_S = 8, 200.0  # of the slow peer in a row; seconds of a row at least
CASES = ("0.5", "0.99", "1.1", "1.5", "3", "10", "three", "every-other", "two-speeds")
TOPOLOGIES = (
    "ring", "torus", "regular:4", "complete", "base:1", "exponential", "one-peer-exponential", "star",
    "erdos-renyi:0.5", "matching",
)  # fmt: skip
ALGORITHMS = {  # with the topologies that each takes
    "dpsgd": ("ring", "torus", "regular:4", "complete", "base:1", "star", "erdos-renyi:0.5", "matching"),
    "dpsgd overlap": ("ring", "torus", "base:1"),
    "sgp": ("ring", "complete", "base:1", "exponential", "one-peer-exponential"),
    "epidemic": ("exponential", "epidemic:2"),
    "gradient-tracking": ("ring", "torus", "complete", "base:1"),
    "choco": ("ring", "regular:4", "complete"),
    "periodic": ("ring", "base:1"),
    "diloco": ("ring", "complete", "base:1"),
    "noloco": ("matching", "base:1"),
    "streaming-diloco": ("ring", "complete"),
    "adpsgd": ("regular:4",),
    "swift": ("complete",),
}


@dataclass
class Row:
    """What one run came to."""

    heard: int = 0  # models of quick neighbours, averaged by quick peers
    due: int = 0
    rounds_s: list[float] = field(default_factory=list)
    trained: int = 0  # trainings of slow peers
    counted: set[tuple[str, int]] = field(default_factory=set)  # slow peer, training
    peers: dict[str, Peer] = field(default_factory=dict)
    failed: float = 0.0  # what of a sum that must stay is not there at the end

    def told(self) -> dict[str, float]:
        return {
            "edges": round(self.heard / max(1, self.due), 3),
            "round_s": round(sum(self.rounds_s) / len(self.rounds_s), 2),
            "longest_s": round(max(self.rounds_s), 1),
            "counted": round(len(self.counted) / max(1, self.trained), 2),
            "sum_error": self.failed,
        }


def pace_of(case: str) -> dict[str, Callable[[int], float]]:
    """Of each slow peer, the seconds of its n-th training."""
    if case == "three":
        return {"1": lambda n: 11.0, "4": lambda n: 15.0, "7": lambda n: 30.0}
    if case == "every-other":
        return {"3": lambda n: 1.5 * DEADLINE_S if n % 2 else 0.5}
    if case == "two-speeds":
        return {name: lambda n: 0.6 * DEADLINE_S for name in "0123"}
    return {"3": lambda n: float(case) * DEADLINE_S}


def algorithm_of(text: str) -> gossip.Algorithm:
    kind, *options = text.split()
    compressor = Quantize(8).contraction() if kind == "choco" else None
    return gossip.build(kind, dict.fromkeys(options, True), compressor)


def run(kind: str, topology: str, case: str, seed: int = 1, trainings: int = TRAININGS) -> Row:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_run(algorithm_of(kind), topology, case, seed, trainings, Path(folder)))


async def _run(
    algorithm: gossip.Algorithm, topology: str, case: str, seed: int, trainings: int, folder: Path
) -> Row:
    slow, row, members = pace_of(case), Row(), names(PEERS)
    ends_s = max(LEAST_S * trainings / TRAININGS, trainings * max(pace(1) for pace in slow.values()))
    network = LocalNetwork(members, faults=Faults(delay_s=0.02), seed=seed)

    def near_of(name: str, t: int) -> Neighborhood:
        return parse("complete" if algorithm.everyone(t) else topology).round(members, t, seed).graph[name]

    async def live(name: str) -> None:
        draw, number = random.Random(f"{seed} {name}"), 0
        async with network.join(name) as neighbors:

            async def train(round: int, weights: Arena, delta: Arena) -> Update:
                nonlocal number
                number += 1
                await neighbors.sleep(slow[name](number) if name in slow else draw.uniform(*QUICK_S))
                row.trained += name in slow
                finished[name] = number
                trained_part(delta).copy_((float(name) - trained_part(weights)) / 2)
                return Update(delta=delta, num_examples=1.0, metrics={})

            pledges = None
            if algorithm.conserved():
                (folder / name).mkdir()
                pledges = Pledges(folder / name, algorithm)
            model = Arena.zeros(SCHEMA)
            peer = row.peers[name] = Peer(name, algorithm, model, train, neighbors, pledges=pledges)

            async def keep_up() -> None:
                if algorithm.waits:
                    await catch_up(peer, neighbors, lambda event: None, ROUNDS)
                    near = lambda t: near_of(name, t)
                    peer.round = meeting(peer.round, near, neighbors.progress(), ROUNDS)

            async def go_on() -> Neighborhood | None:
                before = peer.round
                await keep_up()
                if peer.round == before:
                    return None
                near = near_of(name, peer.round)
                return near if pledges is None else pledges.begin(peer.round, near, members)

            while network.now < ends_s:
                began = network.now
                await keep_up()
                near = near_of(name, peer.round)
                if pledges is not None:
                    near = pledges.begin(peer.round, near, members)
                told = await peer.step(near, DEADLINE_S, go_on if algorithm.waits else None)
                peer.tell_account()
                neighbors.publish(peer.round, share_of_model(peer.model))
                if name not in slow and network.now < ends_s:  # else others may have ended
                    near = near_of(name, peer.round - 1)
                    quick = near.incoming.keys() - slow.keys()
                    row.due, row.heard = row.due + len(quick), row.heard + len(quick & {*told.heard})
                    row.rounds_s.append(network.now - began)
                row.counted |= {
                    (other, finished[other]) for other in told.heard if other in finished and other in slow
                }
            done.add(name)
            while len(done) < PEERS or network.now < ends_s + 5 * DEADLINE_S:
                neighbors.announce(peer.round)
                await neighbors.sleep(1.0)
            if pledges is not None:
                _, peer.state, _ = pledges.settle(
                    neighbors.accounts(), trained_part(peer.model), peer.state, peer._gauge
                )

    done, finished = set[str](), dict[str, int]()
    await asyncio.gather(*map(live, members))
    row.failed = _sum_error(row.peers)
    return row


def _sum_error(peers: Mapping[str, Peer]) -> float:
    """How far a sum that must stay is from what it was: Σ mass from the number of peers, Σ y from Σ d."""
    states = [peer.state for peer in peers.values()]
    if "mass" in states[0]:
        return abs(float(sum(state["mass"] for state in states)) - len(states))
    if "y" in states[0]:
        return float(sum((state["y"] - state["d"]).sum() for state in states))
    return 0.0


def main() -> None:
    import common

    parser = common.arguments(__doc__ or "")
    parser.add_argument("--algorithm", action="append")
    parser.add_argument("--topology", action="append")
    parser.add_argument("--case", action="append")
    common.begin(given := parser.parse_args())
    for kind in given.algorithm or ALGORITHMS:
        for topology in given.topology or ALGORITHMS[kind]:
            for case in given.case or CASES:
                for metric, value in run(kind, topology, case).told().items():
                    common.emit("gossip_slow", f"{kind}/{topology}/{case}", metric, value, UNITS[metric])


if __name__ == "__main__":
    main()
