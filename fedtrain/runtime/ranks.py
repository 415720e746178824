"""A site whose trainer is several ranks: `parallel.ranks` processes, one a device, that train one model.

Rank 0 is the trainer process itself: it alone has to do with the supervisor. It starts the others, tells
them each request, and they train it together, each with the data that it loads. All of them talk over
loopback. A rank that raises, dies or stands still ends all of them, and the supervisor is told which it was;
whatever ends rank 0 ends the others, for the kernel kills them with it.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from .. import strategies
from ..arena import Arena, Frozen, subtract
from ..config import Config
from ..errors import ConfigError, TaskError, reason_of, story_of
from ..messages import Metrics, SiteId, Update
from ..schema import Schema
from ..training.engine import Correct, build_model, weighs_items
from ..training.examples import examples_of
from ..training.mesh import Mesh, Sizes, device_here
from ..training.parallel.data import Dealt
from ..training.parallel.engine import MeshEngine
from ..training.task import Task, collate_of, folder_of, load_task, user_code
from .processes import ending, is_stopped, signalled_when_parent_ends

Fetch = Callable[[str, SiteId], Any]  # ("data" or "eval_data", site) -> what the task has
# What the supervisor is told before all ranks end: the reason, whether it is the answer to the request under
# way (else a new team may try it again), and whether the user's configuration is at fault.
Tell = Callable[[str, bool, bool], None]

FOREVER = timedelta(days=3650)
LOOK_S = 0.5  # between looks at whether a rank is stopped
REPORT_BYTES = 1 << 16  # of a Trouble: as much as a pipe holds
STORY_CHARACTERS = 1 << 13  # of its story: the end
STOPPED_LOOKS = 6  # when it was in so many, one after the other, the team ends
SETTLE_S = 0.5  # the first rank to fail makes others fail: so long is waited for all that they have to say


class Told(msgspec.Struct, array_like=True):
    """What all ranks do next."""

    what: str  # train | evaluate | freeze
    site: SiteId
    round: int


class Hired(msgspec.Struct, array_like=True):
    """All that another rank begins with, on its standard input."""

    rank: int
    port: int
    parent: int  # rank 0's pid
    report: int  # the descriptor that its Trouble is written to
    config: dict[str, Any]
    root: str
    data_dir: str | None


class Trouble(msgspec.Struct, array_like=True):
    """Why a rank can't go on."""

    reason: str
    raised_at: float = (
        0.0  # time.monotonic() of an exception, which is one clock for all; 0: the process ended
    )
    config: bool = False  # a ConfigError
    story: str = ""  # the traceback, for the people here

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        story, config = story_of(error)[-STORY_CHARACTERS:], isinstance(error, ConfigError)
        return cls(f"rank {rank}: {reason_of(error)}", time.monotonic(), config, story)


class Watch(threading.Thread):
    """Rank 0's: looks after the others, and ends all of them when one can't go on.

    A thread, for the main one may wait in a collective for a rank that is no more.
    """

    def __init__(self, tell: Tell) -> None:
        super().__init__(daemon=True)
        self.asked = True  # whether an answer is due: to the request to start, at first
        self._tell = tell
        self._children: list[tuple[int, subprocess.Popen[bytes], int]] = []  # (rank, process, its reports)
        self._own: Trouble | None = None
        self._wake, self._woken = os.pipe()

    def add(self, rank: int, process: subprocess.Popen[bytes], reports: int) -> None:
        """Before the thread starts."""
        os.set_blocking(reports, False)
        self._children.append((rank, process, reports))

    def raised(self, error: BaseException) -> NoReturn:
        """Rank 0 can't go on. Whose fault it was is told by this thread, which then ends the process."""
        self._own = Trouble.of(0, error)
        os.write(self._woken, b".")
        while True:
            signal.pause()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for _, process, _ in self._children:
            poll.register(os.pidfd_open(process.pid), select.POLLIN)
        looks = dict.fromkeys((rank for rank, _, _ in self._children), 0)
        while not poll.poll(LOOK_S * 1000):
            for rank, process, _ in self._children:
                looks[rank] = looks[rank] + 1 if is_stopped(process.pid) else 0
                if looks[rank] == STOPPED_LOOKS:
                    how = f"was stopped for {STOPPED_LOOKS * LOOK_S:g} s"
                    return self._end(Trouble(f"rank {rank} (pid {process.pid}) {how}"))
        time.sleep(SETTLE_S)
        return self._end(min(self._troubles(), key=lambda trouble: trouble.raised_at))

    def _troubles(self) -> Iterator[Trouble]:
        """Of every rank that can't go on."""
        if self._own is not None:
            yield self._own
        for rank, process, reports in self._children:
            with suppress(BlockingIOError, msgspec.DecodeError):  # it wrote none, or was killed over it
                yield msgspec.json.decode(os.read(reports, REPORT_BYTES), type=Trouble)
                continue
            if (status := process.poll()) is not None:
                yield Trouble(f"rank {rank} (pid {process.pid}) {ending(status)}")

    def _end(self, first: Trouble) -> None:
        for _, process, _ in self._children:
            process.kill()
        print(first.story + first.reason, file=sys.stderr, flush=True)
        self._tell(first.reason, self.asked and first.raised_at > 0, first.config)
        os._exit(1)


