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
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median_high, median_low

import zmq

from .. import __version__, events
from ..arena import Arena, ArenaFile
from ..config import Config
from ..digest import digest_of
from ..errors import BadUpdate, CertificateError, ConfigError, JoinRefused, SecAggError, TaskError
from ..events import Emit, Record, noticed
from ..exchange import Contact, Neighborhood, PeerId, ReceivedShare, Share
from ..gossip import Algorithm
from ..messages import Update, averages
from ..pki import Credentials, Revoked
from ..pki.invitation import Guestbook, Invitation
from ..pki.mask_keys import MaskKey, MaskKeys, state
from ..pki.revocation import LIST
from ..pki.roster import Claim, Roster, check, enrol, is_address, own_curve, save
from ..pki.signing import Signer, Verifier
from ..schema import Schema
from ..secagg.circle import Circles
from ..secagg.keys import KeyPair
from ..store import Checkpoint, RunStore
from ..topology import Topology
from ..transport.admission import FAST, Curve, curve_speed, join
from ..transport.links import Settings
from ..transport.shares import Limits
from ..transport.zmq import ZmqNeighbors
from ..wire.gossip import Greeting, Stamp
from .checks import flaw
from .gossip import Peer, algorithm_of, check_hearing, fewest, of_a_peer
from .gossip import agreed as agreed_of_peers
from .parcels import trained_part
from .privacy import Spent
from .progress import Result, evaluation_is_due, finish, keep_evaluation, plain, reason_to_stop
from .supervised import Supervised, Trains
from .threads import all_cores, while_torch_loads
from .trainer import TRIES, Trainer

RELOAD_S = 2.0  # between looks at the roster's folder
ANSWERS = 4  # heartbeats within which whoever is called has answered, or shown that it is no peer
NAMED = 3  # of those who are not here
POLL_S = 0.1  # between looks at who is there
PULL_S = 60.0  # for a state to come
JOIN_S = 60.0  # for the peer that has invited us to answer
EVERYWHERE = ("0.0.0.0", "[::]", "*")  # noqa: S104 - refused as addresses
BEHIND = 2  # rounds that others are ahead, from which on a peer takes their state


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
    algorithm, graph = algorithm_of(config)
    if algorithm.static:
        raise ConfigError(
            f"gossip.algorithm: {config.gossip.algorithm} needs equal copies at both ends of an edge, which "
            f"do not survive a peer that is lost or started again. Use another one between machines."
        )
    folder = config.root / config.network.certs / "sites" / name
    credentials = Credentials.load(folder)
    if credentials.identity.name != name:
        raise CertificateError(f"the certificate in {folder} is {credentials.identity.name}'s, not {name}'s")
    store = RunStore(config.peer_dir(name), warn=noticed(emit))
    try:
        start = start_trainer or (
            lambda scratch: Trainer.start(of_a_peer(config), data_dir=data_dir, scratch=scratch)
        )
        trainer = await while_torch_loads(Supervised.begin(lambda: start(store.folder)))
        try:
            about = trainer.description
            agreed = agreed_of_peers(config)
            store.begin(
                about.schema, agreed, frozen=about.frozen.schema, run=config.run.name,
                task_digest=about.task_digest,
            )  # fmt: skip
            if not store.has_frozen(about.frozen.schema):
                store.keep_frozen((await trainer.initial(store.folder / "frozen", frozen=True)).load())
                (store.folder / "frozen").unlink()
            if (frozen := store.frozen_file()) is not None:
                await trainer.freeze(frozen)
            if graph.kind == "file":  # only its name stands in the settings
                agreed["gossip.graph"] = graph.fingerprint
            circles = None
            if config.gossip.masks:
                circles = Circles(
                    name, config.run.name, config.run.seed, KeyPair(os.urandom(32)), all_cores()
                )
            greeting = Greeting(
                version=__version__, task_digest=about.task_digest, schema_digest=about.schema.digest,
                agreed=agreed, frozen_digest=store.frozen.digest,
                mask_key=circles.public if circles else b"", mask_number=time.time_ns(),
            )  # fmt: skip
            curve = Curve(*own_curve(folder, zmq.curve_keypair))
            roster = enrolled(config, name, credentials, curve, emit, circles, greeting.mask_number)
            if invitation is not None and roster.contact(invitation.host) is None:
                stamp = Stamp.of(config.run.name, about.schema.digest, name)
                await asyncio.to_thread(accept, invitation, roster, name, stamp)
                emit(
                    events.Notice(
                        text=f"joined by {invitation.host}: {len(roster.peers())} peers on the roster"
                    )
                )
            neighbors = ZmqNeighbors(
                me=name, curve=curve, roster=roster, run=config.run.name, greeting=greeting,
                welcome=lambda peer, theirs: fits(name, greeting, peer, theirs, circles),
                listen=config.network.listen or None,
                settings=Settings(
                    config.network.heartbeat, config.network.idle,
                    limits=Limits(payload_bytes=8 * about.schema.nbytes + (1 << 20)),
                ),
                emit=emit,
            )  # fmt: skip
            if (speed := await asyncio.to_thread(curve_speed)) < FAST:
                slow = f"CURVE moves only {speed / 1e6:.0f} MB in a second of CPU"
                emit(events.Notice(text=f"{slow}: is this pyzmq built without libsodium?"))
            spent = Spent(config.privacy, store.folder, emit)
            files = store.folder / "train"
            files.mkdir(exist_ok=True)
            model = (await trainer.initial(files / "initial")).load()
            train = _training(trainer, name, files, spent, emit)
            peer = Peer(name, algorithm, model, train, neighbors, circles, config.gossip.clip)
            neighbors.start()  # ready: others count on us from here on
            watching = asyncio.create_task(_watch(roster, neighbors))
            try:
                return await _rounds(config, graph, peer, neighbors, roster, trainer, store, emit)
            finally:
                watching.cancel()
                await neighbors.stop()
        finally:
            await trainer.close()
    finally:
        store.close()


