"""Which engine trains a simulation's sites: the one that simulate.engine names, or the soonest of a probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...arena import Arena, Slab
from ...config import Config
from ...errors import BadUpdate, ConfigError, Forgotten, TaskError
from ...messages import SiteId
from ...strategies import Strategy, overrides
from ...training.engine import steps_in_round
from ...training.examples import examples_of
from ...training.local import Engine
from ...training.stacked import CHUNK, CHUNK_BYTES, Stacked, refusal
from .learner import Learner
from .trainer_messages import Chosen

FEW = 2000  # updates of a worker: the loop has trained them before another engine is ready
BUDGET_S = 0.04  # of the loop in a probe, after which no further site is trained
FEWEST = 8  # sites in a stack; where fewer fit, they are no sooner at once
GAIN = 1.1  # that is asked of an engine beside the loop: a probe is a few milliseconds long
COMPILE_S = 120.0  # that a worker would train; for less the compiler takes longer than it saves


def stack_of(
    config: Config, engine: Engine, strategy: Strategy, samples: Callable[[], Iterable[Any]], kind: str
) -> Stacked:
    """The engine of this kind. ConfigError where it can't train the task."""
    private = config.privacy
    if private.noise_multiplier and not private.in_sums:
        raise refusal("it adds no noise, which privacy.noise_multiplier asks for")
    own = overrides(strategy, "train")
    return Stacked(engine, own_training=own, samples=samples, compiled=kind == "compiled")


class EngineTrial:
    """Times the engines on some of a simulation's sites."""

    def __init__(
        self, config: Config, learner: Learner, stack: Callable[[str], Stacked],
        pairs: Sequence[tuple[SiteId, Any]], weights: Arena,
    ) -> None:  # fmt: skip
        """`pairs`: (site, its data)."""
        self._config, self._learner, self._stack = config.train, learner, stack
        self._pairs, self._weights = pairs, weights
        self._out = torch.zeros(len(pairs), weights.schema.model.nbytes, dtype=torch.uint8)

    def choose(self, updates: int) -> Chosen:
        """The engine by which one worker has trained so many updates soonest, and why it is that one."""
        if updates < FEW:
            return Chosen("loop", "")  # they are done before another engine is ready
        if CHUNK_BYTES // max(1, self._weights.schema.nbytes) < FEWEST:
            return Chosen("loop", "sites with a model as large are no sooner trained at once")
        try:
            return self._soonest(updates)
        except ConfigError as e:
            return Chosen("loop", str(e).partition(". Use ")[0])
        except (TaskError, BadUpdate, Forgotten) as e:
            return Chosen("loop", f"no other could be tried: {e}")

    def _soonest(self, updates: int) -> Chosen:
        stacked = self._stack("stacked")
        self._loop(1)  # for what only the first one takes
        ready_s = self._stacked(stacked) * len(self._pairs)
        loops, stacks = zip(*((self._loop(), self._stacked(stacked)) for _ in range(2)), strict=True)
        loop_us, stacked_us = (round(1e6 * min(times)) for times in (loops, stacks))
        told = f"{stacked_us} µs an update, the loop {loop_us}, on {len(self._pairs)} sites"
        if loop_us * updates < GAIN * stacked_us * updates + 1e6 * ready_s:
            return Chosen("loop", f"stacked takes {told}")
        if stacked_us * updates < 1e6 * COMPILE_S:
            return Chosen("stacked", told)
        return self._compiled(told, stacked_us, updates)

    def _compiled(self, told: str, stacked_us: int, updates: int) -> Chosen:
        try:
            compiled = self._stack("compiled")
            ready_s = self._stacked(compiled) * len(self._pairs)
        except ConfigError as e:
            return Chosen("stacked", f"{told}; " + str(e).partition(". Use ")[0])
        compiled_us = round(1e6 * min(self._stacked(compiled) for _ in range(2)))
        if GAIN * compiled_us * updates + 1e6 * ready_s < stacked_us * updates:
            return Chosen("compiled", f"{compiled_us} µs an update, stacked {told}")
        return Chosen("stacked", f"{told}; compiled {compiled_us}")

    def _loop(self, sites: int = CHUNK) -> float:
        """Seconds an update, of as many sites as the budget allows: by steps, for others may take more."""
        steps = [steps_in_round(self._config, examples_of(data)) or 1 for _, data in self._pairs]
        rows, done, began = Slab(self._weights.schema.model, self._out).arenas(), 0, time.perf_counter()
        for (site, data), row in zip(self._pairs[:sites], rows, strict=False):
            self._learner.rehearse(site, data, self._weights, row)
            done += 1
            if time.perf_counter() - began > BUDGET_S:
                break
        each_s = (time.perf_counter() - began) / sum(steps[:done])
        return each_s * sum(steps) / len(steps)

    def _stacked(self, stacked: Stacked) -> float:
        """Seconds an update."""
        began = time.perf_counter()
        self._learner.rehearse_many(stacked, self._pairs, self._weights, self._out)
        return (time.perf_counter() - began) / len(self._pairs)
