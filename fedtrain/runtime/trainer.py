"""The trainer: a process with the task's code, the data and the GPUs, and without any key. Both its ends.

`Trainer` is the end that asks: a site's supervisor has one, a simulation a pool of them. It imports no
torch. `Workbench` is the end that works, in `python -m fedtrain.runtime.trainer FD`. Between them is a
socketpair of length-prefixed msgpack; models go by file, or by slots of shared memory, never by message.
A child whose parent is gone, for whatever reason, ends itself and all that it started, which is of its
process group; the parent ends what a child leaves behind. So `kill -9` of either leaves nothing.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from .. import malloc
from ..arena import Arena, ArenaFile, Frozen
from ..config import Config
from ..errors import BadUpdate, ConfigError, FedtrainError, StoreError, TaskError, reason_of, story_of
from ..messages import Evaluation, Metrics, SiteId, Update
from ..schema import Schema
from ..store.disk import explained
from ..store.memory import NEVER, SiteMemory
from . import compressed
from .privacy import noised
from .processes import ending, is_stopped, signalled_when_parent_ends
from .progress import Averages

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
SECTIONS = (
    "run",
    "train",
    "strategy",
    "secagg",
    "compression",
    "privacy",
    "simulate",
    "parallel",
)  # of fedtrain.toml; where keys lie is not among them
DATASETS = 1024  # sites whose data a trainer keeps loaded, those used last
DATA_BYTES = 2 << 30  # and of their tensors at most so much
HEAD = struct.Struct("<I")  # of a frame: how many bytes follow
FRAME_BYTES = 1 << 28  # a longer frame is not ours
ABANDONED_S = 5.0  # for a request that nobody waits for any more, before it is ended with the process
LOOK_S = 1.0  # between looks at whether a process that owes an answer was stopped
STOPPED_LOOKS = 5  # when it was in so many, one after the other, it is ended
CLOSE_S = 3.0  # for a child to leave by itself before it is killed
TRIES = 3  # a process that dies as it starts, or over a request, is started again until it was so many


# --- what is said; each frame is its length (u32) and one of these as msgpack


class Start(msgspec.Struct, tag=True, array_like=True):
    config: dict[str, Any]
    root: str
    data_dir: str | None
    simulated: bool
    metrics_only: bool = False


class Initial(msgspec.Struct, tag=True, array_like=True):
    out: str
    frozen: bool = False


class Apply(msgspec.Struct, tag=True, array_like=True):
    """Write the model that a patch makes of another."""

    base: Place
    patch: Place
    out: str


class Examples(msgspec.Struct, tag=True, array_like=True):
    site: SiteId


class Place(msgspec.Struct, array_like=True):
    """Where global weights lie; the digest tells one round's from the next in the same file."""

    path: str
    digest: str


class Freeze(msgspec.Struct, tag=True, array_like=True):
    """Train with the frozen parameters that lie there, not with those of the task's model()."""

    frozen: Place


class TrainOne(msgspec.Struct, tag=True, array_like=True):
    site: SiteId
    round: int
    weights: Place
    out: str
    counted: int  # as in messages.Train


class TrainMany(msgspec.Struct, tag=True, array_like=True):
    sites: list[SiteId]
    round: int
    weights: Place
    slab: str  # a file of shared memory
    offset: int  # bytes in it, from where the deltas lie one after the other
    counted: list[int]  # of each, as in messages.Train


class EvaluateMany(msgspec.Struct, tag=True, array_like=True):
    sites: list[SiteId]
    round: int
    weights: Place


class Show(msgspec.Struct, tag=True, array_like=True):
    """What the task's metrics() makes of sums over all sites, and of each site's own."""

    total: Metrics
    by_site: dict[SiteId, Metrics]


