"""Trainer processes that share the sites of a simulation among them.

Sites are trained many to a message, and their updates come back in shared memory. What a site sends depends
on the weights, its data and (seed, round, site) alone, so neither the number of processes nor their speed
changes a bit of the model.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from ...aggregation.mean import blocks_of
from ...arena import AnyArena, Arena, ArenaFile, Slab, patches_to
from ...config import Config
from ...errors import ConfigError, TaskError, nearest, some
from ...exchange import in_order
from ...fairness import SERVER
from ...messages import Evaluate, Evaluation, Folded, Metrics, Reply, Request, SiteId, Train, Update
from ...store.memory import NEVER
from ...training.task import Task
from ..journal import Averages, plain
from ..trainers import trainer_messages as msg
from ..trainers.folding import sites_at_once
from ..trainers.supervised import Supervised, TrainerLost, on_machines
from ..trainers.trainer import Trains
from ..trainers.trainer_messages import Description, Failed, good
from ..trainers.workbench import Workbench
from .launchers import Launcher, launched
from .local_trainer import LocalTrainer
from .partial_sums import bytes_of
from .shared_memory import SharedMemory
from .shares import Failures, Share, asked_of, folded, reply_of, singly
from .training_bytes import TrainingBytes

T = TypeVar("T")
Cut = Callable[..., list[Share]]  # shares.folded or shares.singly
AT_A_TIME = 2  # shares that a worker is given: the next one waits when it is done
UNDER_WAY = 4  # shares for each worker that are held, or asked for, before the first of them is used
MANY = 1000  # sites, among which no name is looked for that is like another


class PoolCohort:
    """exchange.Cohort over trainer processes.

    Replies come in the order of the requests, and there is no deadline: the result must not depend on how
    fast the machine is. A few batches are under way at a time, so memory doesn't grow with the sites. An
    update lies in shared memory, which is used again once nobody looks at it.
    """

    def __init__(
        self, config: Config, trainers: Sequence[Supervised], launcher: Launcher, scratch: Path,
        memory: SharedMemory,
    ) -> None:  # fmt: skip
        """`launcher` has started the trainers."""
        self._trainers, self._launcher = [*trainers], launcher
        self.machines = partial(on_machines, self._trainers)
        self._config, self._scratch, self._memory = config, scratch, memory
        self.description: Description = trainers[0].description
        self._stacked = config.simulate.engine == "stacked"
        self._site_s: float | None = None  # that a site's part in a folded round took, of one worker
        self.bytes_in = self.bytes_out = 0  # as they would travel
        about = self.description
        self._wire = TrainingBytes(config, about.schema, about.update, about.extras)
        self._held: dict[SiteId, str] = {}  # the model that each site would have
        self._known = ""  # and the one that it would have from the start
        self._published: ArenaFile | None = None
        self._debugged: tuple[SiteId, Trains] | None = None  # a site that this process trains
        self.tell_lost: Callable[[str], None] = print  # a line about a trainer
        self._failures = Failures()

    @classmethod
    async def start(
        cls,
        config: Config,
        workers: int | None,
        scratch: Path,
        data_dir: Path | None = None,
        task: Task | None = None,
    ) -> Self:
        """A pool of `workers` processes, or of simulate.workers. Without any the sites train in this process,
        with `task` where it is given, else with the one that run.task names."""
        memory = SharedMemory()
        try:
            launcher, trainers = await launched(config, workers, scratch, data_dir, task, memory)
        except BaseException:
            memory.close()
            raise
        return cls(config, trainers, launcher, scratch, memory)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(trainer.close() for trainer in self._trainers))
        await self._launcher.close()
        self._memory.close()

    @property
    def workers(self) -> int:
        return len(self._trainers)

    async def choose(self, sites: list[SiteId], updates: int) -> msg.Chosen:
        """The engine for so many updates, and why; one worker tries a stack of these sites."""
        asked = msg.Choose(sites, -(-updates // self.workers))
        return await self._trainers[0]._ask(asked)  # type: ignore[no-any-return]  # as the message asks

    async def train_by(self, engine: str) -> None:
        """Have all trainers train by this engine."""
        self._stacked = engine == "stacked"
        await asyncio.gather(*(trainer.train_by(engine) for trainer in self._trainers))

    async def beginning(self, start: Path | None) -> tuple[Arena, Arena]:
        """See Trainer.beginning."""
        return await self._trainers[0].beginning(start, self._scratch)

    async def keep_initial(self) -> None:
        """As sites do that take patches."""
        self._known = (await self.beginning(None))[0].digest

    async def freeze(self, frozen: ArenaFile) -> None:
        """Have all trainers train with the run's frozen parameters."""
        here = [] if self._debugged is None else [self._debugged[1]]
        await asyncio.gather(*(trainer.freeze(frozen) for trainer in (*self._trainers, *here)))

    def debug(self, site: SiteId, bench: Workbench) -> None:
        """Have one site trained in this process, where breakpoint() works, and before the others."""
        sites, evaluators = self.description.sites, self.description.evaluators
        if site not in sites and site not in evaluators:
            near = nearest(site, {*sites, *evaluators}) if len(sites) < MANY else f" It has {some(sites)}."
            raise ConfigError(f"--debug {site}: there is no such site.{near}")
        self._debugged = site, LocalTrainer(bench)

    async def examples(self, site: SiteId) -> float | None:
        """See Trainer.examples."""
        return await self._at_a_trainer(lambda trainer: trainer.examples(site), [site])

    async def partition_note(self) -> str:
        return str((await self._trainers[0]._ask(msg.NotePartition())).text)

    async def members(self, at_least: int) -> Sequence[SiteId]:
        return self.description.sites

    async def newcomer(self, known: Collection[SiteId]) -> None:
        await asyncio.get_running_loop().create_future()  # all are there from the start

    def tell(self, site: SiteId, line: str) -> None:
        """There is nobody at a simulated site; the run's own log has the line."""

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        async with aclosing(self._replies(requests, singly)) as replies:
            async for (site,), reply in replies:
                assert not isinstance(reply, Folded), "single updates are asked for"
                yield site, reply

    async def fold(
        self, requests: Mapping[SiteId, Train], deadline_s: float, summands: int = 0,
        plan: Sequence[SiteId] = (),
    ) -> AsyncGenerator[tuple[Sequence[SiteId], Folded | Reply], None]:  # fmt: skip
        """See exchange.Folds. Where a site is debugged, and so the first, all updates come one by one."""
        if self._debugged is not None:
            async with aclosing(in_order(self.exchange(requests, deadline_s), list(requests))) as singles:
                async for site, reply in singles:
                    yield (site,), reply
            return
        block_bytes = bytes_of(self._config, self.description, 1, summands)
        cut, began = partial(folded, block_bytes=block_bytes, site_s=self._site_s), time.perf_counter()
        async with aclosing(self._replies(requests, cut, summands, plan)) as replies:
            async for sites, found in replies:
                yield sites, found
        self._site_s = (time.perf_counter() - began) * len(self._trainers) / max(1, len(requests))

    def _replies(
        self, requests: Mapping[SiteId, Request], cut: Cut, summands: int = 0, plan: Sequence[SiteId] = ()
    ) -> AsyncGenerator[tuple[Sequence[SiteId], Folded | Reply], None]:
        """What comes of the shares, in their order."""
        about, training = self.description, isinstance(next(iter(requests.values()), None), Train)
        results = self._results(requests, cut, summands, plan)
        return self._failures.told(results, len(about.sites if training else about.evaluators))

    async def _results(
        self, requests: Mapping[SiteId, Request], cut: Cut, summands: int = 0, plan: Sequence[SiteId] = ()
    ) -> AsyncGenerator[tuple[Sequence[SiteId], Folded | Reply | Failed], None]:
        """The same with the task's failures. Few shares are under way: memory doesn't grow with the sites."""
        if not requests:
            return
        request = next(iter(requests.values()))
        assert isinstance(request, Train | Evaluate), request
        assert all(r.id == request.id for r in requests.values()), "a simulation asks all its sites the same"
        counted = {site: r.counted for site, r in requests.items() if isinstance(r, Train | Evaluate)}
        weights = self._publish(request.weights)
        number, workers, asked = request.round, len(self._trainers), len(requests)
        waiting = deque(asked_of(self._shared(cut, list(plan or requests)), requests))
        under_way, busy = deque[tuple[Share, asyncio.Task[Any]]](), asyncio.Semaphore(AT_A_TIME * workers)

        async def work(share: Share) -> Folded | Sequence[Reply | Failed]:
            last = [counted[site] for site in share.sites]
            async with busy:
                if isinstance(request, Evaluate):
                    return await self._evaluate(share.sites, number, weights, last)
                if share.folded:
                    found = await self._fold(share, number, weights, last, summands)
                    if isinstance(found, Folded):
                        return found
                return await self._train(share.sites, number, weights, last)

        try:
            while waiting or under_way:
                while waiting and len(under_way) < UNDER_WAY * workers:
                    share = waiting.popleft()
                    under_way.append((share, asyncio.create_task(work(share))))
                share, task = under_way[0]
                found = await task
                under_way.popleft()
                if isinstance(found, Folded):
                    self._count(share.sites, request, found.updates, asked)
                    yield share.sites, found
                    continue
                for site, reply in zip(share.sites, found, strict=True):
                    if self._debugged is not None and site == self._debugged[0]:
                        good(reply)
                    self._count((site,), request, int(isinstance(reply, Update)), asked)
                    yield (site,), reply
        except (asyncio.CancelledError, TaskError, ConfigError):  # the whole run stops
            for _, task in under_way:
                task.cancel()
            raise
        finally:  # whoever wants no more replies leaves no trainer that still reads these weights
            await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)

    def _count(self, sites: Sequence[SiteId], request: Train | Evaluate, updates: int, asked: int) -> None:
        """Count the bytes that these sites, of all that are asked, would have got and sent."""
        weights = request.weights
        for held, times in Counter(map(self._held.get, sites)).items():
            have = self._known if held is None else held
            if have != weights.digest:
                patches = patches_to(weights, have.__eq__)
                sent = [patch.arena for patch in patches] or [weights]
                self.bytes_out += times * sum(arena.schema.nbytes for arena in sent)
        self._held.update(dict.fromkeys(sites, weights.digest))
        self.bytes_in += updates * self._wire.vector_bytes(asked)

    def _shared(self, cut: Cut, sites: list[SiteId]) -> list[Share]:
        """The sites' shares. A debugged site is the first, alone."""
        if self._debugged is not None and self._debugged[0] in sites:
            alone = Share([self._debugged[0]])
            rest = [site for site in sites if site not in alone.sites]
            return [alone, *(self._shared(cut, rest) if rest else [])]
        nbytes = self.description.update.nbytes
        return cut(sites, len(self._trainers), self._at_once, nbytes, stacked=self._stacked)

    @property
    def _at_once(self) -> int:
        about = self.description
        return sites_at_once(self._stacked, about.update.nbytes, on_gpu=about.on_gpu)

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
    ) -> list[Reply | Failed]:
        import torch

        schema, slab = self.description.update, self._memory.slab
        offset, block = self._memory.take(len(sites) * schema.nbytes)
        results = await self._at_a_trainer(
            lambda t: t.train_many(sites, round, weights, slab, offset, counted), sites
        )
        deltas = torch.frombuffer(block, dtype=torch.uint8, count=len(sites) * schema.nbytes)
        rows = Slab(schema, deltas.view(len(sites), schema.nbytes)).arenas()
        updates = (partial(msg.Trained.update, delta=row) for row in rows)
        return [*map(reply_of, results, updates)]

    async def _fold(
        self, share: Share, round: int, weights: ArenaFile, counted: list[int], summands: int
    ) -> Folded | Failed:
        """Failed where the task failed at each of the share's sites, which are then asked one by one."""
        blocks = len(blocks_of(share.places or range(len(share.sites))))
        offset, block = self._memory.take(bytes_of(self._config, self.description, blocks, summands))
        command = msg.FoldMany(
            share.sites, round, msg.ModelFile.of(weights), counted, self._at_once, summands,
            str(self._memory.slab), offset, share.places, share.span,
        )  # fmt: skip
        found = await self._at_a_trainer(lambda trainer: trainer.fold(command))
        return found if isinstance(found, Failed) else msgspec.structs.replace(found, sums=block)

    async def _evaluate(
        self, sites: list[SiteId], round: int, weights: ArenaFile, counted: list[int]
    ) -> list[Reply | Failed]:
        results = await self._at_a_trainer(lambda t: t.evaluate_many(sites, round, weights, counted), sites)
        return [reply_of(r, lambda r: Evaluation(metrics=r.metrics)) for r in results]

    async def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        """What people see of an evaluation."""
        if not self.description.derives:
            return await plain(total, by_site)
        return await self._at_a_trainer(lambda trainer: trainer.shown(total, by_site))

    async def at_server(self, number: int, weights: AnyArena) -> Averages:
        """A journal.AtServer: what a model is worth on the task's eval_data("server")."""
        place = self._publish(weights)
        (found,) = await self._at_a_trainer(
            lambda trainer: trainer.evaluate_many([SERVER], number, place, [NEVER])
        )
        return (await self.shown(good(found).metrics, {}))[0]

    async def _at_a_trainer(self, ask: Callable[[Trains], Awaitable[T]], sites: Sequence[SiteId] = ()) -> T:
        """Ask the least busy one, or the one in this process for a debugged site."""
        if self._debugged is not None and self._debugged[0] in sites:
            return await ask(self._debugged[1])
        while True:
            trainer = min(self._trainers, key=lambda trainer: trainer.backlog)
            try:
                return await ask(trainer)
            except TrainerLost:
                if trainer in self._trainers and len(self._trainers) > 1:
                    self._trainers.remove(trainer)  # the others do its work, with the same bits
                    self.tell_lost(f"a trainer on {trainer.machine} is lost, {self.machines()} go on")
                elif trainer in self._trainers:
                    raise
