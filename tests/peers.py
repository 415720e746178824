"""`fedtrain peer` without processes: all of it over real sockets, but for the trainer, which is a toy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedtrain import pki
from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.messages import Metrics
from fedtrain.pki.invitation import Invitation
from fedtrain.runtime.peers import peer
from fedtrain.runtime.peers.parcels import trained_part
from fedtrain.runtime.sites.approval import key_in
from fedtrain.runtime.trainers import trainer_messages as msg
from fedtrain.runtime.trainers.trainer import Trains
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import RunStore
from tests.allowed import allowed
from tests.limits import WAIT_S
from tests.ports import free_port

SCHEMA = Schema((TensorSpec("w", (20,), "float64", True),))


class Toy(Trains):
    """A trainer whose local steps go half way to the site's own target, in so many seconds."""

    metrics: ClassVar[Metrics] = {}  # of each evaluation

    def __init__(self, target: float, pace_s: float, task: str = "t") -> None:
        self.target, self.pace_s, self.woken = target, pace_s, asyncio.Event()
        self.description = msg.Description(SCHEMA, task)

    async def _ask(self, message: Any) -> Any:
        match message:
            case msg.Initial(out):
                return msg.Saved(written(Arena.zeros(SCHEMA), Path(out)).digest)
            case msg.TrainOne(_, _, place, out):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.pace_s):
                        await self.woken.wait()
                delta, weights = Arena.zeros(SCHEMA), ArenaFile(SCHEMA, Path(place.path)).load()
                trained_part(delta).copy_((self.target - trained_part(weights)) / 2)
                loss = {"loss": (self.target, 1.0)}
                return msg.Done([msg.Trained(1.0, loss, written(delta, Path(out)).digest)])
            case msg.EvaluateMany():
                return msg.Done([msg.Measured(self.metrics)])
        raise AssertionError(message)

    async def close(self) -> None:
        """Nothing runs."""


def written(arena: Arena, path: Path) -> ArenaFile:
    path.write_bytes(arena.payload)
    return ArenaFile(arena.schema, path)


class Village:
    """Peers of one federation, their settings in one folder; `with` ends them."""

    def __init__(self, root: Path, names: Sequence[str], *, rounds: int = 10_000, **gossip: Any) -> None:
        self.root, self.names, self.rounds, self.gossip = root, names, rounds, gossip
        self.ports = {name: free_port() for name in names}
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.trainers: dict[str, Toy] = {}
        self.events: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        root.mkdir(parents=True, exist_ok=True)
        (root / "task.py").write_text("# its trainer is a Toy\n")
        pki.init(root / "certs")
        for name in names:
            pki.issue(root / "certs", "site", name)

    def config(self, **changes: Any) -> Config:
        """`changes`: tables that differ from the village's."""
        table = {
            "run": {"name": "r", "rounds": self.rounds, "task": "task:Toy", "seed": 5},
            "strategy": {"min_sites": 2},
            "evaluate": {"every": 0},
            "gossip": {"topology": "complete", "round_deadline": "30s", **self.gossip},
            "network": {"heartbeat": "1s", "idle": "2s"},
        }
        for key, value in changes.items():
            table[key] = table.get(key, {}) | value
        return Config.of(table, self.root)

    def start(
        self, name: str, *, pace_s: float = 0.01, task: str = "t", invitation: Invitation | None = None,
        toy: Callable[..., Toy] = Toy, **changes: Any,
    ) -> asyncio.Task[Any]:  # fmt: skip
        events = self.events.setdefault(name, [])

        async def start_trainer(scratch: Path) -> Toy:
            self.trainers[name] = toy(float(ord(name[-1]) - ord("a")), pace_s, task)
            return self.trainers[name]

        changes.setdefault("network", {"listen": f"127.0.0.1:{self.ports[name]}"})
        own = self.config(**changes)
        allowed(own, name, masks=own.gossip.masks, pin_members=False)
        work = peer.run(
            own, name, emit=lambda event: events.append((event.kind, event.fields())),
            invitation=invitation, start_trainer=start_trainer,
        )  # fmt: skip
        self.running[name] = asyncio.create_task(work)
        return self.running[name]

    def pin(self, name: str, members: str) -> None:
        """Let only these be with a peer, whether it runs or not."""
        sites = self.root / "certs" / "sites"
        keys = {each: key_in(sites / each) for each in members}
        policy = policy_from(sites / name)
        keep_policy(sites / name, replace(policy, pin_members=True, members=keys))

    async def stop(self, name: str) -> None:
        """As SIGTERM does."""
        task = self.running.pop(name)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def of(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self.events[name] if k == kind]

    def rounds_of(self, name: str) -> int:
        return len(self.of(name, "round_committed"))

    def are_with(self, names: str, there: str) -> bool:
        """Whether the last round of each of these was begun with just those."""
        begun = [self.of(name, "round_started") for name in names]
        return all(rounds and rounds[-1]["sites"] == sorted(there) for rounds in begun)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                for task in self.running.values():
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    def model(self, name: str) -> torch.Tensor:
        store = RunStore(self.root / "runs" / f"r+gossip@{name}", read_only=True)
        try:
            last = store.latest()
            assert last is not None
            return trained_part(last.weights.load()).clone()
        finally:
            store.close()


@contextlib.asynccontextmanager
async def village(root: Path, names: Sequence[str], **options: Any) -> AsyncIterator[Village]:
    made = Village(root, names, **options)
    try:
        yield made
    finally:
        for name in list(made.running):
            with contextlib.suppress(Exception):
                await made.stop(name)