class Description(msgspec.Struct, tag=True, array_like=True):
    """What a trainer has loaded; of a simulation also who takes part, and who evaluates."""

    schema: Schema
    task_digest: str
    sites: list[SiteId] = []
    evaluators: list[SiteId] = []  # the sites, or "central" where they share one pool of data
    frozen: Frozen = Frozen()  # of the task's model()
    derives: bool = False  # the task has a metrics() of its own
    compressed: Schema | None = None  # of an update, where it is compressed

    @property
    def update(self) -> Schema:
        """Of an update, as it travels."""
        return self.compressed or self.schema


class Trained(msgspec.Struct, tag=True, array_like=True):
    num_examples: float
    metrics: Metrics
    digest: str = ""  # of the delta, where it lies in a file of its own


class Evaluated(msgspec.Struct, tag=True, array_like=True):
    metrics: Metrics


class Failed(msgspec.Struct, tag=True, array_like=True):
    reason: str
    config: bool = False  # a ConfigError: the user's files, not the task's code
    store: bool = False  # a StoreError: a full disk, say
    story: str = ""  # its traceback, for the people here; it may quote data, and goes no further
    update: bool = False  # a BadUpdate: what was found can't be used; another site's may

    def error(self) -> FedtrainError:
        return (ConfigError if self.config else StoreError if self.store else TaskError)(self.reason)


class Dying(msgspec.Struct, tag=True, array_like=True):
    """No answer, but why the process ends now."""

    reason: str


class Done(msgspec.Struct, tag=True, array_like=True):
    results: Sequence[Trained | Evaluated | Failed]


class Counted(msgspec.Struct, tag=True, array_like=True):
    examples: float | None


class Showing(msgspec.Struct, tag=True, array_like=True):
    metrics: Averages
    by_site: dict[SiteId, Averages]


class Saved(msgspec.Struct, tag=True, array_like=True):
    digest: str


Ask = Initial | Freeze | Apply | Examples | TrainOne | TrainMany | EvaluateMany | Show
Answer = Description | Failed | Dying | Done | Counted | Saved | Showing

_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)
_asks = msgspec.msgpack.Decoder(Ask)


def _frame(message: Start | Ask | Answer) -> bytes:
    body = _encoder.encode(message)
    return HEAD.pack(len(body)) + body


# --- the end that asks


class TrainerDied(TaskError):
    """The process ended in the middle of its work; another one may be started."""


