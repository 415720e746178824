"""A site whose trainer is several ranks: `parallel.ranks` processes, one a device, that train one model.

Rank 0 is the trainer process itself: it alone has to do with the supervisor. It starts the others, tells
them each request, and they train it together, each with the data that it loads. All of them talk over
loopback. A rank that raises, dies or stands still ends all of them, and the supervisor is told which it was;
whatever ends rank 0 ends the others, for the kernel kills them with it.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ... import strategies
from ...arena import Arena, Frozen, subtract
from ...config import Config
from ...config.project import approved_in, close_paths
from ...errors import ConfigError, TaskError
from ...learning import Correct
from ...messages import Metrics, SiteId, Update
from ...schema import Schema
from ...training.building import build_model
from ...training.collectives import refuse_pickles
from ...training.devices import backend_of, device_of_rank, record_collectives, refuse_shared
from ...training.engine import weighs_items
from ...training.examples import examples_of
from ...training.mesh import Mesh, Sizes
from ...training.parallel.alike import check
from ...training.parallel.data import Dealt
from ...training.parallel.engine import MeshEngine
from ...training.partition import read
from ...training.task import Task, collate_of, load_task
from ..processes import signalled_when_parent_ends
from ..rank_store import RankStore
from ..star.combinations import check_plain
from .rank_monitor import GiveUp, RankFailure, RankMonitor

Fetch = Callable[[str, SiteId], Any]  # ("data" or "eval_data", site) -> what the task has
FOREVER = timedelta(days=3650)


class RankCommand(msgspec.Struct, array_like=True):
    """What all ranks do next."""

    what: str  # train | evaluate | freeze
    site: SiteId
    round: int


class RankStart(msgspec.Struct, array_like=True):
    """All that a rank but rank 0 starts with; it comes on its standard input."""

    rank: int
    port: int
    secret: str  # without which nobody enters the ranks' store
    parent: int  # rank 0's pid
    report: int  # the file descriptor that its RankFailure is written to
    config: dict[str, Any]
    root: str
    data_dir: str | None
    approved: dict[str, str] | None = None  # as trainer_messages.Start


class RankGroup:
    """All ranks of one site, as seen from one of them."""

    def __init__(
        self,
        config: Config,
        task: Task,
        fetch: Fetch,
        rank: int,
        store: RankStore,
        monitor: RankMonitor | None = None,
    ) -> None:
        """`monitor`: of rank 0; None at the others."""
        if config.parallel.sync != "step":
            raise ConfigError(
                "parallel.sync: the ranks of one site train one model; islands are for datacenters"
            )
        self.config, self.task, self.fetch, self.store, self.monitor = config, task, fetch, store, monitor
        self._requests = 0
        os.environ |= {
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(config.parallel.ranks),
            "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo",
        }  # fmt: skip
        device = device_of_rank(config.train.device, config.parallel.backend)
        backend = backend_of(device, config.parallel.backend)
        sizes = Sizes.of(config.parallel, config.parallel.ranks)
        refuse_pickles()
        record_collectives(backend, Path(gettempdir()) / "hangs")
        refuse_shared(store, device, backend)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=config.parallel.ranks,
            timeout=timedelta(seconds=config.parallel.timeout),
        )  # fmt: skip
        self.mesh = Mesh(sizes, device)
        strategy = strategies.build(config.strategy.kind, config.strategy.options, config.root)
        self._correct: Correct | None = strategy.correct if strategies.corrects(strategy) else None
        self._engine: MeshEngine | None = None
        self._weighs: bool | None = None  # see weighs_items, which a site asks at each join
        self.schema, self.frozen = Schema(()), Frozen()
        if rank == 0:  # who alone is asked; the others have no more of the model than they train
            model = build_model(task, config.run.seed, torch.device("cpu"))
            self.schema, self.frozen = Schema.of(model), Frozen.of(Arena.of(model, frozen=True))
        self._freezing = False  # all ranks are to be given other frozen parameters: rank 0 has them
        self._given: Arena | None = None

    # --- rank 0: what a trainer asks

    def initial(self, *, frozen: bool = False) -> Arena:
        return Arena.of(build_model(self.task, self.config.run.seed, torch.device("cpu")), frozen=frozen)

    def freeze(self, frozen: Arena) -> None:
        """Train with these frozen parameters from the next request on."""
        self._send(RankCommand("freeze", "", 0))
        self._freezing, self._given = True, frozen

    def train(self, site: SiteId, round: int, weights: Arena, out: Arena) -> Update:
        """As local.Engine's, but for the last bits: sums over ranks are rounded in another order."""
        self._send(RankCommand("train", site, round))
        update = self._together(lambda: self._train(site, round, weights, out))
        assert isinstance(update, Update), "rank 0 has the model"
        return update

    def evaluate(self, site: SiteId, weights: Arena) -> Metrics:
        self._send(RankCommand("evaluate", site, 0))
        metrics: Metrics = self._together(lambda: self._evaluate(site, weights))
        return metrics

    def weighs_items(self, dataset: Any) -> bool:
        """Asked of one example on a CPU, for a GPU may not hold the whole model; True where it can't be."""
        if self._weighs is not None:
            return self._weighs
        model = build_model(self.task, self.config.run.seed, torch.device("cpu"))
        batches = examples_of(dataset, collate_of(self.task)).batches(1, False, None)
        try:
            self._weighs = weighs_items(self.task, model, batches)
            return self._weighs
        except TaskError:
            if self.mesh.device.type == "cpu":
                raise
            return (
                True  # a loss of kernels that only a GPU has: how many it weighs is known when it has trained
            )

    # --- every rank

    def follow(self) -> None:
        """Do what rank 0 says, until it is gone."""
        while (command := self._next_command()) is not None:
            with suppress(LoadFailed):  # rank 0 reports it
                if command.what == "train":
                    self._train(command.site, command.round, None, None)
                elif command.what == "evaluate":
                    self._evaluate(command.site, None)
                else:
                    self._freezing = True

    def _train(self, site: SiteId, round: int, weights: Arena | None, out: Arena | None) -> Update | None:
        train, mesh = self.config.train, self.mesh
        data = self._loaded(
            lambda: Dealt(self.fetch("data", site), train, self.config.run.seed, site,
                          mesh.data_rank, mesh.data_ranks, collate_of(self.task),
                          self.config.parallel.readers, mesh.device)
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
        return engine.evaluate(dataset, site=site)

    def _dealt_once(self, dataset: Any) -> Dealt:
        mesh = self.mesh
        return Dealt(
            dataset, self.config.train, 0, "", mesh.data_rank, mesh.data_ranks, collate_of(self.task)
        )

    def _engine_for(self, data: Dealt | None) -> MeshEngine:
        if self._engine is None:
            example = None
            if data is not None:
                data.first = check(self.task, data.examples, self.mesh, "data()")
                example = data.example() if self.mesh.sizes.pp > 1 else None
            self._engine = MeshEngine(
                self.task, self.config, self.mesh, example=example, correct=self._correct
            )
        if self._freezing:
            self._engine.install(self._given, frozen=True)
            self._freezing, self._given = False, None
        return self._engine

    def _loaded(self, load: Callable[[], Any]) -> Any:
        """What `load` gives, when all ranks have loaded. When one fails, all raise."""
        found, error = None, None
        try:
            found = load()
        except (TaskError, ConfigError) as e:
            error = e
        failed = torch.tensor(error is not None, dtype=torch.int32, device=self.mesh.device)
        dist.all_reduce(failed)
        if error is not None:
            raise LoadFailed(str(error))
        if int(failed):
            raise LoadFailed(f"{int(failed)} of {self.config.parallel.ranks} ranks could not load their data")
        return found

    def _together(self, work: Callable[[], Any]) -> Any:
        """On rank 0. A request that ends in the middle of a collective ends all ranks."""
        assert self.monitor is not None, "rank 0's"
        self.monitor.asked = True
        try:
            return work()
        except LoadFailed:
            raise
        except BaseException as e:
            self.monitor.raised(e)
        finally:
            self.monitor.asked = False

    def _send(self, command: RankCommand) -> None:
        self.store.set(f"request {self._requests}", msgspec.json.encode(command).decode())
        self._requests += 1

    def _next_command(self) -> RankCommand | None:
        """The next command, however long it takes: rounds may be days apart. None when rank 0 is gone."""
        key = f"request {self._requests}"
        self._requests += 1
        try:
            self.store.wait([key], FOREVER)
            return msgspec.json.decode(self.store.get(key), type=RankCommand)
        except RuntimeError:  # the store was rank 0's
            return None


class LoadFailed(TaskError):
    """A request ended before its first collective, on all ranks alike: the next one may be tried."""


def start_ranks(
    config: Config, task: Task, fetch: Fetch, data_dir: Path | None, give_up: GiveUp
) -> RankGroup:
    """Rank 0 of a site, with its other ranks started. `give_up` is called when they can't go on."""
    strategy = strategies.build(config.strategy.kind, config.strategy.options, config.root)
    check_plain(config, strategy, "parallel.ranks", "the ranks of a site exchange deltas alone. Set it to 1, "
                "or use another strategy")  # fmt: skip
    secret = secrets.token_hex(32)
    store = RankStore.hosted(secret, "127.0.0.1", 0, config.parallel.timeout)
    monitor = RankMonitor(give_up)
    for rank in range(1, config.parallel.ranks):
        reports, report = os.pipe()
        folder = str(data_dir) if data_dir else None
        start = RankStart(
            rank, store.port, secret, os.getpid(), report, config.table(), str(config.root), folder,
            approved_in(config.root)
        )  # fmt: skip
        arguments = [sys.executable, "-P", "-m", __name__]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=(report,))
        os.close(report)
        assert process.stdin is not None, "a pipe was asked for"
        with suppress(BrokenPipeError):  # the monitor will report it
            process.stdin.write(msgspec.json.encode(start))
            process.stdin.close()
        monitor.add(rank, process, reports)
    monitor.start()
    try:
        group = RankGroup(config, task, fetch, 0, store, monitor)
    except BaseException as e:
        monitor.raised(e)
    monitor.asked = False
    return group


def main() -> None:
    """The process of another rank: it works until rank 0 is gone."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=RankStart)
    signalled_when_parent_ends(signal.SIGKILL)
    if os.getppid() != start.parent:  # rank 0 ended before this line
        return
    try:
        work(start)
    except BaseException as e:  # the user's code runs here, and rank 0 is to know
        os.write(start.report, msgspec.json.encode(RankFailure.of(start.rank, e)))
        os._exit(1)  # without waiting for what other ranks would have to do, too


def work(start: RankStart) -> None:
    config = Config.of(start.config, start.root)
    close_paths(config.root, start.approved)
    task = load_task(config.run.task, config.root, Path(start.data_dir) if start.data_dir else None)
    fetch = functools.cache(functools.partial(read, task, run_seed=config.run.seed))
    here = "127.0.0.1", start.port
    store = RankStore.joined(start.secret, lambda: here, config.parallel.timeout)
    RankGroup(config, task, fetch, start.rank, store).follow()


if __name__ == "__main__":
    main()
