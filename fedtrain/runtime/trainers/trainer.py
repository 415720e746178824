"""The trainer of a site, as the process sees it that gives it work: started, asked, watched and ended.

A trainer is a process with the task's code, the data and the GPUs, and without any key
(`trainer_process.py`). A site's supervisor has one, a simulation a pool of them. Messages go over a
socketpair; models go by file, or by slots of shared memory, never by message. This file imports no torch.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ...arena import Arena, ArenaFile
from ...config import Config
from ...errors import TaskError
from ...messages import Evaluation, Folded, Metrics, SiteId, Update
from ...questions import Column, Question
from ...schema import Schema
from ...store.memory import NEVER
from ..journal import Averages
from ..processes import ending, is_stopped
from . import trainer_messages as msg
from .trainer_process import spawn, start_message

ABANDONED_S = 5.0  # a cancelled command that takes longer than this ends the process
POLL_S = 1.0  # how often a process that owes an answer is checked for having been stopped
STOPPED_POLLS = 5  # a process found stopped so many times in a row is ended
CLOSE_S = 3.0  # a child may take so long to leave by itself before it is killed
KILLED_S = 10.0  # until a killed process is left to the kernel: one that waits for a dead disk does not end
TRIES = 3  # a process that dies as it starts, or over a command, is started so many times

_printed: set[tuple[str, ...]] = set()  # where tasks failed: sites that fail alike give one traceback


class TrainerDied(TaskError):
    """The process ended in the middle of its work; another one may be started."""


class Trains:
    """What a site, a peer or a simulation asks of a trainer. Each request is a message with its answer."""

    description: msg.Description
    machine: str = ""  # on which it runs; "": on this one

    async def _ask(self, message: msg.Start | msg.Command) -> Any:
        """The answer; TaskError, ConfigError or StoreError where the trainer failed."""
        raise NotImplementedError("a trainer says where its messages go")

    @property
    def backlog(self) -> int:
        """Requests not answered yet."""
        return 0

    async def close(self) -> None:
        """End what works for this trainer."""

    async def initial(self, out: Path, *, frozen: bool = False) -> ArenaFile:
        """The model before round 0, or the frozen parameters of the task's model(), written to `out`."""
        saved = await self._ask(msg.Initial(str(out), frozen))
        schema = self.description.frozen.schema if frozen else self.description.schema
        return ArenaFile(schema, out, saved.digest)

    async def beginning(self, start: Path | None, scratch: Path) -> tuple[Arena, Arena]:
        """The model that a run begins with, and its frozen parameters: those of `start`, a run directory or
        an export, or the task's own."""
        from ...tracking.export import beginning

        about, out = self.description, scratch / "initial"
        if start is not None:
            return beginning(start, about.schema.model, about.frozen.schema)
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
        await self._ask(msg.Freeze(msg.ModelFile.of(frozen)))

    async def apply(self, base: ArenaFile, patch: ArenaFile, out: Path, summed: msg.Summed | None) -> str:
        """The digest of the model that a patch, or a sum, makes of another, written to `out`."""
        ends = msg.ModelFile.of(base), msg.ModelFile.of(patch)
        return str((await self._ask(msg.Apply(*ends, str(out), summed))).digest)

    async def examples(self, site: SiteId) -> float | None:
        """How many examples the site has; None where only its training can tell."""
        counted: msg.Counted = await self._ask(msg.Examples(site))
        return counted.examples

    async def train(
        self, site: SiteId, round: int, weights: ArenaFile, out: Path, counted: int = NEVER
    ) -> Update:
        """Local training; the delta is written to `out`, whole or not at all. `counted`: as in Train."""
        done = await self._ask(msg.TrainOne(site, round, msg.ModelFile.of(weights), str(out), counted))
        result: msg.Trained = msg.good(done.results[0])
        return result.update(ArenaFile(self.description.update, out, result.digest))

    async def evaluate(
        self, site: SiteId, round: int, weights: ArenaFile, counted: int = NEVER
    ) -> Evaluation:
        done = await self._ask(msg.EvaluateMany([site], round, msg.ModelFile.of(weights), [counted]))
        return Evaluation(metrics=msg.good(done.results[0]).metrics)

    async def columns(self, site: SiteId, form: bool = False) -> tuple[Column, ...]:
        """What the columns of the site's data are; `form`: as sites compare them before a run."""
        found: msg.HasColumns = await self._ask(msg.ColumnsOf(site, form))
        return found.columns

    async def tally(self, site: SiteId, question: Question, least: int) -> Evaluation:
        """The site's answer to a question about its data; see counting.tally."""
        done = await self._ask(msg.TallyOne(site, question, least))
        return Evaluation(metrics=msg.good(done.results[0]).metrics)

    async def train_many(
        self, sites: list[SiteId], round: int, weights: ArenaFile, slab: Path, offset: int, counted: list[int]
    ) -> list[msg.Trained | msg.Failed]:
        """Local training of several sites; their deltas are written into the slab, one after the other."""
        done = await self._ask(
            msg.TrainMany(sites, round, msg.ModelFile.of(weights), str(slab), offset, counted)
        )
        return done.results  # type: ignore[no-any-return]  # as the message asks

    async def fold(self, command: msg.FoldMany) -> Folded | msg.Failed:
        """Local training of several sites, whose updates are summed. Failed when it ends the run."""
        return await self._ask(command)  # type: ignore[no-any-return]  # as the message asks

    async def evaluate_many(
        self, sites: list[SiteId], round: int, weights: ArenaFile, counted: list[int]
    ) -> list[msg.Measured | msg.Failed]:
        done = await self._ask(msg.EvaluateMany(sites, round, msg.ModelFile.of(weights), counted))
        return done.results  # type: ignore[no-any-return]  # as the message asks

    async def shown(
        self, total: Metrics, by_site: Mapping[SiteId, Metrics]
    ) -> tuple[Averages, dict[SiteId, Averages]]:
        """The averages that people see of an evaluation; see task.shown."""
        showing: msg.Showing = await self._ask(msg.Show(total, dict(by_site)))
        return showing.metrics, showing.by_site


