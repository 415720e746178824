"""`fedtrain site NAME`: joins the aggregator, trains when asked, answers each request once.

This process is the supervisor: it holds the key, the connection and the ledger, and loads no torch. The
task's code, the data and the GPU are in a trainer process that never sees the key. Either may be killed:
the supervisor starts another trainer, and a restarted supervisor finds its finished replies in the ledger.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from ...arena import AnyArena, ArenaFile, Frozen, Patch
from ...config import Config
from ...digest import sha256_of
from ...errors import ConfigError, JoinRefused, NotApproved, TaskError, WireError
from ...events import Emit, Notice, SiteRefused, SiteState, noticed
from ...malloc import keep_freed
from ...messages import Evaluate, Failure, Found, Recall, Reply, Request, SiteId, Train
from ...pki.proof import AggregatorCheck
from ...questions import Describe, Tally
from ...schema import Schema
from ...secagg.messages import Advertise, AdvertiseEvaluation, Agree, Mask, Share, Unmask
from ...store import Ledger
from ...store.ledger import NEWEST, Newest
from ...store.memory import NEVER
from ...transport.site_link import longest
from ...wire import decode, encode
from ...wire.codec import fetch_list
from ..auditing import audited
from ..journal import Journal
from ..own_code import load_only_beside_key
from ..star.agreement import bounds_of
from ..star.restored import newest_model
from ..star.secure_terms import hash_of, unverified, verifies
from ..threads import SMALL_BYTES, all_cores
from ..trainers.supervised import Supervised
from ..trainers.trainer import Trainer, Trains
from .approval import Approval, Approvals
from .gate import Gate, gate_of, hold_first_model
from .models import CheckedSums, Models, own_model
from .pins import pins_of
from .records import ledger_of
from .secure_site import SECURE_REQUESTS, SecureSite, secure_site_of
from .spent import Spent
from .start import checked_policy, credentials_of, folder_of, hello_of, link_of
from .statistics import DataStatistics
from .statistics import check_config as check_statistics

REQUESTS = Train | Evaluate | Describe | Tally | Recall  # in the open
MODELS = 4  # in the inbox at most, beside patches: in training, coming, the base of a patch, a spare one


class Site:
    """Answers requests: from the ledger when the answer is known, else by its trainer."""

    def __init__(
        self,
        name: SiteId,
        schema: Schema,
        ledger: Ledger,
        trainer: Trains,
        say: Callable[[str, int], None] = lambda state, round: None,
        secure: SecureSite | None = None,
        spent: Spent | None = None,
        frozen: Frozen = Frozen(),
        models: Models | None = None,
        gate: Gate | None = None,
        statistics: DataStatistics | None = None,
        personal: bool = False,
    ) -> None:
        """`say` tells people what goes on. `frozen`: the frozen parameters of the task's own model().
        `models`: makes models of what is patched. `gate`: what is answered at all; None: everything.
        `personal`: whether this site has a model of its own.

        With `secure`, results are given into secure sums, and nothing that asks for one alone is answered.
        """
        self._secure, self._spent, self._gate, self._statistics = secure, spent, gate or Gate(), statistics
        self._name, self._schema, self._ledger, self._trainer = name, schema, ledger, trainer
        self._say, self._models, self._personal = say, models, personal
        self._under_way: tuple[str, asyncio.Task[Found]] | None = None
        self._own, self._frozen = frozen, frozen  # frozen parameters of the task's model(), and of the run
        self._fetched: ArenaFile | None = None  # the run's, where they are others
        self._given = False  # whether the trainer has them
        self._hashed: tuple[object, bytes] = (), b""  # the newest model's file as it was, and its hash_of
        self.over = ""  # why this process answers nothing any more, until people act here

    def welcomed(self, frozen: str) -> ArenaFile | None:
        """The run's frozen parameters, by their digest, when they have to be fetched: when those of this
        site's model() are others. They are kept for the run."""
        if self._fetched is not None and self._fetched.digest != frozen:
            raise JoinRefused(
                f"the aggregator began another run, with other frozen parameters. Start {self._name} again."
            )
        if frozen != self._own.digest and self._fetched is None:
            self._fetched = ArenaFile(self._own.schema, self._ledger.inbox.file(frozen), frozen)
            self._frozen = Frozen(self._own.schema, frozen)
        return self._fetched

    async def patched(self, patch: Patch, digest: str) -> bool:
        """As Models.made."""
        assert self._models is not None
        await self._stop_work()  # on a model that is passed
        return await self._models.made(patch, digest, self._hash_of)

    def refusal(self, request: Request) -> Failure | None:
        """The reply to what this site does not answer, before a byte that the request names is fetched."""
        for arena in fetch_list(request):
            if difference := self._schema.difference(arena.schema):
                return self._refused(f"the aggregator's model is not this site's: {difference}")
        why = self._gate.refusal(request)
        return self._refused(why, self._gate.strangers(request)) if why else None

    def _refused(self, why: str, strangers: tuple[SiteId, ...] = ()) -> Failure:
        """The reply of a site that a rule of its own keeps from answering."""
        return Failure(reason=f"{self._name} refuses: {why}", final=True, strangers=strangers)

    async def answer(self, request: Request) -> Reply:
        return self.refusal(request) or await self.fulfil(request)

    async def fulfil(self, request: Request) -> Reply:
        """The reply to a request that is not refused. The same question again, in another attempt say, gets
        the same reply; but a failure is no reply to another attempt, which has the work done anew."""
        reply = await self._answer(request)
        if why := self._gate.withheld(request, reply, leaving=True):
            return self._refused(why)
        return self._gate.told(reply) if isinstance(reply, Failure) else reply

    async def _answer(self, request: Request) -> Reply:
        match request, self._secure:
            case Train(), None:
                return await self._result(request, request.weights.digest + self._frozen.digest)
            case Evaluate(), None:
                return await self._result(request, (await self._hash_of(request.weights)).hex())
            case Advertise() | AdvertiseEvaluation(), SecureSite():
                model = await self._hash_of(request.weights)
                await asyncio.to_thread(self._secure.asked_about, request, model, await self._bound())
                result = await self._result(request, model.hex())
                if isinstance(result, Failure):
                    return result
                return await asyncio.to_thread(self._secure.offer, request, model, result)
            case Share() | Mask() | Agree() | Unmask(), SecureSite():
                return await asyncio.to_thread(self._secure.answer, request)
            case Recall(), _:
                return await newest_model(request, self._ledger, self._schema, await self._bound())
            case Describe() | Tally(), _ if self._statistics is not None:
                return await self._statistics.answer(request)
        return Failure(reason=f"{self._name} gives its results into secure sums only (secagg.enabled)")

    async def _result(self, request: Train | Evaluate, model: str) -> Found:
        """What training or evaluation finds, if it may leave."""
        if why := self._gate.unfit(request, model):
            return self._refused(why)
        found = await self._found(request, model)
        why = self._gate.withheld(request, found)
        return self._refused(why) if why else found

    async def _found(self, request: Train | Evaluate, model: str) -> Found:
        """What training or evaluation finds, worked out once; `model` tells its weights from others."""
        kind = "Train" if isinstance(request, Train) else "Evaluate"
        key = f"{kind}/{request.round}/{model}"
        if request.counted != NEVER:
            key += f"/after {request.counted}"
        if body := self._ledger.get(key):
            self._say("masking" if self._secure else "uploading", request.round + 1)
            return self._remembered(body)
        if self._under_way is None or self._under_way[0] != key or failed(self._under_way[1]):
            await self._stop_work()
            self._under_way = (key, asyncio.create_task(self._work(key, request)))
        return await asyncio.shield(self._under_way[1])

    async def _hash_of(self, weights: AnyArena) -> bytes:
        """What binds to a model in the inbox, as two models may have one digest. The file is read again when
        it was changed since it was hashed last."""
        assert isinstance(weights, ArenaFile), weights
        there, frozen = os.stat(weights.file), await self._bound()
        now = frozen, there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns
        if self._hashed[0] != now:
            if weights.schema.nbytes <= SMALL_BYTES:
                self._hashed = now, hash_of(weights, frozen=frozen)
            else:
                self._hashed = now, await asyncio.to_thread(hash_of, weights, all_cores(), frozen)
        return self._hashed[1]

    async def _bound(self) -> str:
        """SHA-256 of the frozen parameters that this site trains with."""
        if self._fetched is not None and not self._frozen.sha256:
            sha256 = await asyncio.to_thread(sha256_of, self._fetched.path)
            self._frozen = msgspec.structs.replace(self._frozen, sha256=sha256)
        return self._frozen.sha256

    async def close(self) -> None:
        await self._stop_work()
        await self._trainer.close()

    async def _stop_work(self) -> None:
        if self._under_way and not self._under_way[1].done():
            self._under_way[1].cancel()
            await asyncio.gather(self._under_way[1], return_exceptions=True)
        self._under_way = None

    async def _work(self, key: str, request: Train | Evaluate) -> Found:
        weights = request.weights
        assert isinstance(weights, ArenaFile)
        newest = Newest(request.round, weights.digest, self._frozen.digest, request.counted)
        self._ledger.keep_newest(newest)
        self._ledger.inbox.keep_only([weights.digest, self._frozen.digest])
        try:
            if self._fetched is not None and not self._given:
                await self._trainer.freeze(self._fetched)
                self._given = True
            return await self._ask_trainer(key, request, weights)
        except (TaskError, ConfigError) as e:  # the latter of a trainer that had to be started again
            if isinstance(e, NotApproved):
                self.over = str(e)
            frozen = self._frozen
            if self._fetched is not None and not self._ledger.inbox.has(
                frozen.digest, frozen.schema.nbytes, again=True
            ):
                raise WireError("the frozen parameters were damaged here: they are fetched again") from e
            return Failure(reason=str(e), final=isinstance(e, ConfigError))

    async def _ask_trainer(self, key: str, request: Train | Evaluate, weights: ArenaFile) -> Found:
        if isinstance(request, Evaluate):
            self._say("evaluating", request.round)
            return await self._trainer.evaluate(self._name, request.round, weights, request.counted)
        self._say("training", request.round + 1)
        if self._spent is not None:
            await asyncio.to_thread(self._spent.check_next, request.counted)
        out = self._ledger.spare()
        update = await self._trainer.train(self._name, request.round, weights, out, request.counted)
        if self._spent is not None:
            await asyncio.to_thread(self._spent.trained, self._name, request.round, update.num_examples)
        path = self._ledger.outbox.file(update.delta.digest)
        os.replace(out, path)
        kept = msgspec.structs.replace(
            update, delta=ArenaFile(update.delta.schema, path, update.delta.digest)
        )
        self._ledger.put(key, encode(kept), kept.delta.digest, kept.delta.schema.nbytes)
        self._say("masking" if self._secure else "uploading", request.round + 1)
        return kept

    def _remembered(self, body: bytes) -> Found:
        reply: Found = decode(body, Found)
        for arena in fetch_list(reply):
            arena.file = self._ledger.outbox.file(arena.digest)
        return reply


