"""Trainers of a simulation in a Ray cluster: an actor each, for the whole run (simulate.on = "ray").

Weights are put into Ray's object store once for each new model, so that each machine fetches them once. An
actor that dies is started again wherever the cluster has room for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ... import malloc
from ...errors import ConfigError
from ..trainers import trainer_messages as msg
from ..trainers.supervised import TrainerLost
from ..trainers.trainer import TrainerDied
from .remote import Bytes, Desk, Model, Remote

PLACE_S = 300.0  # for a new actor to begin, in a cluster that others use as well
LOOK_S = 1.0  # between looks whether the cluster still has a place for it
HERE = str(Path(__file__).parents[3])  # where actors find this very fedtrain
KEPT = 2  # models that stay in the object store: an evaluation's, and the next round's


class RayCluster:
    """The cluster that RAY_ADDRESS names, or that of this machine, which is started where there is none."""

    def __init__(self, gpus: bool) -> None:
        """`gpus`: whether each actor gets a share of one."""
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise ConfigError(
                'simulate.on = "ray" needs Ray: pip install "fedtrain[ray]", on every machine of the cluster.'
            ) from None
        self.ray = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(log_to_driver=True, logging_level=logging.WARNING, include_dashboard=False)
            except ConnectionError as e:
                raise ConfigError(f'simulate.on = "ray": no cluster answers: {str(e).splitlines()[0]}') from e
        self.living: set[Any] = set()  # the actors that have begun
        self._models: dict[str, Any] = {}  # digest -> what Ray knows it by
        resources: dict[str, float] = ray.cluster_resources()
        self.cpus, self.gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        self._share = self.gpus / max(1, self.cpus) if gpus else 0.0
        python = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))
        self._actor: Any = ray.remote(Room).options(
            num_cpus=1, num_gpus=min(1.0, self._share), max_restarts=0, scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"PYTHONPATH": python, **malloc.ENVIRONMENT}},
        )  # fmt: skip

    async def start(self, start: msg.Start) -> Remote:
        """One more trainer. TrainerLost where the cluster has no place for it, or can't start it."""
        actor = await self._place()
        try:
            return await Remote.begin(Actor(self, actor), start)
        except BaseException:
            self.end(actor)
            raise

    async def _place(self) -> Any:
        """An actor that has begun. It may first have been given a machine that was just lost."""
        until, last = time.monotonic() + PLACE_S, ""
        while self._has_room(until):
            actor = self._actor.remote()
            begun = asyncio.wrap_future(actor.begun.remote().future())
            try:
                while self._has_room(until) and not begun.done():
                    await asyncio.wait([begun], timeout=LOOK_S)
                error = begun.exception() if begun.done() else None
                if begun.done() and error is None:
                    self.living.add(actor)
                    return actor
            finally:
                if actor not in self.living:
                    begun.cancel()
                    self.ray.kill(actor)
            if error is not None:
                last = f": {str(error).strip().splitlines()[-1]}"
                if not self._was_lost(error):
                    raise TrainerLost(f"Ray can't start a trainer{last}") from error
                await asyncio.sleep(LOOK_S)
        raise TrainerLost(f"the Ray cluster has no place for another trainer beside {len(self.living)}{last}")

    def _was_lost(self, error: BaseException) -> bool:
        """Whether an actor died with its process or its machine, and the next one may live."""
        lost = isinstance(error, self.ray.exceptions.RayActorError)
        return lost and not error.actor_init_failed  # type: ignore[attr-defined]  # of Ray's class

    def _has_room(self, until: float) -> bool:
        return len(self.living) < self._cpus_here() and time.monotonic() < until

    def _cpus_here(self) -> int:
        """CPUs of the machines that are there now."""
        machines: list[dict[str, Any]] = self.ray.nodes()
        return sum(int(m["Resources"].get("CPU", 0)) for m in machines if m["Alive"])

    def end(self, actor: Any) -> None:
        """The actor has no more to do, or is dead."""
        self.living.discard(actor)
        self.ray.kill(actor)

    def put(self, model: Model) -> Any:
        """What an actor finds the model by."""
        import numpy as np

        digest, read = model
        if digest not in self._models:
            self._models[digest] = self.ray.put(np.frombuffer(read(), np.uint8))
            while len(self._models) > KEPT:
                del self._models[next(iter(self._models))]
        return self._models[digest]

    def close(self) -> None:
        if self._ours:
            self.ray.shutdown()


class Actor:
    """The carrier to one actor."""

    def __init__(self, cluster: RayCluster, actor: Any) -> None:
        self._cluster, self._actor = cluster, actor

    async def carry(self, message: bytes, model: Model | None) -> tuple[Bytes, Bytes]:
        digest, bytes_of = ("", None) if model is None else (model[0], self._cluster.put(model))
        try:
            body, written = await self._actor.answer_with.remote(message, digest, bytes_of)
        except self._cluster.ray.exceptions.RayError as e:
            self._cluster.end(self._actor)
            raise TrainerDied(f"a trainer in the Ray cluster died: {str(e).splitlines()[0]}") from e
        return body, memoryview(written)

    async def close(self) -> None:
        self._cluster.end(self._actor)


class Room(Desk):
    """What Ray makes an actor of."""

    def begun(self) -> None:
        """It is there."""

    def answer_with(self, message: bytes, digest: str, model: Any) -> tuple[bytes, Any]:
        """See Carrier.carry; numpy arrays, for Ray copies no byte of these."""
        import numpy as np

        if model is not None and not self.holds(digest):
            self.hold(digest, model.data)
        body, written = self.answer(message)
        return body, np.frombuffer(written, np.uint8)
