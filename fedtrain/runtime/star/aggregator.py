"""`fedtrain aggregator`: rounds, or versions without rounds, over sites that join by mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...config import Config
from ...events import Admitted, Emit, Notice, noticed
from ...exchange import Cohort
from ...learning import NO_EXTRAS, Extras
from ...malloc import keep_freed
from ...messages import Found, Metrics, NewestModel, Recall, Reply, Request, SiteId
from ...pki import renewal
from ...pki.callers import Callers
from ...pki.identity import Current
from ...pki.proof import prove
from ...questions import Column, Describe, Described, Tally
from ...schema import Schema
from ...statistics import Statistics
from ...store import Checkpoint, RunStore
from ...strategies import Strategy, beginning, build, extras_of
from ...transport.endpoints import TRANSPORTS, RemoteCohort
from ...transport.tls import Tls
from ...wire.frames import AuditHead, Bounds, Hello
from .. import lineage
from ..auditing import audited
from ..journal import Averages, Journal, Result, Shown, no_data, plain, some_of
from ..own_code import source_digest
from ..sites import compressed, privacy
from ..threads import all_cores, while_torch_loads
from ..trainers.supervised import Supervised, unchanged
from ..trainers.trainer import Trainer
from ..trainers.trainer_messages import Description
from . import asynchronous, checks, federated, secure_rounds, secure_terms, statistics
from .agreement import agree, agreed_data, agreed_examples, bounds_of, differences
from .answers import Answers, InTheOpen
from .combinations import check_strategy
from .enough import closing_early
from .held_out import HeldOut, held_out
from .mutual import Mutual, admit_step
from .restored import admit as admit_newest
from .restored import caught_up


@dataclass(frozen=True)
class Listening:
    """An aggregator that sites can join."""

    journal: Journal
    strategy: Strategy
    joined: JoinedSites
    cohort: RemoteCohort
    openly: Cohort  # the cohort whose updates come as they are
    answers: Answers
    task_digest: str
    own: HeldOut | None


async def serve(
    config: Config, *, emit: Emit, start: Path | None = None, data_dir: Path | None = None
) -> Result:
    """Run until the rounds are done; goes on from the last committed one.

    `start`: whose last model a new run begins with, a run directory or an export; None: the task's own.
    `data_dir`: where the task finds eval_data("server"), with evaluate.server; None: in the project's data.
    """
    keep_freed(models=2)  # the mean, and the model that it makes
    compressed.check_config(config)
    compressed.check_own(config)
    if config.privacy.in_sums:
        privacy.check_config(config)
    if config.asynchronous.enabled:
        asynchronous.check_config(config)
    async with listening(config, emit, start, data_dir, training=True) as star:
        async with shown_by_task(config, star.journal.store, star.task_digest, star.own) as shown:
            evaluators = some_of(config, star.joined.evaluators)
            at_server = no_data if star.own is None else star.own.at_server
            if config.asynchronous.enabled:
                result = await asynchronous.run(
                    star.journal, star.openly, star.strategy,
                    evaluate_at=evaluators, shown=shown, at_server=at_server,
                )  # fmt: skip
            else:
                result = await federated.run(
                    star.journal, star.answers, star.strategy,
                    evaluate_at=evaluators, shown=shown, at_server=at_server,
                    catch_up=partial(caught_up, star.journal, star.cohort),
                )  # fmt: skip
        star.journal.finish(result)
        lineage.sign(config, result.run_dir / "model")
        return result


async def survey(config: Config, *, emit: Emit) -> Statistics:
    """Statistics of the sites' data, written to the run directory; those that are there already, without what
    stats.min_cell hides now. The run itself has not begun then: `serve` trains with the same sites."""
    if (there := statistics.written(config.run_dir)) is not None:
        found = statistics.as_asked_now(config, there)
        emit(Notice(text=f"{config.run_dir / statistics.FILE} is there; another run.name asks anew"))
        if found != there:
            statistics.write(config.run_dir, found)
        return found
    async with listening(config, emit, training=False) as star:
        star.journal.waiting(config.strategy.min_sites)
        sums = star.answers
        tallies = (
            statistics.MaskedTallies(config, sums, emit)
            if isinstance(sums, secure_rounds.UnderMasks)
            else statistics.OpenTallies(config, star.cohort, emit)
        )
        return await statistics.collect(
            config, star.cohort, tallies, config.run_dir, emit, star.joined.willing
        )


@asynccontextmanager
async def listening(
    config: Config, emit: Emit, start: Path | None = None, data_dir: Path | None = None, *, training: bool
) -> AsyncGenerator[Listening, None]:
    """Let sites join. At the end they are told whether the run is over."""
    current = Current(config.root / config.network.certs / "aggregator")
    async with AsyncExitStack() as stack:
        audit = stack.enter_context(closing(audited(config, "aggregator", emit, current)))
        emit = audit.emit
        store = stack.enter_context(closing(RunStore(config.run_dir, warn=noticed(emit))))
        journal = Journal(config, store, emit)
        strategy = build(config.strategy.kind, config.strategy.options, config.root)
        check_strategy(config, strategy)
        schema, task_digest = await while_torch_loads(_begin(config, store, strategy, start, training))
        if unverified := secure_terms.unverified(config):
            emit(Notice(text=unverified))
        if start is not None and training:
            _tell_beginning(store, emit)
        joined = JoinedSites(journal, schema, task_digest, current, extras_of(strategy))
        cohort = joined.cohort(audit.witness)
        audit.state_after_rounds(lambda head: cohort.state_head(head, audit.place_of))
        openly = compressed.decompressing(config, schema, cohort, store.turns.keep)
        early = closing_early if training else lambda config, cohort: cohort
        answers = joined.answers(early(config, cohort), early(config, openly))
        cohort.accepted = joined.accepted
        own = None
        if training:
            own = await stack.enter_async_context(held_out(config, store, task_digest, data_dir))
        await cohort.start()
        stack.push_async_callback(
            lambda: cohort.stop(journal.over, filter(joined.callers.may_call, store.joined()))
        )
        stack.push_async_callback(audit.stated)
        emit(Notice(text=f"listening on {config.network.listen}"))
        watching = joined.callers.watch(cohort.cut, emit, cohort.pass_on, lambda: current.trouble)
        stack.callback(asyncio.create_task(watching).cancel)
        certs = config.root / config.network.certs
        renewing = renewal.watch(
            certs, certs / "aggregator", current, emit, joined.callers.that_count, cohort.renew
        )
        stack.callback(asyncio.create_task(renewing).cancel)
        yield Listening(journal, strategy, joined, cohort, openly, answers, task_digest, own)


class JoinedSites:
    """Which sites may join, what they may send, and what each lets itself be asked."""

    def __init__(
        self,
        journal: Journal,
        schema: Schema,
        task_digest: str,
        credentials: Current,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        config, self._extras, self._noise = journal.config, extras, journal.noise
        self._config, self._store, self._emit = config, journal.store, journal.emit
        self._schema, self._task_digest, self._credentials = schema, task_digest, credentials
        self.callers = Callers(credentials(), config.root / config.network.certs)
        self._bounds: dict[SiteId, Bounds] = {}
        self._columns: dict[SiteId, tuple[Column, ...]] = {}  # in the order of joining
        self.mutual: Mutual | None = None  # under masks, which sites refuse which
        codec = compressed.up_codec(config, schema)
        self._update = extras.update(schema) if codec is None else codec.coded  # as an update comes
        self._longest = 0
        if config.secagg.enabled:
            self._longest = secure_terms.longest_vector(config, schema.model, extras)

    def cohort(self, witness: Callable[[SiteId, AuditHead], None]) -> RemoteCohort:
        """The sites as they are asked over the network; `witness` is told how their audit logs stand."""
        config = self._config
        replies = (secure_rounds.REPLIES if config.secagg.enabled else Found) | Described | NewestModel
        return RemoteCohort(
            TRANSPORTS["grpc"](lambda: Tls(*self._credentials.parts()), config.network.heartbeat),
            listen=config.network.listen,
            identify=self.callers.identify, welcome=self._welcome, admit=self._admit,
            inbox=self._store.inbox, replies=replies, prove=self._prove,
            frozen=self._store.frozen_file(), idle_s=config.network.idle, emit=self._emit,
            schemas=(self._schema, self._store.frozen.schema, self._update),
            inline=not (config.compression.down or secure_terms.verifies(config)),
            witness=witness,
        )  # fmt: skip

    def answers(self, cohort: Cohort, openly: Cohort) -> Answers:
        """How the sites' answers become one; `openly` is the cohort whose updates come as they are."""
        if not self._config.secagg.enabled:
            return InTheOpen(self._config, openly, self._emit, self._extras)
        masked = secure_rounds.UnderMasks(
            self._config, cohort, self._emit, federation=self._credentials().identity.federation,
            callers=self.callers, verifier=self.callers.verifier, store=self._store, parallel=all_cores(),
            frozen=self._store.frozen.sha256, extras=self._extras,
        )  # fmt: skip
        self.mutual = masked.mutual
        return masked

    def accepted(self, sites: Collection[SiteId]) -> Collection[SiteId]:
        """The sites without those that are left out, see mutual.py."""
        return sites if self.mutual is None else self.mutual.accepted(sites)

    def evaluators(self, number: int, members: Sequence[SiteId]) -> list[SiteId]:
        """The members that evaluate in this round by their own settings too."""
        bounds = self._bounds
        return [site for site in members if site not in bounds or not bounds[site].evaluation(number)]

    def willing(self, members: Sequence[SiteId]) -> list[SiteId]:
        """The members that give statistics by their own settings too."""
        return [site for site in members if site not in self._bounds or self._bounds[site].statistics]

    def _prove(self, site: SiteId, nonce: bytes) -> tuple[bytes, bytes]:
        return prove(self._credentials(), site, nonce), self.callers.lists

    def _welcome(self, site: SiteId, hello: Hello) -> None:
        """Take a site in, or raise JoinRefused."""
        agree(site, hello, self._config, self._schema, self._task_digest, self._store.frozen.schema)
        before = self._store.examples_of(site)
        agreed_examples(site, hello.examples, before)
        if other := next((each for each in self._columns if each != site), None):
            agreed_data(site, hello.columns, other, self._columns[other])
        if hello.columns:
            self._columns[site] = hello.columns
        if before is None:
            self._store.join(site, hello.examples)
        serial, printed = self.callers.shown(site)
        if self.mutual is not None:
            self.mutual.forget(site, printed)
        self._emit(
            Admitted(
                site=site,
                task_digest=hello.task_digest,
                serial=serial,
                fingerprint=printed.hex(),
                version=hello.version[:20],
                package=hello.package[:64],
            )
        )
        if hello.bounds is not None and self._bounds.get(site) != hello.bounds:
            self._bounds[site] = hello.bounds
            self._noise.said[site] = hello.bounds.noise
            for why in differences(hello.bounds, bounds_of(self._config)):
                self._emit(Notice(text=f"{site}: {why}"))

    def _admit(self, site: SiteId, request: Request, reply: Reply) -> None:
        """BadUpdate for a reply whose header alone shows that it can't be used."""
        masks = self._config.secagg.enabled
        if self.mutual is not None:
            self.mutual.hear(site, request, reply)
        if isinstance(request, Recall):
            admit_newest(reply, self._schema)
        elif isinstance(request, Describe) or (isinstance(request, Tally) and not masks):
            statistics.admit(request, reply)
        elif masks:
            admit_step(request, reply, self._longest)
        else:
            registered, limits = self._store.examples_of(site), self._config.limits
            checks.admit(request, reply, self._update, limits, registered, self._extras)