async def _rounds(
    config: Config,
    graph: Topology,
    peer: Peer,
    neighbors: ZmqNeighbors,
    roster: Roster,
    trainer: Trains,
    store: RunStore,
    emit: Emit,
) -> Result:
    checkpoint = store.latest()
    emit(events.RunStarted(
        run=config.run.name, mode="peer", rounds=config.run.rounds, sites=len(roster.peers()),
        config_digest=config.digest(), resumed_from=checkpoint.round if checkpoint else None,
    ))  # fmt: skip
    if checkpoint is not None:
        peer.go_on(checkpoint)
    if peer.circles is None:  # else the model of a round without a sum is this peer's alone, and its secret
        neighbors.publish(peer.round, _state(peer))
    shape = Shape(graph, config.run.seed, emit)
    if reason_to_stop(config, store, peer.round) is None:
        await _gather(config, peer, neighbors, roster, emit)
        shape.check(peer.algorithm, roster.peers(), config.gossip.masks)
        await _catch_up(peer, neighbors, emit)
    alone, begun_as = False, roster.contact(peer.name)
    while True:
        if peer.algorithm.waits:  # else the fast are ahead of the slow for good, and nobody minds
            await _catch_up(peer, neighbors, emit)
        if evaluation_is_due(config, store, peer.round):
            weights = ArenaFile(peer.model.schema, _written(peer.model, store.folder / "train" / "weights"))
            found = (await trainer.evaluate(peer.name, peer.round, weights)).metrics
            shown = trainer.shown if trainer.description.derives else plain
            metrics, _ = await shown(found, {})
            keep_evaluation(config, store, peer.round, metrics, {peer.name: metrics}, emit)
        reason = reason_to_stop(config, store, peer.round)
        if not peer.algorithm.waits and most_are_done(neighbors, roster, config.run.rounds):
            reason = reason or "most peers have done all rounds"
        if reason is not None:
            break
        own_entry(roster, peer.name, begun_as)
        view, began, sent = neighbors.view(), time.monotonic(), (neighbors.bytes_in, neighbors.bytes_out)
        if view.degraded and not alone:
            here = f"only {len(view.alive)} of {len(roster.peers())} peers are here"
            emit(events.Notice(text=f"{here}: the others may go on without this part"))
        alone = view.degraded
        topology = Topology("complete") if peer.algorithm.everyone(peer.round) else None
        # with all there, the graph that a simulation has
        epoch = 0 if list(view.alive) == roster.peers() else view.epoch
        near = shape.round(view.alive, epoch, peer.round, topology)[peer.name]
        number, sites = peer.round + 1, list(view.alive)
        emit(events.RoundStarted(round=number, sites=sites, neighbors=list(near.incoming)))
        emit(events.SiteState(site=peer.name, round=number, state="training"))
        told = await peer.step(near, config.gossip.round_deadline)
        for other in {peer.name, *near.incoming} - told.missing.keys():
            emit(events.SiteState(site=other, round=peer.round, state="done"))
        for other, why in told.missing.items():
            emit(events.UpdateRefused(site=other, round=peer.round, reason=why))
        mine = averages({peer.name: told.metrics})
        record: Record = {
            "loss": mine.get("loss"),
            "metrics": mine | told.estimates,
            "sites": 1 + len(near.incoming.keys() - told.missing.keys()),
            "seconds": time.monotonic() - began,
            "bytes_in": neighbors.bytes_in - sent[0],
            "bytes_out": neighbors.bytes_out - sent[1],
            "doubted": told.doubted,
        }
        kept = {f"{peer.name}/{key}": value for key, value in peer.kept().items()}
        checkpoint = Checkpoint(peer.round, peer.model, kept)
        store.commit(checkpoint, record, await asyncio.to_thread(store.prepare, checkpoint))
        if peer.circles is None or not told.missing:
            neighbors.publish(peer.round, _state(peer))
        emit(events.RoundCommitted(round=peer.round, **record))
    await _see_off(config, peer, neighbors)
    finish(store, peer.round, reason, emit)
    return Result(peer.round, reason, store.evaluation(peer.round) or {}, store.best_round, store.folder)