class Trainer(asyncio.Protocol):
    """A trainer process. Requests are answered in the order in which they are made; several may wait."""

    description: Description

    def __init__(self, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self._process, self._log = process, log
        self._received = bytearray()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._ended: TrainerDied | None = None
        self._reason = ""  # why, where it is known
        self._silent = asyncio.Event()  # no more answers will come
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        data_dir: Path | None = None,
        scratch: Path,
        log: Path | None = None,
        simulated: bool = False,
        pass_fds: Sequence[int] = (),
        metrics_only: bool = False,
    ) -> Self:
        """A process that has loaded the task; ConfigError or TaskError where it can't, TrainerDied when TRIES
        of them died over it.

        `scratch` is for its temporary files. What the task prints goes to `log`, else to our stderr.
        A `simulated` one has the data of all sites, as [simulate] says; else it has what data(site) finds.
        One with `metrics_only` makes no model and trains nothing.
        """
        for left in reversed(range(TRIES)):
            try:
                return await cls._start(config, data_dir, scratch, log, simulated, pass_fds, metrics_only)
            except TrainerDied:
                if not left:
                    raise
        raise AssertionError("unreachable")

    @classmethod
    async def _start(
        cls,
        config: Config,
        data_dir: Path | None,
        scratch: Path,
        log: Path | None,
        simulated: bool,
        pass_fds: Sequence[int],
        metrics_only: bool,
    ) -> Self:
        ours, theirs = socket.socketpair()
        output = log.open("ab") if log is not None else None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", __name__, str(theirs.fileno()),
                stdin=subprocess.DEVNULL, stdout=output or 2, stderr=output or 2,
                pass_fds=(theirs.fileno(), *pass_fds), env=_environment(config, scratch),
                start_new_session=True,  # Ctrl-C is the parent's to handle, and stop() ends the whole group
            )  # fmt: skip
        finally:
            theirs.close()
            if output is not None:
                output.close()
        trainer = cls(process, log)
        await asyncio.get_running_loop().create_connection(lambda: trainer, sock=ours)
        table = {name: keys for name, keys in config.table().items() if name in SECTIONS}
        start = Start(
            table, str(config.root), None if data_dir is None else str(data_dir), simulated, metrics_only
        )
        try:
            trainer.description = await trainer._ask(start)
        except BaseException:
            await trainer.stop()
            raise
        return trainer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def backlog(self) -> int:
        """Requests not answered yet."""
        return len(self._waiting)

    async def initial(self, out: Path, *, frozen: bool = False) -> ArenaFile:
        """The model before round 0, or the frozen parameters of the task's model(), written to `out`."""
        saved = await self._ask(Initial(str(out), frozen))
        schema = self.description.frozen.schema if frozen else self.description.schema
        return ArenaFile(schema, out, saved.digest)

    async def beginning(self, start: Path | None, scratch: Path) -> tuple[Arena, Arena]:
        """The model that a run begins with, and its frozen parameters: those of `start`, a run directory or
        an export, or the task's own."""
        from ..tracking.export import beginning

        about, out = self.description, scratch / "initial"
        if start is not None:
            return beginning(start, about.schema, about.frozen.schema)
        try:
            return (await self.initial(out)).load(), await self.frozen(scratch)
        finally:
            out.unlink(missing_ok=True)

    async def frozen(self, scratch: Path) -> Arena:
        """The frozen parameters of the task's model()."""
        if not self.description.frozen.digest:
            return Arena.zeros(Schema(()))
        out = scratch / "frozen"
        try:
            return (await self.initial(out, frozen=True)).load()
        finally:
            out.unlink(missing_ok=True)

    async def freeze(self, frozen: ArenaFile) -> None:
        """Train with these frozen parameters from here on, unless they are those of the task's model()."""
        if frozen.digest == self.description.frozen.digest:
            return
        await self._ask(Freeze(_place(frozen)))

    async def apply(self, base: ArenaFile, patch: ArenaFile, out: Path) -> str:
        """The digest of the model that a patch makes of another, written to `out`."""
        saved: Saved = await self._ask(Apply(_place(base), _place(patch), str(out)))
        return saved.digest

    async def examples(self, site: SiteId) -> float | None:
        """How many examples the site has; None where only its training can tell."""
        counted: Counted = await self._ask(Examples(site))
        return counted.examples

    async def train(
        self, site: SiteId, round: int, weights: ArenaFile, out: Path, counted: int = NEVER
    ) -> Update:
        """Local training; the delta is written to `out`, whole or not at all. `counted`: as in Train."""
        done = await self._ask(TrainOne(site, round, _place(weights), str(out), counted))
        result = _good(done.results[0])
        delta = ArenaFile(self.description.update, out, result.digest)
        return Update(delta=delta, num_examples=result.num_examples, metrics=result.metrics)

    async def evaluate(self, site: SiteId, round: int, weights: ArenaFile) -> Evaluation:
        done = await self._ask(EvaluateMany([site], round, _place(weights)))
        return Evaluation(metrics=_good(done.results[0]).metrics)

    async def train_many(
        self,
        sites: list[SiteId],
        round: int,
        weights: ArenaFile,
        slab: Path,
        offset: int,
        counted: list[int],
    ) -> list[Trained | Failed]:
        """Local training of several sites; their deltas are written into the slab, one after the other."""
        done = await self._ask(TrainMany(sites, round, _place(weights), str(slab), offset, counted))
        return done.results  # type: ignore[no-any-return]

    async def evaluate_many(
        self, sites: list[SiteId], round: int, weights: ArenaFile
    ) -> list[Evaluated | Failed]:
        done = await self._ask(EvaluateMany(sites, round, _place(weights)))
        return done.results  # type: ignore[no-any-return]

    async def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        """What people see of an evaluation; see task.shown."""
        showing: Showing = await self._ask(Show(total, dict(by_site)))
        return showing.metrics, showing.by_site

    async def close(self) -> None:
        """Let the process go; it is killed when it does not leave."""
        self._transport.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._watching), CLOSE_S)
        await self.stop()

    async def stop(self) -> None:
        """End the process and all that it started, now."""
        self._kill()
        self._transport.close()
        await self._watching

    async def _ask(self, message: Start | Ask) -> Any:
        if self._ended is not None:
            raise self._ended
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._waiting.append(answer)
        self._transport.write(_frame(message))
        loop.call_later(LOOK_S, self._look, answer, 0)
        try:
            return await answer
        except asyncio.CancelledError:
            loop.call_later(ABANDONED_S, self._give_up, answer)
            raise

    def _give_up(self, answer: asyncio.Future[Any]) -> None:
        """A cancelled request is let finish, so that the process is kept, but not for ever."""
        if answer in self._waiting:
            self._kill()

    def _look(self, answer: asyncio.Future[Any], before: int) -> None:
        """End a process that stands still (SIGSTOP) while an answer is due, and did in so many looks before:
        nothing would come of it until the round is over, while a new one gives the same bits."""
        if answer.done() or self._ended is not None:
            return
        looks = before + 1 if is_stopped(self._process.pid) else 0
        if looks == STOPPED_LOOKS:
            self._reason = f"the trainer process was stopped for {STOPPED_LOOKS * LOOK_S:g} s"
            self._kill()
        asyncio.get_running_loop().call_later(LOOK_S, self._look, answer, looks)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), transport
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Give each answer to whoever asked."""
        self._received += data
        while len(self._received) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(self._received)[0]
            if end > FRAME_BYTES:
                return self._transport.abort()
            if len(self._received) < end:
                return None
            body = self._received[HEAD.size : end]
            del self._received[:end]
            try:
                self._answered(_answers.decode(body))
            except msgspec.DecodeError:
                return self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._silent.set()

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Dying):
            self._reason = answer.reason
            return
        for failed in answer.results if isinstance(answer, Done) else [answer]:
            if isinstance(failed, Failed):
                self._tell(failed)
        asked = self._waiting.popleft()
        if asked.done():  # nobody waits for it any more
            return
        if isinstance(answer, Failed):
            asked.set_exception(answer.error())
        else:
            asked.set_result(answer)

    def _tell(self, failed: Failed) -> None:
        """The people here where and why the task failed; once, however many sites fail there."""
        place = str(self._log), failed.reason.partition(", in ")[0]
        if not failed.story or place in _told:
            return
        _told.add(place)
        if self._log is None:
            print(failed.story, end="", file=sys.stderr, flush=True)
        else:
            with self._log.open("a") as log:
                log.write(failed.story)

    async def _watch(self) -> None:
        """When the process ends, end what it started, and say so to everyone who still waits."""
        status = await self._process.wait()
        self._kill()
        with suppress(asyncio.TimeoutError):  # answers that it had sent before
            await asyncio.wait_for(self._silent.wait(), 1)
        self._transport.close()
        self._ended = TrainerDied(self._reason or f"the trainer process {ending(status)}")
        for asked in self._waiting:
            if not asked.done():
                asked.set_exception(self._ended)
        self._waiting.clear()


def unchanged(agreed: Description, found: Description) -> None:
    """ConfigError when a trainer that was started again has other code than the one before it."""
    if found != agreed:
        raise ConfigError(
            "the task's code was changed while it is being trained, and a trainer process had to be started "
            "again. Undo the change; or start the run's processes again, with the same code at all of them."
        )


def _good(result: Any) -> Any:
    if isinstance(result, Failed):
        raise TaskError(result.reason)
    return result


def _place(weights: ArenaFile) -> Place:
    return Place(str(weights.path), weights.digest)


def _environment(config: Config, scratch: Path) -> dict[str, str]:
    """The child's: ours, less what names keys; fedtrain is found where we found it, whatever the folder."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("FEDTRAIN_", "GRPC_", "SSLKEYLOGFILE"))}
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [here, ours.get("PYTHONPATH", "")]))
    threads = str(config.train.threads)
    return ours | {
        "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch.resolve()),
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
        **malloc.ENVIRONMENT,  # new pages for every batch would cost a tenth of the training
    }  # fmt: skip


