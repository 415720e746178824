"""What the steps of a datacenter's round cost and found, as `step` events."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable

import torch

from ...config import Config
from ...events import Emit, Stepped
from ...training.engine import Number, Step
from ...training.mesh import AXES
from ...training.parallel.engine import MeshEngine


class Meter:
    """Losses and times of a round's steps. Losses are read when they are shown: no step waits for one."""

    def __init__(
        self, engine: MeshEngine, config: Config, emit: Emit, stepped: Callable[[], None] | None = None
    ) -> None:
        """`stepped`: called with each step that is taken in."""
        self.engine, self.config, self.emit, self._stepped = engine, config, emit, stepped
        self._loss: list[torch.Tensor] = []  # since the last event
        self._weight: Number = 0.0
        self._round = torch.zeros(2, dtype=torch.float64, device=engine.mesh.device)  # Σ loss, Σ weight
        self._examples = self._steps = 0
        self._taken: int | torch.Tensor = 0  # of the steps
        self._since = time.monotonic()

    def add(self, step: Step, number: int, round: int) -> None:
        """Take a step in; every parallel.log_every of them is a `step` event. TaskError as Steps.check."""
        self._loss.append(step.loss)
        self._weight = self._weight + step.weight
        self._examples += step.examples
        self._steps += 1
        self._taken = self._taken + step.taken
        if number % self.config.parallel.log_every == 0:
            self._tell(number, round)
            self.engine.steps.check(f"step {number}")
        if self._stepped is not None:
            self._stepped()

    def loss_of_round(self) -> float:
        """Over all examples that the round's steps saw, of every island."""
        self._take_losses()
        mesh = self.engine.mesh
        axes = tuple(axis for axis in AXES if axis != "tp" and getattr(mesh.sizes, axis) > 1)
        loss, weight = mesh.sum(self._round, axes).tolist()
        return loss / weight if weight else math.nan

    def _take_losses(self) -> torch.Tensor:
        """Σ loss and Σ weight since the last time, of this rank."""
        loss = torch.stack(self._loss).sum() if self._loss else self._round.new_zeros(())
        found = torch.stack([loss, torch.as_tensor(self._weight).to(loss)])
        self._round += found
        self._loss, self._weight = [], 0.0
        return found

    def _tell(self, number: int, round: int) -> None:
        engine, mesh = self.engine, self.engine.mesh
        loss, weight = mesh.sum(self._take_losses(), mesh.axes("tp")).tolist()
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        waiting, flops = engine.waiting_s(), engine.flops.of_step
        self.emit(Stepped(
            step=number, round=round, loss=loss / weight if weight else None,
            lr=float(engine.optimizer.param_groups[0]["lr"]), seconds=seconds / self._steps,
            examples_per_s=self._examples / seconds, items_per_s=weight / seconds,
            mfu=flops * self._steps / (seconds * engine.peak) if flops else None,
            comm_share=None if waiting is None else min(1.0, waiting * self._steps / seconds),
            memory_bytes=memory_bytes(mesh.device), skipped=self._steps - int(self._taken),
        ))  # fmt: skip
        self._examples = self._steps = self._taken = 0


def memory_bytes(device: torch.device) -> int:
    """The most that this rank has had so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
