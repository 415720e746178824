"""How a peer keeps up with the others: it waits for them, takes the state of one that is far ahead, and stays
for those who are slower."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median_high, median_low

from ...arena import Arena
from ...config import Config
from ...errors import BadUpdate
from ...events import Emit, Notice, UpdateRefused
from ...exchange import Neighborhood, Neighbors, PeerId
from ...pki.roster import Roster
from ...store import AGREED, Checkpoint
from ...transport.overlay import FEW, turns_of
from ...transport.zmq import ZmqNeighbors
from ..journal import Journal, Lap
from .consensus import ENDED, Consensus
from .gossip import Peer
from .gossip_setup import fewest, needed
from .parcels import other_parts, share_of_model, state_of, trained_part, write
from .telling import in_words
from .votes import Voters, parties

ANSWERS = 4  # heartbeats within which whoever is called has answered, or shown that it is no peer
NAMED = 3  # of those who are not here
REPEAT_S = 300.0  # between lines of a peer that waits about who is not here, and why
POLL_S = 0.1  # between looks at who is there
PULL_S = 60.0  # for a state to come
NOTICE = 2  # rounds in which all of few hear of a wish to end
PATIENCE = 4  # of the idle time: after one or two such parts, who still waits takes the model of others
LONGEST = 10  # idle times that a peer stays for others after its end, while these come and move
BEHIND = 2  # rounds that others are ahead, from which on a peer takes their state


async def gather(journal: Journal, peer: Peer, neighbors: ZmqNeighbors, roster: Roster) -> None:
    """Wait for the whole roster, and their keys where there are masks; after the idle time, for as many as a
    round needs. One that has done all rounds is enough: this peer takes its model."""
    config = journal.config
    need, because = needed(config, peer.algorithm)
    began, told, named = time.monotonic(), (-1, -1), -math.inf

    def here() -> int:
        alive = neighbors.view().alive
        return len(alive if peer.sums is None else peer.sums.knows(alive))

    def all_in() -> int:
        """As many as are waited for by now."""
        return max(need, len(roster.peers())) if time.monotonic() < began + config.network.idle else need

    while not some_are_done(neighbors, config.run.rounds) and (have := here()) < (wanted := all_in()):
        if because:
            journal.emit(Notice(text=f"{need} peers are needed: {because}"))
            because = ""
        if told != (have, wanted):
            journal.waiting(wanted, have)
            told = have, wanted
        now = time.monotonic()
        if now > max(began + ANSWERS * config.network.heartbeat, named + REPEAT_S):
            ended = " Where they have ended the run, start one of them again: it gives this peer the model."
            missing = f"not here yet: {_who_is_missing(peer, neighbors, roster)}"
            journal.emit(Notice(text=missing + (ended if peer.round else "")))
            named = now
        await asyncio.sleep(POLL_S)


def _who_is_missing(peer: Peer, neighbors: ZmqNeighbors, roster: Roster) -> str:
    """The first few who are not connected, and why; or how many more have to be on the roster."""
    away = sorted(neighbors.near - {*neighbors.connected()})
    refused = [f"{name} ({why})" for name in away if (why := neighbors.refusal(name))]
    away = [name for name in away if not neighbors.refusal(name)]
    if refused and not away:
        return ", ".join(refused[:NAMED])
    if not away:
        return f"the roster has {len(roster.peers())} peers. Enrol others, or look at gossip.roster"
    more = f" and {len(away) - NAMED} more" if len(away) > NAMED else ""
    silent = (
        f"{', '.join(map(neighbors.trouble, away[:NAMED]))}{more}. Check their network.listen and address"
    )
    return ", ".join([*refused[:NAMED], silent])


async def catch_up(peer: Peer, neighbors: Neighbors, emit: Emit, rounds: int) -> bool:
    """Take a neighbour's state when this peer joined late, or was away: when most are ahead. Where it is a
    few, they were away, alone and so fast; what they reach is no reason to drop our own. Nor is one believed
    that says to be further than most, or than the run's `rounds`. Returns whether a state was taken."""
    known = neighbors.progress().items()  # beyond the rounds are those who make one model of all
    progress = {other: min(reached, rounds) for other, reached in known if reached <= rounds + ENDED}
    ahead = {other: r for other, r in progress.items() if r >= peer.round + BEHIND}
    if 2 * len(ahead) <= len(progress):
        return False
    middle = median_low(ahead.values())
    for other in sorted(ahead, key=lambda p: (abs(ahead[p] - middle), p))[:2]:
        letter = await neighbors.pull(other, PULL_S)
        if letter is None or not peer.round < letter.round <= rounds + ENDED:
            continue
        reached = min(letter.round, rounds)
        try:
            model = state_of(letter, peer.model.schema)
            if reached > (most := median_high(neighbors.progress().values() or [middle]) + BEHIND):
                raise BadUpdate(f"it is after round {reached}, and most are not beyond {most}")
        except BadUpdate as e:
            emit(UpdateRefused(site=other, round=peer.round + 1, reason=f"its state: {e}"))
            continue
        jump(peer, model, reached)
        emit(Notice(text=f"took the model of {other} after round {reached}"))
        return True
    return False


