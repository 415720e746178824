"""One run of peers without a server, drawn from a seed: production gossip (peer, thread's work, courier,
membership, greetings, pledges, stores) over wires.py, with the same faults as in world.py, and what must be
true of it:

commits   no restart takes a round back
digest    peers that know of each other that they agreed have one model, to the last bit, after restarts too
mass      where a sum must stay: what all peers hold and what is on its way is, in all, as much as at first
privacy   no model leaves before the disk has a line for the noise in it
progress  when nothing goes wrong any more, all who have somebody to go on with end
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from fedtrain.config import Config
from fedtrain.errors import Damaged
from fedtrain.events import Emit, Event, PeersAgreed, RunStarted
from fedtrain.pki import Credentials
from fedtrain.pki.roster import own_curve
from fedtrain.pki.signing import Verifier
from fedtrain.runtime.peers import averaging, peer
from fedtrain.runtime.peers.enrolment import enter
from fedtrain.runtime.peers.pledges import Pledges
from fedtrain.store import RunStore
from fedtrain.transport import peer_thread
from fedtrain.transport import zmq as zmq_transport
from fedtrain.transport.admission import Curve
from fedtrain.transport.shares import Limits
from tests.vsim.chance import Change, curve_keypair, drawn, standing
from tests.vsim.claims import Onlooker, Values
from tests.vsim.clock import CURRENT
from tests.vsim.wires import SimLinks, SimThread, Wires, stop
from tests.vsim.world import SITES, Machine, Plan, StartTrainer, World, ground

ALGORITHMS = (
    "dpsgd complete", "dpsgd ring", "dpsgd base:1", "sgp complete", "sgp exponential", "sgp ring",
    "sgp one-peer-exponential", "gradient-tracking complete", "epidemic epidemic:1", "swift complete",
    "adpsgd complete", "periodic complete",
)  # fmt: skip


@dataclass
class VillagePlan(Plan):
    """What a seed says."""

    @property
    def ground(self) -> str:
        return "gossip"

    @property
    def roles(self) -> tuple[str, ...]:
        return self.sites

    @classmethod
    def of(cls, seed: int) -> Self:
        draw = random.Random(f"village {seed}")
        kind = draw.choice(["open", "open", "noise"])
        algorithm, topology = draw.choice(ALGORITHMS).split()
        sites = SITES[: draw.choice([2, 3, 3, 4])]
        table = {
            "run": {"name": "r", "task": "vsim_task:Numbers", "rounds": draw.choice([2, 3, 5]),
                    "seed": seed % 97},
            "strategy": {"min_sites": 2},
            "evaluate": {"every": 0 if kind == "noise" else draw.choice([0, 0, 1])},
            "network": {"heartbeat": 1, "idle": draw.choice([2.0, 10.0])},
            "privacy": {"noise_multiplier": 1.0} if kind == "noise" else {},
            "gossip": {"algorithm": algorithm, "topology": topology,
                       "round_deadline": draw.choice([5.0, 30.0])},
        }  # fmt: skip
        return cls(
            seed, kind, sites, table, inline=0, chunk=16 if draw.random() < 0.4 else 1 << 20,
            fsync_s=draw.choice([0, 0, 0.01, 0.5]), train_s=draw.choice([0.0, 0.2, 3.0]),
            dies=draw.choice([0, 0, 0.2]), faults_s=draw.choice([5.0, 20.0, 60.0]), faults=draw.randint(0, 5),
        )  # fmt: skip


@dataclass
class SlowPlan(VillagePlan):
    """The same with one peer that trains for about as long as the deadline, or longer."""

    def slow_s(self, site: str) -> float:
        draw = random.Random(f"slow {self.seed}")
        if site != draw.choice(self.sites):
            return 0.0
        return float(draw.choice([0.5, 0.99, 1.1, 1.5, 3.0]) * self.table["gossip"]["round_deadline"])


def address_of(name: str) -> str:
    return f"127.0.0.1:{7000 + SITES.index(name)}"


@cache
def entries(names: tuple[str, ...], real: bool) -> Path:
    """A roster with these peers, as each has entered itself. `real`: as in chance.drawn."""
    root = ground("gossip")
    folder = root / f"roster-{len(names)}-{real:d}"
    for name in names:
        own, draw = root / "certs" / "sites" / name, random.Random(f"entry {name}")
        config = Config.of({"network": {"listen": address_of(name)}, "gossip": {"roster": str(folder)}}, root)
        with drawn(draw, real):
            credentials = Credentials.load(own)
            curve = Curve(*own_curve(own, partial(curve_keypair, draw)))
            verifier = Verifier(credentials.root, credentials.identity.federation)
            enter(config, name, credentials, curve, verifier)
    return folder


class Village(World):
    """One seed, run once."""

    plans = VillagePlan

    @classmethod
    def grounds(cls) -> None:
        for sites in (2, 3, 4):
            for real in (False, True):
                entries(SITES[:sites], real)

    def _between(self, draw: random.Random) -> None:
        self.network = Wires(self.loop, draw)
        self.claims = PeerClaims(self)

    def _own(self, name: str, config: Config) -> Config:
        roster = self.folder / f"roster-{name}"  # no power cut takes it: it is another's to write, too
        shutil.copytree(entries(self.plan.sites, self.plan.real), roster)
        return replace(
            config,
            network=replace(config.network, listen=address_of(name)),
            gossip=replace(config.gossip, roster=str(roster)),
        )

    async def _run(self, name: str, config: Config, emit: Emit, start: StartTrainer) -> str:
        return (await peer.run(config, name, emit=emit, start_trainer=start)).reason

    async def _over(self, lives: list[asyncio.Future[None]]) -> None:
        """Until all have ended but those who are left alone: they wait for others by right."""
        while lives:
            alone = len(lives) < self.configs[self.plan.sites[0]].strategy.min_sites
            timeout_s = max(self.plan.faults_s - self.loop.now, 0.0) + 60.0 if alone else None
            over, _ = await asyncio.wait(lives, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not over:
                return
            for life in over:
                lives.remove(life)
                life.result()
        self.claims.all_ended = True

    def _replaced(self) -> list[Change]:
        limits = partial(Limits, chunk_bytes=self.plan.chunk)
        return [
            (peer_thread, "Links", partial(SimLinks, self.network)),
            (peer_thread, "threading", SimpleNamespace(Thread=SimThread)),
            (zmq_transport.ZmqNeighbors, "stop", stop), (zmq_transport, "keep_freed", lambda: None),
            (peer, "Limits", limits),
        ]  # fmt: skip


class SlowVillage(Village):
    """One seed with a slow peer, run once."""

    plans = SlowPlan


class PeerClaims(Onlooker):
    """Looks on while a village runs. An AssertionError is a fault that the seed has found."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.counts = dict.fromkeys(("commits", "restarts", "agreed", "released", "weighed"), 0)
        self.all_ended = False
        self._reached: dict[str, int] = {}  # the last round that a peer has committed for sure
        self._agreed: dict[str, tuple[str, set[str]]] = {}
        self._last: dict[str, str] = {}  # of each peer, the digest of what it found last
        self._kept: dict[str, str] = {}  # the same as it committed last: a killed one has no more
        self._left: dict[str, set[str]] = defaultdict(set)

    def trained(self, site: str, number: int, weights: str, digest: str, delta: Values) -> None:
        self._last[site] = digest

    def told(self, machine: Machine, event: Event) -> None:
        if isinstance(event, PeersAgreed):
            self.counts["agreed"] += 1
            before = self._agreed.get(machine.name, (event.digest, ()))[0]
            self.holds(before == event.digest, f"{machine.name} agreed twice, on two models")
            self._agreed[machine.name] = event.digest, {*event.peers}
        elif isinstance(event, RunStarted):
            self._last[machine.name] = self._kept.get(machine.name, "")

    @contextmanager
    def watching(self) -> Iterator[None]:
        begins = looked_before(averaging.Averaging._begin, self._leaves)
        commits = self._commits_by(RunStore.commit)
        with standing((averaging.Averaging, "_begin", begins), (RunStore, "commit", commits)):
            yield

    def _commits_by(self, commit: Any) -> Any:
        def committing(store: RunStore, checkpoint: Any, *rest: Any) -> None:
            process = CURRENT.get()
            assert process is not None
            name, number = process.name, checkpoint.round
            before = self._reached.get(name, 0)
            self.holds(number >= before, f"{name} commits round {number}, and had round {before}")
            commit(store, checkpoint, *rest)
            self.counts["commits"] += 1
            self._reached[name] = number
            self._kept[name] = self._last.get(name, "")

        return committing

    def _leaves(self, exchange: Any, own: Any, *_: Any) -> None:
        """A model is about to leave a peer."""
        name = own.name
        if self.world.plan.kind != "noise" or not self._last.get(name):
            return
        self._left[name].add(self._last[name])
        disk = self.world.machines[name].disk
        sure = disk.durable(disk.folder / f"@{name}" / "releases.jsonl").count(b"\n")
        self.counts["released"] += 1
        left = len(self._left[name])
        self.holds(sure >= left, f"{name} gives what has noise of {left} releases, and its ledger has {sure}")

    def at_the_end(self) -> None:
        for name, (digest, others) in self._agreed.items():
            both = [o for o in sorted(others & self._agreed.keys()) if name in self._agreed[o][1]]
            for other in both:  # one that was killed before it had committed the model is not among them
                self.holds(
                    self._agreed[other][0] == digest, f"{name} agreed with {other}, who has another model"
                )
        for name, reached in self._reached.items():
            checkpoint = self._checkpoint(name)
            kept = -1 if checkpoint is None else checkpoint.round
            if reached:  # round 0 is the untrained model: who trained no round forgets it, and begins anew
                self.holds(kept >= reached, f"{name} committed round {reached}, and its store has {kept}")
        if self.all_ended:
            self._weigh()
        super().at_the_end()

    def _checkpoint(self, name: str) -> Any:
        folder = self.world.configs[name].peer_dir(name)
        try:
            store = RunStore(folder, read_only=True)
        except Damaged:  # a peer that was not started again after a power cut, which makes it again
            store = RunStore(folder)
        try:
            found = store.latest()
            return None if found is None else replace(found, state=dict(found.state))
        finally:
            store.close()

    def _weigh(self) -> None:
        """Σ of all peers' mass, and of what was given and not counted: their number."""
        held, open_, counted = 0.0, list[tuple[str, str, int, float]](), {}
        for name in self.world.plan.sites:
            checkpoint = self._checkpoint(name)
            state = {key.removeprefix(f"{name}/"): value for key, value in checkpoint.state.items()}
            if "state/mass" not in state:
                return
            held += float(state["state/mass"])
            pledges = Pledges.__new__(Pledges)
            pledges._parcels = {}
            pledges.go_on(state)
            counted[name] = pledges.counted
            for (taker, number), weight in pledges._given.items():
                open_.append((name, taker, number, weight * pledges._parcels[number].fields["mass"]))
        for giver, taker, number, mass in open_:
            account = counted[taker].get(giver)
            if account is None or number not in account:
                held += mass
        self.counts["weighed"] += 1
        number = len(self.world.plan.sites)
        self.holds(abs(held - number) < 1e-9, f"the mass of {number} peers is {held}")


def looked_before(real: Any, before: Any) -> Any:
    """The method, before which `before(self, *arguments)` looks on."""

    def called(self: Any, *arguments: Any) -> Any:
        before(self, *arguments)
        return real(self, *arguments)

    return called