class Shape:
    """The graph over those who are there: the run's own, or the nearest that so many can have."""

    def __init__(self, graph: Topology, seed: int, emit: Emit) -> None:
        self._graph, self._seed, self._emit = graph, seed, emit
        self._of: tuple[Sequence[PeerId], int] | None = None  # members and epoch that _now is for
        self._now = graph

    def check(self, algorithm: Algorithm, members: Sequence[PeerId], masks: bool) -> None:
        """ConfigError where these could never agree, or hear too few."""
        graph, _ = self._graph.near(members, self._seed)
        graph.check(members, self._seed)
        check_hearing(algorithm, graph, members, self._seed, masks)

    def round(
        self, members: Sequence[PeerId], epoch: int, t: int, other: Topology | None
    ) -> Mapping[PeerId, Neighborhood]:
        """Each one's part of round t; `other` is a round's own graph."""
        if self._of != (members, epoch):
            self._of = members, epoch
            self._now, why = self._graph.near(members, self._seed, epoch)
            if why:
                self._emit(events.Notice(text=f"{why} With those who are here now it is {self._now}."))
            try:
                self._now.check(members, self._seed, epoch)
            except ConfigError as e:
                self._emit(events.Notice(text=f"{e} Until then each part goes on by itself."))
        return (other or self._now).round(members, t, self._seed, epoch).graph


async def _gather(config: Config, peer: Peer, neighbors: ZmqNeighbors, roster: Roster, emit: Emit) -> None:
    """Wait for the whole roster, and their keys where there are masks; after the idle time, for as many as a
    round needs."""
    need = max(2, config.strategy.min_sites, fewest(peer.algorithm, config.gossip.masks))
    began, told, named = time.monotonic(), -1, False

    def here() -> int:
        alive = neighbors.view().alive
        return len(alive if peer.circles is None else peer.circles.knows(alive))

    while (have := here()) < need or (
        have < len(roster.peers()) and time.monotonic() < began + config.network.idle
    ):
        if have != told:
            emit(events.Waiting(need=max(need, len(roster.peers())), have=have))
            told = have
        if not named and time.monotonic() > began + ANSWERS * config.network.heartbeat:
            emit(events.Notice(text=f"not here yet: {_who_is_missing(peer, neighbors, roster)}"))
            named = True
        await asyncio.sleep(POLL_S)


def _who_is_missing(peer: Peer, neighbors: ZmqNeighbors, roster: Roster) -> str:
    """The first few who are not connected, and why; or how many more have to be on the roster."""
    away = sorted({*roster.peers()} - {peer.name, *neighbors.connected()})
    if not away:
        return f"the roster has {len(roster.peers())} peers. Enrol others, or look at gossip.roster"
    more = f" and {len(away) - NAMED} more" if len(away) > NAMED else ""
    return f"{', '.join(map(neighbors.trouble, away[:NAMED]))}{more}. Check their network.listen and address"


def most_are_done(neighbors: ZmqNeighbors, roster: Roster, rounds: int) -> bool:
    """Whether a peer that nobody waits for should end too: it would train on alone, away from all others."""
    done = sum(reached >= rounds for reached in neighbors.reached().values())
    return 2 * done > len(roster.peers()) - 1 > 0


