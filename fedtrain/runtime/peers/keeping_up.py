"""How a peer keeps up with the others: it waits for them, takes the state of one that is far ahead, and stays
for those who are slower."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from statistics import median_high, median_low

from ...arena import Arena
from ...config import Config
from ...digest import digest_of
from ...errors import BadUpdate
from ...events import Emit, Notice, UpdateRefused
from ...exchange import ReceivedShare, Share
from ...pki.roster import Roster
from ...schema import Schema
from ...transport.zmq import ZmqNeighbors
from ..journal import Journal
from ..star.checks import flaw
from .gossip import Peer
from .gossip_setup import fewest
from .parcels import trained_part

ANSWERS = 4  # heartbeats within which whoever is called has answered, or shown that it is no peer
NAMED = 3  # of those who are not here
POLL_S = 0.1  # between looks at who is there
PULL_S = 60.0  # for a state to come
BEHIND = 2  # rounds that others are ahead, from which on a peer takes their state


async def gather(journal: Journal, peer: Peer, neighbors: ZmqNeighbors, roster: Roster) -> None:
    """Wait for the whole roster, and their keys where there are masks; after the idle time, for as many as a
    round needs."""
    config = journal.config
    need = max(2, config.strategy.min_sites, fewest(peer.algorithm, config.gossip.masks))
    began, told, named = time.monotonic(), -1, False

    def here() -> int:
        alive = neighbors.view().alive
        return len(alive if peer.sums is None else peer.sums.knows(alive))

    while (have := here()) < need or (
        have < len(roster.peers()) and time.monotonic() < began + config.network.idle
    ):
        if have != told:
            journal.waiting(max(need, len(roster.peers())), have)
            told = have
        if not named and time.monotonic() > began + ANSWERS * config.network.heartbeat:
            journal.emit(Notice(text=f"not here yet: {_who_is_missing(peer, neighbors, roster)}"))
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


async def catch_up(peer: Peer, neighbors: ZmqNeighbors, emit: Emit, rounds: int) -> None:
    """Take a neighbour's state when this peer joined late, or was away: when most are ahead. Where it is a
    few, they were away, alone and so fast; what they reach is no reason to drop our own. Nor is one believed
    that says to be further than most, or than the run's `rounds`."""
    progress = {other: reached for other, reached in neighbors.progress().items() if reached <= rounds}
    ahead = {other: r for other, r in progress.items() if r >= peer.round + BEHIND}
    if 2 * len(ahead) <= len(progress):
        return
    middle = median_low(ahead.values())
    for other in sorted(ahead, key=lambda p: (abs(ahead[p] - middle), p))[:2]:
        letter = await neighbors.pull(other, PULL_S)
        if letter is None or not peer.round < letter.round <= rounds:
            continue
        try:
            model = state_of(letter, peer.model.schema)
            if letter.round > (most := median_high(neighbors.progress().values() or [middle]) + BEHIND):
                raise BadUpdate(f"it is after round {letter.round}, and most are not beyond {most}")
        except BadUpdate as e:
            emit(UpdateRefused(site=other, round=peer.round + 1, reason=f"its state: {e}"))
            continue
        peer.model = model
        peer.round, peer.state = letter.round, peer.algorithm.init(trained_part(peer.model))
        emit(Notice(text=f"took the model of {other} after round {letter.round}"))
        return


async def see_off(config: Config, peer: Peer, neighbors: ZmqNeighbors) -> None:
    """Stay for those who are slower: they may still take our last share, or our state."""
    neighbors.announce(peer.round)
    with suppress(TimeoutError):
        async with asyncio.timeout(config.network.idle):
            while any(r < peer.round for r in neighbors.progress().values()):  # noqa: ASYNC110  # no event tells it
                await asyncio.sleep(POLL_S)


def state_of(letter: ReceivedShare, schema: Schema) -> Arena:
    """The model that a neighbour gave; BadUpdate unless it is whole, of our kind, and can be trained."""
    data = letter.share.payload
    if len(data) != schema.nbytes or digest_of(data).encode() != letter.share.note:
        raise BadUpdate("it is not the model that it says")
    model = Arena.wrap(schema, data)
    if problem := flaw(model, {}):
        raise BadUpdate(problem)
    return model


def share_of_state(peer: Peer) -> Share:
    """What a late joiner is given: the model, and its digest. No peer writes to a model once it is there."""
    return Share(peer.model.payload, note=peer.model.digest.encode())
