"""`fedtrain peer NAME`: one site that trains and averages with its neighbours, over ZeroMQ.

This process holds the keys, the connections and the mixing; the task's code and the data are in a trainer
process, as at a site of a federation. Which peers there are is the roster's, who of them is there SWIM's,
whom this one hears in a round the topology's, and what it does with it `gossip.Peer`'s: this file puts them
together, keeps each round on disk, and takes the state of others when this peer is far behind.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path

import zmq

from ... import __version__
from ...arena import Arena, ArenaFile
from ...config import Config
from ...errors import CertificateError, ConfigError, TaskError
from ...events import Emit, Notice, SiteState, UpdateRefused, noticed
from ...exchange import Neighborhood, PeerId
from ...messages import Update, averages
from ...pki import renewal
from ...pki.identity import Current
from ...pki.invitation import Invitation
from ...pki.roster import Roster, own_curve
from ...pki.signing import Signer
from ...secagg.keys import KeyPair
from ...secagg.peer_sums import PeerSums
from ...store import AGREED, RunStore
from ...store.disk import private, private_folder
from ...topology import Topology
from ...transport.admission import Curve
from ...transport.link import LinkSettings
from ...transport.shares import Limits
from ...transport.zmq import ZmqNeighbors
from ...wire.gossip import Greeting, Stamp
from ..auditing import audited
from ..journal import Journal, Lap, Result, plain
from ..sites.approval import Approval, Approvals, policy_of
from ..sites.pins import pins_of
from ..sites.records import records_of
from ..sites.spent import Spent
from ..star.agreement import agree_as_peers
from ..threads import all_cores, while_torch_loads
from ..trainers.supervised import Supervised
from ..trainers.trainer import TRIES, Trainer, Trains
from .enrolment import accept, enrolled, watch, while_entered
from .gossip import GoOn, Peer, RoundReport
from .gossip_setup import agreed as agreed_of_peers
from .gossip_setup import (
    algorithm_beside_key,
    as_begun,
    begun_with,
    check_graph,
    check_policy,
    compared,
    of_a_peer,
)  # fmt: skip
from .keeping_up import agree, checkpoint_of, gather, keep_up, peers_of, see_off, why_end
from .parcels import share_of_model
from .pledges import Pledges
from .shape import Shape
from .telling import Stall, in_words, tell_apart, worded

STATE_S = 1.0  # between heads of this peer's audit log that its neighbours are told
AHEAD = 2  # rounds whose neighbours are connected with before they begin


async def run(
    config: Config,
    name: PeerId,
    *,
    data_dir: Path | None = None,
    emit: Emit,
    invitation: Invitation | None = None,
    start_trainer: Callable[[Path], Awaitable[Trains]] | None = None,
) -> Result:
    """Take part until the run's rounds are done; goes on from the last round that is on this peer's disk.

    With an `invitation` the roster may be empty: it is fetched from the peer that made it, unless that peer
    is on it already.
    """
    folder = config.root / config.network.certs / "sites" / name
    algorithm, graph = algorithm_beside_key(config, folder)
    if config.evaluate.patience and not algorithm.waits:
        raise ConfigError(
            f"evaluate.patience: peers that never wait, as with {config.gossip.algorithm}, have no round in "
            f"which all could end. Leave it out, or use another gossip.algorithm."
        )
    credentials = (current := Current(folder))()
    if credentials.identity.name != name:
        raise CertificateError(f"the certificate in {folder} is {credentials.identity.name}'s, not {name}'s")
    policy, approvals = policy_of(folder, credentials), Approvals(folder)
    check_policy(config, policy)
    check_graph(algorithm, graph, config.run.seed, config.gossip.masks)

    approved: list[Approval] = []  # of each trainer that was started

    async def start(scratch: Path) -> Trains:
        approved.append(approvals.check(config))  # before a line of the task runs
        if start_trainer is not None:
            return await start_trainer(scratch)
        own, files, how = of_a_peer(config), approved[-1].files, policy.confine
        return await Trainer.start(own, data_dir=data_dir, scratch=scratch, confine=how, approved=files)

    async with AsyncExitStack() as stack:
        audit = stack.enter_context(closing(audited(config, name, emit, current)))
        emit = audit.emit
        store = stack.enter_context(closing(RunStore(config.peer_dir(name), warn=noticed(emit), copies=True)))
        journal = Journal(config, store, emit)
        files = store.folder / "train"
        private_folder(files)
        trainer = await while_torch_loads(Supervised.begin(lambda: start(files)))
        emit(approved[-1].event)
        stack.push_async_callback(trainer.close)
        if trainer.description.confined:
            emit(Notice(text=trainer.description.confined))
        store.forget_if_unused()
        schema = trainer.description.schema
        algorithm = await asyncio.to_thread(as_begun, config, algorithm, graph, schema.numel, store.meta())
        agreed = await _begin(config, store, trainer, graph, begun_with(algorithm))
        sums = None
        if config.gossip.masks:
            sums = PeerSums(name, config.run.name, config.run.seed, KeyPair(os.urandom(32)), all_cores())
        greeting = Greeting(
            version=__version__, task_digest=trainer.description.task_digest, schema_digest=schema.digest,
            agreed=agreed, frozen_digest=store.frozen.digest, run=config.run.name,
            mask_key=sums.public if sums else b"", mask_number=time.time_ns(),
        )  # fmt: skip
        curve = Curve(*own_curve(folder, zmq.curve_keypair))
        pins = pins_of(folder, policy, credentials, emit)
        roster = enrolled(config, name, credentials, curve, emit, sums, greeting.mask_number, pins)
        if invitation is not None and roster.contact(invitation.host) is None:
            stamp = Stamp.of(config.run.name, schema.digest, name)
            await accept(invitation, roster, name, stamp)
            emit(Notice(text=f"joined by {invitation.host}: {len(roster.peers())} peers on the roster"))
        neighbors = ZmqNeighbors(
            me=name, curve=curve, sign=Signer.of(credentials).sign, roster=roster, run=config.run.name,
            greeting=greeting,
            welcome=lambda peer, theirs: agree_as_peers(name, greeting, peer, theirs, sums),
            listen=config.network.listen or None,
            settings=LinkSettings(
                config.network.heartbeat, config.network.idle,
                limits=Limits(payload_bytes=8 * schema.nbytes + (1 << 20)),
            ),
            emit=worded(emit, config.run.rounds),
            witness=audit.overheard,
        )  # fmt: skip
        model = (await trainer.initial(files / "initial")).load()
        records = records_of(folder, store.folder, policy, emit)
        spent = Spent.of_site(config, store.folder, journal.emit, policy, records)
        train = _training(trainer, name, files, spent, emit, policy.min_examples)
        pledges = Pledges(store.folder, algorithm) if algorithm.conserved() else None
        peer = Peer(name, algorithm, model, train, neighbors, sums, config.gossip.clip, pledges)
        neighbors.start()  # ready: others count on this peer from here on
        stack.push_async_callback(neighbors.stop)
        audit.state_after_rounds(neighbors.state_head, STATE_S)
        stack.push_async_callback(audit.stated)
        certs = config.root / config.network.certs
        stack.callback(asyncio.create_task(renewal.watch(certs, folder, current, emit)).cancel)
        rounds = _rounds(journal, graph, peer, neighbors, roster, trainer, model)
        return await while_entered(rounds, watch(config, name, current, curve, roster, neighbors))


async def _begin(
    config: Config, store: RunStore, trainer: Trains, graph: Topology, found: Mapping[str, float]
) -> dict[str, str]:
    """The settings that all peers share; the run is begun in the store, and its frozen parameters are at the
    trainer."""
    about, agreed = trainer.description, agreed_of_peers(config)
    store.begin(
        about.schema, agreed, frozen=about.frozen.schema, run=config.run.name,
        task_digest=about.task_digest, **found,
    )  # fmt: skip
    if not store.has_frozen(about.frozen.schema):
        store.keep_frozen(await trainer.frozen(store.folder / "train"))
    if (frozen := store.frozen_file()) is not None:
        await trainer.freeze(frozen)
    # only the name of a graph in a file stands in the settings
    agreed |= compared(config) | ({"gossip.graph": graph.fingerprint} if graph.kind == "file" else {})
    return agreed | {f"gossip.{key}": repr(value) for key, value in found.items()}


async def _rounds(
    journal: Journal, graph: Topology, peer: Peer, neighbors: ZmqNeighbors, roster: Roster, trainer: Trains,
    initial: Arena,
) -> Result:  # fmt: skip
    config, checkpoint = journal.config, journal.store.latest()
    journal.traffic = neighbors
    journal.start("peer", len(roster.peers()), checkpoint.round if checkpoint else 0)
    if checkpoint is not None:
        peer.go_on(checkpoint)
        peer.tell_account()
    if peer.sums is None:  # else the model of a round without a sum is this peer's alone, and its secret
        neighbors.publish(peer.round, share_of_model(peer.model))
    shape = Shape(graph, config.run.seed, journal.emit)

    def near_at(round: int) -> Neighborhood:
        graph = Topology("complete") if peer.algorithm.everyone(round) else None
        return shape.round(*alive(neighbors, roster), round, graph)[peer.name]

    to_agree = config.gossip.agree and (checkpoint is None or AGREED not in checkpoint.state)
    over = checkpoint if config.gossip.agree and not to_agree else None
    if journal.reason_to_stop(peer.round, over) is None:
        await gather(journal, peer, neighbors, roster)
        shape.check(peer.algorithm, roster.peers(), config.gossip.masks)
        await keep_up(journal, peer, neighbors, near_at)
    if peer.pairs is not None:
        peer.pairs.nearby = lambda: shape.round(*alive(neighbors, roster), peer.round, None)[peer.name]
    stall = Stall(journal.emit, config.gossip.masks)
    apart, now = "", set[PeerId]()

    async def go_on() -> Neighborhood | None:
        before = peer.round
        await keep_up(journal, peer, neighbors, near_at)
        peer.round = min(peer.round, config.run.rounds - 1)  # it ends with that, where the others have ended
        if peer.round == before:
            return None
        stall.slow(before, peer.round)
        near = near_at(peer.round)
        return near if peer.pledges is None else peer.pledges.begin(peer.round, near, roster.peers())

    while True:
        if peer.algorithm.waits and over is None:  # else the fast are ahead of the slow, and nobody minds
            await keep_up(journal, peer, neighbors, near_at)
        if journal.evaluation_is_due(peer.round) and not (to_agree and peer.round >= config.run.rounds):
            await _evaluate(journal, peer.name, peer.round, peer.model, trainer)
        reason = journal.reason_to_stop(peer.round, over)
        reason = why_end(peer, neighbors, roster, config.run.rounds, reason, to_agree)
        if reason is not None:
            break
        lap, view = Lap(), neighbors.view()
        apart = tell_apart(journal.emit, view, roster, apart)
        (members, epoch), near = alive(neighbors, roster), near_at(peer.round)
        if peer.pledges is not None:
            near = peer.pledges.begin(peer.round, near, roster.peers())
        soon = [shape.round(members, epoch, peer.round + k, None)[peer.name] for k in range(1, AHEAD + 1)]
        now, before = peers_of(near), now
        pledged = peer.pledges.takers() if peer.pledges is not None else set[PeerId]()
        neighbors.keep(now.union(before, pledged, *map(peers_of, soon)))
        journal.round_started(peer.round, list(members), neighbors=list(near.incoming))
        told = await _round(journal, peer, neighbors, near, lap, go_on if peer.algorithm.waits else None)
        if peer.algorithm.waits:
            stall.note(near, told, neighbors.differing(), roster.struck)
        to_agree, over = config.gossip.agree, None
    if peer.pairs is not None:
        await peer.pairs.end(config.gossip.round_deadline)
    reached, others = await agree(journal, peer, neighbors, roster, initial, to_agree)
    again = to_agree and journal.store.evaluation(peer.round) is not None  # it was of this peer's own model
    if again or journal.evaluation_is_due(peer.round):
        model = last.weights.load() if (last := journal.store.latest()) is not None else peer.model
        await _evaluate(journal, peer.name, peer.round, model, trainer)
    await see_off(config, neighbors, reached, others)
    last = journal.store.latest()
    own_model = to_agree and last is not None and AGREED not in last.state
    result = replace(journal.result(peer.round, reason), own_model=own_model)
    journal.finish(result)
    return result


def alive(neighbors: ZmqNeighbors, roster: Roster) -> tuple[Sequence[PeerId], int]:
    """Who is there, and the epoch of the graph over them: with all there, the graph that a simulation has."""
    view = neighbors.view()
    return view.alive, 0 if list(view.alive) == roster.peers() else view.epoch


async def _round(
    journal: Journal, peer: Peer, neighbors: ZmqNeighbors, near: Neighborhood, lap: Lap, go_on: GoOn | None
) -> RoundReport:
    """Train, average with those who are near, commit; and offer the model to late joiners."""
    emit, store = journal.emit, journal.store
    emit(SiteState(site=peer.name, round=peer.round + 1, state="training"))
    told = await peer.step(near, journal.config.gossip.round_deadline, go_on)
    whys = {other: in_words(why, journal.config.run.rounds) for other, why in told.missing.items()}
    told = replace(told, missing=whys)
    for other in sorted({peer.name, *near.incoming} - told.missing.keys()):
        emit(SiteState(site=other, round=peer.round, state="done"))
    for other, why in told.missing.items() if peer.algorithm.waits or peer.pairs is not None else ():
        if not why.startswith("refused: "):  # that was told as it came
            emit(UpdateRefused(site=other, round=peer.round, reason=why))
    alone = len(neighbors.view().alive) == 1 or (near.incoming and not told.heard and peer.pairs is None)
    estimates = {} if alone else told.estimates  # of one peer they say nothing
    metrics = averages({peer.name: told.metrics}) | estimates
    record = lap.record(metrics, 1 + len(told.heard))
    record["doubted"] = told.doubted
    after = checkpoint_of(peer)
    journal.commit(after, record, await asyncio.to_thread(store.prepare, after))
    peer.tell_account()
    if peer.sums is None or not told.missing:
        neighbors.publish(peer.round, share_of_model(peer.model))
    return told


async def _evaluate(journal: Journal, name: PeerId, round: int, model: Arena, trainer: Trains) -> None:
    weights = written(model, journal.store.folder / "weights")
    found = (await trainer.evaluate(name, round, weights)).metrics
    metrics, _ = await (trainer.shown if trainer.description.derives else plain)(found, {})
    journal.keep_evaluation(round, metrics, {name: metrics})


def _training(
    trainer: Trains, name: PeerId, folder: Path, spent: Spent, emit: Emit, least: int
) -> Callable[[int, Arena, Arena], Awaitable[Update]]:
    """Weights and delta go to the trainer process and back as files. `least`: policy.min_examples."""

    async def train(round: int, weights: Arena, delta: Arena) -> Update:
        given = written(weights, folder.parent / "weights")
        for left in reversed(range(TRIES)):  # a failure may be over the next time
            try:
                update = await trainer.train(name, round, given, folder / "delta")
                break
            except TaskError as e:
                if not left:
                    raise
                emit(Notice(text=f"round {round + 1}: training failed and is tried again: {e}"))
        if update.num_examples < least:
            raise ConfigError("policy.min_examples: this peer has fewer examples, so its model stays here.")
        await asyncio.to_thread(spent.trained, name, round, update.num_examples)
        delta.copy_(update.delta.load())
        return update

    return train


def written(arena: Arena, path: Path) -> ArenaFile:
    """The arena as a file that the trainer reads."""
    with open(path, "wb", opener=private) as file:
        file.write(arena.payload)
    return ArenaFile(arena.schema, path)