def failed(work: asyncio.Task[Found]) -> bool:
    """Whether work is over and found nothing."""
    return work.done() and (
        work.cancelled() or work.exception() is not None or isinstance(work.result(), Failure)
    )


async def run(
    config: Config,
    name: SiteId,
    *,
    data_dir: Path | None = None,
    emit: Emit,
    start_trainer: Callable[[Path], Awaitable[Trains]] | None = None,
) -> str:
    """Serve until the run is over; returns why it ended. JoinRefused when both ends disagree.
    `start_trainer(scratch)` makes the trainer, when it is not to be a process with the task's code."""
    keep_freed()
    check_statistics(config)
    own, current = folder_of(config, name), credentials_of(config, name)
    credentials = current()
    policy, approvals = checked_policy(config, name, credentials), Approvals(own)
    audit = audited(config, name, emit, current)
    emit = audit.emit
    ledger = ledger_of(config, name, own, policy, emit)

    approved: list[Approval] = []  # of each trainer that was started

    async def start() -> Trains:
        approved.append(approvals.check(config))  # before a line of the task runs, in each process
        if start_trainer is not None:
            return await start_trainer(ledger.scratch)
        files, scratch, how = approved[-1].files, ledger.scratch, policy.confine
        return await Trainer.start(config, data_dir=data_dir, scratch=scratch, confine=how, approved=files)

    pins = pins_of(own, policy, credentials, emit)
    check = AggregatorCheck(credentials, config.root / config.network.certs, emit, pins)
    journal = Journal(config, None, emit)
    journal.start("site", buffer=config.asynchronous.buffer if config.asynchronous.enabled else 0)
    try:
        trainer = await Supervised.begin(start)
        emit(approved[-1].event)  # of the bytes that the trainer loaded
        requests = SECURE_REQUESTS | Recall if config.secagg.enabled else REQUESTS
        link = link_of(config, current, check, ledger.inbox, requests, policy, emit)

        def say(state: str, round: int) -> None:
            link.status(state)
            emit(SiteState(site=name, state=state, round=round))

        if (about := trainer.description).confined:
            emit(Notice(text=about.confined))
        noisy, secure = config.privacy.noise_multiplier > 0, None
        spent = Spent.of_site(config, ledger.folder, emit, policy, ledger.records) if noisy else None
        checked = CheckedSums(ledger.folder, emit) if verifies(config) else None
        if why := unverified(config):
            emit(Notice(text=why))
        if config.secagg.enabled:
            load_only_beside_key(config, approved[-1].files)
            secure = secure_site_of(
                config, name, current, ledger, check, about.extras, spent, policy, checked
            )
        statistics = DataStatistics(name, trainer, config, ledger.folder, secure, noticed(emit))
        bounds = bounds_of(config, policy)
        models = Models(config, ledger, trainer, emit, checked, link.where, all_cores())
        # under masks nobody is told how many
        examples = await trainer.examples(name) if not secure or policy.min_examples > 1 else None
        gate = gate_of(emit, bounds, policy, name, examples, ledger, masks=secure is not None, pins=pins)
        if secure is not None:
            gate.asked["policy.cohort_change"] = secure.tells_too_much
            hold_first_model(gate, policy, await own_model(trainer, ledger.scratch), secure.answered)
        site = Site(name, about.schema, ledger, trainer, say, secure, spent, about.frozen, models, gate,
                    statistics, about.personal)  # fmt: skip
        of_models = MODELS * (about.schema.nbytes + about.frozen.schema.nbytes)
        ledger.inbox.limit = of_models + longest(about.schema)
        if config.compression.down:
            await models.keep_initial()
        form = await trainer.columns(name, form=True)
        hello = hello_of(config, about, bounds, form, None if secure else examples)
        watching = asyncio.create_task(check.watch(link.cut, current))
        try:
            agreed = about.schema, about.frozen.schema, about.update
            patched = site.patched if config.compression.down or checked else None
            ends = hello, site.fulfil, site.welcomed, patched, agreed, audit.answer
            reason = await link.serve(*ends, refusal=site.refusal, over=lambda: site.over)
        finally:
            watching.cancel()
            await site.close()
        if about.personal and (ledger.folder / NEWEST).exists():
            emit(Notice(text=f"{name}'s own model: fedtrain export {ledger.folder.name} --site {name}"))
        journal.end(None, reason)
        return reason
    except (JoinRefused, NotApproved) as e:
        emit(SiteRefused(site=name, reason=str(e)))
        raise
    finally:
        ledger.close()
        audit.close()
