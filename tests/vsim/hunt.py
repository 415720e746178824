"""Many seeds, in processes that are forked for a few of them each: who was killed in a world leaves what it
had open, and no `finally` of its may run. So such a process ends without collecting anything."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import safetensors.torch  # noqa: F401  # what is loaded late is loaded once
import torch

from tests.vsim.world import World

BATCH = 100  # seeds of a process: each begins by loading and learning what all need


@dataclass
class Found:
    """What seeds came to."""

    failed: dict[int, str] = field(default_factory=dict)  # seed -> why
    counts: dict[str, int] = field(default_factory=dict)  # of what happened in all

    def add(self, failed: Mapping[int, str], counts: Mapping[str, int]) -> None:
        self.failed |= failed
        self.counts |= {what: self.counts.get(what, 0) + n for what, n in counts.items()}


def hunt(seeds: Sequence[int], *, trace: bool = False, most: int = 1, world: type[World] = World) -> Found:
    """Run these seeds, until `most` of them have failed."""
    found = Found()
    world.grounds()
    torch.zeros(1)
    for at in range(0, len(seeds), BATCH):
        batch = _forked(seeds[at : at + BATCH], trace, most - len(found.failed), world)
        found.add(batch.failed, batch.counts)
        if len(found.failed) >= most:
            break
    return found


def _forked(seeds: Sequence[int], trace: bool, most: int, world: type[World]) -> Found:
    reading, writing = os.pipe()
    sys.stdout.flush()
    if not (child := os.fork()):
        try:
            os.close(reading)
            with open(writing, "wb") as pipe:
                pipe.write(msgspec.json.encode(_run(seeds, trace, most, world)))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told, f"the process of seeds {seeds[0]} to {seeds[-1]} died"
    return msgspec.json.decode(told, type=Found)


def _run(seeds: Sequence[int], trace: bool, most: int, kind: type[World]) -> Found:
    gc.disable()
    found, kept = Found(), list[World]()
    for seed in seeds:
        kept.append(world := kind(seed, print if trace else None))
        try:
            world.run()
        except BaseException as e:
            found.failed[seed] = f"{type(e).__name__}: {e}"
            if trace:
                traceback.print_exc(file=sys.stdout)
        found.add({}, world.counts | world.network.counts | world.claims.counts)
        if len(found.failed) >= most:
            break
    return found
