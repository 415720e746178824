"""An aggregator whose run directory is an older copy: its sites bring the newest model that they hold.

A site never trains a round again of which a sum was opened, so an aggregator that was restored from a copy
can't go on from the copy's round. As it starts again, it asks its sites which model they were asked about
last. The newest one of which most sites of the run, and strategy.min_sites at least, say the same SHA-256 is
fetched from one of them, and is the last committed round from then on. The same where only the model's own
bytes are damaged here: the strategy's state, and all that was known of the round, are used then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable

from ...arena import ArenaFile
from ...errors import BadUpdate, Damaged
from ...events import Notice
from ...exchange import Cohort, gather
from ...messages import Failure, NewestModel, Recall, Reply, SiteId
from ...schema import Schema
from ...secagg.messages import Advertise, AdvertiseEvaluation
from ...store import Checkpoint, Ledger
from ..journal import Journal, Lap
from .central_noise import CentralNoise
from .secure_terms import hash_of


async def caught_up(
    journal: Journal, cohort: Cohort, checkpoint: Checkpoint, noise: CentralNoise | None
) -> Checkpoint:
    """The last committed round of a run that goes on; a later one where most sites hold its model."""
    config, store, lap, own = journal.config, journal.store, Lap(), checkpoint.round
    sites, idle_s = await cohort.members(config.strategy.min_sites), float(config.network.idle)
    request = Recall(id=f"{config.run.name}/{own}/0/recall", round=own)
    replies = await gather(cohort, dict.fromkeys(sites, request), idle_s)
    said = {site: reply for site, reply in replies.items() if isinstance(reply, NewestModel)}
    votes = Counter((reply.round, reply.model) for reply in said.values() if reply.round >= own)
    need = max(config.strategy.min_sites, len(store.joined()) // 2 + 1)
    for number, model in sorted((each for each, many in votes.items() if many >= need), reverse=True):
        holders = [
            site for site, reply in sorted(said.items()) if (reply.round, reply.model) == (number, model)
        ]
        if number > own:
            whole = Recall(id=f"{config.run.name}/{number}/0/recall", round=number, whole=True)
            for site in holders:
                reply = (await gather(cohort, {site: whole}, config.strategy.round_deadline)).get(site)
                weights = reply.weights if isinstance(reply, NewestModel) else None
                if not isinstance(weights, ArenaFile):
                    continue
                if (await asyncio.to_thread(hash_of, weights, frozen=store.frozen.sha256)).hex() == model:
                    break
            else:
                continue
            try:
                back = store.recover(number, weights)
            except Damaged as e:  # but its plan is here: the same sites train it again, to the same bits
                journal.emit(Notice(text=f"{e} The sites train round {number} again"))
                break
            if back is not None:
                journal.emit(Notice(text=f"the model of round {number} came from {site}: nothing is lost"))
                return back
            text = (
                f"this run directory ended with round {own}, as a copy does: the run goes on after round "
                f"{number}: {len(holders)} sites hold its model. What it had of the rounds between is lost"
            )
            if checkpoint.state:
                text += f". The strategy's own state (its momentum, say) is the one of round {own}"
            journal.emit(Notice(text=text))
            for lost in range(own, number):
                if noise is not None:
                    noise.releases(lost, secrets.randbits(128))
            checkpoint = Checkpoint(number, weights.load(), checkpoint.state)
            inside = over(said.values(), Advertise.__name__, number - 1)
            journal.commit(checkpoint, {"sites": len(holders), "seconds": lap.seconds}, inside=inside)
        for kind in (Advertise, AdvertiseEvaluation):
            evaluation = kind is AdvertiseEvaluation
            summed = over(said.values(), kind.__name__, number)
            if summed and not store.opened(number, evaluation=evaluation):
                store.opens(number, [summed], evaluation=evaluation)
        break
    return checkpoint


async def newest_model(request: Recall, ledger: Ledger, schema: Schema, frozen: str) -> NewestModel:
    """A site's reply: the newest model that it was asked about, as it lies there. `frozen`: SHA-256 of the
    run's frozen parameters."""
    newest, inbox = ledger.newest(), ledger.inbox
    if newest is None or newest.round < request.round or not inbox.has(newest.weights, schema.nbytes):
        return NewestModel()
    weights = ArenaFile(schema, inbox.file(newest.weights), newest.weights)
    model = await asyncio.to_thread(hash_of, weights, frozen=frozen)
    sent = weights if request.whole else None
    return NewestModel(round=newest.round, model=model.hex(), sums=ledger.sums(), weights=sent)


def over(said: Iterable[NewestModel], kind: str, number: int) -> tuple[SiteId, ...]:
    """Over which sites most say that a sum of this round was opened."""
    found = Counter(sites for each in said for of, sites in each.sums.get(kind, ()) if of == number)
    return found.most_common(1)[0][0] if found else ()


def admit(reply: Reply, schema: Schema) -> None:
    """BadUpdate unless it answers a Recall, with a model of this schema if it has one."""
    weights = reply.weights if isinstance(reply, NewestModel) else None
    if not isinstance(reply, NewestModel | Failure) or (weights is not None and weights.schema != schema):
        raise BadUpdate(f"{type(reply).__name__} does not answer which model this site has")