async def _catch_up(peer: Peer, neighbors: ZmqNeighbors, emit: Emit) -> None:
    """Take a neighbour's state when this peer joined late, or was away: when most are ahead. Where it is a
    few, they were away, alone and so fast; what they reach is no reason to drop our own. Nor is one believed
    that says to be further than most."""
    progress = neighbors.progress()
    ahead = {other: r for other, r in progress.items() if r >= peer.round + BEHIND}
    if 2 * len(ahead) <= len(progress):
        return
    middle = median_low(ahead.values())
    for other in sorted(ahead, key=lambda p: (abs(ahead[p] - middle), p))[:2]:
        letter = await neighbors.pull(other, PULL_S)
        if letter is None or letter.round <= peer.round:
            continue
        try:
            model = state_of(letter, peer.model.schema)
            if letter.round > (most := median_high(neighbors.progress().values() or [middle]) + BEHIND):
                raise BadUpdate(f"it is after round {letter.round}, and most are not beyond {most}")
        except BadUpdate as e:
            emit(events.UpdateRefused(site=other, round=peer.round + 1, reason=f"its state: {e}"))
            continue
        peer.model = model
        peer.round, peer.state = letter.round, peer.algorithm.init(trained_part(peer.model))
        emit(events.Notice(text=f"took the model of {other} after round {letter.round}"))
        return


async def _see_off(config: Config, peer: Peer, neighbors: ZmqNeighbors) -> None:
    """Stay for those who are slower: they may still take our last share, or our state."""
    neighbors.announce(peer.round)
    with suppress(TimeoutError):
        async with asyncio.timeout(config.network.idle):
            while any(r < peer.round for r in neighbors.progress().values()):  # noqa: ASYNC110  # no event tells it
                await asyncio.sleep(POLL_S)


async def _watch(roster: Roster, neighbors: ZmqNeighbors) -> None:
    """Look at the roster again and again: call who is new, cut off who was struck off."""
    while True:
        neighbors.revoked()
        neighbors.connect([other for other in roster.peers() if other != neighbors.me])
        await asyncio.sleep(RELOAD_S)
        await asyncio.to_thread(roster.reload)


def enrolled(
    config: Config,
    name: PeerId,
    credentials: Credentials,
    curve: Curve,
    emit: Emit,
    circles: Circles | None = None,
    mask_number: int = 0,
) -> Roster:
    """The run's roster, with this peer's own entry as it is today; and with the keys that `circles` need of
    those whom this peer does not meet."""
    federation = credentials.identity.federation
    revoked = Revoked(config.root / config.network.certs / LIST, credentials.root)
    verifier = Verifier(credentials.root, federation, revoked=revoked)
    folder = config.root / config.gossip.roster
    address, number, have = called_at(config), 0, None
    with suppress(CertificateError, FileNotFoundError):
        have, number = check((folder / f"{name}.peer").read_bytes(), verifier, federation)
    if have is None or (have.key, have.address) != (curve.public, address):
        number = max(number + 1, int(time.time()))
        claim = Claim(peer=name, federation=federation, key=curve.public, address=address, number=number)
        save(folder, name, enrol(Signer.of(credentials), claim).encode())
    return Roster(
        folder, verifier, federation, revoked=revoked,
        mask_keys=None if circles is None else carried(
            circles, Signer.of(credentials), verifier, federation, config.run.name, mask_number
        ),
        guests=Guestbook(config.root / config.network.certs / "sites" / name),
        refuse=lambda file, why: emit(events.Notice(text=f"roster: {file} is refused: {why}")),
    )  # fmt: skip


def carried(
    circles: Circles, signer: Signer, verifier: Verifier, federation: str, run: str, number: int
) -> MaskKeys:
    """Where keys come for `circles` that others pass on; with our own."""

    def told(peer: PeerId, key: bytes, number: int) -> None:
        try:
            circles.hear(peer, key, number)
        except SecAggError as e:
            raise CertificateError(str(e)) from None

    keys = MaskKeys(verifier, federation, run, told)
    mine = MaskKey(peer=circles.me, federation=federation, run=run, key=circles.public, number=number)
    keys.add(state(signer, mine))
    return keys


def called_at(config: Config) -> str | None:
    """Where others call this peer; None when they can't: then it calls them."""
    address = config.network.address or config.network.listen
    host, _, port = address.rpartition(":")
    if address and (host in EVERYWHERE or not is_address(address)):
        raise ConfigError(
            f'network.address: nobody can call {address}. Set network.address = "HOST:{port}" as others '
            f'reach this machine; where nobody can, network.listen = "": then this peer calls the others.'
        )
    return address or None


def own_entry(roster: Roster, me: PeerId, begun_as: Contact | None = None) -> bytes:
    """What others are shown of us; CertificateError when it counts no more, or not as it was when we began:
    then the run ends here."""
    now = roster.contact(me)
    if now is not None and begun_as is not None and now != begun_as:
        raise CertificateError(
            f"another process is {me} now, at {now.address or 'no address'}: two have its certificate, and "
            f"the one that was started last counts. Stop one of them, or give each machine a name of its own."
        )
    if now is None:
        raise CertificateError(
            f"{me}'s own entry counts no more: its certificate was revoked or has expired, or its file was "
            f"taken from {roster.folder}. With a new certificate the same command goes on."
        )
    return roster.entry(me)