async def beside_torch(starting: Awaitable[T]) -> T:
    """Await trainers that start, and load torch here meanwhile: it takes as long."""
    loading = asyncio.create_task(asyncio.to_thread(import_module, "torch"))
    try:
        return await starting
    finally:
        await loading


# --- the end that works


def digest_of(config: Config) -> str:
    """Of the source that decides what is trained; none of it is run."""
    from ..training.task import task_digest

    own = [config.strategy.kind] if ":" in config.strategy.kind else []
    return task_digest(config.run.task, config.root, *own)


class Workbench:
    """The task, its engine, and the data of the sites used last. Needs no process: --debug has one inline."""

    def __init__(
        self,
        config: Config,
        data_dir: Path | None = None,
        *,
        simulated: bool,
        tell: Callable[[str, bool, bool], None] = lambda reason, answer, config: None,
    ) -> None:
        """`tell`: see ranks.Tell."""
        from .. import strategies
        from ..training.local import Engine
        from ..training.partition import SimulatedSites
        from ..training.task import derives, folder_of, load_task
        from ..training.vmapped import Vmapped

        if config.privacy.noise_multiplier and simulated and config.simulate.engine == "vmap":
            raise ConfigError('privacy.noise_multiplier: simulate.engine = "vmap" adds none. Use "loop".')
        digest = digest_of(config)  # before a line of it runs
        self._config = config
        self._task = load_task(config.run.task, config.root, data_dir)
        self._folder = folder_of(self._task)
        self._simulated = SimulatedSites(self._task, config.simulate, config.run.seed) if simulated else None
        strategy = strategies.build(config.strategy.kind, config.strategy.options, config.root)
        correct = strategy.correct if strategies.corrects(strategy) else None
        self._team = None
        if not simulated and config.parallel.ranks > 1:
            from .ranks import gathered

            self._team = gathered(config, self._task, self._load, data_dir, tell)
        else:
            self._engine = Engine(self._task, config.train, config.run.seed, correct)
        stack = self._simulated is not None and config.simulate.engine == "vmap"
        self._vmapped = Vmapped(self._engine) if stack else None
        self._data: OrderedDict[tuple[str, SiteId], tuple[Any, int]] = OrderedDict()
        self._data_bytes = 0
        self._weights: tuple[Place, Arena] | None = None
        self._slab: tuple[str, mmap.mmap] | None = None
        engine = self._team or self._engine
        self.description = Description(engine.schema, digest, frozen=engine.frozen)
        self._codec = compressed.up_codec(config, engine.schema)
        if self._codec is not None:
            self.description.compressed = self._codec.coded
        if self._simulated is not None:
            names = self._simulated.names
            self.description.sites = names
            self.description.evaluators = names if self._simulated.natural else ["central"]
        self.description.derives = derives(self._task)

    def initial(self, *, frozen: bool = False) -> Arena:
        """The weights that a run starts from, equal at all sites; or the frozen parameters."""
        return (self._team or self._engine).initial(frozen=frozen)

    def freeze(self, frozen: ArenaFile) -> None:
        """As Trainer.freeze; BadUpdate when they are not those that were announced."""
        if frozen.digest == self.description.frozen.digest:
            return
        found = frozen.load()
        if found.digest != frozen.digest:
            raise BadUpdate(
                f"{frozen.path}, the frozen parameters, is damaged: it is not {frozen.digest[:12]}…"
            )
        (self._team or self._engine).freeze(found)

    def train(self, site: SiteId, round: int, weights: Arena, out: Arena, counted: int = NEVER) -> Update:
        """The site's update, in `out` as it travels: with noise first, where there is any, and then
        compressed."""
        delta = out if self._codec is None else self._delta
        if self._team is not None:
            update = self._team.train(site, round, weights, delta)
        else:
            update = self._engine.train(site, self._load("data", site), round, weights, delta)
        update = noised(self._config, update, site, round, weights, self._simulated is not None)
        return self._compressed(update, site, round, out, counted)

    @cached_property
    def _delta(self) -> Arena:
        """Where an update is written that leaves compressed."""
        return Arena.empty(self.description.schema)

    def _compressed(self, update: Update, site: SiteId, round: int, out: Arena, counted: int) -> Update:
        codec, delta = self._codec, update.delta
        if codec is None:
            return update
        assert isinstance(delta, Arena), delta
        seed = compressed.up_seed(self._config, round, site)
        if not codec.stateful:
            codec.encode(delta, seed, {}, out)
        else:
            memory = self._memory(site)
            if counted != NEVER and memory.empty:
                print(
                    f"{site} has kept nothing of round {counted + 1}, in which it counted: it goes on as "
                    f"a new site would",
                    file=sys.stderr,
                )
                counted = NEVER
            before = codec.init() if counted == NEVER else memory.load(counted).views()
            _, after = codec.encode(delta, seed, before, out)
            memory.keep(round, counted, Arena.pack(after))
        return msgspec.structs.replace(update, delta=out)

    def _memory(self, site: SiteId) -> SiteMemory:
        simulated = self._simulated is not None
        folder = self._config.simulate_dir if simulated else self._config.site_dir(site)
        return SiteMemory(folder / "memory" / site, durable=not simulated)

    def evaluate(self, site: SiteId, round: int, weights: Arena) -> Evaluation:
        if self._team is not None:
            return Evaluation(metrics=self._team.evaluate(site, weights))
        return Evaluation(metrics=self._engine.evaluate(self._load("eval_data", site), weights))

    def examples(self, site: SiteId) -> float | None:
        from ..training.examples import Stream, examples_of

        data = self._load("data", site)
        examples = examples_of(data)
        if isinstance(examples, Stream) or (self._team or self._engine).weighs_items(data):
            return None
        return float(examples.count)

    def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        """What people see of an evaluation; see task.shown."""
        from ..training.task import shown

        return shown(self._task, total, by_site)

    def answer(self, ask: Ask) -> Answer:
        match ask:
            case Initial(out, frozen):
                initial = self.initial(frozen=frozen)
                with _new_file(initial.schema, Path(out)) as arena:
                    return Saved(arena.copy_(initial).digest)
            case Freeze(place):
                self.freeze(ArenaFile(self.description.frozen.schema, Path(place.path), place.digest))
                return Saved(place.digest)
            case Apply(base, patch, out):
                codec = compressed.down_codec(self._config, self.description.schema)
                assert codec is not None, "no patches come without compression.down"
                model = ArenaFile(codec.schema, Path(base.path), base.digest).load()
                change = ArenaFile(codec.coded, Path(patch.path), patch.digest)
                with _new_file(codec.schema, Path(out)) as arena:
                    arena.copy_(compressed.patched(self._config, codec, model, change))
                    return Saved(arena.digest)
            case Examples(site):
                return Counted(self.examples(site))
            case TrainOne(site, round, place, out, counted):
                weights = self._at(place)
                with _new_file(self.description.update, Path(out)) as arena:
                    update = self.train(site, round, weights, arena, counted)
                    return Done([Trained(update.num_examples, update.metrics, arena.digest)])
            case TrainMany(sites, round, place, slab, offset, counted):
                return Done(
                    self._train_many(
                        sites, round, self._at(place), self._block(slab, offset, len(sites)), counted
                    )
                )
            case EvaluateMany(sites, round, place):
                weights = self._at(place)
                return Done([self._evaluated(site, round, weights) for site in sites])
            case Show(total, by_site):
                return Showing(*self.shown(total, by_site))

    def _train_many(
        self, sites: list[SiteId], round: int, weights: Arena, deltas: torch.Tensor, counted: list[int]
    ) -> list[Trained | Failed]:
        """`deltas` is uint8 [sites, bytes of an update as it travels]."""
        outs = [Arena(self.description.update, deltas[i]) for i in range(len(sites))]
        if self._vmapped is None:
            each = zip(sites, outs, counted, strict=True)
            return [self._trained(site, round, weights, out, last) for site, out, last in each]
        try:
            pairs = [(site, self._load("data", site)) for site in sites]
            whole = deltas if self._codec is None else deltas.new_empty(len(sites), weights.schema.nbytes)
            updates = self._vmapped.train(pairs, round, weights, whole)
            for update, site, out, last in zip(updates, sites, outs, counted, strict=True):
                self._compressed(update, site, round, out, last)
        except (TaskError, BadUpdate) as e:
            if len(sites) == 1:
                return [_failed(e)]
            # One by one, so that only those fail whose fault it is.
            alone = [
                self._train_many([site], round, weights, deltas[i : i + 1], counted[i : i + 1])
                for i, site in enumerate(sites)
            ]
            return [result for results in alone for result in results]
        return [Trained(update.num_examples, update.metrics) for update in updates]

    def _trained(
        self, site: SiteId, round: int, weights: Arena, out: Arena, counted: int
    ) -> Trained | Failed:
        try:
            update = self.train(site, round, weights, out, counted)
        except (TaskError, BadUpdate) as e:
            return _failed(e)
        return Trained(update.num_examples, update.metrics)

    def _evaluated(self, site: SiteId, round: int, weights: Arena) -> Evaluated | Failed:
        try:
            return Evaluated(self.evaluate(site, round, weights).metrics)
        except TaskError as e:
            return _failed(e)

    def _load(self, what: str, site: SiteId) -> Any:
        """The site's data() or eval_data(), loaded once while it is among those used last."""
        key = what, site
        if key in self._data:
            self._data.move_to_end(key)
            return self._data[key][0]
        loaded = self._fetch(what, site)
        nbytes = _nbytes(loaded)
        self._data[key] = loaded, nbytes
        self._data_bytes += nbytes
        while len(self._data) > 1 and (len(self._data) > DATASETS or self._data_bytes > DATA_BYTES):
            _, (_, freed) = self._data.popitem(last=False)
            self._data_bytes -= freed
        return loaded

    def _fetch(self, what: str, site: SiteId) -> Any:
        from ..training.task import user_code

        if self._simulated is not None:
            if what == "data":
                return self._simulated.data(site)
            if not self._simulated.natural:
                return self._simulated.eval_data()[site]
        with user_code(self._folder, f"{what}({site!r})"):
            return self._task.data(site) if what == "data" else self._task.eval_data(site)

    def _at(self, place: Place) -> Arena:
        """Global weights, looked at where they lie; writing to them would not reach the file."""
        if self._weights is None or self._weights[0] != place:
            with open(place.path, "rb") as f:
                self._weights = (
                    place,
                    Arena.wrap(self.description.schema, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)),
                )
        return self._weights[1]

    def _block(self, slab: str, offset: int, sites: int) -> torch.Tensor:
        """uint8 [sites, bytes of an update as it travels] of a slab, which grows now and then."""
        import torch

        nbytes = self.description.update.nbytes
        if self._slab is None or self._slab[0] != slab or len(self._slab[1]) < offset + sites * nbytes:
            with open(slab, "r+b") as f:
                self._slab = slab, mmap.mmap(f.fileno(), 0)
        flat = torch.frombuffer(self._slab[1], dtype=torch.uint8, offset=offset, count=sites * nbytes)
        return flat.view(sites, nbytes)