async def _begin(
    config: Config, store: RunStore, strategy: Strategy, start: Path | None, training: bool
) -> tuple[Schema, str]:
    """The run's model and its task's digest, for training with an initial model in the store. A new run asks
    a process that loads the task; one that goes on with the same source knows."""
    if (known := store.begun()) is not None and known[1] == source_digest(config):
        store.begin(
            known[0], config.agreed(), frozen=store.frozen.schema, run=config.run.name, task_digest=known[1]
        )
        if (store.latest() is not None or not training) and store.has_frozen(store.frozen.schema):
            return known
    scratch = store.folder / "trainer"
    scratch.mkdir(mode=0o700, exist_ok=True)
    async with await Trainer.start(config, scratch=scratch, confine="auto") as trainer:
        about = trainer.description
        store.begin(
            about.schema, config.agreed(), frozen=about.frozen.schema, run=config.run.name,
            task_digest=about.task_digest, derives=about.derives, local=about.local,
        )  # fmt: skip
        if training and store.latest() is None:
            initial, frozen = await trainer.beginning(start, scratch)
            store.keep_frozen(frozen)
            store.commit(Checkpoint(0, *beginning(strategy, initial)), {})
        elif not store.has_frozen(about.frozen.schema):
            store.keep_frozen(await trainer.frozen(scratch))
    return about.schema, about.task_digest