async def keep_up(
    journal: Journal, peer: Peer, neighbors: ZmqNeighbors, near: Callable[[int], Neighborhood]
) -> None:
    """Take the model of others where they are far ahead, and go on to the round of neighbours that are a
    round ahead. What others are then told of this peer's shares must hold after a restart, too."""
    rounds = journal.config.run.rounds
    jumped = await catch_up(peer, neighbors, journal.emit, rounds)
    if jumped and peer.pledges is not None:
        journal.store.commit(checkpoint_of(peer), {})
    if peer.pledges is None or not peer.pledges.began(peer.round):
        peer.round = meeting(peer.round, near, neighbors.progress(), rounds)


def meeting(
    round: int, near: Callable[[int], Neighborhood], progress: Mapping[PeerId, int], rounds: int
) -> int:
    """The round that a peer does next: the first from which none of its neighbours in it has gone on. It is
    at most BEHIND after that of most peers, and one of the run."""
    progress = {peer: at for peer, at in progress.items() if at < rounds}  # the others have ended
    last = min(rounds - 1, median_high(progress.values()) + BEHIND) if progress else round
    while round < last and any(progress.get(peer, round) > round for peer in peers_of(near(round))):
        round += 1
    return round


def peers_of(near: Neighborhood) -> set[PeerId]:
    return {*near.incoming, *near.outgoing}


def jump(peer: Peer, model: Arena, round: int) -> None:
    """Go on from the model of others, who are at a later round. A share of a sum stays this peer's, and what
    it found, where no neighbour has heard of that."""
    if peer.unheard is not None:
        model = write(model.load(), trained_part(model) + peer.unheard, other_parts(model))
    if peer.pledges is None:
        peer.state = peer.algorithm.init(trained_part(model))
    else:
        peer.state = peer.pledges.abandon(peer.round, trained_part(peer.model), peer.state, peer._gauge)
    peer.model, peer.round = model, round


def checkpoint_of(peer: Peer) -> Checkpoint:
    kept = {f"{peer.name}/{key}": value for key, value in peer.kept().items()}
    return Checkpoint(peer.round, peer.model, kept)


async def agree(
    journal: Journal, peer: Peer, neighbors: ZmqNeighbors, roster: Roster, initial: Arena, wanted: bool
) -> tuple[int, set[PeerId]]:
    """Have one model with all who are here, where that is `wanted`. Returns what to announce at last, and who
    needs nothing of this peer any more where they are gone."""
    config, everybody = journal.config, {*roster.peers()}

    def alive() -> Sequence[PeerId]:
        return neighbors.view().alive

    def is_called(name: PeerId) -> bool:
        return (at := roster.contact(name)) is not None and at.address is not None

    voters = Voters(roster.peers(), neighbors.sign, roster.proves, is_called, config.run.name)
    least = max(2, voters.need, fewest(peer.algorithm, config.gossip.masks))
    end = Consensus(
        peer, config.run.rounds, initial, alive, config.gossip.round_deadline, voters,
        turns_of(len(roster.peers())), config.network.idle / PATIENCE,
    )  # fmt: skip
    last, lap = journal.store.latest(), Lap()
    if last is None or last.round != peer.round:  # it took another's, and no round of its own followed
        last = checkpoint_of(peer)
        journal.store.commit(last, {})
    if not wanted and AGREED in last.state:
        neighbors.publish(end.done, share_of_model(last.weights.load(), journal.agreed_of()))
        return end.done, journal.have_agreed(last)
    if not wanted:
        return peer.round, everybody
    with suppress(TimeoutError):
        async with asyncio.timeout(config.network.idle):
            while len(alive()) < least and not some_are_done(neighbors, end.done):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    if (found := await end.run(least)) is not None:
        if found.made_of.of and peer.name not in found.made_of.of:
            of = ", ".join(found.made_of.of[:FEW])
            late = f"{peer.name} was late, or not here, when these peers agreed"
            journal.emit(Notice(text=f"your model is not in the model of all, which is of {of}: {late}"))
        peer.round = journal.agreed(last, found.model, found.peers, found.made_of, lap).round
        return end.done, {*found.peers}
    lost = {name: in_words(why, config.run.rounds) for name, why in sorted(end.lost.items())}
    missing = [f"{name} ({why})" for name, why in [*lost.items()][:NAMED]]
    here = f"{len(alive())} of {len(roster.peers())} peers are here, {least} are needed"
    missing += [f"{', '.join(who[:NAMED])}: digest {made[:8]}" for made, who in parties(end.votes).items()]
    why = f"no model of all: {', '.join(missing) or here}. This peer ends with its own. Started again"
    journal.emit(Notice(text=f"{why} while peers are there that have agreed, it takes theirs."))
    return peer.round, everybody