class MetricsOnly:
    """The task's metrics() and nothing else, for an aggregator, which has no data: no model is made."""

    broken = False

    def __init__(self, config: Config) -> None:
        from ..training.task import derives, load_task

        digest = digest_of(config)
        self._task = load_task(config.run.task, config.root)
        self.description = Description(Schema(()), digest, derives=derives(self._task))

    def answer(self, ask: Ask) -> Answer:
        from ..training.task import shown

        assert isinstance(ask, Show), ask
        return Showing(*shown(self._task, ask.total, ask.by_site))


def _nbytes(data: Any) -> int:
    """Of data() as tensors; 0 of a Dataset, which may well lie on disk."""
    from ..training.examples import Tensors, examples_of

    examples = examples_of(data)
    return sum(c.nbytes for c in examples.columns) if isinstance(examples, Tensors) else 0


@contextmanager
def _new_file(schema: Schema, path: Path) -> Iterator[Arena]:
    """An arena that lies in a file: under its name with all that the block wrote, or not there at all.

    A file of its size that lies there already, an older update, is written over: fresh pages are dear.
    """
    partial = path.with_name(path.name + ".new")
    try:
        with explained(path):
            if path.exists() and path.stat().st_size == schema.nbytes:
                path.replace(partial)
            file = partial.open("r+b" if partial.exists() else "w+b")
        with file as f:
            with explained(path):
                f.truncate(schema.nbytes)
                if schema.nbytes:  # or a write to the map, on a disk that is full, ends the process
                    os.posix_fallocate(f.fileno(), 0, schema.nbytes)
            yield (
                Arena.wrap(schema, mmap.mmap(f.fileno(), schema.nbytes))
                if schema.nbytes
                else Arena.zeros(schema)
            )
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _failed(error: Exception) -> Failed:
    """One line for whoever asked, without data values, and the story for the people here."""
    config, store = isinstance(error, ConfigError), isinstance(error, StoreError)
    return Failed(reason_of(error), config, store, story_of(error), isinstance(error, BadUpdate))


