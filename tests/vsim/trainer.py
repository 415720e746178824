"""A trainer without a process: seven numbers, which follow from the site, the round and the weights."""

from __future__ import annotations

import asyncio
import struct
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedtrain.config import Config
from fedtrain.digest import digest_of
from fedtrain.runtime.trainers import trainer_messages as msg
from fedtrain.runtime.trainers.trainer import TrainerDied, Trains
from tests.vsim.claims import SCHEMA, Values, examples_of, payload_of, values_of
from tests.vsim.known import task_of

if TYPE_CHECKING:
    from tests.vsim.world import World


class Numbers(Trains):
    """A trainer: what it finds follows from site, round and weights, with noise also from chance."""

    def __init__(self, world: World, config: Config) -> None:
        self._world = world
        self.description = msg.Description(SCHEMA, task_of(config.root, config.run.task))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, message: Any) -> Any:
        world = self._world
        await asyncio.sleep(world.draw.expovariate(1) * world.plan.train_s)
        if isinstance(message, msg.TrainOne):
            await asyncio.sleep(world.plan.slow_s(message.site))
        if world.faulty and world.draw.random() < world.plan.dies:
            world.counts["trainer"] += 1
            raise TrainerDied("the seed says so")
        match message:
            case msg.Initial(out=out):
                return msg.Saved(written(Path(out), np.arange(7, dtype=np.float32)))
            case msg.Examples(site=name):
                return msg.Counted(examples_of(name))
            case msg.ColumnsOf():
                return msg.HasColumns(())
            case msg.EvaluateMany(sites=[name], weights=weights):
                values = values_of(bytes_of(weights.path))
                loss = float(np.float32(values.sum() % 7)) * examples_of(name)
                return msg.Done([msg.Measured({"loss": (loss, examples_of(name))})])
            case msg.TrainOne(site=name, round=round, weights=weights, out=out):
                data = bytes_of(weights.path)
                assert digest_of(data) == weights.digest
                again = world.trainings if world.plan.kind == "noise" else 0
                delta = delta_of(name, round, values_of(data), again)
                world.trainings += 1
                digest = written(Path(out), delta)
                world.claims.trained(name, round, weights.digest, digest, delta)
                metrics = {} if again else {"loss": (1.0 * examples_of(name), examples_of(name))}
                return msg.Done([msg.Trained(examples_of(name), metrics, digest)])
        raise AssertionError(message)


def bytes_of(path: str) -> bytes:
    return Path(path).read_bytes()


def written(path: Path, values: Values) -> str:
    """The digest of an arena of these numbers, in a file."""
    path.write_bytes(data := payload_of(values))
    return digest_of(data)


def delta_of(name: str, number: int, weights: Values, again: int) -> Values:
    """A site's update: some of the weights back, and numbers of its own, up to 0.3 each."""
    key = blake2b(struct.pack("<sqq", name.encode(), number, again), digest_size=28).digest()
    own = np.frombuffer(key, np.uint32).astype(np.float64) / 2**32 - 0.5
    return (0.6 * own - weights.astype(np.float64) / 64).astype(np.float32)
