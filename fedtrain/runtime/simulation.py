"""`fedtrain simulate`: many sites on one machine, through the same rounds as a federation.

Sites are trained by a pool of trainer processes, many to a message, and their deltas come back in shared
memory. What a site sends depends on the weights, its data and (seed, round, site) alone, so neither the
number of workers nor their speed changes a bit of the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

from ..arena import AnyArena, Arena, ArenaFile, Slab, patches_to
from ..config import Config
from ..errors import CertificateError, ConfigError, Damaged, TaskError, nearest
from ..exchange import Before, Cohort
from ..messages import Evaluate, Evaluation, Failure, Metrics, Reply, Request, SiteId, Train, Update
from ..secagg.messages import Advertise, AdvertiseEvaluation
from ..store import Checkpoint, RunStore
from ..store.disk import lock
from ..strategies import build, state_init
from . import asynchronous, compressed, secure
from .answers import Answers, InTheOpen, kept
from .federated import run
from .privacy import Spending
from .progress import Averages, Emit, Result, finish, noticed, plain
from .trainer import TRIES, Description, Failed, Trainer, TrainerDied, Workbench, beside_torch, unchanged

T = TypeVar("T")
VMAP_SITES = 50  # a batch of the vmap engine; fixed, for its last bits depend on who is stacked with whom
LOOP_SITES = 50  # a batch of the loop engine, at most
BATCH_BYTES = 16 << 20  # of deltas in a batch, unless one is larger
AHEAD = 3  # batches under way for each worker
TOLD_SITES = 50  # of a round with more, events name only the updates that were refused


async def simulate(
    config: Config,
    *,
    emit: Emit,
    debug: SiteId | None = None,
    fresh: bool = False,
    workers: int | None = None,
    data_dir: Path | None = None,
    start: Path | None = None,
) -> Result:
    """Run the whole federation here, from the last committed round on, or from the first when `fresh`.

    `start`: whose last model a new run begins with, a run directory or an export; None: the task's own.
    `debug` names a site that is trained in this very process, so that breakpoint() in the task works.
    """
    strategy = build(config.strategy.kind, config.strategy.options, config.root)
    compressed.check_config(config)
    if config.asynchronous.enabled:
        asynchronous.check_config(config)
    if fresh:
        forget(config.simulate_dir)
    warn = cannot_go_back() if config.asynchronous.enabled else noticed(emit)
    store = RunStore(config.simulate_dir, durable=False, warn=warn)
    try:
        async with await PoolCohort.start(config, workers, store.folder, data_dir) as pool:
            about = pool.description
            enough_sites(config, len(about.sites))
            if len(about.sites) * config.strategy.fraction > TOLD_SITES:
                emit = without(emit, "update_received", "site_state")
            store.begin(
                about.schema, agreed(config), frozen=about.frozen.schema, run=config.run.name,
                task_digest=about.task_digest,
            )  # fmt: skip
            if store.latest() is None:
                initial, frozen = await pool.beginning(start)
                store.keep_frozen(frozen)
                store.commit(Checkpoint(0, initial, state_init(strategy, initial)), {})
            elif not store.has_frozen(about.frozen.schema):
                store.keep_frozen((await pool.beginning(None))[1])
            if (kept := store.frozen_file()) is not None:
                await pool.freeze(kept)
            if config.compression.down:
                await pool.keep_initial()
            evaluators = lambda number, members: about.evaluators
            cohort: Cohort = pool
            if debug is not None:
                bench = Workbench(config, data_dir, simulated=True)
                if kept is not None:
                    bench.freeze(kept)
                cohort = InlineCohort(debug, bench, pool)
            if config.privacy.noise_multiplier:
                cohort = Spending(config, cohort, store.folder, emit)
            cohort = compressed.decompressing(config, about.schema, cohort)
            if config.asynchronous.enabled:
                clock = asynchronous.Clocked(config, cohort, about.sites, ahead=AHEAD * pool.workers)
                result = await asynchronous.run(
                    config, cohort, store, strategy, emit,
                    asks=clock, evaluate_at=evaluators, shown=pool.shown,
                )  # fmt: skip
            else:
                result = await run(
                    config, answers(config, cohort, emit), store, strategy, emit,
                    evaluate_at=evaluators, shown=pool.shown,
                )  # fmt: skip
        finish(store, result.rounds, result.reason, emit)
        return result
    finally:
        store.close()


def answers(config: Config, cohort: Cohort, emit: Emit) -> Answers:
    """As the real federation would make one of many, with or without the work of hiding them."""
    if not config.secagg.enabled:
        return InTheOpen(config, cohort, emit)
    if not config.simulate.masks:
        return secure.FixedPointSums(config, cohort, emit)
    return UnderMasks(config, cohort, emit)


def cannot_go_back() -> Callable[[str], None]:
    """Without rounds the next model depends on all that was under way, which no round before it has."""

    def stop(line: str) -> None:
        raise Damaged(f"{line} A simulation of asynchronous sites can't go on: start it with --fresh.")

    return stop


def forget(folder: Path) -> None:
    """Remove a run directory, unless some process is at work in it."""
    if folder.exists():
        lock(folder).close()
        shutil.rmtree(folder)


def enough_sites(config: Config, sites: int) -> None:
    if sites < config.strategy.min_sites:
        raise ConfigError(
            f"strategy.min_sites: {config.strategy.min_sites}, but the simulation has {sites} sites. "
            f"Lower it, or raise simulate.sites."
        )


def without(emit: Emit, *kinds: str) -> Emit:
    """Ten thousand events a second would cost as much as the training that they tell of."""

    def emit_others(kind: str, **fields: Any) -> None:
        if kind not in kinds:
            emit(kind, **fields)

    return emit_others


def agreed(config: Config) -> dict[str, str]:
    """What must not change between the rounds of one simulation."""
    return config.agreed() | {
        f"simulate.{key}": repr(getattr(config.simulate, key))
        for key in ("sites", "partition", "engine", "speeds")
    }


class PoolCohort:
    """exchange.Cohort over trainer processes.

    Replies come in the order of the requests, and there is no deadline: the result must not depend on how
    fast the machine is. A few batches are under way at a time, so memory doesn't grow with the sites. An
    update lies in shared memory, which is used again once nobody looks at it.
    """

    def __init__(
        self,
        config: Config,
        trainers: list[Trainer],
        start: Callable[[], Awaitable[Trainer]],
        scratch: Path,
        memory: Memory,
    ) -> None:
        """`start` makes another trainer, in the place of one that died."""
        self._trainers, self._start, self._scratch, self._memory = trainers, start, scratch, memory
        self.description: Description = trainers[0].description
        self._vmap = config.simulate.engine == "vmap"
        most, nbytes = VMAP_SITES if self._vmap else LOOP_SITES, self.description.update.nbytes
        self._batch_sites = max(1, min(most, BATCH_BYTES // max(1, nbytes)))  # at most
        self.bytes_in = self.bytes_out = 0  # as they would travel in the open
        self._in_the_open = not config.secagg.enabled
        self._held: dict[SiteId, str] = {}  # the model that each site would have
        self._known = ""  # and the one that it would have from the start
        self._replacing = asyncio.Lock()
        self._published: ArenaFile | None = None
        self._frozen: ArenaFile | None = None  # of the run, which every trainer has

    @classmethod
    async def start(
        cls, config: Config, workers: int | None, scratch: Path, data_dir: Path | None = None
    ) -> Self:
        """A pool of `workers` processes, else simulate.workers, else one a core."""
        memory = Memory()

        async def start() -> Trainer:
            return await Trainer.start(
                config, data_dir=data_dir, scratch=scratch, simulated=True, pass_fds=memory.fds
            )

        count = workers or config.simulate.workers or len(os.sched_getaffinity(0))
        started = await beside_torch(asyncio.gather(*(start() for _ in range(count)), return_exceptions=True))
        trainers = [t for t in started if isinstance(t, Trainer)]
        if errors := [e for e in started if isinstance(e, BaseException)]:
            await asyncio.gather(*(trainer.close() for trainer in trainers))
            memory.close()
            raise errors[0]
        return cls(config, trainers, start, scratch, memory)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(trainer.close() for trainer in self._trainers))
        self._memory.close()

    @property
    def workers(self) -> int:
        return len(self._trainers)

    async def beginning(self, start: Path | None) -> tuple[Arena, Arena]:
        """See Trainer.beginning."""
        return await self._trainers[0].beginning(start, self._scratch)

    async def initial(self) -> Arena:
        """The task's own model before round 0."""
        return (await self.beginning(None))[0]

    async def keep_initial(self) -> None:
        """As sites do that take patches."""
        self._known = (await self.initial()).digest

    async def freeze(self, frozen: ArenaFile) -> None:
        """Have all trainers train with the run's frozen parameters."""
        self._frozen = frozen
        await asyncio.gather(*(trainer.freeze(frozen) for trainer in self._trainers))

    async def members(self, at_least: int) -> list[SiteId]:
        return self.description.sites

    async def newcomer(self, known: Collection[SiteId]) -> None:
        await asyncio.get_running_loop().create_future()  # all are there from the start

    def tell(self, site: SiteId, line: str) -> None:
        """There is nobody at a simulated site; the run's own log has the line."""

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        if not requests:
            return
        request = next(iter(requests.values()))
        assert isinstance(request, Train | Evaluate), request
        assert all(r.id == request.id for r in requests.values()), "a simulation asks all its sites the same"
        counted = {site: r.counted for site, r in requests.items() if isinstance(r, Train)}
        weights = self._publish(request.weights)
        waiting, number = deque(self._batches(list(requests))), request.round
        under_way: deque[tuple[list[SiteId], asyncio.Task[list[Reply]]]] = deque()

        def work(sites: list[SiteId]) -> Coroutine[Any, Any, list[Reply]]:
            if isinstance(request, Evaluate):
                return self._evaluate(sites, number, weights)
            return self._train(sites, number, weights, [counted[site] for site in sites])

        try:
            while waiting or under_way:
                while waiting and len(under_way) < AHEAD * len(self._trainers):
                    sites = waiting.popleft()
                    under_way.append((sites, asyncio.create_task(work(sites))))
                sites, task = under_way[0]
                replies = await task
                under_way.popleft()
                for site, reply in zip(sites, replies, strict=True):
                    self._count(site, request, reply)
                    yield site, reply
        except (asyncio.CancelledError, TaskError, ConfigError):  # the whole run stops
            for _, task in under_way:
                task.cancel()
            raise
        finally:  # whoever wants no more replies leaves no trainer that still reads these weights
            await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)

    def _count(self, site: SiteId, request: Train | Evaluate, reply: Reply) -> None:
        if self._in_the_open:
            weights = request.weights
            if (held := self._held.get(site, self._known)) != weights.digest:
                patches = patches_to(weights, lambda base: base == held)
                sent = [patch.arena for patch in patches] or [weights]
                self.bytes_out += sum(arena.schema.nbytes for arena in sent)
                self._held[site] = weights.digest
            if isinstance(reply, Update):
                self.bytes_in += reply.delta.schema.nbytes

    def _batches(self, sites: list[SiteId]) -> list[list[SiteId]]:
        """In order. The loop engine's are made small enough that every worker gets some."""
        size = self._batch_sites
        if not self._vmap:
            size = min(size, -(-len(sites) // (AHEAD * len(self._trainers))))
        return [sites[at : at + size] for at in range(0, len(sites), size)]

    def _publish(self, weights: AnyArena) -> ArenaFile:
        """Put the global weights where every trainer can map them, once for each new model."""
        if isinstance(weights, ArenaFile):
            return weights
        assert isinstance(weights, Arena), weights
        if self._published is None or self._published.digest != weights.digest:
            self._published = self._memory.publish(weights)
        return self._published

    async def _train(
        self, sites: list[SiteId], round: int, weights: ArenaFile, counted: list[int]
    ) -> list[Reply]:
        import torch

        schema = self.description.update
        offset, block = self._memory.take(self._batch_sites * schema.nbytes)
        slab = self._memory.slab
        results = await self._at_a_trainer(
            lambda t: t.train_many(sites, round, weights, slab, offset, counted)
        )
        deltas = torch.frombuffer(block, dtype=torch.uint8, count=len(sites) * schema.nbytes)
        rows = Slab(schema, deltas.view(len(sites), schema.nbytes)).arenas()
        return [
            Failure(reason=r.reason)
            if isinstance(r, Failed) and r.update
            else Update(delta=row, num_examples=good(r).num_examples, metrics=good(r).metrics)
            for r, row in zip(results, rows, strict=True)
        ]

    async def _evaluate(self, sites: list[SiteId], round: int, weights: ArenaFile) -> list[Reply]:
        results = await self._at_a_trainer(lambda t: t.evaluate_many(sites, round, weights))
        return [Evaluation(metrics=good(r).metrics) for r in results]

    async def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        """What people see of an evaluation."""
        if not self.description.derives:
            return await plain(total, by_site)
        return await self._at_a_trainer(lambda trainer: trainer.shown(total, by_site))

    async def _at_a_trainer(self, ask: Callable[[Trainer], Awaitable[T]]) -> T:
        """Ask the least busy one. When it dies over it, ask a new one: the same work gives the same."""
        for left in reversed(range(TRIES)):
            trainer = min(self._trainers, key=lambda t: t.backlog)
            try:
                return await ask(trainer)
            except TrainerDied:
                if not left:
                    raise
                async with self._replacing:
                    if trainer in self._trainers:
                        self._trainers[self._trainers.index(trainer)] = another = await self._start()
                        unchanged(self.description, another.description)
                        if self._frozen is not None:
                            await another.freeze(self._frozen)
        raise AssertionError("unreachable")


def good(result: T | Failed) -> T:
    """TaskError for one that failed, which ends the run: the same machine would try again."""
    if isinstance(result, Failed):
        raise result.error()
    return result


class InlineCohort(Before):
    """One site in this process, where breakpoint() works; the others wherever they are."""

    def __init__(self, site: SiteId, bench: Workbench, others: Cohort) -> None:
        known = {*bench.description.sites, *bench.description.evaluators}
        if site not in known:
            raise ConfigError(f"--debug {site}: there is no such site.{nearest(site, known)}")
        super().__init__(others)
        self._site, self._bench = site, bench

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        rest = dict(requests)
        request = rest.pop(self._site, None)
        if request is not None:
            assert isinstance(request, Train | Evaluate), request
            weights = request.weights if isinstance(request.weights, Arena) else request.weights.load()
            if isinstance(request, Train):
                out = Arena.zeros(self._bench.description.update)
                yield self._site, self._bench.train(self._site, request.round, weights, out, request.counted)
            else:
                yield self._site, self._bench.evaluate(self._site, request.round, weights)
        async with aclosing(self._others.exchange(rest, deadline_s)) as replies:
            async for pair in replies:
                yield pair


class UnderMasks(secure.UnderMasks):
    """Simulated sites under masks. One pool of data, which is no site's, is evaluated in the open."""

    def __init__(self, config: Config, cohort: Cohort, emit: Emit) -> None:
        keys = SimulatedKeys()
        super().__init__(
            config, MaskedCohort(config, cohort, keys), emit,
            federation=SimulatedKeys.FEDERATION, fingerprints=keys.fingerprints, verify=keys.verify,
            spread=secure.spread(),
        )  # fmt: skip
        self._openly = secure.FixedPointSums(config, cohort, emit)

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        if len(sites) == 1:
            return await self._openly.evaluate(number, sites, weights)
        return await super().evaluate(number, sites, weights)


class SimulatedKeys:
    """Signing keys of simulated sites; a certificate is a site's name, and this is who vouches for it."""

    FEDERATION = "simulation"

    def __init__(self) -> None:
        self._keys: dict[SiteId, ec.EllipticCurvePrivateKey] = {}

    def key(self, site: SiteId) -> ec.EllipticCurvePrivateKey:
        return self._keys.setdefault(site, ec.generate_private_key(ec.SECP256R1()))

    def fingerprints(self, sites: Sequence[SiteId]) -> dict[SiteId, bytes]:
        return {site: hashlib.sha256(site.encode()).digest() for site in sites}

    def verify(self, certificate: bytes, message: bytes, signature: bytes) -> tuple[SiteId, bytes]:
        site = certificate.decode()
        try:
            self.key(site).public_key().verify(signature, message, secure.ECDSA)
        except InvalidSignature:
            raise CertificateError(f"{site}: a signature is not by its key") from None
        return site, hashlib.sha256(certificate).digest()


class MaskedCohort(Before):
    """Simulated sites that answer under masks, doing all that real ones do; the wire alone is left out.

    The updates of a round are held until they are masked, as at so many sites.
    """

    def __init__(self, config: Config, others: Cohort, keys: SimulatedKeys) -> None:
        super().__init__(others)
        self._config, self._keys = config, keys
        self._sites: dict[SiteId, secure.SecureSite] = {}

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        first = next(iter(requests.values()))
        if isinstance(first, Advertise | AdvertiseEvaluation):
            work = Train if isinstance(first, Advertise) else Evaluate
            inner = work(id=first.id, round=first.round, weights=first.weights)
            model = await asyncio.to_thread(secure.hash_of, first.weights, secure.spread())
            async with aclosing(self._others.exchange(dict.fromkeys(requests, inner), deadline_s)) as replies:
                async for site, reply in replies:
                    if isinstance(reply, Update | Evaluation):
                        result = kept(reply) if isinstance(reply, Update) else reply
                        yield site, await asyncio.to_thread(self._site(site).offer, first, model, result)
                    else:
                        yield site, reply
            return
        for site, request in requests.items():
            yield site, await asyncio.to_thread(self._site(site).answer, request)  # type: ignore[arg-type]  # not step 0

    def _site(self, site: SiteId) -> secure.SecureSite:
        if site not in self._sites:
            key = self._keys.key(site)
            self._sites[site] = secure.SecureSite(
                self._config, site, SimulatedKeys.FEDERATION,
                certificate=site.encode(), sign=lambda message: key.sign(message, secure.ECDSA),
                verify=self._keys.verify, spread=secure.spread(),
            )  # fmt: skip
        return self._sites[site]


class Memory:
    """What a pool shares: one file with the global weights, and a slab of blocks for deltas.

    The files have no name, so nothing is left behind, whatever kills us. Trainers inherit them.
    """

    def __init__(self) -> None:
        self.fds = _nameless(), _nameless()
        self.weights, self.slab = (Path(f"/dev/fd/{fd}") for fd in self.fds)
        self._free: list[tuple[int, mmap.mmap]] = []
        self._end = 0

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def publish(self, weights: Arena) -> ArenaFile:
        """Nobody may be at work with the model that was published before."""
        at, payload = 0, weights.payload
        while at < len(payload):
            at += os.pwrite(self.fds[0], payload[at:], at)
        return ArenaFile(weights.schema, self.weights, weights.digest)

    def take(self, block_bytes: int) -> tuple[int, memoryview]:
        """A block (all are of one size) and where it is in the slab. It is free again when the view, and
        every tensor made from it, is gone."""
        if not self._free:
            size = -(-block_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self.fds[1], self._end + size)
            self._free.append((self._end, mmap.mmap(self.fds[1], size, offset=self._end)))
            self._end += size
        block = self._free.pop()
        view = memoryview(block[1])[:block_bytes]
        weakref.finalize(view, self._free.append, block)
        return block[0], view


def _nameless() -> int:
    """A file in memory; where the system has no such thing, one on disk that is already unlinked."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedtrain")
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())


def draw_partition(config: Config, path: Path) -> None:
    """A picture of how much of which label every simulated site has."""
    import numpy as np

    from ..training.partition import SimulatedSites, draw, labels_of
    from ..training.task import load_task

    sites = SimulatedSites(load_task(config.run.task, config.root), config.simulate, config.run.seed)
    labels = [np.asarray(labels_of(sites.data(name))) for name in sites.names]
    ends = np.cumsum([len(of_site) for of_site in labels])
    parts = dict(zip(sites.names, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
    draw(np.concatenate(labels), parts, path)
