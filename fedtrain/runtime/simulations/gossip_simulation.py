"""`fedtrain simulate --mode gossip`: every site as a peer in this process, over the seam in memory."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...aggregation import WeightedMean
from ...arena import Arena
from ...config import Config
from ...errors import ConfigError, nearest
from ...events import Emit, Notice, UpdateRefused, noticed
from ...exchange import Neighborhood, PeerId
from ...gossip import Algorithm, Ruled, rules
from ...messages import Update, averages, summed
from ...modes import check_dealt
from ...secagg.keys import KeyPair
from ...secagg.peer_sums import PeerSums
from ...store import AGREED, Checkpoint, RunStore
from ...store.memory import DataNotes
from ...store.rounds import MadeOf
from ...topology import Topology
from ...training.task import Task
from ...transport.memory import LocalNetwork
from ..journal import Journal, Lap, Result
from ..peers.consensus import Consensus
from ..peers.gossip import Peer, RoundReport, Train
from ..peers.gossip_setup import agreed as agreed_of_peers
from ..peers.gossip_setup import algorithm_of, as_begun, begun_with, check_hearing, fewest, of_a_peer
from ..peers.parcels import trained_part
from ..peers.votes import Voters
from ..peers.whole_models import of_all
from ..sites.spent import Spent
from ..trainers.workbench import Workbench
from .simulation import agreed as agreed_simulation
from .simulation import forget, names_without_certificate
from .site_models import slowness

UNEVEN = ("dirichlet", "shards")  # partitions that give sites other kinds of examples


async def simulate(
    config: Config, *, emit: Emit, fresh: bool = False, data_dir: Path | None = None, task: Task | None = None
) -> Result:
    """Every site of the simulation as a peer, from the last committed round on, or from the first when
    `fresh`. What is committed is every peer's model; the run's model is their mean."""
    algorithm, graph = algorithm_of(config)
    if fresh:
        forget(config.gossip_dir)
    bench = Workbench(of_a_peer(config), data_dir, simulated=True, task=task)
    about = bench.description
    check_dealt(config, natural=not about.pooled)
    if strangers := graph.strangers(about.sites):
        raise ConfigError(
            f"gossip.topology: {graph} names {strangers[0]}.{nearest(strangers[0], about.sites)}"
        )
    graph.check(about.sites, config.run.seed)
    check_hearing(algorithm, graph, about.sites, config.run.seed, config.gossip.masks)
    async with AsyncExitStack() as stack:
        store = stack.enter_context(
            closing(RunStore(config.gossip_dir, durable=False, warn=noticed(emit), copies=True))
        )
        bench.notes = DataNotes(store.folder)
        journal = Journal(config, store, DataNotes(store.folder).telling(emit))
        agreed = agreed_of_peers(config) | agreed_simulation(config)
        store.forget_if_unused()
        algorithm = as_begun(config, algorithm, graph, about.schema.numel, store.meta())
        store.begin(
            about.schema, agreed, frozen=about.frozen.schema, run=config.run.name,
            task_digest=about.task_digest, **begun_with(algorithm),
        )  # fmt: skip
        if not store.has_frozen(about.frozen.schema):
            store.keep_frozen(bench.initial(frozen=True))
        if (frozen := store.frozen_file()) is not None:
            bench.freeze(frozen)
        if why := cost_of_rule(config, algorithm):
            emit(Notice(text=why))
        spent = Spent(config, store.folder, journal.emit)
        pace = {
            name: 1.0 if algorithm.waits else slowness(config, name, last=name == about.sites[-1])
            for name in about.sites
        }
        priced = config.privacy.noise_multiplier and config.privacy.unit == "example"  # by how many there are
        fastest = min(about.sites, key=lambda name: (pace[name], (priced and bench.examples(name)) or 0))
        network = LocalNetwork(about.sites)
        sums = _peer_sums(config, about.sites)
        initial = bench.initial()
        by_loop = config.simulate.engine in ("auto", "loop") or not algorithm.waits
        at_once = None if by_loop else _AtOnce(bench)
        peers = {
            name: Peer(
                name, algorithm, initial.load(),
                _trainer(bench, name, at_once, spent if name == fastest else None),
                await stack.enter_async_context(network.join(name)), sums.get(name),
                config.gossip.clip,
            )
            for name in about.sites
        }  # fmt: skip
        result = await _rounds(journal, graph, peers, pace, bench, initial.load())
        journal.finish(result)
        return result


@dataclass(frozen=True)
class _BetweenPeers:
    """What all peers move: each byte goes out at one and comes in at another."""

    peers: Collection[Peer]

    @property
    def bytes_out(self) -> int:
        return sum(peer.bytes_out for peer in self.peers)

    bytes_in = bytes_out


async def _rounds(
    journal: Journal,
    graph: Topology,
    peers: Mapping[PeerId, Peer],
    pace: Mapping[PeerId, float],
    bench: Workbench,
    initial: Arena,
) -> Result:
    config, store = journal.config, journal.store
    journal.traffic = _BetweenPeers(peers.values())
    checkpoint = store.latest()
    number = 0 if checkpoint is None else checkpoint.round
    journal.start("gossip", len(peers), number)
    if number < config.run.rounds:
        for note in filter(None, (names_without_certificate(bench.description), bench.partition_note())):
            journal.emit(Notice(text=note))
    if checkpoint is None:
        checkpoint = _checkpoint(0, peers)
        store.commit(checkpoint, {})
    else:
        for peer in peers.values():
            peer.go_on(checkpoint)
    for name, peer in peers.items():
        peer.round = number if peer.algorithm.waits else turns(number, pace[name])
    while True:
        to_agree = config.gossip.agree and AGREED not in checkpoint.state
        if to_agree and number >= config.run.rounds:
            checkpoint, to_agree = await _agreed(journal, peers, checkpoint, initial), False
        if journal.evaluation_is_due(number):
            _evaluate(journal, bench, checkpoint)
        if reason := journal.reason_to_stop(number, checkpoint if AGREED in checkpoint.state else None):
            if to_agree:
                before, checkpoint = checkpoint, await _agreed(journal, peers, checkpoint, initial)
                if checkpoint.weights.digest != before.weights.digest:
                    _evaluate(journal, bench, checkpoint)
            return journal.result(number, reason)
        lap = Lap()
        journal.round_started(number, list(peers))
        steps = await _steps(config, graph, peers, pace, number)
        number += 1
        checkpoint = _checkpoint(number, peers)
        for name, told in steps:
            for other, why in told.missing.items() if peers[name].algorithm.waits else ():
                journal.emit(UpdateRefused(site=other, round=number, reason=f"at {name}: {why}"))
        metrics = averages({f"{i:09}": told.metrics for i, (_, told) in enumerate(steps)})
        if clipped := float(sum(told.clipped for _, told in steps)):
            metrics["clipped"] = clipped
        metrics["disagreement"] = disagreement(peers, checkpoint)
        metrics["moved"] = math.sqrt(sum(float(peer._now[1]) for peer in peers.values()) / len(peers))
        record = lap.record(metrics, len({name for name, _ in steps}))
        record["doubted"] = doubted([told for _, told in steps])
        journal.commit(checkpoint, record)


async def _agreed(
    journal: Journal, peers: Mapping[PeerId, Peer], last: Checkpoint, initial: Arena
) -> Checkpoint:
    """The last round with the one model that all peers make of theirs: see peers/consensus.py."""
    config, names = journal.config, sorted(peers)
    one, lap = peers[names[0]], Lap()
    if one.sums is None:
        model = of_all(peers, config.run.rounds, initial)
    else:
        ends = [
            Consensus(
                peer, config.run.rounds, initial, lambda: names, config.gossip.round_deadline, Voters(names)
            )
            for peer in peers.values()
        ]
        all_ = await asyncio.gather(*(end.run(fewest(one.algorithm, True)) for end in ends))
        model = None if all_[0] is None else all_[0].model
    if model is None:
        journal.emit(Notice(text=f"no model of all: {len(names)} peers are too few for gossip.rule or masks"))
        return last
    return journal.agreed(last, model, names, MadeOf(len(names), names), lap)


def _evaluate(journal: Journal, bench: Workbench, checkpoint: Checkpoint) -> None:
    weights, number = checkpoint.weights.load(), checkpoint.round
    each = {site: bench.evaluate(site, number, weights).metrics for site in bench.description.evaluators}
    journal.keep_evaluation(number, *bench.shown(summed(each), each))


async def _steps(
    config: Config, graph: Topology, peers: Mapping[PeerId, Peer], pace: Mapping[PeerId, float], number: int
) -> list[tuple[PeerId, RoundReport]]:
    """Round `number` of every peer, and how each went.

    Where peers never wait, each does as many rounds of its own as simulate.speeds gives it the time for, in
    the order in which they end; of those at one moment the first by name is first.
    """
    members = list(peers)

    @cache
    def parts(t: int, everyone: bool) -> Mapping[PeerId, Neighborhood]:
        return (Topology("complete") if everyone else graph).round(members, t, config.run.seed).graph

    def near(name: PeerId) -> Neighborhood:
        t = peers[name].round
        return parts(t, peers[name].algorithm.everyone(t))[name]

    async def step(name: PeerId) -> RoundReport:
        peer = peers[name]
        told = await peer.step(near(name), config.gossip.round_deadline)
        if peer.pairs is not None:
            peer.pairs.began = trained_part(peer.model)
        return told

    for name, peer in peers.items():
        if peer.pairs is not None:  # it answers in its first round, too
            peer.pairs.near = near(name)
            peer.pairs.began = trained_part(peer.model) if peer.pairs.began is None else peer.pairs.began

    if all(peer.algorithm.waits for peer in peers.values()):
        return list(zip(peers, await asyncio.gather(*map(step, peers)), strict=True))
    ends = sorted(
        (turn * pace[name], name)
        for name in peers
        for turn in range(turns(number, pace[name]) + 1, turns(number + 1, pace[name]) + 1)
    )
    return [(name, await step(name)) for _, name in ends]


def turns(time: float, pace: float) -> int:
    """How many rounds a peer has done by then, each of which takes it `pace`."""
    return math.floor(time / pace + 1e-9)


def _peer_sums(config: Config, names: Sequence[PeerId]) -> dict[PeerId, PeerSums]:
    """Each peer's; with masks only where simulate.masks asks for the work as it is done for real."""
    if not config.gossip.masks:
        return {}
    pairs = {name: KeyPair(os.urandom(32)) if config.simulate.masks else None for name in names}
    found = {name: PeerSums(name, config.run.name, config.run.seed, pair) for name, pair in pairs.items()}
    for one in found.values():
        for name, other in found.items():
            if name != one.me:
                one.meet(name, other.public)
    return found