def invite(config: Config, guest: PeerId, host: PeerId, *, days: float) -> Invitation:
    """An invitation to the peer `host`, whose folder is here; its process may run or not."""
    address = called_at(config)
    if address is None:
        raise ConfigError(f"{host} can't be called, so it can't invite. Let a peer with an address do it.")
    folder = config.root / config.network.certs / "sites" / host
    Credentials.load(folder)
    key, _ = own_curve(folder, zmq.curve_keypair)
    return Guestbook(folder).invite(
        guest, host=host, address=address, key=key,
        life=timedelta(days=days), new=zmq.curve_keypair,
    )  # fmt: skip


def accept(invitation: Invitation, roster: Roster, me: PeerId, stamp: Stamp) -> None:
    """Fetch the roster from the peer that has invited this one; ConnectError says why it can't be. Blocks."""
    if invitation.guest != me:
        raise JoinRefused(f"this invitation is for {invitation.guest}, not for {me}")
    host = Contact(invitation.host, invitation.key, invitation.address)
    guest = Curve(zmq.curve_public(invitation.secret), invitation.secret)

    def add(statement: bytes) -> None:
        with suppress(CertificateError):  # the host has it; whether it counts here is ours to say
            roster.add(statement)

    join(host, guest, stamp, own_entry(roster, me), add, JOIN_S)
    found = roster.contact(host.peer)
    if found is None or found.key != host.key:
        raise JoinRefused(f"who answers at {host.address} can't prove to be {host.peer} of this federation")


def fits(me: PeerId, mine: Greeting, peer: PeerId, theirs: Greeting, circles: Circles | None = None) -> None:
    """JoinRefused, in one line that reads well at both ends, unless both train the same thing. What `circles`
    have to know of the other is taken in."""
    for key in sorted({*mine.agreed, *theirs.agreed}):
        here, there = mine.agreed.get(key), theirs.agreed.get(key)
        if here != there:
            raise JoinRefused(
                f"{peer} and {me} differ in {key[:64]}: {str(there)[:64]} at {peer}, {str(here)[:64]} "
                f"at {me}. Use the same fedtrain.toml at both."
            )
    if theirs.task_digest != mine.task_digest:
        raise JoinRefused(
            f"{peer} and {me} have different task code: {theirs.task_digest[:12]} at {peer}, "
            f"{mine.task_digest[:12]} at {me}. Copy the same task file to both."
        )
    if theirs.frozen_digest != mine.frozen_digest:
        raise JoinRefused(
            f"{peer} and {me} have different frozen parameters: {theirs.frozen_digest[:12]} at {peer}, "
            f"{mine.frozen_digest[:12]} at {me}. Let model() load them from the same file at both."
        )
    if circles is not None:
        try:
            circles.meet(peer, theirs.mask_key, theirs.mask_number)
        except SecAggError as e:
            raise JoinRefused(str(e)) from None


def _training(
    trainer: Trains, name: PeerId, folder: Path, spent: Spent, emit: Emit
) -> Callable[[int, Arena, Arena], Awaitable[Update]]:
    """Weights and delta go to the trainer process and back as files."""

    async def train(round: int, weights: Arena, delta: Arena) -> Update:
        given = ArenaFile(weights.schema, _written(weights, folder / "weights"))
        for left in reversed(range(TRIES)):  # a failure may be over the next time
            try:
                update = await trainer.train(name, round, given, folder / "delta")
                break
            except TaskError as e:
                if not left:
                    raise
                emit(events.Notice(text=f"round {round + 1}: training failed and is tried again: {e}"))
        spent.one_more(name, round)
        delta.copy_(update.delta.load())
        return update

    return train


def _written(arena: Arena, path: Path) -> Path:
    path.write_bytes(arena.payload)
    return path


def state_of(letter: ReceivedShare, schema: Schema) -> Arena:
    """The model that a neighbour gave; BadUpdate unless it is whole, of our kind, and can be trained."""
    data = letter.share.payload
    if len(data) != schema.nbytes or digest_of(data).encode() != letter.share.note:
        raise BadUpdate("it is not the model that it says")
    model = Arena.wrap(schema, data)
    if problem := flaw(model, {}):
        raise BadUpdate(problem)
    return model


def _state(peer: Peer) -> Share:
    """What a late joiner is given: the model, and its digest. No peer writes to a model once it is there."""
    return Share(peer.model.payload, note=peer.model.digest.encode())
