"""Islands that are told to leave in the middle of a round go on where they were: the last model is that of a
run that nobody interrupted."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.events import Event
from fedtrain.runtime.datacenters.datacenter import Datacenter
from fedtrain.store import RunStore
from fedtrain.training.elastic import Leave, Left
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.task import load_task
from tests.equivalence.tiny import case, project
from tests.worlds import world

ROUNDS = 3
EVEN = {"local_steps": 8}  # every island takes as many
UNEVEN = {"local_steps": 0, "local_epochs": 2}  # of 40 and of 56 examples: 6 and 8 steps a round
DILOCO = {"kind": "diloco"}
CASES = {
    "diloco": case("Rows", sync="local", strategy=DILOCO, train=EVEN),
    "streaming": case("Rows", sync="local", strategy=DILOCO, fragments=2, overlap=3, mix=0.25, train=EVEN),
    "uneven": case("Natural", sync="local", strategy=DILOCO, train=UNEVEN),
    "uneven-streaming": case("Natural", sync="local", fragments=2, overlap=2, train=UNEVEN),
    "as-sites": case("Natural", sync="local", carry=False, train=UNEVEN),
    "fedprox": case("Natural", sync="local", strategy={"kind": "fedprox", "mu": 0.1}, train=UNEVEN),
}
FROM_THE_START = ("as-sites", "fedprox")  # a round that was interrupted is begun again


def train(folder: Path, name: str, table: dict[str, Any], told_at: int = 0) -> tuple[Arena | None, list[int]]:
    """(the last model, of rank 0; the steps that this rank took). `told_at`: the step in which rank 1 gets
    SIGTERM."""
    table = {**table, "run": table["run"] | {"name": name, "rounds": ROUNDS}}
    config = Config.of(table | {"parallel": table["parallel"] | {"log_every": 1}}, folder)
    mesh = Mesh(Sizes.of(config.parallel, dist.get_world_size()), torch.device("cpu"), islands=True)
    store = RunStore(config.datacenter_dir, durable=False) if mesh.rank == 0 else None
    taken: list[int] = []

    def emit(event: Event) -> None:
        kind, fields = event.kind, event.fields()
        if kind == "step":
            taken.append(fields["step"])
            if mesh.rank == 1 and fields["step"] == told_at:
                signal.raise_signal(signal.SIGTERM)

    # By this clock each step takes long: so ranks ask each other after each.
    with Leave(clock=itertools.count().__next__) as leave:
        room = Datacenter(config, load_task(config.run.task, folder), mesh, store, emit, leave)
        if store is not None:
            store.begin(room.engine.schema, {}, run=name, task_digest="")
        try:
            room.run(None)
        except Left:
            return None, taken
        finally:
            last = store.latest() if store is not None else None
            if store is not None:
                store.close()
    return (last.weights.load() if last is not None else None), taken


def interrupt(rank: int, ranks: int, folder: Path, steps: list[int]) -> None:
    for name, table in CASES.items():
        expected, straight = train(folder, name, table)
        for told_at in steps:
            model, before = train(folder, f"{name}-{told_at}", table, told_at)
            assert model is None, "it left"
            assert 0 < len(before) < len(straight)
            model, after = train(folder, f"{name}-{told_at}", table)
            if name in FROM_THE_START:
                assert before[-1] - after[0] < 8, "the rounds before stay done"
                again = [step for step in before if step < after[0]]
                assert again + after == straight
            else:
                assert before + after == straight, (name, told_at)
            if expected is not None:
                assert model is not None
                assert model.digest == expected.digest, (name, told_at)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return project(tmp_path_factory.mktemp("islands"))


@pytest.mark.slow  # 18 short runs on two ranks
def test_islands_told_to_leave_within_a_round_go_on_there(folder):
    world(2, interrupt, folder, [10, 15])  # in the second one; at 15 an uneven island waits for the other