_told: set[tuple[str, str]] = set()  # a thousand sites that fail alike are one traceback


def _serve(channel: socket.socket) -> None:
    """Load what Start names, then answer until the other end is gone."""
    if hasattr(os, "SCHED_BATCH"):  # or each request's arrival takes the core from who sends the next one
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    threading.Thread(target=_leave_with, args=(channel,), daemon=True).start()
    signalled_when_parent_ends(signal.SIGCONT)  # or that thread might be stopped
    stream = channel.makefile("rwb")

    def frames() -> Iterator[bytes]:
        while head := stream.read(HEAD.size):
            yield stream.read(*HEAD.unpack(head))

    saying = threading.Lock()

    def say(answer: Answer) -> None:
        with saying, suppress(BrokenPipeError):  # nobody is there any more, and this process ends
            stream.write(_frame(answer))
            stream.flush()

    def tell(reason: str, answer: bool, config: bool) -> None:
        saying.acquire()  # for good: the process ends, and nothing is said after this
        stream.write(_frame(Failed(reason, config) if answer else Dying(reason)))
        stream.flush()

    incoming = frames()
    start = msgspec.msgpack.decode(next(incoming), type=Start)
    gc.disable()  # what is loaded stays: to look for garbage in it takes a seventh of the time
    try:
        data_dir = Path(start.data_dir) if start.data_dir is not None else None
        config = Config.of(start.config, start.root)
        bench: Workbench | MetricsOnly
        if start.metrics_only:
            bench = MetricsOnly(config)
        else:
            bench = Workbench(config, data_dir, simulated=start.simulated, tell=tell)
    except Exception as e:  # the user's imports and constructors run here
        return say(_failed(e))
    gc.freeze()
    gc.enable()
    say(bench.description)
    for body in incoming:
        try:
            answer = bench.answer(_asks.decode(body))
        except Exception as e:  # torch and the user's code run here, and this process has to go on
            answer = _failed(e)
        say(answer)


def _leave_with(channel: socket.socket) -> None:
    """End this process, and all that it started, as soon as the other end is gone."""
    poll = select.poll()
    poll.register(channel, 0)  # hang-up is always reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
