"""An aggregator, its sites and a simulation in this process: all that they are, over real connections, but
for the trainers, whose work is done here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedtrain.arena import AnyArena
from fedtrain.config import Config
from fedtrain.errors import TaskError
from fedtrain.events import Event
from fedtrain.pki import init, issue
from fedtrain.runtime.own_code import source_digest
from fedtrain.runtime.simulations import simulation
from fedtrain.runtime.simulations.pool import PoolCohort
from fedtrain.runtime.simulations.shared_memory import SharedMemory
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from fedtrain.runtime.trainers.supervised import Supervised
from fedtrain.runtime.trainers.trainer import Trainer, Trains
from fedtrain.runtime.trainers.trainer_messages import Failed
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import Checkpoint, RunStore
from fedtrain.strategies import beginning, build
from tests.allowed import allowed
from tests.ports import free_port

WAIT_S = 60.0


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, event: Event) -> None:
        self.append((event.kind, event.fields()))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self if k == kind]


class InProcess(Trainer):
    """A trainer whose requests are answered where they are made."""

    def __init__(self, config: Config, scratch: Path, *, simulated: bool) -> None:
        self.bench = Workbench(config, simulated=simulated)
        self.description = self.bench.description

    @property
    def backlog(self) -> int:
        return 0

    async def _ask(self, message: Any) -> Any:
        await asyncio.sleep(0)
        try:
            answer = self.bench.answer(message)
        except Exception as e:  # as in a trainer's own process
            answer = Failed.of(e)
        if isinstance(answer, Failed):
            raise TaskError(answer.reason)
        return answer

    async def close(self) -> None:
        """There is no process."""


class Launcher:
    """Of a pool whose trainers a test has made. `start` makes another in the place of one that died."""

    def __init__(self, start: Callable[[], Awaitable[Trains]] | None = None) -> None:
        self._start = start

    async def start(self, number: int) -> Trains:
        assert self._start is not None, "no trainer dies here"
        return await self._start()

    async def close(self) -> None:
        """Nothing was started for all."""


def pool_of(
    config: Config, trainers: Sequence[Trains], scratch: Path,
    start: Callable[[], Awaitable[Trains]] | None = None,
) -> PoolCohort:  # fmt: skip
    launcher = Launcher(start)
    supervised = [Supervised(partial(launcher.start, i), trainer) for i, trainer in enumerate(trainers)]
    return PoolCohort(config, supervised, launcher, scratch, SharedMemory())


def certify(config: Config, sites: list[str]) -> None:
    init(config.root / "certs")
    issue(config.root / "certs", "aggregator")
    for name in sites:
        issue(config.root / "certs", "site", name)


def begin(config: Config, *, simulated: bool = False, chosen: AnyArena | None = None) -> None:
    """The run with its initial model, as the aggregator's own trainer would give it; or the `chosen` one."""
    bench = Workbench(config, simulated=simulated)
    store = RunStore(config.run_dir)
    strategy = build(config.strategy.kind, config.strategy.options)
    initial, about = chosen or bench.initial(), bench.description
    store.begin(
        initial.schema, config.agreed(), frozen=about.frozen.schema, run=config.run.name,
        task_digest=source_digest(config), derives=about.derives, local=about.local,
    )  # fmt: skip
    if store.latest() is None:
        store.keep_frozen(bench.initial(frozen=True))
        store.commit(Checkpoint(0, *beginning(strategy, initial)), {})
    store.close()


async def serve_site(config: Config, name: str, emit: Events) -> str:
    async def start(scratch: Path) -> InProcess:
        return InProcess(config, scratch, simulated=False)

    return await site.run(allowed(config, name), name, emit=emit, start_trainer=start)


def federation(
    config: Config,
    sites: list[str],
    wire: Wire | None = None,
    logs: Mapping[str, Events] = MappingProxyType({}),
) -> Events:
    """A whole run; what the aggregator told."""
    if not (config.root / "certs").exists():
        certify(config, sites)
    begin(config)
    events = Events()

    async def all_of_it() -> None:
        async with asyncio.timeout(WAIT_S), wire or Wire(), asyncio.TaskGroup() as group:
            group.create_task(aggregator.serve(config, emit=events))
            for name in sites:
                group.create_task(serve_site(config, name, logs.get(name, Events())))

    asyncio.run(all_of_it())
    return events


def simulated(config: Config, monkeypatch: Any, workers: int = 1) -> Events:
    """The same as a simulation."""
    events = Events()

    async def start(config: Config, *, scratch: Path, simulated: bool, **_: Any) -> InProcess:
        return InProcess(config, scratch, simulated=simulated)

    with monkeypatch.context() as patched:  # undone also where the simulation raises
        patched.setattr(Trainer, "start", start)
        asyncio.run(simulation.simulate(config, emit=events, workers=workers))
    return events


def final(folder: Path) -> AnyArena:
    """The last committed model of a run directory."""
    store = RunStore(folder, read_only=True)
    checkpoint = store.latest()
    store.close()
    assert checkpoint is not None
    return checkpoint.weights


class Wire:
    """What stands between the sites and the aggregator, and counts the bytes of TCP that pass."""

    def __init__(self, port: int = 0, to: int = 0) -> None:
        self._port, self._to, self.nbytes = port, to, 0
        self._connections: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> None:
        if self._port:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)

    async def __aexit__(self, *_: object) -> None:
        if self._port:
            self._server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        sinks = [writer]
        try:
            there = await asyncio.open_connection("127.0.0.1", self._to)
            sinks.append(there[1])
            await asyncio.gather(self._copy(reader, there[1]), self._copy(there[0], writer))
        except (OSError, asyncio.CancelledError):  # the aggregator doesn't listen yet, or all is over
            pass
        finally:
            for sink in sinks:
                sink.transport.abort()
            self._connections.discard(task)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 18):
            self.nbytes += len(data)
            sink.write(data)
            await sink.drain()
        sink.write_eof()


def with_port(table: dict[str, Any]) -> dict[str, Any]:
    return table | {"network": {"listen": f"127.0.0.1:{free_port()}", "heartbeat": "1s", "idle": "2s"}}
