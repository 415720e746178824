"""What the steps of a datacenter's round cost and found: as `step` events, and as the round's record."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Mapping
from typing import Any

import torch

from ...config import Config
from ...events import Emit, Record, Stepped
from ...training.engine import Number, Step
from ...training.mesh import AXES
from ...training.parallel.engine import MeshEngine
from ..journal import Lap

Sums = list[float]  # Σ loss and Σ weight of the steps that were taken, and how many were left out
NONE = (0.0, 0.0, 0.0)


class Meter:
    """Losses and times of a round's steps. Losses are read when they are shown: no step waits for one.

    They are added one after the other, so the sums have the same bits however often they were read meanwhile.
    A checkpoint has those of each rank: a round that went on after a restart tells of all of its steps.
    """

    def __init__(self, engine: MeshEngine, config: Config, emit: Emit) -> None:
        self.engine, self.config, self.emit = engine, config, emit
        self._before_s = 0.0  # what the round took before the process was started
        self.begin(anew=True)

    def begin(self, *, anew: bool) -> None:
        """A round begins, or one of a checkpoint goes on."""
        if anew:
            self._round: Sums = [*NONE]
            self._before_s = 0.0
        self._lap, self._unread = Lap(self._before_s), list[tuple[torch.Tensor, Number, Number]]()
        self._begin_event()

    def _begin_event(self) -> None:
        self._since, self._event, self._examples, self._steps = time.monotonic(), [*NONE], 0, 0

    @property
    def seconds(self) -> float:
        """That the round took so far."""
        return self._lap.seconds

    def add(self, step: Step, number: int, round: int) -> None:
        """Take a step in; every parallel.log_every of them is a `step` event. TaskError as Steps.check."""
        self._unread.append((step.loss, step.weight, step.taken))
        self._examples += step.examples
        self._steps += 1
        if number % self.config.parallel.log_every == 0:
            self._tell(number, round)
            self.engine.steps.check(f"step {number}")

    def record(self, sites: int, found: Mapping[str, float] | None = None) -> Record:
        """Of the round, until now. `found`: what its sites measured; None: the mean over all examples that
        its steps saw, of every island."""
        self._read()
        mesh = self.engine.mesh
        axes = tuple(axis for axis in AXES if axis != "tp" and getattr(mesh.sizes, axis) > 1)
        loss, weight, skipped = self._summed(self._share(), axes)
        if found is None:
            found = {"loss": loss / weight} if weight else {}
        record = self._lap.record(found, sites)
        return record | {"skipped": int(skipped)} if skipped else record

    # --- a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The sums of each rank of the island that has examples of its own, one after the other."""
        self._read()
        mesh = self.engine.mesh
        place, places = self._place()
        rows = torch.zeros(places, len(NONE), dtype=torch.float64, device=mesh.device)
        rows[place] = torch.tensor(self._round, dtype=torch.float64)
        return {"sums": mesh.sum(rows, mesh.axes("tp")).flatten().tolist(), "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Each rank's own sums; with another number of ranks the first one has those of all."""
        sums, (place, places) = list(state["sums"]), self._place()
        rows = [sums[at : at + len(NONE)] for at in range(0, len(sums), len(NONE))]
        if len(rows) != places:
            rows = [[math.fsum(column) for column in zip(*rows, strict=True)]] + [[*NONE]] * (places - 1)
        self._round, self._before_s = rows[place], float(state["seconds"])

    def _place(self) -> tuple[int, int]:
        """(which one this rank is, of how many) of the island, tensor-parallel ranks counted as one."""
        mesh, place, places = self.engine.mesh, 0, 1
        for axis in mesh.axes("tp"):
            size = getattr(mesh.sizes, axis)
            place, places = place * size + mesh.at[axis], places * size
        return place, places

    # --- sums

    def _read(self) -> None:
        """Add up the steps since it was done last."""
        unread, self._unread = self._unread, []
        losses, weights, taken = map(_floats, zip(*unread, strict=True)) if unread else ([], [], [])
        for loss, weight, counts in zip(losses, weights, taken, strict=True):
            found = (loss, weight, 0.0) if counts else (0.0, 0.0, 1.0)
            for sums in (self._round, self._event):
                for i, each in enumerate(found):
                    sums[i] += each

    def _share(self) -> Sums:
        """Of the round's sums: an island's ranks leave out the same steps, and the first one counts them."""
        loss, weight, skipped = self._round
        return [loss, weight, 0.0 if self._place()[0] else skipped]

    def _summed(self, sums: Sums, axes: tuple[str, ...]) -> Sums:
        mesh = self.engine.mesh
        found: Sums = mesh.sum(torch.tensor(sums, dtype=torch.float64, device=mesh.device), axes).tolist()
        return found

    def _tell(self, number: int, round: int) -> None:
        self._read()
        engine, mesh = self.engine, self.engine.mesh
        loss, weight, _ = self._summed(self._event, mesh.axes("tp"))
        seconds = time.monotonic() - self._since
        waiting, flops = engine.waiting_s(), engine.flops.of_step
        self.emit(Stepped(
            step=number, round=round, loss=loss / weight if weight else None,
            lr=float(engine.optimizer.param_groups[0]["lr"]), seconds=seconds / self._steps,
            examples_per_s=self._examples / seconds, items_per_s=weight / seconds,
            mfu=flops * self._steps / (seconds * engine.peak) if flops else None,
            comm_share=None if waiting is None else min(1.0, waiting * self._steps / seconds),
            memory_bytes=memory_bytes(mesh.device), skipped=int(self._event[-1]),
        ))  # fmt: skip
        self._begin_event()


def _floats(numbers: tuple[Number, ...]) -> list[float]:
    """Where they are tensors, read at once: a GPU is waited for once."""
    tensors = [number for number in numbers if isinstance(number, torch.Tensor)]
    if not tensors:
        return [float(number) for number in numbers]
    here = tensors[0].device
    found: list[float] = torch.stack([torch.as_tensor(n, device=here).double() for n in numbers]).tolist()
    return found


def memory_bytes(device: torch.device) -> int:
    """The most that this rank has had so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
