"""An aggregator, its sites and a simulation in this process: all that they are, over real connections, but
for the trainers, whose work is done here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fedtrain.config import Config
from fedtrain.errors import TaskError
from fedtrain.pki import init, issue
from fedtrain.runtime import federated, simulation, site
from fedtrain.runtime.trainer import Failed, Trainer, Workbench, _failed, digest_of
from fedtrain.store import Checkpoint, RunStore
from fedtrain.strategies import build, state_init
from fedtrain.update import AnyArena
from tests.ports import free_port

WAIT_S = 60.0


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, **fields: Any) -> None:
        self.append((kind, fields))

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
            answer = _failed(e)
        if isinstance(answer, Failed):
            raise TaskError(answer.reason)
        return answer

    async def close(self) -> None:
        """There is no process."""


def certify(config: Config, sites: list[str]) -> None:
    init(config.root / "certs")
    issue(config.root / "certs", "aggregator")
    for name in sites:
        issue(config.root / "certs", "site", name)


def begin(config: Config) -> None:
    """The run with its initial model, as the aggregator's own trainer would give it."""
    bench = Workbench(config, simulated=False)
    store = RunStore(config.run_dir)
    strategy = build(config.strategy.kind, config.strategy.options)
    initial = bench.initial()
    store.begin(initial.schema, config.agreed(), run=config.run.name, task_digest=digest_of(config))
    if store.latest() is None:
        store.commit(Checkpoint(0, initial, state_init(strategy, initial)), {})
    store.close()


async def serve_site(config: Config, name: str, emit: Events) -> str:
    async def start(scratch: Path) -> InProcess:
        return InProcess(config, scratch, simulated=False)

    return await site.run(config, name, emit=emit, start_trainer=start)


def federation(config: Config, sites: list[str]) -> Events:
    """A whole run; what the aggregator told."""
    certify(config, sites)
    begin(config)
    events = Events()

    async def all_of_it() -> None:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            group.create_task(federated.serve(config, emit=events))
            for name in sites:
                group.create_task(serve_site(config, name, Events()))

    asyncio.run(all_of_it())
    return events


def simulated(config: Config, monkeypatch: Any) -> Events:
    """The same as a simulation."""
    events = Events()

    async def start(config: Config, *, scratch: Path, simulated: bool, **_: Any) -> InProcess:
        return InProcess(config, scratch, simulated=simulated)

    monkeypatch.setattr(Trainer, "start", start)
    asyncio.run(simulation.simulate(config, emit=events, workers=1))
    monkeypatch.undo()
    return events


def final(folder: Path) -> AnyArena:
    """The last committed model of a run directory."""
    store = RunStore(folder, read_only=True)
    checkpoint = store.latest()
    store.close()
    assert checkpoint is not None
    return checkpoint.weights


def with_port(table: dict[str, Any]) -> dict[str, Any]:
    return table | {"network": {"listen": f"127.0.0.1:{free_port()}", "heartbeat": "1s", "idle": "2s"}}