def _tell_beginning(store: RunStore, emit: Emit) -> None:
    """Print what a site's policy has to name, where a run begins with another model than the task's own."""
    if (latest := store.latest()) is not None and latest.round == 0:
        model = secure_terms.hash_of(latest.weights, all_cores(), store.frozen.sha256).hex()
        text = (
            f"the run begins with the model {model}. Sites take it where it was a model of an earlier run "
            f"of theirs; at each other site, once its people agree: fedtrain policy set initial={model}"
        )
        emit(Notice(text=text))


@asynccontextmanager
async def shown_by_task(
    config: Config, store: RunStore, task_digest: str, own: HeldOut | None = None
) -> AsyncGenerator[Shown, None]:
    """What the task's metrics() makes of evaluations. The task's code never runs in this process, which has
    the aggregator's key: with the first evaluation a process is started for it, if there is a metrics() and
    none has been started (`own`)."""
    process: Supervised | None = None
    scratch = store.folder / "trainer"

    async def shown(
        total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        nonlocal process
        if not total:
            return {}, {}
        if process is None:
            process = await Supervised.begin(
                lambda: Trainer.start(config, scratch=scratch, metrics_only=True, confine="auto")
            )
            unchanged(Description(Schema(()), task_digest, derives=True), process.description)
        return await process.shown(total, by_site)

    try:
        derives = store.meta().get("derives")
        yield plain if not derives else shown if own is None else own.shown
    finally:
        if process is not None:
            await process.close()
