"""The power is cut at any moment of a run, at each role, and its disk keeps what it may: whoever goes on
makes the same model, bit for bit, and has every round that was committed."""

import asyncio
import hashlib
import shutil
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.errors import StoreError
from fedtrain.runtime.simulations import simulation
from fedtrain.store import Checkpoint, RunStore
from tests.damage import SCHEMA, Star
from tests.faults.test_files import Alone, Pool, memory, room  # noqa: F401 - fixtures
from tests.powercut import HOWS, Disk, materialised, recorded
from tests.soaking import taken

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace (apt-get install strace)"),
]
MARKS = "marks"  # the file of the rounds whose commit has returned
ROUNDS = 4


class Peer:
    """What a gossip peer has on its disk: its own model after each round, made from the one before."""

    def __init__(self, root):
        self.folder, self.lines = root / "runs/r@b", []

    async def go(self):
        with closing(RunStore(self.folder, warn=self.lines.append)) as store:
            store.begin(SCHEMA, {}, task_digest="t")
            last = store.latest() or Checkpoint(-1, Arena.zeros(SCHEMA))
            for number in range(last.round + 1, ROUNDS + 1):
                model, draw = Arena.zeros(SCHEMA), torch.Generator().manual_seed(number)
                before = last.weights.load().flat(SCHEMA.sections[0])
                model.flat(SCHEMA.sections[0]).copy_(before * 0.5 + torch.rand(200, generator=draw))
                last = Checkpoint(number, model, {"float32/m": torch.full((3,), float(number))})
                store.commit(last, {"loss": 1.0})
                store.evaluated(number, {"loss": 1.0 / (number + 1)}, best=True)
            return last.weights.digest


@dataclass(frozen=True)
class Role:
    """Whose power is cut: the folders that are its own, of a world that is made anew for each attempt."""

    make: object
    folders: tuple[str, ...]
    store: str = ""  # of the rounds that no power cut takes
    durable: bool = True  # else it may stop, with a line that says what to do


ROLES = {
    "aggregator": Role(partial(Star, masks=False, rounds=ROUNDS), ("r/",), "r"),
    "aggregator masks": Role(partial(Star, masks=True, rounds=ROUNDS), ("r/",), "r"),
    "site": Role(partial(Star, masks=False, rounds=ROUNDS), ("r@b/", "@b/")),
    "site masks": Role(partial(Star, masks=True, rounds=ROUNDS), ("r@b/", "@b/")),
    "peer": Role(Peer, ("r@b/",), "r@b"),
    "simulation": Role(partial(Alone, mode="simulate"), ("",), durable=False),
    "datacenter": Role(partial(Alone, mode="datacenter"), ("r+datacenter/",), "r+datacenter"),
}


def live(root, role):
    """In a process of its own; a mark follows each commit."""
    torch.set_num_threads(1)
    simulation.PoolCohort = Pool
    commit = RunStore.commit

    def marked(store, checkpoint, *rest, **options):
        commit(store, checkpoint, *rest, **options)
        with (root / "runs" / MARKS).open("ab") as marks:
            marks.write(b"%d\n" % checkpoint.round)

    RunStore.commit = marked
    asyncio.run(ROLES[role].make(root).go())


@pytest.fixture(scope="module", params=ROLES)
def lived(request, memory):  # noqa: F811
    """(role, the model that it makes, what it did to its disk)"""
    role, name = ROLES[request.param], request.param.replace(" ", "-")
    folder = memory / f"power-{name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "PoolCohort", Pool)
        (folder / "killed/runs").mkdir(parents=True)
        whole = asyncio.run(role.make(folder / "whole").go())
        yield role, whole, recorded(folder / "killed/runs", partial(live, folder / "killed", request.param))


def went_wrong(role, whole, content, folder):
    """What a run that goes on with these files does wrong, or ""."""
    marks = content.pop(MARKS, b"").split()
    materialised(content, folder / "runs")
    world = role.make(folder)
    if role.store:
        try:
            with closing(RunStore(folder / "runs" / role.store, warn=world.lines.append)) as store:
                last = store.latest()
        except StoreError as e:
            return str(e)
        if (found := last.round if last else -1) < (promised := int(marks[-1]) if marks else -1):
            return f"round {promised} was committed, and {found} is the last one: {world.lines}"
    try:
        digest = asyncio.run(world.go())
    except StoreError as e:
        return "" if not role.durable and str(folder) in str(e) else f"{type(e).__name__}: {e}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "" if digest == whole else f"another model: {world.lines}"


def cut(lived, room, every, seeds, first=0):  # noqa: F811
    """Cut at each `every`th operation from the first on, in all ways, torn by so many seeds. How many cuts
    there were."""
    role, whole, ops = lived
    disk, tried, seen, wrong = Disk(), 0, set(), []
    for i, op in enumerate(ops):
        disk.did(op)
        if i % every != first:
            continue
        others = {p: d for p, d in disk.kept("all").items() if not p.startswith(role.folders) or p == MARKS}
        for how, seed in [*((how, 0) for how in HOWS), *(("torn", seed + 1) for seed in range(seeds))]:
            kept = {p: d for p, d in disk.kept(how, i + 1000 * seed).items() if p.startswith(role.folders)}
            content, tried = kept | others, tried + 1
            state = hashlib.sha256(repr(sorted(content.items())).encode()).digest()
            if state in seen:
                continue
            seen.add(state)
            if found := went_wrong(role, whole, dict(content), room / str(tried)):
                wrong.append(f"operation {i} ({op.kind} {op.path}), {how} {seed}: {found}")
            shutil.rmtree(room / str(tried))
    assert not wrong, f"{len(wrong)} of {tried} ({len(seen)} states):\n" + "\n".join(wrong[:12])
    return tried


@pytest.mark.slow(8)
def test_a_power_cut_at_some_moments_changes_no_bit_of_the_model(lived, room):  # noqa: F811
    assert cut(lived, room, every=max(1, len(lived[2]) // 6), seeds=0) >= 30


@pytest.mark.soak(part=0.025)
def test_a_power_cut_at_any_moment_changes_no_bit_of_the_model(lived, room, request):  # noqa: F811
    every = max(1, len(lived[2]) // 6)
    assert sum(cut(lived, room, every, 3, first) for first in taken(range(every), request)) >= 30
