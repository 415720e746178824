"""Trainers of a simulation that run elsewhere: in a Ray cluster (on_ray.py), or as ranks of torchrun
(on_ranks.py).

The pool asks them what it asks a trainer process of its own, by the same messages. A message names models,
and the room for what is asked for, by paths, which mean nothing on another machine: so the bytes travel
beside the message, and a `Desk` over there puts its own paths in their place. A `Carrier` takes both there
and back.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from msgspec.structs import replace

from ...config import Config
from ...errors import ConfigError
from ...messages import Folded
from ...store.disk import private
from ..trainers import trainer_messages as msg
from ..trainers.metrics_only import MetricsOnly
from ..trainers.trainer import Trains, print_traceback
from ..trainers.trainer_process import bench_of
from ..trainers.workbench import Workbench
from .shared_memory import nameless

Bytes: TypeAlias = bytes | bytearray | memoryview
Model = tuple[str, Callable[[], bytes]]  # a model's digest, and how to read its bytes


class Carrier(Protocol):
    """The way to one trainer, and back."""

    async def carry(self, message: bytes, model: Model | None) -> tuple[Bytes, Bytes]:
        """The answer, and what was written into the room that the message names. TrainerDied where nobody
        answers any more."""

    async def close(self) -> None:
        """End the trainer."""


class Remote(Trains):
    """A trainer that runs elsewhere."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier, self._unanswered = carrier, 0

    @classmethod
    async def begin(cls, carrier: Carrier, start: msg.Start) -> Remote:
        """The trainer, which has loaded its task."""
        trainer = cls(carrier)
        trainer.description = await trainer._ask(replace(start, machine=this_machine()))
        return trainer

    @property
    def backlog(self) -> int:
        return self._unanswered

    async def close(self) -> None:
        await self._carrier.close()

    async def _ask(self, message: msg.Start | msg.Command) -> Any:
        place = model_of(message)
        model = None if place is None else (place.digest, Path(place.path).read_bytes)
        self._unanswered += 1
        try:
            body, written = await self._carrier.carry(msg.encoded(message), model)
        finally:
            self._unanswered -= 1
        outcome = msg.outcomes.decode(body)
        for failed in msg.failures_in(outcome):
            print_traceback(failed)
        if isinstance(outcome, msg.Failed):
            raise outcome.error()
        if isinstance(message, msg.Start):
            self.machine = bytes(written).decode()
        keep(message, outcome, written)
        return outcome


class Desk:
    """What answers over there: a Workbench, whose models and rooms are in this process's own memory."""

    def __init__(self) -> None:
        self._model, self._room = nameless(), nameless()
        self._held = ""  # the digest of the model in self._model
        self._bench: Workbench | MetricsOnly | None = None

    def holds(self, digest: str) -> bool:
        return digest == self._held

    def hold(self, digest: str, model: Bytes) -> None:
        """Keep a model for the messages that name it, instead of the one before."""
        os.ftruncate(self._model, len(model))
        put(f"/dev/fd/{self._model}", 0, model)
        self._held = digest

    def answer(self, message: bytes) -> tuple[bytes, Bytes]:
        """As Carrier.carry. What goes wrong is in the answer."""
        try:
            outcome, written = self._answer(msg.requests.decode(message))
        except Exception as e:  # torch and the user's code run in this block, and this process must go on
            outcome, written = msg.Failed.of(e), b""
        return msg.encoded(outcome), written

    def _answer(self, message: msg.Start | msg.Command) -> tuple[msg.Outcome, Bytes]:
        if isinstance(message, msg.Start):
            self._bench = bench_of(message)
            check_memory(message, self._bench.description)
            return self._bench.description, platform.node().encode()
        bench = self._bench
        assert isinstance(bench, Workbench), "Start, of what trains, is the first message"
        match message:
            case msg.Initial(frozen=frozen):
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder) / "model"
                    return bench.answer(msg.Initial(str(out), frozen)), out.read_bytes()
            case msg.Freeze():
                return bench.answer(msg.Freeze(self._place(message.frozen))), b""
            case msg.FoldMany():
                found = bench.answer(replace(message, weights=self._place(message.weights), slab=""))
                if not isinstance(found, Folded):
                    return found, b""
                return replace(found, sums=memoryview(b"")), found.sums
            case msg.EvaluateMany():
                return bench.answer(replace(message, weights=self._place(message.weights))), b""
            case msg.TrainMany():
                nbytes = len(message.sites) * bench.description.update.nbytes
                if os.fstat(self._room).st_size < nbytes:
                    os.ftruncate(self._room, nbytes)
                there = replace(
                    message, weights=self._place(message.weights), slab=f"/dev/fd/{self._room}", offset=0
                )
                return bench.answer(there), os.pread(self._room, nbytes, 0)
        return bench.answer(message), b""

    def _place(self, model: msg.ModelFile) -> msg.ModelFile:
        assert self.holds(model.digest), f"model {model.digest} has not come here"
        return msg.ModelFile(f"/dev/fd/{self._model}", model.digest)


def this_machine() -> str:
    """The running kernel, whose processes can share a database, after the name that people have for it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def check_memory(start: msg.Start, about: msg.Description) -> None:
    """ConfigError where sites remember something, in a database of another machine than this one."""
    (home, kernel), (here, ours) = start.machine.split(" "), this_machine().split(" ")
    if about.remembers and (kernel or home) != (ours or here):
        config = Config.of(start.config, start.root)
        raise ConfigError(
            f'simulate.on = "{config.simulate.on}": with strategy.kind = "{config.strategy.kind}" and '
            f'compression.up = "{config.compression.up}" sites remember something from one training to the '
            f"next, in a database on {home}, which the worker on {here} can't share. Have all workers on "
            f'{home}, or set simulate.on = "local".'
        )


def model_of(message: msg.Start | msg.Command) -> msg.ModelFile | None:
    """The model that a message names, if it names one."""
    match message:
        case (
            msg.FoldMany(weights=model)
            | msg.TrainMany(weights=model)
            | msg.EvaluateMany(weights=model)
            | msg.Freeze(frozen=model)
        ):
            return model
    return None


def keep(message: msg.Start | msg.Command, outcome: msg.Outcome, written: Bytes) -> None:
    """Write what was found over there into the room that the message names here."""
    match message:
        case msg.FoldMany(slab=slab, offset=offset) if isinstance(outcome, Folded):
            put(slab, offset, written)
        case msg.Initial(out):
            with open(out, "wb", opener=private) as file:
                file.write(written)
        case msg.TrainMany(slab=slab, offset=offset):
            put(slab, offset, written)


def put(path: str, offset: int, data: Bytes) -> None:
    """Write the bytes into a file that is there, from `offset` on."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        at = 0
        while at < len(data):
            at += file.write(data[at:])