class Team:
    """All ranks of one site, as seen from one of them."""

    def __init__(
        self, config: Config, task: Task, fetch: Fetch, rank: int, store: TCPStore, watch: Watch | None = None
    ) -> None:
        """`watch` is rank 0's."""
        if config.parallel.sync != "step":
            raise ConfigError(
                "parallel.sync: the ranks of one site train one model; islands are for datacenters"
            )
        self.config, self.task, self.fetch, self.store, self.watch = config, task, fetch, store, watch
        self._requests = 0
        os.environ |= {
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(config.parallel.ranks),
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        device = device_here(config.train.device)
        sizes = Sizes.of(config.parallel, config.parallel.ranks)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store, rank=rank, world_size=config.parallel.ranks,
            timeout=timedelta(seconds=config.parallel.timeout),
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        self.mesh = Mesh(sizes, device)
        strategy = strategies.build(config.strategy.kind, config.strategy.options, config.root)
        self._correct: Correct | None = strategy.correct if strategies.corrects(strategy) else None
        self._engine: MeshEngine | None = None
        model = build_model(task, config.run.seed, torch.device("cpu"))
        self.schema, self.frozen = Schema.of(model), Frozen.of(Arena.of(model, frozen=True))
        self._freezing = False  # all ranks are to be given other frozen parameters: rank 0 has them
        self._given: Arena | None = None

    # --- rank 0: what a trainer asks

    def initial(self, *, frozen: bool = False) -> Arena:
        return Arena.of(build_model(self.task, self.config.run.seed, torch.device("cpu")), frozen=frozen)

    def freeze(self, frozen: Arena) -> None:
        """Train with these frozen parameters from the next request on."""
        self._tell(Told("freeze", "", 0))
        self._freezing, self._given = True, frozen

    def train(self, site: SiteId, round: int, weights: Arena, out: Arena) -> Update:
        """As local.Engine's, but for the last bits: sums over ranks are rounded in another order."""
        self._tell(Told("train", site, round))
        update = self._together(lambda: self._train(site, round, weights, out))
        assert isinstance(update, Update), "rank 0 has the model"
        return update

    def evaluate(self, site: SiteId, weights: Arena) -> Metrics:
        self._tell(Told("evaluate", site, 0))
        metrics: Metrics = self._together(lambda: self._evaluate(site, weights))
        return metrics

    def weighs_items(self, dataset: Any) -> bool:
        model = build_model(self.task, self.config.run.seed, torch.device("cpu"))
        examples = examples_of(dataset, collate_of(self.task))
        batches = examples.batches(self.config.train.eval_batch_size, False, None)
        return weighs_items(self.task, model, batches)

    # --- every rank

    def follow(self) -> None:
        """Do what rank 0 says, until it is gone."""
        while (told := self._hear()) is not None:
            with suppress(Unready):  # told by rank 0
                if told.what == "train":
                    self._train(told.site, told.round, None, None)
                elif told.what == "evaluate":
                    self._evaluate(told.site, None)
                else:
                    self._freezing = True

    def _train(self, site: SiteId, round: int, weights: Arena | None, out: Arena | None) -> Update | None:
        train, mesh = self.config.train, self.mesh
        data = self._loaded(
            lambda: Dealt(self.fetch("data", site), train, self.config.run.seed, site,
                          mesh.data_rank, mesh.data_ranks, collate_of(self.task))
        )  # fmt: skip
        engine = self._engine_for(data)
        engine.install(weights)
        seen = engine.train(data, round, self.config.run.rounds)
        total, whole = map(engine.over_ranks, seen.total())
        local = engine.gather()
        if weights is None or out is None or local is None:
            return None
        subtract(local, weights, out)
        num_examples = data.examples.count * whole / seen.examples / mesh.sizes.cp
        return Update(delta=out, num_examples=num_examples, metrics={"loss": (total, whole)})

    def _evaluate(self, site: SiteId, weights: Arena | None) -> Metrics:
        dataset = self._loaded(lambda: self.fetch("eval_data", site))
        engine = self._engine_for(None) if self._engine else self._engine_for(self._dealt_once(dataset))
        engine.install(weights)
        return engine.evaluate(dataset)

    def _dealt_once(self, dataset: Any) -> Dealt:
        mesh = self.mesh
        return Dealt(
            dataset, self.config.train, 0, "", mesh.data_rank, mesh.data_ranks, collate_of(self.task)
        )

    def _engine_for(self, data: Dealt | None) -> MeshEngine:
        if self._engine is None:
            example = data.example() if data is not None else None
            self._engine = MeshEngine(
                self.task, self.config, self.mesh, example=example, correct=self._correct
            )
        if self._freezing:
            self._engine.install(self._given, frozen=True)
            self._freezing, self._given = False, None
        return self._engine

    def _loaded(self, load: Callable[[], Any]) -> Any:
        """What `load` gives, once all ranks have theirs: else all raise, and none waits for the others."""
        found, error = None, None
        try:
            found = load()
        except (TaskError, ConfigError) as e:
            error = e
        failed = torch.tensor(error is not None, dtype=torch.int32, device=self.mesh.device)
        dist.all_reduce(failed)
        if error is not None:
            raise Unready(str(error))
        if int(failed):
            raise Unready(f"{int(failed)} of {self.config.parallel.ranks} ranks could not load their data")
        return found

    def _together(self, work: Callable[[], Any]) -> Any:
        """On rank 0. A request that ends in the middle of a collective ends all ranks."""
        assert self.watch is not None, "rank 0's"
        self.watch.asked = True
        try:
            return work()
        except Unready:
            raise
        except BaseException as e:
            self.watch.raised(e)
        finally:
            self.watch.asked = False

    def _tell(self, told: Told) -> None:
        self.store.set(f"request {self._requests}", msgspec.json.encode(told).decode())
        self._requests += 1

    def _hear(self) -> Told | None:
        """However long it takes: rounds may be days apart."""
        key = f"request {self._requests}"
        self._requests += 1
        try:
            self.store.wait([key], FOREVER)
            return msgspec.json.decode(self.store.get(key), type=Told)
        except RuntimeError:  # the store was rank 0's
            return None


class Unready(TaskError):
    """A request ended before its first collective, on all ranks alike: the next one may be tried."""


def gathered(config: Config, task: Task, fetch: Fetch, data_dir: Path | None, tell: Tell) -> Team:
    """Rank 0 of a site's team, the other ranks started. `tell` is called when they can't go on."""
    listener = socket.create_server(("127.0.0.1", 0))
    store = TCPStore(
        "127.0.0.1", listener.getsockname()[1], config.parallel.ranks, True,
        timeout=timedelta(seconds=config.parallel.timeout), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    watch = Watch(tell)
    for rank in range(1, config.parallel.ranks):
        reports, report = os.pipe()
        folder = str(data_dir) if data_dir else None
        hired = Hired(rank, store.port, os.getpid(), report, config.table(), str(config.root), folder)
        command = [sys.executable, "-P", "-m", __name__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(report,))
        os.close(report)
        assert process.stdin is not None, "a pipe was asked for"
        with suppress(BrokenPipeError):  # the watch will tell
            process.stdin.write(msgspec.json.encode(hired))
            process.stdin.close()
        watch.add(rank, process, reports)
    watch.start()
    try:
        team = Team(config, task, fetch, 0, store, watch)
    except BaseException as e:
        watch.raised(e)
    watch.asked = False
    return team


def main() -> None:
    """Another rank: for as long as rank 0 is there."""
    hired = msgspec.json.decode(sys.stdin.buffer.read(), type=Hired)
    signalled_when_parent_ends(signal.SIGKILL)
    if os.getppid() != hired.parent:  # it ended before
        return
    try:
        work(hired)
    except BaseException as e:  # the user's code runs here, and rank 0 is to know
        os.write(hired.report, msgspec.json.encode(Trouble.of(hired.rank, e)))
        os._exit(1)  # without waiting for what other ranks would have to do, too


def work(hired: Hired) -> None:
    config = Config.of(hired.config, hired.root)
    task = load_task(config.run.task, config.root, Path(hired.data_dir) if hired.data_dir else None)
    folder = folder_of(task)

    @functools.cache
    def fetch(what: str, site: SiteId) -> Any:
        with user_code(folder, f"{what}({site!r})"):
            return task.data(site) if what == "data" else task.eval_data(site)

    timeout = timedelta(seconds=config.parallel.timeout)
    store = TCPStore("127.0.0.1", hired.port, config.parallel.ranks, False, timeout=timeout)
    Team(config, task, fetch, hired.rank, store).follow()


if __name__ == "__main__":
    main()