class Trainer(Trains, asyncio.Protocol):
    """A trainer process. Requests are answered in the order in which they are made; several may wait."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self._process, self._log = process, log
        self._received = bytearray()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._ended: TrainerDied | None = None
        self._reason = ""  # why the process ended, where that is known
        self._silent = asyncio.Event()  # set when no more answers will come
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
        gpu: str | None = None,
        confine: str = "off",
        approved: dict[str, str] | None = None,
    ) -> Self:
        """Start a process and have it load the task.

        Args:
            scratch: The folder that it may write, its $TMPDIR; and `memory` beside it, if there is one.
            log: The file that what the task prints goes to; None: the stderr of this process.
            simulated: It has the data of all sites, as [simulate] says, not what data(site) finds.
            pass_fds: File descriptors that it inherits.
            metrics_only, confine: It makes no model and trains nothing; as policy.confine.
            gpu: The only GPU that it sees, as CUDA_VISIBLE_DEVICES names it.
            approved: The project's files, each with its SHA-256, of which alone it loads any; None: all.

        Raises:
            ConfigError, TaskError: It cannot load the task.
            TrainerDied: TRIES processes died over it.
        """
        start = start_message(config, data_dir, simulated=simulated, metrics_only=metrics_only)
        start.approved = approved
        for left in reversed(range(TRIES)):
            process, channel = await spawn(config, scratch, log, pass_fds, gpu, confine, data_dir)
            trainer = cls(process, log)
            loop, connected = asyncio.get_running_loop(), functools.partial(lambda made: made, trainer)
            await loop.create_connection(connected, sock=channel)
            try:
                trainer.description = await trainer._ask(start)
            except BaseException as e:
                await trainer.stop()
                if not (left and isinstance(e, TrainerDied)):
                    raise
            else:
                return trainer
        raise AssertionError("unreachable")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def backlog(self) -> int:
        return len(self._waiting)

    async def close(self) -> None:
        """End the process: by itself, or killed after CLOSE_S."""
        self._transport.close()
        await self._end_within(CLOSE_S)
        await self.stop()

    async def stop(self) -> None:
        """End the process and all that it started, now."""
        self._kill()
        self._transport.close()
        await self._end_within(KILLED_S)

    async def _end_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for may swallow a cancel (Python 3.11)
                await asyncio.shield(self._watching)

    async def _ask(self, message: msg.Start | msg.Command) -> Any:
        if self._ended is not None:
            raise self._ended
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._waiting.append(answer)
        self._transport.write(msg.framed(message))
        loop.call_later(POLL_S, self._poll, answer, 0)
        try:
            return await answer
        except asyncio.CancelledError:
            loop.call_later(ABANDONED_S, self._give_up, answer)
            raise

    def _give_up(self, answer: asyncio.Future[Any]) -> None:
        """A cancelled request is let finish, so that the process is kept, but not for ever."""
        if answer in self._waiting:
            self._kill()

    def _poll(self, answer: asyncio.Future[Any], before: int) -> None:
        """End a process that was stopped (SIGSTOP) in STOPPED_POLLS polls in a row while an answer was due: a
        new process gives the same bits, and sooner. `before`: in how many polls up to this one."""
        if answer.done() or self._ended is not None:
            return
        polls = before + 1 if is_stopped(self._process.pid) else 0
        if polls == STOPPED_POLLS:
            self._reason = f"the trainer process was stopped for {STOPPED_POLLS * POLL_S:g} s"
            self._kill()
        asyncio.get_running_loop().call_later(POLL_S, self._poll, answer, polls)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), transport
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Give each answer to whoever asked."""
        self._received += data
        while len(self._received) >= msg.LENGTH.size:
            end = msg.LENGTH.size + msg.LENGTH.unpack_from(self._received)[0]
            if end > msg.FRAME_BYTES:
                return self._transport.abort()
            if len(self._received) < end:
                return None
            body = self._received[msg.LENGTH.size : end]
            del self._received[:end]
            try:
                self._answered(msg.outcomes.decode(body))
            except msgspec.DecodeError:
                return self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._silent.set()

    def _answered(self, outcome: msg.Outcome) -> None:
        if isinstance(outcome, msg.Dying):
            self._reason = outcome.reason
            return
        for failed in msg.failures_in(outcome):
            print_traceback(failed, self._log)
        asked = self._waiting.popleft()
        if asked.done():  # nobody waits for it any more
            return
        if isinstance(outcome, msg.Failed):
            return asked.set_exception(outcome.error())
        asked.set_result(outcome)

    async def _watch(self) -> None:
        """When the process ends, end what it started, and say so to everyone who still waits."""
        status = await self._process.wait()
        self._kill()
        with suppress(asyncio.TimeoutError):  # to receive the answers that it had sent
            await asyncio.wait_for(self._silent.wait(), 1)
        self._transport.close()
        self._ended = TrainerDied(self._reason or f"the trainer process {ending(status)}")
        for asked in self._waiting:
            if not asked.done():
                asked.set_exception(self._ended)
        self._waiting.clear()


def print_traceback(failed: msg.Failed, log: Path | None = None) -> None:
    """Print where and why the task failed, to a log or to stderr; once, however many sites fail there."""
    place = str(log), *re.findall(r'File ".*", line \d+', failed.traceback)
    if not failed.traceback or place in _printed:
        return
    _printed.add(place)
    if log is None:
        print(failed.traceback, end="", file=sys.stderr, flush=True)
    else:
        with log.open("a") as file:
            file.write(failed.traceback)