def cost_of_rule(config: Config, algorithm: Algorithm) -> str:
    """A line for who sets a robust rule on uneven data; "" for others."""
    ruled = isinstance(algorithm, Ruled) and not isinstance(algorithm.rule, rules.GraphMean)
    if not ruled or config.simulate.partition.partition(":")[0] not in UNEVEN:
        return ""
    return (
        f"gossip.rule: {config.gossip.rule} on uneven data ({config.simulate.partition}) leaves out what "
        f'honest peers have learned too: docs/gossip.md has what rules cost. "self_clip" costs least, "mean" '
        f"nothing."
    )


def doubted(told: Sequence[RoundReport]) -> dict[PeerId, float]:
    """Peers whose models did not count whole everywhere: the mean share over all that judged them."""
    shares: dict[PeerId, list[float]] = {}
    for of_one in told:
        for peer, share in of_one.judged.items():
            shares.setdefault(peer, []).append(share)
    means = {peer: math.fsum(each) / len(each) for peer, each in sorted(shares.items())}
    return {peer: mean for peer, mean in means.items() if mean < 1}


def disagreement(peers: Mapping[PeerId, Peer], checkpoint: Checkpoint) -> float:
    """The root mean square distance of the peers' models from their mean, relative to it."""
    mean = trained_part(checkpoint.weights.load())
    square = sum(float((trained_part(p.model) - mean).double().square().sum()) for p in peers.values())
    return math.sqrt(square / len(peers)) / max(float(mean.double().norm()), 1e-30)


