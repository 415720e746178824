"""Islands that are told to leave in the middle of a round go on where they were, and those that are killed
from their last checkpoint: the last model is that of a run that nobody interrupted."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import ProcessException

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.events import Event
from fedtrain.runtime.datacenters.datacenter import Datacenter
from fedtrain.runtime.datacenters.islands import IslandSites
from fedtrain.store import RunStore
from fedtrain.training.checkpoint import Checkpoints
from fedtrain.training.elastic import Leave, Left
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.island import Island
from fedtrain.training.task import load_task
from tests.equivalence.tiny import case, project
from tests.worlds import world

ROUNDS = 3
EVEN = {"local_steps": 8}  # every island takes as many
UNEVEN = {"local_steps": 0, "local_epochs": 2}  # of 40 and of 56 examples: 6 and 8 steps a round
SGD = UNEVEN | {"optimizer": "sgd", "lr": 0.05}
DILOCO = {"kind": "diloco"}
CASES = {
    "diloco": case("Rows", sync="local", strategy=DILOCO, train=EVEN),
    "streaming": case("Rows", sync="local", strategy=DILOCO, fragments=2, overlap=3, mix=0.25, train=EVEN),
    "uneven": case("Natural", sync="local", strategy=DILOCO, train=UNEVEN),
    "uneven-streaming": case("Natural", sync="local", fragments=2, overlap=2, train=UNEVEN),
    "as-sites": case("Natural", sync="local", carry=False, train=UNEVEN),
    "fedprox": case("Natural", sync="local", strategy={"kind": "fedprox", "mu": 0.1}, train=UNEVEN),
    "scaffold": case("Natural", sync="local", carry=False, strategy={"kind": "scaffold"}, train=SGD),
}
FROM_THE_START = ("as-sites", "fedprox", "scaffold")  # a round that was interrupted is begun again
# When an island is killed: on which rank, before or after which call of a method.
FATAL = {
    "an island trains": (1, Island, "steps", 3, True),
    "the islands' step is made": (1, IslandSites, "exchange", 2, False),
    "the checkpoint is written": (0, Checkpoints, "save", 2, False),
    "the round is committed": (0, RunStore, "commit", 2, False),
}


def train(
    folder: Path, name: str, table: dict[str, Any], told_at: int = 0, rounds: int = ROUNDS
) -> tuple[Arena | None, list[int], list[float]]:
    """(the last model, of rank 0; the steps that this rank took; the rounds' losses). `told_at`: the step in
    which rank 1 gets SIGTERM. Islands that are sites leave NAME-RANK.safetensors: what they share, and what
    this one knows."""
    table = {**table, "run": table["run"] | {"name": name, "rounds": rounds}}
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
            store.begin(room.schema, {}, run=name, task_digest="")
        try:
            room.run(None)
            if room.methods is not None:
                found = room.methods.tensors() | room.methods.state_dict()
                save_file(found, folder / f"{name}-{mesh.rank}.safetensors")
        except Left:
            return None, taken, []
        finally:
            last = store.latest() if store is not None else None
            losses = [each.record["loss"] for each in store.rounds()] if store is not None else []
            if store is not None:
                store.close()
    return (last.weights.load() if last is not None else None), taken, losses


def interrupt(rank: int, ranks: int, folder: Path, steps: list[int]) -> None:
    for name, table in CASES.items():
        expected, straight, losses = train(folder, name, table)
        for told_at in steps:
            model, before, _ = train(folder, f"{name}-{told_at}", table, told_at)
            assert model is None, "it left"
            assert 0 < len(before) < len(straight)
            model, after, found = train(folder, f"{name}-{told_at}", table)
            if name in FROM_THE_START:
                assert before[-1] - after[0] < 8, "the rounds before stay done"
                again = [step for step in before if step < after[0]]
                assert again + after == straight
            else:
                assert before + after == straight, (name, told_at)
            if expected is not None:
                assert model is not None
                assert model.digest == expected.digest, (name, told_at)
                assert found == losses, "of all of a round's steps"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return project(tmp_path_factory.mktemp("islands"))


@pytest.mark.slow  # 18 short runs on two ranks
def test_islands_told_to_leave_within_a_round_go_on_there(folder):
    world(2, interrupt, folder, [10, 15])  # in the second one; at 15 an uneven island waits for the other


# --- kill -9


@contextmanager
def dying(folder: Path, owner: type, name: str, time: int, before: bool) -> Iterator[None]:
    """This process gets SIGKILL at the `time`-th call of a method, before or after its work; and says so."""
    real, calls = getattr(owner, name), itertools.count(1)

    def method(*given: Any, **named: Any) -> Any:
        now = next(calls) == time
        found = None if now and before else real(*given, **named)
        if now:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, method)
        yield


def run(rank: int, ranks: int, folder: Path, table: dict[str, Any], name: str, fatal: str) -> None:
    at, *where = FATAL.get(fatal, [-1])
    with dying(folder, *where) if at == rank else nullcontext():
        train(folder, name, table, rounds=7)


@pytest.mark.slow(12)
def test_islands_killed_at_any_moment_end_with_the_bits_of_an_undisturbed_run(folder):
    """Of SCAFFOLD, with a last layer that stays at its island: so each remembers a vector and two tensors."""
    table = CASES["scaffold"] | {"strategy": {"kind": "scaffold", "local": ["4.*"]}}
    world(2, run, folder, table, "whole", "")
    for fatal in FATAL:
        with pytest.raises(ProcessException):
            world(2, run, folder, table, "killed", fatal)
        (folder / "died").unlink()
    world(2, run, folder, table, "killed", "")
    for rank in range(2):
        whole, killed = (load_file(folder / f"{how}-{rank}.safetensors") for how in ("whole", "killed"))
        assert whole.keys() == killed.keys()
        assert all(torch.equal(whole[name], killed[name]) for name in whole)