def why_end(
    peer: Peer, neighbors: ZmqNeighbors, roster: Roster, rounds: int, own: str | None, to_agree: bool
) -> str | None:
    """Why a peer ends now; None when it goes on. `own`: why it would by itself. Peers that wait for others
    end all with one round. One that nobody waits for, or that is alone, ends when most have. None ends in a
    round that it had begun before a restart: others may count its shares, and it would count them, too."""
    if peer.round < rounds and peer.pledges is not None and peer.pledges.began(peer.round):
        return None
    if peer.algorithm.waits and to_agree and peer.round < rounds:
        own = reason_to_end(neighbors, roster, peer.round, own)
    unawaited = not peer.algorithm.waits or len(neighbors.view().alive) == 1
    ended = unawaited and most_are_done(neighbors, rounds)
    return own or ("most peers have done all rounds" if ended else None)


def some_are_done(neighbors: ZmqNeighbors, rounds: int) -> bool:
    """Whether a peer is here that has done so many rounds."""
    return any(reached >= rounds for reached in neighbors.progress().values())


def most_are_done(neighbors: ZmqNeighbors, rounds: int) -> bool:
    """Whether a peer that nobody waits for should end too: it would train on alone, away from all others."""
    done = sum(reached >= rounds for reached in neighbors.reached().values())
    return 2 * done > len(neighbors.near) > 0


def reason_to_end(neighbors: ZmqNeighbors, roster: Roster, round: int, own: str | None) -> str | None:
    """Why all peers end now, with one round, which follows from what most want; None when they go on. `own`:
    why this peer would."""
    known, ends = roster.peers(), dict(neighbors.ends())
    if own is not None and neighbors.me not in ends:
        neighbors.end_after(round)
        ends[neighbors.me] = round
    since = sorted(at for peer, at in ends.items() if peer in known)
    most = len(known) // 2 + 1
    if len(since) < most or round < since[most - 1] + notice_of(len(known)):
        return None
    return own or f"{len(since)} of {len(known)} peers see no improvement any more"


def notice_of(peers: int) -> int:
    """Rounds in which all of so many hear that one would end, which many pass on from peer to peer."""
    return NOTICE if peers <= FEW else NOTICE * math.ceil(math.log2(peers))


async def see_off(config: Config, neighbors: ZmqNeighbors, reached: int, without: set[PeerId]) -> None:
    """Stay for those who are slower: they may still take our last share, or our state. Of those who are gone
    only for some: `without` these."""
    neighbors.announce(reached)

    def behind() -> dict[PeerId, int]:
        here, told = neighbors.progress(), neighbors.reached()
        known = {peer: told.get(peer, -1) for peer in neighbors.near - without | here.keys()}
        return {peer: at for peer, at in known.items() if at < reached}

    began = came = time.monotonic()
    waited, idle_s = behind(), config.network.idle
    while waited and time.monotonic() < min(came + idle_s, began + LONGEST * idle_s):
        await asyncio.sleep(POLL_S)
        if (now := behind()) != waited:
            waited, came = now, time.monotonic()