class _AtOnce:
    """Trains together all peers that ask in one turn of the loop, by the engine of simulate.engine."""

    def __init__(self, bench: Workbench) -> None:
        self._bench, self._asked = bench, list[tuple[PeerId, Arena, Arena, asyncio.Future[Update]]]()

    async def train(self, name: PeerId, round: int, weights: Arena, delta: Arena) -> Update:
        answer: asyncio.Future[Update] = asyncio.get_running_loop().create_future()
        self._asked.append((name, weights, delta, answer))
        if len(self._asked) == 1:
            await asyncio.sleep(0)  # the steps of the other peers are due already
            asked, self._asked = self._asked, []
            updates = self._bench.train_peers(round, [(name, start) for name, start, *_ in asked])
            for (*_, out, done), update in zip(asked, updates, strict=True):
                out.copy_(update.delta.load())
                done.set_result(update)
        return await answer


def _trainer(bench: Workbench, name: PeerId, at_once: _AtOnce | None, spent: Spent | None) -> Train:
    async def train(round: int, weights: Arena, delta: Arena) -> Update:
        what = name, round, weights, delta
        update = bench.train(*what) if at_once is None else await at_once.train(*what)
        if spent is not None:
            spent.trained(name, round, update.num_examples)
        return update

    return train


def _checkpoint(number: int, peers: Mapping[PeerId, Peer]) -> Checkpoint:
    """The mean model, and all that every peer keeps."""
    first = next(iter(peers.values())).model
    mean = WeightedMean(first.schema)
    for name in sorted(peers):
        mean.add(Update(delta=peers[name].model, num_examples=1.0))
    weights = mean.result()
    for section in first.schema.sections:
        if not section.moves:
            weights.flat(section).copy_(first.flat(section))
    state = {f"{name}/{key}": value for name, peer in peers.items() for key, value in peer.kept().items()}
    return Checkpoint(number, weights, state)
